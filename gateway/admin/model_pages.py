"""What the list of models and the page of one show, ready for their templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.paginator import Paginator
from django.db.models import F, Q
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext_lazy

from core.charts import Chart, Line
from core.limits import limits
from gateway.models import ApiKey, Model, ModelAlias
from gateway.services.compatibility import find_fits
from gateway.services.explanations import explain_waits
from gateway.services.limits import CAPS, default_caps, model_caps
from gateway.services.model_list import (
    Kind,
    ListedModel,
    Sort,
    count_kinds,
    find_listed_model,
    list_models_of_fleet,
    sort_models,
)
from gateway.services.models import read_targets
from gateway.services.rollups import RANGES, Metric, Series, read_series
from gateway.values import Dimension, Weights
from governance.operations.queries import list_underway
from governance.states import OPEN_RUNS, RunState
from nodes.operations.load import MODEL_LOAD, find_lost_models
from wire import clock
from wire.contract import NodeStatus

Context = dict[str, Any]  # Any: Django's template context
_KINDS: Mapping[Kind, str | Promise] = {
    Kind.ALL: gettext_lazy("All"),
    Kind.LOADED: gettext_lazy("Loaded"),
    Kind.LOADING: gettext_lazy("Loading"),
    Kind.ON_DISK: gettext_lazy("On disk"),
    Kind.MISSING: gettext_lazy("Allowed, on no node"),
    Kind.DENIED: gettext_lazy("Not allowed"),
}
_COLUMNS: tuple[tuple[Sort | None, str | Promise], ...] = (
    (Sort.NAME, gettext_lazy("Model")),
    (Sort.STATE, gettext_lazy("State")),
    (Sort.SIZE, gettext_lazy("Memory")),
    (None, gettext_lazy("Context")),
    (Sort.SPEED, gettext_lazy("Tokens/s")),
    (Sort.REQUESTS, gettext_lazy("Requests")),
    (None, pgettext_lazy("column", "Access")),
)
TABS: Mapping[str, str | Promise] = {
    "overview": gettext_lazy("Overview"),
    "limits": gettext_lazy("Limits and price"),
    "routing": gettext_lazy("Routing"),
    "compatibility": gettext_lazy("Compatibility"),
    "code": gettext_lazy("Code"),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A link that narrows, sorts or opens a part. ``sorted``: as ``aria-sort`` says it; ``count`` None = none is shown."""

    label: str | Promise
    url: str
    is_current: bool
    count: int | None = None
    sorted: str = ""


def describe_list(request: HttpRequest) -> Context:
    """Return the list of models; five queries, however many models and nodes there are."""
    asked = request.GET
    chosen = _read_range(request)
    text = asked.get("q", "").replace("\x00", "").strip()[: limits().console.search_chars]
    kind, by = _read(Kind, asked.get("show")) or Kind.ALL, _read(Sort, asked.get("sort")) or Sort.NAME
    is_reversed = asked.get("dir") == "back"
    models = [model for model in list_models_of_fleet(RANGES[chosen][1]) if _is_found(model, text.lower())]
    counts = count_kinds(models)
    shown = sort_models([model for model in models if model.is_of(kind)], by, is_reversed=is_reversed)
    page = Paginator(shown, limits().gateway.page_models).get_page(asked.get("page"))

    def locate(**changes: str) -> str:
        now = {"range": chosen, "q": text, "show": kind.value, "sort": by.value, "dir": "back" if is_reversed else ""}
        return "?" + urlencode([(name, value) for name, value in {**now, **changes}.items() if value])

    def locate_sort(sort: Sort) -> Choice | None:
        turns = sort is by and not is_reversed
        up = (by is Sort.NAME) is not is_reversed
        said = ("ascending" if up else "descending") if sort is by else ""
        return Choice("", locate(sort=sort.value, dir="back" if turns else ""), sort is by, sorted=said)

    return {
        "models": page.object_list,
        "page": page,
        "older": locate(page=str(page.next_page_number())) if page.has_next() else "",
        "newer": locate(page=str(page.previous_page_number())) if page.has_previous() else "",
        "found": len(shown),
        "text": text,
        "chips": [Choice(label, locate(show=one.value), one is kind, counts[one]) for one, label in _KINDS.items()],
        "columns": [(label, locate_sort(sort) if sort is not None else None) for sort, label in _COLUMNS],
        "hidden": [("range", chosen), ("show", kind.value), ("sort", by.value), ("dir", "back" if is_reversed else "")],
        "is_narrowed": bool(text) or kind is not Kind.ALL,
        "ranges": list_ranges(),
        "range": chosen,
        "range_label": RANGES[chosen][0],
        "as_of": clock.now(),
    }


def list_ranges() -> list[tuple[str, str | Promise]]:
    return [(name, label) for name, (label, _span) in RANGES.items()]


def _read_range(request: HttpRequest) -> str:
    asked = request.GET.get("range", "")
    return asked if asked in RANGES else "24h"


def _read(words: type[Kind] | type[Sort], text: str | None) -> Any:  # Any: a member of the one that is given
    return next((word for word in words if word.value == text), None)


def _is_found(model: ListedModel, text: str) -> bool:
    return text in model.name.lower() or any(text in alias.lower() for alias in model.aliases)


def describe_page(request: HttpRequest, row: Model) -> Context:
    """Return the page of a model: what every tab shows, and what the one that is asked for shows."""
    asked = request.GET.get("tab", "")
    tab = asked if asked in TABS else "overview"
    listed = find_listed_model(row)
    context: Context = {
        "listed": listed,
        "tab": tab,
        "tabs": [Choice(label, "?" + urlencode({"tab": name}), name == tab) for name, label in TABS.items()],
        "load_url": _locate_load(row.name),
        "playground_url": f"{reverse('playground:page')}?{urlencode({'model': row.name})}",
    }
    match tab:
        case "limits":
            return {**context, "caps": _list_caps(row), "currency": settings.CURRENCY}
        case "routing":
            return {**context, **_describe_routing(row)}
        case "compatibility":
            return {**context, **_describe_compatibility(row)}
        case "code":
            return {**context, "snippets": write_snippets(listed), "base_url": settings.GATEWAY_PUBLIC_URL.rstrip("/")}
        case _:
            return {**context, **_describe_now(row, listed), **_describe_use(request, row)}


def _locate_load(model: str, node: str = "") -> str:
    asked = {"model": model, "node": node} if node else {"model": model}
    return f"{reverse('admin:gateway_model_load')}?{urlencode(asked)}"


def _locate_proposal(operation: str, **params: str) -> str:
    return f"{reverse('approvals:propose')}?{urlencode({'operation': operation, **params})}"


# The first tab


@dataclass(frozen=True, slots=True)
class LoadStep:
    """How far a load of the model is, for people. ``word`` and ``style``: a badge; ``percent`` None = there is no bar.

    ``is_open``: something is still to come.
    """

    title: str
    url: str
    word: str
    style: str
    text: str
    is_open: bool
    has_bar: bool = False
    percent: int | None = None
    eta_s: float | None = None
    is_done: bool = False


def _describe_now(row: Model, listed: ListedModel) -> Context:
    """Return where the model is, what is being loaded, and what is gone although people had it loaded."""
    most = limits().gateway.page_places
    places = listed.fleet.places
    steps = _list_steps(row)
    wait = explain_waits([row.name])[row.name] if row.allowed else None
    return {
        "places": places[:most],
        "places_beyond": max(0, len(places) - most),
        "unload_urls": {
            place.node_id: _locate_proposal("model-unload", target=place.runner_id, modelId=row.name)
            for place in places[:most]
            if place.runner_id
        },
        "lost": find_lost_models(model=row.name),
        "steps": steps,
        "is_moving": any(step.is_open for step in steps) or bool(listed.fleet.loading),
        "wait": wait,
    }


def _list_steps(row: Model) -> list[LoadStep]:
    found = []
    for one in list_underway(MODEL_LOAD.name, recent_s=limits().gateway.page_asked_s):
        if one.params.get("modelId") != row.name:
            continue
        url = reverse("approvals:operation", args=[one.summary.id])
        if not one.runs:
            found.append(_describe_waiting(one.summary, one.asked, url))
        found += [_describe_run(run, url) for run in one.runs]
    return found


def _describe_waiting(summary: Any, asked: tuple[str, ...], url: str) -> LoadStep:  # Any: OperationSummary
    if summary.state != "pending":
        return LoadStep(summary.title, url, _("approved"), "mst-is-running", _("It is sent to the node."), is_open=True)
    counts = {"approvals": summary.approvals, "required": summary.required, "names": ", ".join(asked)}
    text = _("%(approvals)s of %(required)s have signed.") if not asked else _(
        "%(approvals)s of %(required)s have signed; these can: %(names)s."
    )  # fmt: skip
    return LoadStep(summary.title, url, _("waits for approval"), "mst-is-queued", text % counts, is_open=True)


_RUN_WORDS: Mapping[RunState, tuple[str | Promise, str]] = {
    RunState.QUEUED: (gettext_lazy("approved"), "mst-is-running"),
    RunState.DISPATCHED: (gettext_lazy("sent"), "mst-is-running"),
    RunState.EXECUTING: (gettext_lazy("loading"), "mst-is-running"),
    RunState.SUCCEEDED: (gettext_lazy("loaded"), "mst-available"),
    RunState.FAILED: (gettext_lazy("failed"), "mst-error"),
    RunState.UNKNOWN: (gettext_lazy("cut off"), "mst-draining"),
    RunState.RESOLVED: (gettext_lazy("cut off"), "mst-draining"),
    RunState.SKIPPED: (gettext_lazy("left out"), "mst-draining"),
}


def _describe_run(run: Any, url: str) -> LoadStep:  # Any: OperationRun, whose module is governance's own
    state = RunState(run.state)
    word, style = _RUN_WORDS[state]
    is_open = state in OPEN_RUNS
    return LoadStep(
        title=_("Load on %(node)s") % {"node": run.target.partition("#")[0]},
        url=url,
        word=str(word),
        style=style,
        text=(run.stage if is_open else "") or run.message,
        is_open=is_open,
        has_bar=state in {RunState.DISPATCHED, RunState.EXECUTING},
        percent=run.percent,
        eta_s=run.eta_s,
        is_done=state is RunState.SUCCEEDED,
    )


def _describe_use(request: HttpRequest, row: Model) -> Context:
    """Return how the model was asked for within the range, and who may ask for it."""
    chosen = _read_range(request)
    series = read_series(RANGES[chosen][1], dimension=Dimension.MODEL, name=row.name, metric=Metric.TTFT)
    usable = ApiKey.objects.filter(revoked_at=None).exclude(expires_at__lt=clock.now()).select_related("tenant")
    names = Q(allowed_models__contains=[row.name])
    some = list(usable.filter(names, tenant__is_active=True).order_by("tenant__name", "name")[: limits().gateway.page_places])
    return {
        "sums": series.total,
        "ttft": None if series.total.p50_ms is None else (round(series.total.p50_ms), round(series.total.p95_ms or 0)),
        "charts": draw_charts(row.name, series),
        "ranges": list_ranges(),
        "range": chosen,
        "range_label": RANGES[chosen][0],
        "tab_query": {"tab": "overview"},
        "open_keys": usable.filter(allowed_models=[], tenant__is_active=True).count(),
        "some_keys": some,
    }


def draw_charts(name: str, series: Series) -> list[Chart]:
    """Return what the page of a model draws: requests by outcome, tokens, and the time to the first of them."""
    starts = [int(at.timestamp()) for at, _sums in series.points]
    sums = [one for _at, one in series.points]
    step_s = int(series.step.total_seconds())
    link = f"{reverse('admin:gateway_requestrecord_changelist')}?{urlencode({'model': name})}&since={{since}}&until={{until}}"
    return [
        Chart(
            "requests", _("Requests"), "requests", starts, step_s,
            [
                Line(_("served"), [one.served for one in sums], "good"),
                Line(_("refused"), [one.refused for one in sums], "refused"),
                Line(_("cancelled"), [one.cancelled for one in sums], "cancelled"),
                Line(_("failed"), [one.failed for one in sums], "fault"),
            ],
            kind="bars", is_stacked=True, link=link,
        ),
        Chart(
            "ttft", _("Time to the first token"), "ms", starts, step_s,
            [
                Line(_("median"), [one.p50_ms for one in sums], "first"),
                Line(_("95th percentile"), [one.p95_ms for one in sums], "second"),
            ],
        ),
        Chart(
            "tokens", _("Tokens"), "tokens", starts, step_s,
            [
                Line(_("prompts"), [one.prompt_tokens for one in sums], "third"),
                Line(_("answers"), [one.completion_tokens for one in sums], "first"),
            ],
            kind="areas", is_stacked=True,
        ),
    ]  # fmt: skip


# The other tabs

_CAP_WORDS: Mapping[str, str | Promise] = {
    "max_tokens": gettext_lazy("Most tokens to generate"),
    "max_prompt_chars": gettext_lazy("Longest prompt, in characters"),
    "max_queue": gettext_lazy("Longest queue, in requests"),
}


@dataclass(frozen=True, slots=True)
class Cap:
    """A limit of a model. ``own``: whether it has one of its own; else the installation's default counts."""

    label: str | Promise
    value: int
    own: bool


def _list_caps(row: Model) -> list[Cap]:
    today, default = model_caps(row), default_caps()
    return [Cap(_CAP_WORDS[name], today.get(name, default[name]), getattr(row, name) is not None) for name in CAPS]


_PART_WORDS: Mapping[str, str | Promise] = {
    "load": gettext_lazy("Free slots"),
    "active": gettext_lazy("Few requests"),
    "latency": gettext_lazy("Speed"),
    "reliability": gettext_lazy("Reliability"),
    "affinity": gettext_lazy("Affinity to session and prompt"),
}


def _describe_routing(row: Model) -> Context:
    usual = {part: getattr(limits().gateway, f"score_{part}") for part in Weights.__struct_fields__}
    aliases = ModelAlias.objects.filter(targets__contains=[{"model": row.name}]).select_related("tenant")
    known = set(Model.objects.filter(name__in=row.fallbacks).values_list("name", "pk"))
    keys = dict(known)
    return {
        "weights": [
            (_PART_WORDS[part], row.score_weights.get(part, value), part in row.score_weights) for part, value in usual.items()
        ],
        "fallback_links": [(name, keys.get(name)) for name in row.fallbacks],
        "alias_rows": [
            (alias, next(target.weight for target in read_targets(alias) if target.model == row.name))
            for alias in aliases.order_by("name", F("tenant__name").asc(nulls_first=True))[: limits().gateway.page_places]
        ],
        "alias_url": f"{reverse('admin:gateway_modelalias_add')}?{urlencode({'targets': row.name})}",
    }


def _describe_compatibility(row: Model) -> Context:
    found, most = find_fits(row.name), limits().nodes.gpu_page_default_rows
    offline = sum(fit.gpu.status is NodeStatus.OFFLINE for fit in found.fits)
    return {
        "compatibility": found,
        "fits": found.fits[:most],
        "fits_beyond": max(0, len(found.fits) - most),
        "fits_offline": offline,
    }


@dataclass(frozen=True, slots=True)
class Snippet:
    """A program that asks the model. ``name``: a part of ids."""

    name: str
    label: str | Promise
    text: str


_BODIES: Mapping[str, Mapping[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Say hello."}], "stream": True},
    "/v1/embeddings": {"input": ["a sentence", "another one"]},
    "/v1/images/generations": {"prompt": "a lighthouse at dusk", "size": "1024x1024"},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 64},
}
"""What a first request says, by path, in the order in which a model's paths are looked at."""
_TRANSCRIPTIONS = "/v1/audio/transcriptions"


def write_snippets(listed: ListedModel) -> list[Snippet]:
    """Return programs that ask the gateway for a model, for the first of the API paths that it answers."""
    paths = {path for place in listed.fleet.places for path in place.endpoints}
    base, model = settings.GATEWAY_PUBLIC_URL.rstrip("/"), listed.name
    if paths and _TRANSCRIPTIONS in paths:
        return [Snippet("curl", "curl", _write_upload(base, model)), Snippet("env", _("Environment"), _write_environment(base))]
    chosen = next((path for path in _BODIES if path in paths), "/v1/chat/completions")
    body = {"model": model, **_BODIES[chosen]}
    return [
        Snippet("curl", "curl", _write_curl(base, chosen, body)),
        Snippet("python", "Python", _write_python(base, chosen, body)),
        Snippet("env", _("Environment"), _write_environment(base)),
    ]


def _write_curl(base: str, path: str, body: Mapping[str, object]) -> str:
    flag = "-N " if body.get("stream") else ""
    text = json.dumps(body, indent=2, ensure_ascii=False)
    head = [f"curl {flag}{base}{path}", '-H "Authorization: Bearer $MUSTER_API_KEY"', '-H "Content-Type: application/json"']
    return " \\\n  ".join([*head, "--data-binary @- <<'JSON'"]) + f"\n{text}\nJSON"


_CALLS = {
    "/v1/chat/completions": "chat.completions.create",
    "/v1/embeddings": "embeddings.create",
    "/v1/images/generations": "images.generate",
    "/v1/completions": "completions.create",
}


def _write_python(base: str, path: str, body: Mapping[str, object]) -> str:
    fields = "".join(f"    {name}={value!r},\n" for name, value in body.items())
    loop = "for chunk in answer:\n    print(chunk.choices[0].delta.content or '', end='')"
    ending = loop if body.get("stream") else "print(answer)"
    return (
        "import os\nfrom openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{base}/v1", api_key=os.environ["MUSTER_API_KEY"])\n'
        f"answer = client.{_CALLS[path]}(\n{fields})\n{ending}"
    )


def _write_upload(base: str, model: str) -> str:
    head = [f"curl {base}{_TRANSCRIPTIONS}", '-H "Authorization: Bearer $MUSTER_API_KEY"', f"-F model={json.dumps(model)}"]
    return " \\\n  ".join([*head, "-F file=@speech.wav"])


def _write_environment(base: str) -> str:
    return f'export OPENAI_BASE_URL="{base}/v1"\nexport OPENAI_API_KEY="$MUSTER_API_KEY"'

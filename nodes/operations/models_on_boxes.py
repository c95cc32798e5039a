"""Operations that a box carries out itself: load, unload, flush, reload. Each needs a token, which governance makes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

from core.limits import limits
from governance.errors import InvalidProposal
from governance.registry import Choices, Description, Done, Impact, Line, NotNow, Request, RunOrder, Sent, Signer, Undone
from nodes.direct import ring_direct_box
from nodes.models import Node, NodeOpKey, NodePresence, Reach, read_clock
from nodes.operations.choices import flush_choices, list_boxes, load_choices, reload_choices, unload_choices
from nodes.operations.impact import (
    CAUTION,
    DANGER,
    OK,
    judge_eviction,
    judge_history,
    judge_live,
    judge_memory,
    judge_reach,
)
from nodes.operations.lost_models import find_lost_models
from nodes.operations.params import KEEP, LOAD_FIELDS, RELOAD_FIELDS, UNLOAD_FIELDS, clean_flush, clean_params
from nodes.operations.targets import Target, clean_targets, find_signed, hinders, name_of, read_target
from nodes.services.availability import judge_status
from wire.contract import NodeStatus


class _BoxOperation:
    """What they have in common. Each says its name, its parameters and its words."""

    name: str
    title: str
    is_remote = True

    def clean(self, targets: Sequence[str], params: Mapping[str, object]) -> Request:
        """Return the request with runner ids as targets. Raises InvalidProposal."""
        cleaned = self._clean_params(params)
        return Request(clean_targets(targets, is_remote=True), cleaned)

    def describe(self, targets: Sequence[str], params: Mapping[str, object]) -> Description:
        """Return the request in words, each parameter beside what is so today."""
        found = [target for target in map(read_target, targets) if target is not None]
        boxes = Line("On" if len(targets) == 1 else f"On {len(targets)} nodes, one after the other", ", ".join(targets))
        return Description(f"{self._sentence(params)} {_name_boxes(targets)}", [boxes, *self._lines(params, found)])

    def preview(self, targets: Sequence[str], params: Mapping[str, object]) -> Sequence[Impact]:
        """Return what it would mean for each box."""
        impacts: list[Impact] = []
        for signed in targets:
            target = read_target(signed)
            if target is None:
                impacts.append(Impact(DANGER, f"{signed} is no node that is known here any more."))
                continue
            impacts += [*judge_reach(target), *self._judge(target, params, signed)]
            impacts += judge_history(self.name, signed, params, target.node.name)
        return impacts

    def find_signer(self, target: str) -> Signer | None:
        """Return the box's newest key; None while it is away or takes no operations."""
        node = find_signed(target)
        if node is None or not node.op_level or node.runner_id != target:
            return None
        key = NodeOpKey.objects.filter(node=node, retired_at=None).order_by("-pk").first()
        return None if key is None else Signer(node.op_level, key.kid, bytes(key.secret), node.runner_id)

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        """Say which node is to get it: a gateway sends it, and a task to a node that is called over HTTP."""
        node = find_signed(order.target)
        if node is None:
            return NotNow(f"{order.target} is no node that is known here", retry_s=limits().nodes.command_away_retry_s)
        if problem := hinders(node) or _is_away(node):
            return NotNow(problem, retry_s=limits().nodes.command_away_retry_s)
        if node.reach == Reach.DIRECT.value:
            ring_direct_box(order.run_id)
        return Sent(node.pk)

    def _clean_params(self, params: Mapping[str, object]) -> dict[str, object]:
        raise NotImplementedError

    def _sentence(self, params: Mapping[str, object]) -> str:
        """Return the title up to the names of the boxes."""
        raise NotImplementedError

    def _lines(self, params: Mapping[str, object], found: Sequence[Target]) -> list[Line]:
        raise NotImplementedError

    def _judge(self, target: Target, params: Mapping[str, object], signed: str) -> Iterator[Impact]:
        raise NotImplementedError


class ModelLoad(_BoxOperation):
    """Load a model, another one making room for it where that is asked for."""

    name = "model-load"
    title = "Load a model"

    def clean(self, targets: Sequence[str], params: Mapping[str, object]) -> Request:
        """Return the request with runner ids as targets. Raises InvalidProposal, also for nodes that cannot keep a model."""
        request = super().clean(targets, params)
        unable = _find_unable(request.targets, lambda node: node.keeps_models) if _is_kept(request.params) else []
        if unable:
            raise InvalidProposal(
                f"{_join_first(unable)} has not said that it can keep a model loaded: the runner there is of an "
                "older version, works at level L0, or is called over HTTP. Update it, or ask for the load alone.", param=KEEP,
            )  # fmt: skip
        return request

    def find_undone(self, op_id: uuid.UUID) -> Sequence[Undone]:
        """Return which models this operation has loaded that are not loaded any more."""
        return [Undone(f"{lost.what} {lost.advice}", lost.again) for lost in find_lost_models(op_id)]

    def choices(self) -> Choices:
        """Return what the page that proposes offers."""
        return load_choices(list_boxes())

    def _clean_params(self, params: Mapping[str, object]) -> dict[str, object]:
        cleaned = clean_params(params, LOAD_FIELDS)
        # Left out where it is false: so statements without it stay what they were, and runners that do not know it take them.
        return cleaned if _is_kept(cleaned) else {name: value for name, value in cleaned.items() if name != KEEP}

    def _sentence(self, params: Mapping[str, object]) -> str:
        return f"Load {params.get('modelId')} on"

    def _lines(self, params: Mapping[str, object], found: Sequence[Target]) -> list[Line]:
        labels = {
            "quantization": "Quantization",
            "maxContextLength": "Tokens per request",
            "gpuMemoryBudgetMB": "Memory for it, MiB",
        }
        lines = [Line("Model", str(params.get("modelId")), _now_of(found, params.get("modelId")))]
        lines += [
            Line(label, str(params[field]), "as the node is set up") for field, label in labels.items() if field in params
        ]
        if "evictModel" in params:
            lines.append(Line("Unloaded first", str(params["evictModel"]), _now_of(found, params["evictModel"])))
        after = "is loaded again, until an unload is approved" if _is_kept(params) else "is not loaded again"
        lines.append(Line("After a restart of the node", after))
        overrides = params.get("overrides")
        if isinstance(overrides, Mapping):
            lines += [Line(f"Engine: {name}", str(value), "as the node is set up") for name, value in sorted(overrides.items())]
        return lines

    def _judge(self, target: Target, params: Mapping[str, object], signed: str) -> Iterator[Impact]:
        model = str(params.get("modelId"))
        if model in target.loaded:
            kept = " It is kept loaded from then on." if _is_kept(params) else ""
            yield Impact(
                CAUTION,
                f"{model} is loaded on {target.node.name} already: the same load changes nothing, another is refused.{kept}",
            )
            return
        yield from judge_eviction(target, params)
        yield from judge_memory(target, params, operation=self.name, signed=signed)


class ModelUnload(_BoxOperation):
    """Unload a model; by force without waiting for what runs."""

    name = "model-unload"
    title = "Unload a model"

    def choices(self) -> Choices:
        """Return what the page that proposes offers."""
        return unload_choices(list_boxes())

    def _clean_params(self, params: Mapping[str, object]) -> dict[str, object]:
        return clean_params(params, UNLOAD_FIELDS)

    def _sentence(self, params: Mapping[str, object]) -> str:
        how = "Unload by force" if params.get("force") is True else "Unload"
        return f"{how} {params.get('modelId')} from"

    def _lines(self, params: Mapping[str, object], found: Sequence[Target]) -> list[Line]:
        is_forced = params.get("force") is True
        running = "are cut off at once" if is_forced else "may finish within the node's own limit"
        return [
            Line("Model", str(params.get("modelId")), _now_of(found, params.get("modelId"))),
            Line("Requests that run", running),
        ]

    def _judge(self, target: Target, params: Mapping[str, object], signed: str) -> Iterator[Impact]:
        model = str(params.get("modelId"))
        if model not in target.loaded:
            yield Impact(CAUTION, f"{model} is not loaded on {target.node.name}.")
            return
        verb = "they are cut off" if params.get("force") is True else "they may finish within the node's own limit"
        yield from judge_live(target, model, verb=verb)


class CacheFlush(_BoxOperation):
    """Flush caches: all, of a model, of a tenant or of a tag."""

    name = "cache-flush"
    title = "Flush caches"

    def choices(self) -> Choices:
        """Return what the page that proposes offers."""
        return flush_choices(list_boxes())

    def _clean_params(self, params: Mapping[str, object]) -> dict[str, object]:
        return clean_flush(params)

    def _sentence(self, params: Mapping[str, object]) -> str:
        model, tenant = params.get("modelId"), params.get("tenantId")
        match params.get("scope"):
            case "tenant":
                what = f"the cache of tenant {tenant}"
            case "tag":
                what = f"the cache tagged {params.get('tag')}" + (f" of tenant {tenant}" if tenant else "")
            case "model":
                return f"Flush the cache of model {model} on"
            case _:
                what = "all caches"
        return f"Flush {what}{f' of model {model}' if model else ''} on"

    def _lines(self, params: Mapping[str, object], found: Sequence[Target]) -> list[Line]:
        labels = {"scope": "Scope", "tenantId": "Tenant", "modelId": "Model", "tag": "Tag"}
        return [Line(label, str(params[field])) for field, label in labels.items() if field in params]

    def _judge(self, target: Target, params: Mapping[str, object], signed: str) -> Iterator[Impact]:
        model = params.get("modelId")
        if params.get("scope") == "all":
            yield Impact(
                DANGER, f"The caches of every tenant on {target.node.name} are emptied; their next requests are slower."
            )
        if isinstance(model, str) and model not in target.loaded:
            yield Impact(CAUTION, f"{model} is not loaded on {target.node.name}.")
        elif not target.loaded:
            yield Impact(OK, f"No model is loaded on {target.node.name}.")
        else:
            yield from judge_live(target, model if isinstance(model, str) else None, verb="some engines refuse while they run")


class SettingsReload(_BoxOperation):
    """Have nodes read their settings files again: what can be loaded there changes, what is loaded does not."""

    name = "settings-reload"
    title = "Reload the settings of nodes"

    def clean(self, targets: Sequence[str], params: Mapping[str, object]) -> Request:
        """Return the request with runner ids as targets. Raises InvalidProposal, also for nodes that do not know it."""
        request = super().clean(targets, params)
        # Over HTTP the call exists and takes no token: nothing there would look at what people signed.
        unable = _find_unable(request.targets, lambda node: node.reloads_settings and node.reach != Reach.DIRECT.value)
        if unable:
            raise InvalidProposal(
                f"{_join_first(unable)} has not said that it can reload its settings by an approval: the runner "
                "there is of an older version, has no data folder, or is called over HTTP. Update it, or have its owner reload "
                "them on the node.", param="targets",
            )  # fmt: skip
        return request

    def choices(self) -> Choices:
        """Return what the page that proposes offers."""
        return reload_choices(list_boxes())

    def _clean_params(self, params: Mapping[str, object]) -> dict[str, object]:
        return clean_params(params, RELOAD_FIELDS)

    def _sentence(self, params: Mapping[str, object]) -> str:
        return "Reload the settings of"

    def _lines(self, params: Mapping[str, object], found: Sequence[Target]) -> list[Line]:
        return [
            Line(
                "What is read", "settings.json and local.json on the node, as they are then; they are no part of what is signed"
            ),
            Line("Models that are loaded", "stay as they are; if one would change, nothing is taken over"),
        ]

    def _judge(self, target: Target, params: Mapping[str, object], signed: str) -> Iterator[Impact]:
        for model in sorted(target.loaded):
            yield Impact(
                OK, f"{model} is loaded on {target.node.name} and stays as it is; with other settings for it the node refuses."
            )


def _join_first(names: Sequence[str]) -> str:
    return ", ".join(names[: limits().nodes.listed_names])


def _find_unable(targets: Sequence[str], is_able: Callable[[Node], bool]) -> list[str]:
    """Return the names of the signed nodes that have not said that they know what is asked for."""
    return [node.name for node in map(find_signed, targets) if node is not None and not is_able(node)]


def _is_kept(params: Mapping[str, object]) -> bool:
    return params.get(KEEP) is True


def _is_away(node: Node) -> str:
    presence: NodePresence | None = getattr(node, "presence", None)
    has_way = node.reach == Reach.DIRECT.value or (presence is not None and presence.connected)
    if not has_way or judge_status(node, presence, now=read_clock()) is NodeStatus.OFFLINE:
        return f"{node.name} is offline; it is told when it is back"
    return ""


def _now_of(found: Sequence[Target], model: object) -> str:
    """Return on how many of the boxes a model is loaded now."""
    holding = [target.node.name for target in found if model in target.loaded]
    if not holding:
        return "not loaded"
    return "loaded" if len(found) == 1 else f"loaded on {_join_first(holding)}"


def _name_boxes(targets: Sequence[str]) -> str:
    names = [name_of(target) for target in targets[: limits().nodes.listed_names]]
    beyond = f" and {len(targets) - limits().nodes.listed_names} more" if len(targets) > limits().nodes.listed_names else ""
    return ", ".join(names) + beyond

"""Loading and unloading of models, and the settings that say what can be loaded; loaded models that are gone again."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models.fields.json import KeyTextTransform
from django.utils import timezone
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from core.limits import limits
from governance.audit import find_last_event, find_last_event_at, record_event
from governance.errors import InvalidProposal
from governance.notices import list_requester_and_signers, notify_of_event
from governance.operations.runs import LastRun, last_run, list_last_successes
from governance.registry import Choices, Impact, Line, MemoryChange, Request, Undone, make_query
from nodes.models import Node, ProviderState, Reach, clock_of
from nodes.operations.targets import (
    CAUTION,
    DANGER,
    OK,
    Field,
    NodeOperation,
    Params,
    Target,
    brief_live,
    clean_targets,
    explain_unready,
    find_places,
    find_signed,
    judge_live,
    list_options,
    list_targets,
    offer,
    offer_models,
    print_memory,
    refuse_unable,
)
from nodes.reports import read_replicas, read_stored
from nodes.services.availability import iterate_rows, read_availability
from nodes.services.telemetry import MemoryBar
from wire import clock
from wire.bridge import GpuInfo
from wire.contract import NodeStatus
from wire.ids import format_id

KEEP = "keepLoaded"
"""Of a load: the node loads the model again by itself after every restart."""
GPUS = "gpus"
"""Of a load: the GPUs that each replica takes, by their numbers on the node."""
MEMBERS = "members"
"""Of a load: the nodes of one replica over several, the head first: their runner ids, cluster addresses and GPUs."""
RELOAD_FAILED = "node.reload-failed"


class ModelLoad(NodeOperation):
    """Load a model, another one making room for it where that is asked for."""

    name = "model-load"
    title = gettext_noop("Load a model")
    fields: Mapping[str, Field] = {
        "modelId": Field("text", is_required=True),
        "quantization": Field("text"),
        "maxContextLength": Field("number"),
        "gpuMemoryBudgetMB": Field("number"),
        "evictModel": Field("text"),
        GPUS: Field("numbers"),
        MEMBERS: Field("members"),
        "overrides": Field("object"),
        KEEP: Field("truth"),
    }

    def clean(self, targets: Sequence[str], params: Params) -> Request:
        """Return the request with runner ids as targets. Raises InvalidProposal, also for nodes that cannot keep a model, or
        cannot be in a replica with others.
        """
        request = super().clean(targets, params)
        if MEMBERS in request.params:
            return _clean_members(request)
        if _is_kept(request.params):
            why = (
                "keep a model loaded: the runner there is of an older version, works at level L0, or is called over HTTP. "
                "Update it, or ask for the load alone."
            )
            refuse_unable(request.targets, lambda node: node.keeps_models, why=why, param=KEEP)
        return request

    def clean_params(self, params: Params) -> dict[str, object]:
        cleaned = super().clean_params(params)
        # Left out where it is false: so statements without it stay what they were, and runners that do not know it take them.
        return cleaned if _is_kept(cleaned) else {name: value for name, value in cleaned.items() if name != KEEP}

    def is_joint(self, params: Params) -> bool:
        """Return whether it is one replica over all the nodes."""
        return MEMBERS in params

    def find_undone(self, op_id: uuid.UUID) -> Sequence[Undone]:
        """Return which models this operation has loaded that are not loaded any more."""
        return [Undone(f"{lost.what} {lost.advice}", lost.again) for lost in find_lost_models(op_id)]

    def choices(self) -> Choices:
        """Return what a load offers: what the nodes could load, and what has to go for it."""
        targets = list_targets()
        model = {
            **offer_models(find_places(targets, is_available=True)),
            "help": _("Models found on the nodes, or type a name."),
        }
        keep = {
            "name": KEEP, "label": _("Keep it loaded"), "kind": "checkbox", "required": False,
            "initial": any(target.node.keeps_models for target in targets),
            "help": _(
                "The node loads it again by itself after every restart, until an unload is approved. Approvers sign this."
            ),
        }  # fmt: skip
        evict: dict[str, object] = {"name": "evictModel", "label": _("Replace (unload first)"), "required": False}
        if places := find_places(targets):
            evict |= {"kind": "select", "choices": [("", _("nothing")), *list_options(places)]}
        else:
            evict["help"] = _("Nothing is loaded at the moment.")
        rare: list[dict[str, object]] = [
            {"name": "maxContextLength", "label": _("Context length in tokens"), "kind": "number", "min": 1,
             "help": _("Empty: as the node is set up.")},
            {"name": "gpuMemoryBudgetMB", "label": _("GPU memory that it may take, in MiB"), "kind": "number", "min": 1,
             "help": _("Empty: what it needs.")},
            {"name": "quantization", "label": _("Quantization"), "help": _("Empty: as the node is set up.")},
            {"name": GPUS, "label": _("GPUs"), "kind": "list",
             "help": _("Their numbers on the node, such as [0, 1]: one replica takes them all. Empty: as the node is set up.")},
            {"name": MEMBERS, "label": _("One replica over all these nodes"), "kind": "list",
             "help": _('vLLM on Ray, the head first: [{"node": "gpu1", "gpus": [0, 1]}, {"node": "gpu2", "gpus": [0, 1]}].')},
            {"name": "overrides", "label": _("Settings of the engine"), "kind": "json",
             "help": _('A JSON object, such as {"n_gpu_layers": 20}. Whole numbers only.')},
        ]  # fmt: skip
        rare = [{**field, "required": False, "is_rare": True} for field in rare]
        return offer(targets, is_remote=True, params=[model, keep, evict, *rare])

    def write_sentence(self, params: Params, nodes: str) -> str:
        text = _("Load %(model)s as one replica on %(nodes)s") if self.is_joint(params) else _("Load %(model)s on %(nodes)s")
        return text % {"model": params.get("modelId"), "nodes": nodes}

    def write_lines(self, params: Params, found: Sequence[Target]) -> list[Line]:
        labels = {
            "quantization": _("Quantization"),
            "maxContextLength": _("Tokens per request"),
            "gpuMemoryBudgetMB": _("Memory for it, MiB"),
        }
        lines = [Line(_("Model"), str(params.get("modelId")), _now_of(found, params.get("modelId")))]
        lines += [Line(label, str(params[field]), _say_as_set_up()) for field, label in labels.items() if field in params]
        if "evictModel" in params:
            lines.append(Line(_("Unloaded first"), str(params["evictModel"]), _now_of(found, params["evictModel"])))
        lines += _describe_gpus(params, found)
        after = _("is loaded again, until an unload is approved") if _is_kept(params) else _("is not loaded again")
        lines.append(Line(_("After a restart of the node"), after))
        overrides = params.get("overrides")
        if isinstance(overrides, Mapping):
            lines += [
                Line(_("Engine: %(name)s") % {"name": name}, str(value), _say_as_set_up())
                for name, value in sorted(overrides.items())
            ]
        return lines

    def judge(self, target: Target, params: Params, signed: str) -> Iterator[Impact]:
        model, name = str(params.get("modelId")), target.node.name
        if model in target.loaded:
            said = {"model": model, "node": name}
            text = _("%(model)s is loaded on %(node)s already: the same load changes nothing, another is refused.") % said
            yield Impact(CAUTION, text)
            if _is_kept(params):
                yield Impact(OK, _("%(model)s is kept loaded on %(node)s from then on.") % said)
            return
        evicted = params.get("evictModel")
        if isinstance(evicted, str) and evicted not in target.loaded:
            text = _("%(model)s is to be unloaded first, but it is not loaded on %(node)s.")
            yield Impact(CAUTION, text % {"model": evicted, "node": name})
        elif isinstance(evicted, str):
            yield Impact(CAUTION, _("%(model)s is unloaded from %(node)s first.") % {"model": evicted, "node": name})
            yield from judge_live(target, evicted, fate=_say_may_finish())
        gpus, parts = _list_named(params, signed), _count_parts(params)
        yield from _judge_gpus(target, gpus)
        explain_misfit: Callable[..., str] = import_string(settings.NODE_MODEL_FIT)  # it lives above this app
        quantization = str(params.get("quantization") or "")
        if why := explain_misfit(model, node_id=target.node.pk, quantization=quantization, gpus=gpus, parts=parts):
            text = _("The chosen GPUs of %(node)s cannot run %(model)s: %(why)s.")
            text = text if gpus else _("No GPU of %(node)s can run %(model)s: %(why)s.")
            yield Impact(DANGER, text % {"node": name, "model": model, "why": why})
        yield self._judge_memory(target, params, signed)

    def write_briefs(self, target: Target, params: Params) -> Iterator[str]:
        evicted, memory = params.get("evictModel"), target.said.memory
        if isinstance(evicted, str) and evicted in target.loaded:
            yield _("unloads %(model)s first") % {"model": evicted}
            yield from brief_live(target, evicted)
        if memory is None:
            return
        needed, freed = _memory_of(params.get("modelId"), target), _memory_of(evicted, target)
        change = MemoryChange(target.node.name, memory.total_mb, memory.used_mb, freed, needed or None)
        said = {"now": print_memory(change.used_mb), "total": print_memory(change.total_mb)}
        if change.then_mb is None:
            yield _("memory %(now)s of %(total)s used") % said
        else:
            yield _("memory %(now)s → %(then)s of %(total)s") % {**said, "then": print_memory(change.then_mb)}

    def _judge_memory(self, target: Target, params: Params, signed: str) -> Impact:
        model, name, memory = str(params.get("modelId")), target.node.name, target.said.memory
        if memory is None:
            return Impact(CAUTION, _("%(node)s does not say how much memory it has.") % {"node": name})
        freed = sum(replica.memory_mb or 0 for replica in target.said.loaded if replica.model == params.get("evictModel"))
        total, free = _room_on(target, _list_named(params, signed), memory)
        needed = _memory_of(model, target)
        if not needed and (run := last_run(self.name, target=signed, params=params)) is not None:
            before = run.result.get("gpuMemoryUsedMB")
            needed = before if isinstance(before, int) else 0
        change = MemoryChange(name, total, total - free, freed, needed if needed > 0 else None)
        said = {"model": model, "node": name, "free": free + freed, "total": total, "needed": needed}
        if change.fits is None:
            text = _("Memory use of %(model)s unknown. %(free)s of %(total)s MiB are free on %(node)s.") % said
            return Impact(CAUTION, text, change)
        text = _("%(model)s took %(needed)s MiB when it was last measured; %(free)s MiB are free on %(node)s.") % said
        return Impact(OK if change.fits else DANGER, text, change)


class ModelUnload(NodeOperation):
    """Unload a model; by force without waiting for what runs."""

    name = "model-unload"
    title = gettext_noop("Unload a model")
    fields: Mapping[str, Field] = {"modelId": Field("text", is_required=True), "force": Field("truth")}

    def choices(self) -> Choices:
        """Return what an unload offers: what is loaded, and whether to wait for what runs."""
        targets = list_targets()
        force = {
            "name": "force", "label": _("By force: requests that run are cut off"), "kind": "checkbox", "required": False,
            "help": _("Otherwise they may finish within the node's own limit."),
        }  # fmt: skip
        return offer(targets, is_remote=True, params=[offer_models(find_places(targets)), force])

    def write_sentence(self, params: Params, nodes: str) -> str:
        is_forced = params.get("force") is True
        text = _("Unload by force %(model)s from %(nodes)s") if is_forced else _("Unload %(model)s from %(nodes)s")
        return text % {"model": params.get("modelId"), "nodes": nodes}

    def write_lines(self, params: Params, found: Sequence[Target]) -> list[Line]:
        is_forced = params.get("force") is True
        running = _("are cut off at once") if is_forced else _("may finish within the node's own limit")
        return [
            Line(_("Model"), str(params.get("modelId")), _now_of(found, params.get("modelId"))),
            Line(_("Requests that run"), running),
        ]

    def judge(self, target: Target, params: Params, signed: str) -> Iterator[Impact]:
        model = str(params.get("modelId"))
        spanning = next((one for one in target.said.spanning if one.model == model and one.state != "failed"), None)
        if spanning is not None:
            text = _("The replica ends on all of its nodes: %(nodes)s.")
            yield Impact(CAUTION, text % {"nodes": ", ".join(spanning.members)})
        if model not in target.loaded:
            if spanning is None:
                text = _("%(model)s is not loaded on %(node)s.")
                yield Impact(CAUTION, text % {"model": model, "node": target.node.name})
            return
        yield from judge_live(target, model, fate=_("They are cut off.") if params.get("force") is True else _say_may_finish())
        freed, memory = _memory_of(model, target), target.said.memory
        if freed and memory is not None:
            change = MemoryChange(target.node.name, memory.total_mb, memory.used_mb, freed, 0)
            text = _("%(freed)s MiB become free on %(node)s.") % {"freed": freed, "node": target.node.name}
            yield Impact(OK, text, change)

    def write_briefs(self, target: Target, params: Params) -> Iterator[str]:
        model = str(params.get("modelId"))
        yield from brief_live(target, model)
        if freed := _memory_of(model, target):
            yield _("%(memory)s become free") % {"memory": print_memory(freed)}


class SettingsReload(NodeOperation):
    """Have nodes read their settings files again: what can be loaded there changes, what is loaded does not."""

    name = "settings-reload"
    title = gettext_noop("Reload the settings of nodes")

    def clean(self, targets: Sequence[str], params: Params) -> Request:
        """Return the request with runner ids as targets. Raises InvalidProposal, also for nodes that do not know it."""
        request = super().clean(targets, params)
        why = (
            "reload its settings by an approval: the runner there is of an older version, has no data folder, or is called "
            "over HTTP. Update it, or have its owner reload them on the node."
        )
        # Over HTTP the call exists and takes no token: nothing there would look at what people signed.
        refuse_unable(
            request.targets, lambda node: node.reloads_settings and node.reach != Reach.DIRECT.value, why=why, param="targets"
        )
        return request

    def choices(self) -> Choices:
        """Return what a reload of the settings offers: it has no parameters."""
        return offer(list_targets(), is_remote=True, params=[])

    def write_sentence(self, params: Params, nodes: str) -> str:
        return _("Reload the settings of %(nodes)s") % {"nodes": nodes}

    def write_lines(self, params: Params, found: Sequence[Target]) -> list[Line]:
        read = _("settings.json and local.json on the node, as they are then; they are no part of what is signed")
        return [
            Line(_("What is read"), read),
            Line(_("Models that are loaded"), _("stay as they are; if one would change, nothing is taken over")),
        ]

    def judge(self, target: Target, params: Params, signed: str) -> Iterator[Impact]:
        for model in sorted(target.loaded):
            text = _("%(model)s is loaded on %(node)s and stays as it is; with other settings for it the node refuses.")
            yield Impact(OK, text % {"model": model, "node": target.node.name})


MODEL_LOAD, MODEL_UNLOAD, SETTINGS_RELOAD = ModelLoad(), ModelUnload(), SettingsReload()


def _say_as_set_up() -> str:
    return _("as the node is set up")


def _say_may_finish() -> str:
    return _("They may finish within the node's own limit.")


def _is_kept(params: Params) -> bool:
    return params.get(KEEP) is True


def _clean_members(request: Request) -> Request:
    """Return a load over several nodes as it is signed: every node with its address and GPUs, the head first.

    Raises InvalidProposal.
    """
    params = dict(request.params)
    given = [entry for entry in _list_members(params) if isinstance(entry, Mapping)]
    if _is_kept(params) or GPUS in params:
        raise InvalidProposal(
            _("%(members)s cannot go together with %(keep)s and %(gpus)s; leave those out.")
            % {"members": MEMBERS, "keep": KEEP, "gpus": GPUS},
            param=MEMBERS,
        )
    order = clean_targets([str(entry["node"]) for entry in given], is_remote=True)
    if len(order) < len(given) or len(order) < 2 or set(order) != set(request.targets):
        raise InvalidProposal(
            _("%(members)s must name the nodes of the request, two or more, each once.") % {"members": MEMBERS}, param=MEMBERS
        )
    if len({len(list(entry["gpus"])) for entry in given}) > 1:
        raise InvalidProposal(
            _("%(members)s must name as many GPUs on each node as on the others.") % {"members": MEMBERS}, param=MEMBERS
        )
    why = (
        "be in a replica with other nodes: start it with --cluster-address IP:PORT, an address in a network that only these "
        "nodes reach."
    )
    refuse_unable(order, lambda node: bool(node.cluster_address) and node.op_level == "L2", why=why, param=MEMBERS)
    nodes = [node for text in order if (node := find_signed(text)) is not None]
    params[MEMBERS] = [
        {"node": node.runner_id, "address": node.cluster_address, "gpus": list(entry["gpus"])}
        for node, entry in zip(nodes, given, strict=True)
    ]
    return Request(order, params)


def _list_members(params: Params) -> list[Mapping[str, Any]]:  # Any: JSON
    members = params.get(MEMBERS)
    return [entry for entry in members if isinstance(entry, Mapping)] if isinstance(members, list | tuple) else []


def _list_named(params: Params, signed: str) -> list[int]:
    """Return the GPUs that a load names on a node, ``signed``: the node's id as it is signed; none when it names none."""
    own = (entry.get("gpus") for entry in _list_members(params) if entry.get("node") == signed)
    named = params.get(GPUS, next(own, None))
    return [index for index in named if isinstance(index, int)] if isinstance(named, list | tuple) else []


def _count_parts(params: Params) -> int:
    """Return how many GPUs share one replica."""
    if MEMBERS in params:
        return max(1, sum(len(_list_named(params, str(entry.get("node")))) for entry in _list_members(params)))
    return max(1, len(_list_named(params, "")))


def _describe_gpus(params: Params, found: Sequence[Target]) -> Iterator[Line]:
    """Yield the lines that name every GPU of every node, with what each is today."""
    there = {target.node.runner_id: target for target in found}
    if MEMBERS in params:
        for place, entry in enumerate(_list_members(params)):
            node, gpus = str(entry.get("node")), _list_named(params, str(entry.get("node")))
            today = (
                ", ".join(_name_gpu(there[node], index) for index in gpus) if node in there else _("the node is not known here")
            )
            role = _("Head, which serves") if place == 0 else _("Lends its GPUs")
            said = {"node": node, "gpus": ", ".join(map(str, gpus)), "address": entry.get("address")}
            yield Line(role, _("%(node)s: GPU %(gpus)s, at %(address)s") % said, today)
        yield Line(_("Network"), _("Ray's ports on these nodes open to each other and to nobody else"))
        yield Line(_("When one node is lost"), _("the replica ends on all of them"))
        return
    named = _list_named(params, "")
    if not named:
        if any(len(target.said.gpus) > 1 for target in found):
            yield Line(_("GPUs"), _say_as_set_up())
        return
    today = "; ".join(
        f"{target.node.name}: {', '.join(_name_gpu(target, index) for index in named)}"
        for target in found[: limits().nodes.listed_names]
    )
    yield Line(_("GPUs"), ", ".join(map(str, named)), today)


def _name_gpu(target: Target, index: int) -> str:
    gpu = next((gpu for gpu in target.said.gpus if gpu.index == index), None)
    if gpu is None:
        return _("%(gpu)s is not there") % {"gpu": index}
    return _("%(gpu)s is %(name)s") % {"gpu": index, "name": gpu.name}


def _room_on(target: Target, gpus: Sequence[int], memory: MemoryBar) -> tuple[int, int]:
    """Return the memory for a replica on these GPUs, and what it may have: of each as much as is free on the fullest."""
    known = {
        gpu.index: (gpu.memory_total_mb, gpu.memory_total_mb - gpu.memory_used_mb)
        for gpu in target.said.gpus
        if gpu.memory_total_mb is not None and gpu.memory_used_mb is not None
    }
    if not gpus or not known.keys() >= set(gpus):
        return memory.total_mb, memory.total_mb - memory.used_mb
    return sum(known[index][0] for index in gpus), len(gpus) * min(known[index][1] for index in gpus)


def _memory_of(model: object, target: Target) -> int:
    """Return what a model has on a node now, as the node says; 0 = nothing, or it does not say."""
    replicas = (*target.said.loaded, *target.said.changing)
    return max((replica.memory_mb or 0 for replica in replicas if replica.model == model), default=0)


def _judge_gpus(target: Target, gpus: Sequence[int]) -> Iterator[Impact]:
    """Yield what is known of the GPUs that a load names: those that are not there, and what is on the others."""
    there = {gpu.index for gpu in target.said.gpus}
    for index in gpus:
        if there and index not in there:
            text = _("%(node)s has no GPU %(gpu)s; the load will be refused.")
            yield Impact(DANGER, text % {"node": target.node.name, "gpu": index})
        elif on_it := sorted({one.model for one in (*target.said.loaded, *target.said.reserved) if index in one.gpus}):
            text = _("GPU %(gpu)s of %(node)s has %(models)s on it.")
            yield Impact(CAUTION, text % {"node": target.node.name, "gpu": index, "models": ", ".join(on_it)})


def _now_of(found: Sequence[Target], model: object) -> str:
    holding = [target.node.name for target in found if model in target.loaded]
    if not holding:
        return _("not loaded")
    if len(found) == 1:
        return _("loaded")
    return _("loaded on %(nodes)s") % {"nodes": ", ".join(holding[: limits().nodes.listed_names])}


# Models that an operation has loaded and that are gone although nobody had them unloaded


@dataclass(frozen=True, slots=True)
class LostModel:
    """A model that a node does not have although its last load succeeded. ``reason``: as the node says it, "" = it does not.

    ``is_kept``: people approved that it stays loaded. ``gave_up_ms``: when the node stopped trying to load it again, as it says
    (Unix time in milliseconds); None = it has not. ``back_at``: when the node last connected, None = not known. ``again``:
    the query of the page that proposes, which asks for the same once more.
    """

    model: str
    node_id: uuid.UUID
    node_name: str
    op_id: uuid.UUID
    loaded_at: datetime
    back_at: datetime | None
    reason: str
    is_kept: bool
    again: str
    gave_up_ms: int | None = None

    @property
    def what(self) -> str:
        """One sentence that names model and node."""
        return f"{self.model} was loaded on {self.node_name} and is not any more."

    @property
    def advice(self) -> str:
        """Since when, and why."""
        since = f"It was loaded at {_print(self.loaded_at)}."
        if self.back_at is not None:
            since = f"{since} {self.node_name} connected at {_print(self.back_at)} without it."
        if self.is_kept:
            why = f"It is approved to stay loaded, and {self.node_name} says: {self.reason or 'nothing about it'}."
        else:
            why = f"{self.node_name} says: {self.reason}." if self.reason else "Its approval did not ask to keep it loaded."
        return f"{since} {why}"


def find_lost_models(op_id: uuid.UUID | None = None, *, model: str | None = None) -> tuple[LostModel, ...]:
    """Return what nodes that are connected have lost, by node and model; ``op_id``: only what this operation had loaded;
    ``model``: this one alone.

    Three queries when nothing is lost, one while no node that takes operations is connected.
    """
    had = None if model is None else {run.target for run in _list_loads(None, model)}
    targets = {target.node.runner_id: target for target in list_targets(had) if _is_heard(target)} if had != set() else {}
    if not targets:
        return ()
    loads = [run for run in _read_loads(targets, model) if op_id is None or run.op_id == op_id]
    lost = [found for run in loads if (found := _compare(targets[run.target], run)) is not None]
    return tuple(sorted(lost, key=lambda each: (each.node_name, each.model)))


def tell_failed_reloads() -> int:
    """Tell of each kept model that a node has given up loading again, once for each time it gave up; return how many are new.

    Who asked for the load and who signed it are told, since they said that the model stays loaded and can ask for it again.
    """
    gave_up = [lost for lost in find_lost_models() if lost.is_kept and lost.gave_up_ms is not None]
    return sum(_tell(lost) for lost in gave_up)


@transaction.atomic
def _tell(lost: LostModel) -> bool:
    # The row lock makes "not told yet" and "told" one step: two sweeps at once tell of a failure once.
    node = Node.objects.select_for_update(of=("self",)).get(pk=lost.node_id)
    told = find_last_event(action=RELOAD_FAILED, target=node.printed_id, detail={"model": lost.model})
    if told is not None and (
        told.detail.get("gave_up_ms") == lost.gave_up_ms
        or clock.now() - told.at < timedelta(seconds=limits().nodes.reload_failed_again_s)
    ):
        return False
    detail = {"name": node.name, "model": lost.model, "reason": lost.reason, "gave_up_ms": lost.gave_up_ms}
    event = record_event(
        actor="system:sweep", action=RELOAD_FAILED, target=node.printed_id, detail=detail, op_id=format_id("op", lost.op_id)
    )
    notify_of_event(event, "reload_failed", usernames=list_requester_and_signers(lost.op_id))
    return True


def _is_heard(target: Target) -> bool:
    # Only what a node says now counts; one that is away has another problem.
    node, said = target.node, target.said.says_something and target.said.is_current
    return bool(node.runner_id and node.op_level and said and target.status is not NodeStatus.OFFLINE)


def _list_loads(targets: Collection[str] | None, model: str | None) -> list[LastRun]:
    """Return the last load or unload of each model on each target."""
    names = [MODEL_LOAD.name, MODEL_UNLOAD.name]
    return list_last_successes(targets=targets, operations=names, member="modelId", subject=model)


def _read_loads(targets: Collection[str], model: str | None) -> Iterator[LastRun]:
    # A load counts unless an unload or an eviction of the same model came after it.
    evictions = list_last_successes(targets=targets, operations=[MODEL_LOAD.name], member="evicted", subject=model)
    evicted_at = {(run.target, run.subject): run.ended_at for run in evictions}
    for run in _list_loads(targets, model):
        is_evicted = evicted_at.get((run.target, run.subject), run.ended_at) > run.ended_at
        if run.operation == MODEL_LOAD.name and not is_evicted and not _is_ended_elsewhere(run):
            yield run


def _is_ended_elsewhere(run: LastRun) -> bool:
    """Whether a replica over several nodes was unloaded, or loaded anew, on another of them, which ended it here."""
    others = [str(entry.get("node")) for entry in _list_members(run.params) if entry.get("node") != run.target]
    if not others:
        return False
    later = list_last_successes(targets=others, operations=[MODEL_LOAD.name, MODEL_UNLOAD.name], member="modelId")
    return any(one.subject == run.subject and one.op_id != run.op_id and one.ended_at > run.ended_at for one in later)


def _compare(target: Target, run: LastRun) -> LostModel | None:
    model, view, node = str(run.params.get("modelId")), target.said, target.node
    is_there = model in target.loaded or model in node.model_names
    if is_there or any(replica.model == model for replica in (*view.changing, *view.reserved)):
        return None
    failed = next((replica for replica in view.failed if replica.model == model), None)
    reason, gave_up_ms = (failed.detail, failed.gave_up_ms) if failed is not None else ("", None)
    return LostModel(
        model=model, node_id=node.pk, node_name=node.name, op_id=run.op_id, loaded_at=run.ended_at,
        back_at=find_last_event_at(action="node.connect", target=node.printed_id), reason=reason.rstrip("."),
        is_kept=run.params.get(KEEP) is True, again=_make_query(run), gave_up_ms=gave_up_ms,
    )  # fmt: skip


def _make_query(run: LastRun) -> str:
    members = [str(entry.get("node")) for entry in _list_members(run.params)]
    return make_query(run.operation, members or [run.target], {KEEP: False, **run.params}, op_class=run.op_class)


def _print(at: datetime) -> str:
    return f"{timezone.localtime(at):%Y-%m-%d %H:%M %Z}"


# Room for a model that is not loaded yet


@dataclass(frozen=True, slots=True)
class Room:
    """What a node has for one more model, in MiB: of its GPUs together, or of the host where it has none (``has_gpu``).

    ``one_gpu_mb``: free on its emptiest GPU. ``loaded``: what each loaded model holds. None = the node does not say.
    ``refusal``: why it takes no load now, empty = it does. ``is_away``: because it is offline. ``keeps``: it can keep a model
    loaded.
    """

    node_id: uuid.UUID
    node: str
    runner_id: str
    refusal: str
    is_away: bool
    keeps: bool
    has_gpu: bool
    total_mb: int | None
    free_mb: int | None
    gpus: int
    one_gpu_mb: int | None
    loaded: tuple[tuple[str, int], ...]


_SUMS = ("kind", "total_mb", "used_mb")
"""Of a node's memory. The facts of its models stand beside them, and are long."""


def read_rooms() -> list[Room]:
    """Return the room of every node that is heard or takes operations, by name; one query."""
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).exclude(credential__revoked_at__isnull=False)
    sums = {f"memory_{part}": KeyTextTransform(part, "presence__memory") for part in _SUMS}
    read = ("runner_id", "op_level", "policy_version", "policy_error", "clock_skew_ms", "keeps_models", "agent_session")
    columns = (*read, "presence__gpus", "presence__replicas", *sums)
    found = [_measure_room(node) for node in iterate_rows(rows.annotate(**sums).order_by("name", "pk"), *columns)]
    return [room for room in found if room is not None]


def _measure_room(node: Any) -> Room | None:  # Any: a row
    availability = read_availability(node, now=clock_of(node))
    is_away = availability.status is NodeStatus.OFFLINE
    if is_away and not node.op_level:
        return None
    gpus = read_stored(node.gpus, list[GpuInfo]) or []
    free = [max(0, gpu.memory_total_mb - (gpu.memory_used_mb or 0)) for gpu in gpus if gpu.memory_total_mb]
    kind, total, used = (getattr(node, f"memory_{part}") for part in _SUMS)
    total, used = _read_int(total), _read_int(used)
    if total is None and free:
        total, used = sum(gpu.memory_total_mb or 0 for gpu in gpus), sum(gpu.memory_used_mb or 0 for gpu in gpus)
    held: Counter[str] = Counter()
    for replica in read_replicas(node.replicas):
        held[replica.model] += (replica.memory_mb or 0) if replica.state == "loaded" else 0
    is_able = bool(node.runner_id and node.op_level)
    refusal = explain_unready(node) if is_able else _("%(node)s takes no loads from here.") % {"node": node.name}
    return Room(
        node_id=node.pk, node=node.name, runner_id=node.runner_id if is_able else "", keeps=node.keeps_models,
        refusal=_("%(node)s is offline.") % {"node": node.name} if is_away else refusal,
        is_away=is_away, has_gpu=bool(free) and kind != "host", total_mb=total,
        free_mb=None if total is None else max(0, total - (used or 0)), gpus=len(free), one_gpu_mb=max(free, default=None),
        loaded=tuple(sorted((model, mb) for model, mb in held.items() if mb)),
    )  # fmt: skip


def _read_int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None

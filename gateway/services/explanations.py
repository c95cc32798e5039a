"""Why requests wait, model by model: what stands in the way, and what an operator can do. Reads only."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from django.db.models import Count, Min

from core.limits import limits
from gateway.models import RequestRecord
from gateway.values import RequestOutcome, judge_outcome
from nodes.services.availability import Has, ServingNode, read_nodes_of
from nodes.states import Unavailable
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, ErrorCode, RequestState
from wire.engine_errors import Blame, judge_error

_BRIEF = {
    Unavailable.DRAINING: "draining",
    Unavailable.DRAINED: "drained",
    Unavailable.CORDONED: "cordoned",
    Unavailable.PROVIDER_OFF: "provider off",
    Unavailable.TAKEN_BACK: "taken back",
    Unavailable.HOLDS_BACK: "node holds back",
    Unavailable.LATE: "node late",
    Unavailable.ERROR: "node in error",
    Unavailable.UNREACHABLE: "node unreachable",
    Unavailable.SILENT: "node offline",
}
_LIFTED_FIRST = tuple(_BRIEF)
"""A click first, then a question to somebody, then a walk to the node."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a request for a model waits. ``brief`` fits a badge; ``reason`` and ``advice`` are sentences.

    ``is_starting``: nothing stands in the way.
    """

    brief: str
    reason: str
    advice: str
    is_starting: bool = False


@dataclass(frozen=True, slots=True)
class WaitingModel:
    """A model that requests wait for: how many, for how long the first of them, and why."""

    model: str
    requests: int
    oldest_wait_s: float
    wait: Wait


def read_waits() -> tuple[WaitingModel, ...]:
    """Return what is waited for, the longest wait first; one query when nothing waits, three when something does."""
    queued = RequestRecord.objects.filter(state=RequestState.QUEUED.value).values("model")
    waits = queued.annotate(requests=Count("pk"), since=Min("created_at")).order_by("since")
    rows = waits[: limits().gateway.page_waiting_models]
    found = {row["model"]: row for row in rows}
    now = clock.now()
    return tuple(
        WaitingModel(model, found[model]["requests"], max(0.0, (now - found[model]["since"]).total_seconds()), wait)
        for model, wait in explain_waits(found).items()
    )


def explain_waits(models: Collection[str]) -> dict[str, Wait]:
    """Return for each model why a request for it would wait now; two queries, none for no model."""
    if not models:
        return {}
    nodes, running = read_nodes_of(models), _count_running()
    return {model: explain_wait(model, _add_running(nodes[model], running)) for model in models}


def explain_wait(model: str, nodes: Sequence[ServingNode]) -> Wait:
    """Return why a request for a model waits, given the nodes that have it, load it or could. Pure."""
    loaded = [node for node in nodes if node.has is Has.LOADED]
    able = [node for node in loaded if node.unavailable is None]
    free = [node for node in able if node.active < node.slots]
    if free:
        return Wait(
            "starting",
            f"{model} is served by {free[0].name} ({free[0].slots - free[0].active} of {free[0].slots} slots free).",
            "It starts at once. If it does not, the node may not answer the request's path: see its page.",
            is_starting=True,
        )
    if able:
        full = join_names(f"{node.name} {node.active} of {node.slots}" for node in able)
        return Wait(
            "nodes full",
            f"Every node that has {model} is full: {full}.",
            f"It starts when one is done. To shorten the queue, load {model} on another node or lower the rates of keys.",
        )
    loading = [node for node in nodes if node.has is Has.LOADING and node.unavailable is None]
    if loading:
        far = f", {loading[0].percent} % so far" if loading[0].percent is not None else ""
        return Wait("loading", f"{loading[0].name} is loading {model}{far}.", "It starts when the model is loaded.")
    if loaded:
        return _explain_held(model, loaded)
    return _explain_missing(model, nodes)


def _explain_held(model: str, nodes: Sequence[ServingNode]) -> Wait:
    # The advice is for the reason that an operator lifts most easily.
    first = min(nodes, key=lambda node: _LIFTED_FIRST.index(node.unavailable or Unavailable.SILENT))
    if len(nodes) == 1:
        reason = f"Only {first.name} has {model}, and it {first.unavailable}."
    else:
        reason = f"No node that has {model} takes work: {join_names(f'{node.name} {node.unavailable}' for node in nodes)}."
    return Wait(_BRIEF[first.unavailable or Unavailable.SILENT], reason, _advise(model, first))


def _advise(model: str, node: ServingNode) -> str:
    match node.unavailable:
        case Unavailable.PROVIDER_OFF:
            return f"Enable the provider {node.provider}, or load {model} on a node of another one."
        case Unavailable.DRAINING | Unavailable.DRAINED:
            return f"Undrain {node.name}, or load {model} on another node."
        case Unavailable.CORDONED:
            return f"Uncordon {node.name}, or load {model} on another node."
        case Unavailable.TAKEN_BACK:
            return f"Ask {node.owner or 'its owner'}, or load {model} on another node."
        case Unavailable.ERROR:
            look = f"Look at the page of {node.name} and at its log."
            return f"{node.name} says: {node.last_error}" if node.last_error else look
        case Unavailable.LATE:
            return f"{node.name} gets no new work until it is heard again. Check its network."
        case Unavailable.UNREACHABLE:
            return f"{node.name} is heard, but its public_base_url does not answer: its page under Nodes says why."
        case _:
            return f"Check the power of {node.name}, its network and the runner's log."


def _explain_missing(model: str, nodes: Sequence[ServingNode]) -> Wait:
    able = [node.name for node in nodes if node.has is Has.COULD and node.unavailable is None]
    if able:
        where = join_names(able)
        return Wait(
            "not loaded", f"No node has {model} loaded; {where} could load it.", f"Propose on the page of {able[0]} to load it."
        )
    return Wait(
        "no node",
        f"No node has {model}.",
        "Check the model name, or load it on a node.",
    )


def _count_running() -> Counter[uuid.UUID]:
    # Our own records are newer than the last heartbeat of a node.
    states = [state.value for state in OPEN_REQUEST_STATES if state is not RequestState.QUEUED]
    rows = RequestRecord.objects.filter(state__in=states, node_id__isnull=False).values_list("node_id")
    return Counter(dict(rows.annotate(count=Count("pk")).order_by()))


def _add_running(nodes: Sequence[ServingNode], running: Mapping[uuid.UUID, int]) -> list[ServingNode]:
    return [replace(node, active=max(node.active, running.get(node.node_id, 0))) for node in nodes]


def join_names(parts: Iterable[str]) -> str:
    """Return some names for a sentence; further ones are counted."""
    named = list(parts)
    most = limits().gateway.page_named
    beyond = f" and {len(named) - most} more" if len(named) > most else ""
    return ", ".join(named[:most]) + beyond


NOBODY_THERE = frozenset({
    ErrorCode.NO_AVAILABLE_NODE, ErrorCode.NODE_STALE, ErrorCode.NODE_DRAINING, ErrorCode.NODE_UNHEALTHY,
    ErrorCode.REQUEST_TIMEOUT,
})  # fmt: skip
"""Endings that had to do with the nodes; how those stand now may say why."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What happened, and what to do about it; ``advice`` may be empty."""

    what: str
    advice: str = ""


_ENDINGS = {
    ErrorCode.NODE_STALE: Ending("The nodes that serve the model had stopped reporting.", "Look at their heartbeats."),
    ErrorCode.NODE_DRAINING: Ending(
        "Every node that serves the model was being held back.", "Undrain or uncordon one, or load the model on another node."
    ),
    ErrorCode.NODE_UNHEALTHY: Ending(
        "Every node that serves the model reported an error.", "Look at the pages and logs of those nodes."
    ),
    ErrorCode.MODEL_NOT_ALLOWED: Ending(
        "The client may not use the model it asked for: it is not on the allow-list, not among the key's models, or unknown.",
        "Allow it on the page Models, make an alias of that name, or change the models of the key.",
    ),
    ErrorCode.PROMPT_TOO_LARGE: Ending(
        "The prompt has more characters than the model's cap.", "Shorten it, or raise the cap on the model's page."
    ),
    ErrorCode.MAX_TOKENS_TOO_LARGE: Ending(
        "The client asked for more tokens than the model's cap.", "Ask for fewer, or raise the cap on the model's page."
    ),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Ending(
        "Prompt and answer do not fit into the model's context, says the engine.",
        "Shorten the prompt, or serve the model with a longer context.",
    ),
    ErrorCode.RESPONSE_NOT_FOUND: Ending(
        "The client continued an answer that is not kept for its tenant, or not any more.",
        "Send the whole conversation, or let the tenant keep answers.",
    ),
    ErrorCode.RATE_LIMITED: Ending(
        "The key had used up its requests per minute.", "Wait, or raise the limit of key or tenant."
    ),
    ErrorCode.BAD_REQUEST: Ending(
        "The request could not be understood or not be carried; the client was told which field.",
        "The client has to change it.",
    ),
    ErrorCode.BODY_TOO_LARGE: Ending("The request is larger than the gateway takes.", "Send less, or raise the setting."),
    ErrorCode.REQUEST_INTERRUPTED: Ending(
        "The node was lost or taken back while it worked, and the request could not move on to another one.",
        "The client may repeat it. Look at what became of the node.",
    ),
    ErrorCode.INTERNAL_ERROR: Ending("A defect of Muster.", "Look for the request's id in the log of the gateway."),
    ErrorCode.CLIENT_CLOSED_REQUEST: Ending("The client left, or stopped reading, before the answer was complete."),
    ErrorCode.TICKET_UNUSED: Ending(
        "No request came to the node with this ticket, as far as the node told.", "It is charged what it had reserved."
    ),
}


def name_state(record: RequestRecord) -> tuple[str, str]:
    """Return the word for a request's state, and the name of its badge's colour.

    The contract's ``rejected`` is two things for an operator: refused for what the caller sent, or not accepted for want of
    room.
    """
    state = RequestState(record.state)
    if state is not RequestState.REJECTED:
        return state.value, state.value
    is_refused = judge_outcome(state, record.status_code) is RequestOutcome.REFUSED
    return ("refused", "refused") if is_refused else ("not accepted", "rejected")


def explain_ending(record: RequestRecord) -> Ending | None:
    """Return what the end of a request means; None for one that is open or was served."""
    if not record.error_code:
        return None
    if record.error_code == ErrorCode.NO_AVAILABLE_NODE:
        return _explain_no_node(record)
    if record.error_code == ErrorCode.REQUEST_TIMEOUT:
        return _explain_timeout(record)
    is_of_engine = bool(record.engine_error) and record.error_code != ErrorCode.CONTEXT_LENGTH_EXCEEDED
    if is_of_engine or record.error_code == ErrorCode.FORWARDED_REQUEST_FAILED:
        return _explain_engine(record)
    known = _ENDINGS.get(ErrorCode(record.error_code)) if record.error_code in set(ErrorCode) else None
    return known or Ending("It ended with this code.", "docs/api.md lists what each code means.")


def _explain_no_node(record: RequestRecord) -> Ending:
    if record.state == RequestState.REJECTED:
        return Ending(
            "The queue of the model was full, or the request could not be recorded.",
            "Load the model on more nodes, raise its queue on the model's page, or look at the database.",
        )
    return Ending("No node took the request in time.")


def _explain_timeout(record: RequestRecord) -> Ending:
    if record.attempts:
        return Ending(
            "The answer took longer than a request may take in all.", "Ask for less, or raise MUSTER_REQUEST_TIMEOUT_S."
        )
    return Ending(
        "It waited in the queue for as long as a request may.", "Load the model on more nodes, or lower the rates of keys."
    )


_ADVICE = {
    401: "Check the key with which the node asks its engine (--backend-key).",
    402: "Check the account with which the node asks its engine.",
    403: "Check the key with which the node asks its engine (--backend-key).",
    404: "Look whether the model is still loaded there.",
    405: "Look whether the engine answers this endpoint.",
    410: "Look whether the model is still offered there.",
}


def _explain_engine(record: RequestRecord) -> Ending:
    where = f"The engine on {record.node_name}" if record.node_name else "The engine"
    status = record.status_code or 0
    log = "" if record.engine_error else f"Look for {record.printed_id} in the log of the node."
    if record.state == RequestState.REJECTED:
        return Ending(f"{where} refused the request with HTTP {status}.", "The caller has to change it.")
    if 200 <= status < 300 and record.is_streaming:
        return Ending(f"{where} failed in the middle of the answer, after {record.bytes_out:,} bytes.", log)
    if status >= 400 and judge_error(status) is Blame.CAPACITY:
        return Ending(f"{where} had no room (HTTP {status}).", "Load the model on more nodes, or let the engine take more.")
    if 400 <= status < 500:
        return Ending(f"{where} turned the node away with HTTP {status}.", _ADVICE.get(status, log))
    return Ending(f"{where} failed{f' with HTTP {status}' if status >= 500 else ''}.", log)


class TimePart(NamedTuple):
    """One stretch of a request's time. ``start`` and ``share`` in percent of the whole, ``ms`` in milliseconds."""

    name: str
    label: str
    ms: int
    start: float
    share: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The first lines of a request's page. ``now``: how the nodes of its model stand at this moment, where that matters.

    ``asked``: the name the client used, if another than the model's. ``badge``: the name of the colour of ``state``.
    """

    state: str
    badge: str
    is_open: bool
    what: str
    advice: str
    now: Wait | None
    asked: str
    parts: tuple[TimePart, ...]


def explain_request(record: RequestRecord) -> Explanation:
    """Return what a request's page says first. Two queries when nodes matter, else none."""
    is_open = RequestState(record.state) in OPEN_REQUEST_STATES
    asks_why = record.state == RequestState.QUEUED or record.error_code in NOBODY_THERE
    now = explain_waits([record.model])[record.model] if asks_why and record.model else None
    what, advice = _say_state(record, now)
    state, badge = name_state(record)
    return Explanation(
        state=state,
        badge=badge,
        is_open=is_open,
        what=what,
        advice=advice,
        now=now if not is_open else None,
        asked=record.asked_model,
        parts=split_time(record),
    )


def split_time(record: RequestRecord) -> tuple[TimePart, ...]:
    """Return where the time of a finished request went: queue, the wait for the first byte, the answer."""
    whole = record.latency_ms or 0
    if not whole or not record.attempts:
        return ()
    queue = min(record.queue_ms or 0, whole)
    first = min(max(record.ttfb_ms if record.ttfb_ms is not None else whole, queue), whole)
    stretches = (
        ("queue", "in the queue", queue),
        ("first", "to the first byte", first - queue),
        ("answer", "the answer", whole - first),
    )
    parts, start = [], 0
    for name, label, ms in stretches:
        parts.append(TimePart(name, label, ms, round(100 * start / whole, 3), round(100 * ms / whole, 3)))
        start += ms
    return tuple(parts)


def _say_state(record: RequestRecord, now: Wait | None) -> tuple[str, str]:
    match RequestState(record.state):
        case RequestState.QUEUED:
            return (f"It waits: {now.reason}", now.advice) if now is not None else ("It waits for a node.", "")
        case RequestState.ASSIGNED:
            return f"{record.node_name} is to answer it.", ""
        case RequestState.RUNNING:
            return f"{record.node_name} works on it.", ""
    ending = explain_ending(record)
    if ending is not None:
        return ending.what, ending.advice
    return ("Answered in full.", "") if record.state == RequestState.COMPLETED else (f"It was {record.state}.", "")

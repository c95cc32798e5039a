"""Why requests wait, model by model: what stands in the way, and what an operator can do. Reads only."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from django.conf import settings
from django.db.models import Count, Min
from django.utils.formats import number_format
from django.utils.functional import Promise
from django.utils.translation import get_language, gettext_lazy, override
from django.utils.translation import gettext as _

from core.limits import limits
from gateway.models import RequestRecord
from gateway.values import RequestOutcome, judge_outcome
from nodes.services.availability import Has, ServingNode, read_nodes_of
from nodes.states import Unavailable
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, ErrorCode, RequestState
from wire.engine_errors import Blame, judge_error

Words = str | Promise
_BRIEF: dict[Unavailable, Words] = {
    Unavailable.DRAINING: gettext_lazy("draining"),
    Unavailable.DRAINED: gettext_lazy("drained"),
    Unavailable.CORDONED: gettext_lazy("cordoned"),
    Unavailable.PROVIDER_OFF: gettext_lazy("provider off"),
    Unavailable.TAKEN_BACK: gettext_lazy("taken back"),
    Unavailable.HOLDS_BACK: gettext_lazy("node holds back"),
    Unavailable.LATE: gettext_lazy("node late"),
    Unavailable.ERROR: gettext_lazy("node in error"),
    Unavailable.UNREACHABLE: gettext_lazy("node unreachable"),
    Unavailable.SILENT: gettext_lazy("node offline"),
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
    language = get_language() or settings.LANGUAGE_CODE
    return explain_waits_in([language], models)[language]


def explain_waits_in(languages: Iterable[str], models: Collection[str]) -> dict[str, dict[str, Wait]]:
    """Return the same in each of these languages; no more queries."""
    nodes = read_nodes_of(models) if models else {}
    running = _count_running() if models else Counter[uuid.UUID]()
    found: dict[str, dict[str, Wait]] = {}
    for language in languages:
        with override(language):
            found[language] = {model: explain_wait(model, _add_running(nodes[model], running)) for model in models}
    return found


def explain_wait(model: str, nodes: Sequence[ServingNode]) -> Wait:
    """Return why a request for a model waits, given the nodes that have it, load it or could. Pure."""
    loaded = [node for node in nodes if node.has is Has.LOADED]
    able = [node for node in loaded if node.unavailable is None]
    free = [node for node in able if node.active < node.slots]
    if free:
        return Wait(
            _("starting"),
            _("%(model)s is served by %(node)s (%(free)d of %(slots)d slots free).")
            % {"model": model, "node": free[0].name, "free": free[0].slots - free[0].active, "slots": free[0].slots},
            _("It starts at once. If it does not, the node may not answer the request's path: see its page."),
            is_starting=True,
        )
    if able:
        of_slots = _("%(node)s %(active)d of %(slots)d")
        full = join_names(of_slots % {"node": node.name, "active": node.active, "slots": node.slots} for node in able)
        return Wait(
            _("nodes full"),
            _("Every node that has %(model)s is full: %(nodes)s.") % {"model": model, "nodes": full},
            _("It starts when one is done. To shorten the queue, load %(model)s on another node or lower the rates of keys.")
            % {"model": model},
        )
    loading = [node for node in nodes if node.has is Has.LOADING and node.unavailable is None]
    if loading:
        values = {"node": loading[0].name, "model": model, "percent": loading[0].percent}
        if loading[0].percent is None:
            reason = _("%(node)s is loading %(model)s.") % values
        else:
            reason = _("%(node)s is loading %(model)s, %(percent)d %% so far.") % values
        return Wait(_("loading"), reason, _("It starts when the model is loaded."))
    if loaded:
        return _explain_held(model, loaded)
    return _explain_missing(model, nodes)


def _explain_held(model: str, nodes: Sequence[ServingNode]) -> Wait:
    # The advice is for the reason that an operator lifts most easily.
    first = min(nodes, key=lambda node: _LIFTED_FIRST.index(node.unavailable or Unavailable.SILENT))
    if len(nodes) == 1:
        values = {"node": first.name, "model": model, "how": first.unavailable}
        reason = _("Only %(node)s has %(model)s, and it %(how)s.") % values
    else:
        named = join_names(f"{node.name} {node.unavailable}" for node in nodes)
        reason = _("No node that has %(model)s takes work: %(nodes)s.") % {"model": model, "nodes": named}
    return Wait(str(_BRIEF[first.unavailable or Unavailable.SILENT]), reason, _advise(model, first))


def _advise(model: str, node: ServingNode) -> str:
    values = {"node": node.name, "model": model, "provider": node.provider, "owner": node.owner, "error": node.last_error}
    match node.unavailable:
        case Unavailable.PROVIDER_OFF:
            said = _("Enable the provider %(provider)s, or load %(model)s on a node of another one.")
        case Unavailable.DRAINING | Unavailable.DRAINED:
            said = _("Undrain %(node)s, or load %(model)s on another node.")
        case Unavailable.CORDONED:
            said = _("Uncordon %(node)s, or load %(model)s on another node.")
        case Unavailable.TAKEN_BACK if node.owner:
            said = _("Ask %(owner)s, or load %(model)s on another node.")
        case Unavailable.TAKEN_BACK:
            said = _("Ask its owner, or load %(model)s on another node.")
        case Unavailable.ERROR if node.last_error:
            said = _("%(node)s says: %(error)s")
        case Unavailable.ERROR:
            said = _("Look at the page of %(node)s and at its log.")
        case Unavailable.LATE:
            said = _("%(node)s gets no new work until it is heard again. Check its network.")
        case Unavailable.UNREACHABLE:
            said = _("%(node)s is heard, but its public_base_url does not answer: its page under Nodes says why.")
        case _other:
            said = _("Check the power of %(node)s, its network and the runner's log.")
    return said % values


def _explain_missing(model: str, nodes: Sequence[ServingNode]) -> Wait:
    able = [node.name for node in nodes if node.has is Has.COULD and node.unavailable is None]
    if able:
        where = join_names(able)
        return Wait(
            _("not loaded"),
            _("No node has %(model)s loaded; %(nodes)s could load it.") % {"model": model, "nodes": where},
            _("Propose on the page of %(node)s to load it.") % {"node": able[0]},
        )
    return Wait(_("no node"), _("No node has %(model)s.") % {"model": model}, _("Check the model name, or load it on a node."))


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
    shown = ", ".join(named[:most])
    if len(named) <= most:
        return shown
    return _("%(names)s and %(count)d more") % {"names": shown, "count": len(named) - most}


NOBODY_THERE = frozenset({
    ErrorCode.NO_AVAILABLE_NODE, ErrorCode.NODE_STALE, ErrorCode.NODE_DRAINING, ErrorCode.NODE_UNHEALTHY,
    ErrorCode.REQUEST_TIMEOUT,
})  # fmt: skip
"""Endings that had to do with the nodes; how those stand now may say why."""


class Fault(StrEnum):
    """Who can do something about the end of a request."""

    CALLER = "caller"
    CAPACITY = "capacity"
    ENGINE = "engine"
    NODE = "node"
    OPERATOR = "operator"
    OURS = "ours"
    NOBODY = "nobody"


FAULT_WORDS: dict[Fault, Words] = {
    Fault.CALLER: gettext_lazy("The caller's mistake. It counts in no error rate."),
    Fault.CAPACITY: gettext_lazy("A lack of room: neither the caller nor a node made a mistake."),
    Fault.ENGINE: gettext_lazy("The engine's fault."),
    Fault.NODE: gettext_lazy("The node's fault, or that of its network."),
    Fault.OPERATOR: gettext_lazy("An operator's doing: the nodes of the model were taken out of service."),
    Fault.OURS: gettext_lazy("Muster's fault. Please report it with the request's id."),
    Fault.NOBODY: gettext_lazy("Nobody's fault."),
}


@dataclass(frozen=True, slots=True)
class Ending:
    """What happened, and what to do about it; ``advice`` may be empty."""

    what: Words
    advice: Words = ""
    fault: Fault = Fault.CALLER


_ENDINGS = {
    ErrorCode.NODE_STALE: Ending(
        gettext_lazy("The nodes that serve the model had stopped reporting."),
        gettext_lazy("Look at their heartbeats."),
        Fault.NODE,
    ),
    ErrorCode.NODE_DRAINING: Ending(
        gettext_lazy("Every node that serves the model was being held back."),
        gettext_lazy("Undrain or uncordon one, or load the model on another node."),
        Fault.OPERATOR,
    ),
    ErrorCode.NODE_UNHEALTHY: Ending(
        gettext_lazy("Every node that serves the model reported an error."),
        gettext_lazy("Look at the pages and logs of those nodes."),
        Fault.NODE,
    ),
    ErrorCode.MODEL_NOT_ALLOWED: Ending(
        gettext_lazy("The client may not use this model: it is not on the allow-list, not among the key's models, or unknown."),
        gettext_lazy("Allow it on the page Models, make an alias of that name, or change the models of the key."),
    ),
    ErrorCode.PROMPT_TOO_LARGE: Ending(
        gettext_lazy("The prompt has more characters than the model's limit."),
        gettext_lazy("Shorten it, or raise the limit on the model's page."),
    ),
    ErrorCode.MAX_TOKENS_TOO_LARGE: Ending(
        gettext_lazy("The client asked for more tokens than the model's limit."),
        gettext_lazy("Ask for fewer, or raise the limit on the model's page."),
    ),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Ending(
        gettext_lazy("Prompt and answer do not fit into the model's context, says the engine."),
        gettext_lazy("Shorten the prompt, or serve the model with a longer context."),
    ),
    ErrorCode.RESPONSE_NOT_FOUND: Ending(
        gettext_lazy("The client continued an answer that is not kept for its tenant, or not any more."),
        gettext_lazy("Send the whole conversation, or let the tenant keep answers."),
    ),
    ErrorCode.RATE_LIMITED: Ending(
        gettext_lazy("The key or its tenant had used up a rate or a budget."),
        gettext_lazy("Wait, or raise the limit of key or tenant. Usage shows their budgets."),
    ),
    ErrorCode.BAD_REQUEST: Ending(
        gettext_lazy("The request could not be understood or not be carried; the client was told which field."),
        gettext_lazy("The client has to change it."),
    ),
    ErrorCode.BODY_TOO_LARGE: Ending(
        gettext_lazy("The request is larger than the gateway takes."), gettext_lazy("Send less, or raise the setting.")
    ),
    ErrorCode.REQUEST_INTERRUPTED: Ending(
        gettext_lazy("The node was lost or taken back while it worked, and the request could not move on to another one."),
        gettext_lazy("The client may repeat it. Look at what became of the node."),
        Fault.NODE,
    ),
    ErrorCode.INTERNAL_ERROR: Ending(
        gettext_lazy("A defect of Muster."), gettext_lazy("Look for the request's id in the log of the gateway."), Fault.OURS
    ),
    ErrorCode.CLIENT_CLOSED_REQUEST: Ending(
        gettext_lazy("The client left, or stopped reading, before the answer was complete."), "", Fault.NOBODY
    ),
    ErrorCode.TICKET_UNUSED: Ending(
        gettext_lazy("No request came to the node with this ticket, as far as the node told."),
        gettext_lazy("It is charged what it had reserved."),
        Fault.NOBODY,
    ),
}
ERROR_WORDS: dict[ErrorCode, Words] = {
    ErrorCode.NO_AVAILABLE_NODE: gettext_lazy("no node in time"),
    ErrorCode.NODE_STALE: gettext_lazy("nodes silent"),
    ErrorCode.NODE_DRAINING: gettext_lazy("nodes held back"),
    ErrorCode.NODE_UNHEALTHY: gettext_lazy("nodes in error"),
    ErrorCode.MODEL_NOT_ALLOWED: gettext_lazy("model not allowed"),
    ErrorCode.PROMPT_TOO_LARGE: gettext_lazy("prompt too large"),
    ErrorCode.MAX_TOKENS_TOO_LARGE: gettext_lazy("too many tokens asked for"),
    ErrorCode.REQUEST_TIMEOUT: gettext_lazy("took too long"),
    ErrorCode.FORWARDED_REQUEST_FAILED: gettext_lazy("the engine failed"),
    ErrorCode.REQUEST_INTERRUPTED: gettext_lazy("node lost"),
    ErrorCode.RATE_LIMITED: gettext_lazy("rate or budget used up"),
    ErrorCode.BAD_REQUEST: gettext_lazy("malformed request"),
    ErrorCode.BODY_TOO_LARGE: gettext_lazy("body too large"),
    ErrorCode.INTERNAL_ERROR: gettext_lazy("defect of Muster"),
    ErrorCode.CLIENT_CLOSED_REQUEST: gettext_lazy("caller left"),
    ErrorCode.TICKET_UNUSED: gettext_lazy("ticket not used"),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: gettext_lazy("context too long"),
    ErrorCode.RESPONSE_NOT_FOUND: gettext_lazy("earlier answer not kept"),
}
"""The error of a record in a few words, for a list."""
_STATE_WORDS: dict[RequestState, Words] = {
    RequestState.QUEUED: gettext_lazy("queued"),
    RequestState.ASSIGNED: gettext_lazy("assigned"),
    RequestState.RUNNING: gettext_lazy("running"),
    RequestState.COMPLETED: gettext_lazy("served"),
    RequestState.FAILED: gettext_lazy("failed"),
    RequestState.INTERRUPTED: gettext_lazy("interrupted"),
    RequestState.CANCELLED: gettext_lazy("cancelled"),
}


def name_state(record: RequestRecord) -> tuple[str, str]:
    """Return the word for a request's state, and the name of its badge's colour.

    The contract's ``rejected`` is two things for an operator: refused for what the caller sent, or not accepted for want of
    room.
    """
    state = RequestState(record.state)
    if state is not RequestState.REJECTED:
        return str(_STATE_WORDS[state]), state.value
    is_refused = judge_outcome(state, record.status_code) is RequestOutcome.REFUSED
    return (_("refused"), "refused") if is_refused else (_("not accepted"), "rejected")


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
    return known or Ending(_("It ended with this code."), _("docs/api.md lists what each code means."))


def _explain_no_node(record: RequestRecord) -> Ending:
    if record.state == RequestState.REJECTED:
        return Ending(
            _("The queue of the model was full, or the request could not be recorded."),
            _("Load the model on more nodes, raise its queue on the model's page, or look at the database."),
            Fault.CAPACITY,
        )
    return Ending(_("No node took the request in time."), "", Fault.CAPACITY)


def _explain_timeout(record: RequestRecord) -> Ending:
    if record.attempts:
        return Ending(
            _("The answer took longer than a request may take in all."),
            _("Ask for less, or raise MUSTER_REQUEST_TIMEOUT_S."),
            Fault.ENGINE,
        )
    return Ending(
        _("It waited in the queue for as long as a request may."),
        _("Load the model on more nodes, or lower the rates of keys."),
        Fault.CAPACITY,
    )


_ADVICE: dict[int, Words] = {
    401: gettext_lazy("Check the key with which the node asks its engine (--backend-key)."),
    402: gettext_lazy("Check the account with which the node asks its engine."),
    403: gettext_lazy("Check the key with which the node asks its engine (--backend-key)."),
    404: gettext_lazy("Look whether the model is still loaded there."),
    405: gettext_lazy("Look whether the engine answers this endpoint."),
    410: gettext_lazy("Look whether the model is still offered there."),
}


def _explain_engine(record: RequestRecord) -> Ending:
    status = record.status_code or 0
    where = {
        "engine": _("The engine on %(node)s") % {"node": record.node_name} if record.node_name else _("The engine"),
        "status": status,
        "bytes": number_format(record.bytes_out, force_grouping=True),
    }
    log = _("Look for %(id)s in the log of the node.") % {"id": record.printed_id}
    if record.engine_error:
        log = _("The client may repeat it. If it happens again, look at the log and the memory of the node.")
    if record.state == RequestState.REJECTED:
        return Ending(
            _("%(engine)s refused the request with HTTP %(status)d.") % where, _("The client has to change it."), Fault.CALLER
        )
    if 200 <= status < 300 and record.is_streaming:
        return Ending(_("%(engine)s failed in the middle of the answer, after %(bytes)s bytes.") % where, log, Fault.ENGINE)
    if status >= 400 and judge_error(status) is Blame.CAPACITY:
        return Ending(
            _("%(engine)s had no room (HTTP %(status)d).") % where,
            _("Load the model on more nodes, or let the engine take more."),
            Fault.CAPACITY,
        )
    if 400 <= status < 500:
        said = _("%(engine)s turned the node away with HTTP %(status)d.")
        return Ending(said % where, _ADVICE.get(status, log), Fault.NODE)
    failed = _("%(engine)s failed with HTTP %(status)d.") if status >= 500 else _("%(engine)s failed.")
    return Ending(failed % where, log, Fault.ENGINE)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The first lines of a request's page. ``now``: how the nodes of its model stand at this moment, where that matters.

    ``badge``: the name of the colour of ``state``. ``fault``: whose it was, as a sentence; empty = it was served, or is open.
    """

    state: str
    badge: str
    is_open: bool
    what: str
    advice: str
    fault: str
    now: Wait | None


def explain_request(record: RequestRecord) -> Explanation:
    """Return what a request's page says first. Two queries when nodes matter, else none."""
    is_open = RequestState(record.state) in OPEN_REQUEST_STATES
    asks_why = record.state == RequestState.QUEUED or record.error_code in NOBODY_THERE
    now = explain_waits([record.model])[record.model] if asks_why and record.model else None
    ending = None if is_open else explain_ending(record)
    what, advice = (str(ending.what), str(ending.advice)) if ending is not None else _say_state(record, now)
    state, badge = name_state(record)
    return Explanation(
        state=state,
        badge=badge,
        is_open=is_open,
        what=what,
        advice=advice,
        fault=str(FAULT_WORDS[ending.fault]) if ending is not None else "",
        now=now if not is_open else None,
    )


def _say_state(record: RequestRecord, now: Wait | None) -> tuple[str, str]:
    node = {"node": record.node_name}
    match RequestState(record.state):
        case RequestState.QUEUED if now is not None:
            return _("It waits: %(reason)s") % {"reason": now.reason}, now.advice
        case RequestState.QUEUED:
            return _("It waits for a node."), ""
        case RequestState.ASSIGNED:
            return _("%(node)s is to answer it.") % node, ""
        case RequestState.RUNNING:
            return _("%(node)s works on it.") % node, ""
        case RequestState.COMPLETED:
            return _("Answered in full."), ""
    return _("It was %(state)s.") % {"state": name_state(record)[0]}, ""

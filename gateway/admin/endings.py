"""What the state and the ending of a request mean, in words for an operator: what happened, and what to do. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.models import RequestRecord
from gateway.values import RequestOutcome, judge_outcome
from wire.contract import ErrorCode, RequestState
from wire.engine_errors import Blame, judge_error

NOBODY_THERE = frozenset(
    {
        ErrorCode.NO_AVAILABLE_NODE,
        ErrorCode.NODE_STALE,
        ErrorCode.NODE_DRAINING,
        ErrorCode.NODE_UNHEALTHY,
        ErrorCode.REQUEST_TIMEOUT,
    }
)
"""Endings that had to do with the boxes; how those stand now may say why."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What happened, and what to do about it; ``advice`` may be empty."""

    what: str
    advice: str = ""


_ENDINGS = {
    ErrorCode.NODE_STALE: Ending("The boxes that serve the model had stopped reporting.", "Look at their heartbeats."),
    ErrorCode.NODE_DRAINING: Ending(
        "Every box that serves the model was being held back.", "Undrain or uncordon one, or load the model on another box."
    ),
    ErrorCode.NODE_UNHEALTHY: Ending(
        "Every box that serves the model reported an error.", "Look at the pages and logs of those boxes."
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
        "The box was lost or taken back while it worked, and the request could not move on to another one.",
        "The client may repeat it. Look at what became of the box.",
    ),
    ErrorCode.INTERNAL_ERROR: Ending("A defect of Muster.", "Look for the request's id in the log of the gateway."),
    ErrorCode.CLIENT_CLOSED_REQUEST: Ending("The client left, or stopped reading, before the answer was complete."),
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

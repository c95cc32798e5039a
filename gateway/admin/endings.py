"""What the ending of a request means, in words for an operator: what happened, and what to do. Pure.

The words that the client got are not stored, as they may hold a part of its prompt; the code is.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.models import RequestRecord
from wire.contract import ErrorCode, RequestState

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


def explain_ending(record: RequestRecord) -> Ending | None:
    """Return what the end of a request means; None for one that is open or was served."""
    if not record.error_code:
        return None
    if record.error_code == ErrorCode.NO_AVAILABLE_NODE:
        return _explain_no_node(record)
    if record.error_code == ErrorCode.REQUEST_TIMEOUT:
        return _explain_timeout(record)
    if record.error_code == ErrorCode.FORWARDED_REQUEST_FAILED:
        return _explain_engine(record)
    known = _ENDINGS.get(ErrorCode(record.error_code)) if record.error_code in set(ErrorCode) else None
    return known or Ending("It was refused with this code.", "docs/api.md lists what each code means.")


def _explain_no_node(record: RequestRecord) -> Ending:
    if record.state == RequestState.REJECTED:
        return Ending(
            "The queue of the model was full.", "Load the model on more boxes, or raise its queue on the model's page."
        )
    return Ending("No box took it in time.")


def _explain_timeout(record: RequestRecord) -> Ending:
    if record.attempts:
        return Ending(
            "The answer took longer than a request may take in all.", "Ask for less, or raise MUSTER_REQUEST_TIMEOUT_S."
        )
    return Ending(
        "It waited in the queue for as long as a request may.", "Load the model on more boxes, or lower the rates of keys."
    )


def _explain_engine(record: RequestRecord) -> Ending:
    where = f"The engine on {record.node_name}" if record.node_name else "The engine"
    status = record.status_code or 0
    log = "Its own words went to the client and are not kept; look at the log of the box."
    if 200 <= status < 300 and record.is_streaming:
        return Ending(f"{where} failed in the middle of the answer, after {record.bytes_out:,} bytes.", log)
    if 400 <= status < 500:
        return Ending(f"{where} refused it with HTTP {status}.", log)
    return Ending(f"{where} failed.", log)

"""Outcomes of an attempt: what came of one try of a request on one node, and what that says of the node.

Pure: the dispatcher and the pipeline act on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus

from gateway.errors import ForwardedRequestFailed, GatewayError, NoAvailableNode, RequestInterrupted, RequestTimeout
from nodes.links import EndKind, LinkEnd
from nodes.links.ejections import Verdict
from wire.bridge import TokenCounts
from wire.contract import RequestState


class RetryReason(StrEnum):
    """Why another node should be tried; ``unspoken``, ``foreign_tools``: perhaps the same one, in other words.

    ``broken``: a stream had begun, and can go on. ``uncontinued``: a node was asked to go on with one, and would not.
    """

    LOST = "lost"
    ENGINE = "engine"
    BUSY = "busy"
    RECLAIMED = "reclaimed"
    BROKEN = "broken"
    UNCONTINUED = "uncontinued"
    UNSPOKEN = "unspoken"
    FOREIGN_TOOLS = "foreign_tools"


@dataclass(frozen=True, slots=True)
class Served:
    """The client has the whole answer. ``status`` is the engine's; ``usage`` is None when the engine did not say."""

    status: int
    usage: TokenCounts | None
    text_chars: int | None = field(default=None, compare=False)
    """Characters of an unstreamed answer without usage, to estimate from."""
    has_failed: bool = False
    """The engine's stream held an error: the client was told by the engine itself."""
    error: GatewayError | None = field(default=None, compare=False)
    """What the engine said instead of an answer, or at the end of its stream: the client was told that."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Another node may take it, or go on with what reached the client. ``error`` is what to say if none may."""

    reason: RetryReason
    error: GatewayError


@dataclass(frozen=True, slots=True)
class Broken:
    """It is over. ``told`` says whether the client was told already (a stream that had begun)."""

    error: GatewayError
    told: bool


Outcome = Served | Retry | Broken


def judge_node(outcome: Outcome | None) -> Verdict:
    """Return what an attempt says of its node. What the caller asked wrongly, and what it did not wait for, says nothing."""
    match outcome:
        case Served(status=status, has_failed=has_failed, error=error):
            if has_failed or (status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED):
                is_callers = error is not None and error.state is RequestState.REJECTED
                return Verdict.NOTHING if is_callers else Verdict.FAILED
            return Verdict.GOOD if status < 400 else Verdict.NOTHING
        case Retry(reason=RetryReason.LOST | RetryReason.ENGINE):
            return Verdict.SUSPECT
        case Broken(error=RequestInterrupted() | ForwardedRequestFailed()) | Retry(reason=RetryReason.BROKEN):
            return Verdict.FAILED
        case _:
            return Verdict.NOTHING


def judge_end(end: LinkEnd) -> tuple[GatewayError, RetryReason | None]:
    match end.kind:
        case EndKind.BUSY:
            if end.retry_after_s is None:
                return ForwardedRequestFailed(), RetryReason.BUSY
            words = "Every node that serves the model is busy."
            return NoAvailableNode(words, retry_after_s=end.retry_after_s), RetryReason.BUSY
        case EndKind.LINK_LOST:
            return RequestInterrupted(), RetryReason.LOST
        case EndKind.RECLAIMED:
            return RequestInterrupted(), RetryReason.RECLAIMED
        case EndKind.TIMEOUT:
            return RequestTimeout(), None
        case EndKind.ENGINE_FAILED | EndKind.COMPLETE:
            return ForwardedRequestFailed(), RetryReason.ENGINE if end.retryable else None

"""Whether the engine speaks a surface itself: then bytes pass through, and what it says badly stays as it is."""

from __future__ import annotations

from conformance.table import Surface
from conformance.target import CHAT, MESSAGES, Target, require_ok
from conformance.verdicts import NotApplicable


async def skip_where_native(target: Target, surface: Surface) -> None:
    """Raise NotApplicable when the scripted engine itself got the request of that surface, not a translation."""
    if surface is Surface.MESSAGES:
        answer = await target.messages("[[echo]]")
    else:
        answer = await target.responses("[[echo]]")
    require_ok(answer)
    path = MESSAGES if surface is Surface.MESSAGES else "/v1/responses"
    if f'\\"path\\": \\"{path}\\"'.encode() in answer.body:
        raise NotApplicable(f"the engine speaks {path} itself: what it says passes through as it is")
    assert CHAT.encode() in answer.body

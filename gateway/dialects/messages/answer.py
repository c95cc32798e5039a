"""What an answer ends with, and unstreamed answers as messages."""

from __future__ import annotations

from collections.abc import Callable

from gateway.dialects.chat import ChatChoice, ChatMessage, ChatUsage
from gateway.dialects.messages.arguments import read_arguments
from gateway.dialects.messages.events import UNSIGNED, encode, make_usage
from wire.bridge import TokenCounts

FAILED_FINISHES = frozenset({"abort", "error"})
"""What vLLM says when it stopped for a reason of its own: no answer."""
_CALL_FINISHES = frozenset({"tool_calls", "function_call"})


def count_tokens(usage: ChatUsage | None) -> TokenCounts | None:
    """Return what an engine counted, cached tokens included."""
    return None if usage is None else usage.to_counts()


def find_stop(
    finish_reason: str | None,
    stopped_by: int | str | None,
    *,
    has_calls: bool,
    has_cut_calls: bool = False,
    refuses: bool,
) -> tuple[str, str | None]:
    """Return ``stop_reason`` and ``stop_sequence``.

    ``stopped_by``: the stop sequence, from engines that say it (vLLM; a number is a token). Calls count whatever an engine
    says, but for a sequence that cut one short: that call must not be made.
    """
    if finish_reason == "length":
        return "max_tokens", None
    if refuses or finish_reason == "content_filter":
        return "refusal", None
    is_stopped = isinstance(stopped_by, str) and bool(stopped_by)
    if has_calls and (finish_reason in _CALL_FINISHES or not (has_cut_calls and is_stopped)):
        return "tool_use", None
    if is_stopped:
        return "stop_sequence", str(stopped_by)
    return "end_turn", None


def render_whole(
    choice: ChatChoice, message: ChatMessage, *, head: dict[str, object], usage: ChatUsage | None, make_id: Callable[[int], str]
) -> bytes:
    """Return an unstreamed answer as a message. ``head``: its first fields."""
    blocks = _list_texts(message)
    used: set[str] = set()
    for number, part in enumerate(message.tool_calls or ()):
        function = part.function
        call_id = part.id if part.id and part.id not in used else make_id(number)
        used.add(call_id)
        blocks.append(
            {
                "type": "tool_use",
                "id": call_id,
                "name": (function.name if function is not None else None) or "",
                "input": read_arguments((function.arguments if function is not None else None) or ""),
            }
        )
    stop_reason, stop_sequence = find_stop(
        choice.finish_reason, choice.stopped_by, has_calls=bool(message.tool_calls), refuses=bool(message.refusal)
    )
    end = {"stop_reason": stop_reason, "stop_sequence": stop_sequence, "usage": make_usage(usage)}
    return encode({**head, "content": blocks or [{"type": "text", "text": ""}], **end})


def _list_texts(message: ChatMessage) -> list[dict[str, object]]:
    blocks: list[dict[str, object]] = []
    if message.thought:
        blocks.append({"type": "thinking", "thinking": message.thought, "signature": UNSIGNED})
    if text := (message.content or "") + (message.refusal or ""):
        blocks.append({"type": "text", "text": text})
    return blocks

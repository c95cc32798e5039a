"""Getting a real model to call a tool: it gets several goes, for it may write prose or run out of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any  # what chooses a tool is JSON

from conformance.engine.speech import OTHER_TOOL
from conformance.target import Target
from conformance.verdicts import NotApplicable

QUESTION = "What is the weather in Paris?"
_FREE = (QUESTION, "Is it cold in Rome? Use the tool.")
_NAMED = ("What time is it in Paris?", "Call get_time for Rome.", "I fly to Rome now: how late is it there?", "Paris, time.")


@dataclass(frozen=True, slots=True)
class Go:
    """One request for a call. ``is_named``: the client names the tool, the one with the fewest parameters."""

    prompt: str
    is_named: bool = False

    def choose(self, *, free: Any, named: Any) -> Any:
        """Return the tool_choice of a dialect: ``free`` when any call will do."""
        return named if self.is_named else free

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """How a chat completion with the call may end: OpenAI says ``stop`` where the client named the function."""
        return ("tool_calls", "stop") if self.is_named else ("tool_calls",)


def list_goes(target: Target, directive: str) -> list[Go]:
    """Return what to try until there is a call; the scripted engine needs one go, with its directive."""
    if target.scripted:
        return [Go(f"[[{directive}]] {QUESTION}")]
    return [*map(Go, _FREE), *(Go(prompt, is_named=True) for prompt in _NAMED)]


def no_call() -> NotApplicable:
    """Return what to raise when no go brought one."""
    return NotApplicable(f"the model finished no call of a tool in {len(_FREE) + len(_NAMED)} answers")


CHAT_NAMED = {"type": "function", "function": {"name": OTHER_TOOL}}
MESSAGES_NAMED = {"type": "tool", "name": OTHER_TOOL}
RESPONSES_NAMED = {"type": "function", "name": OTHER_TOOL}

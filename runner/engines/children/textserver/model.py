"""The port that a text library implements in its child: tokenise, generate step by step, stop, give numbers. No HTTP."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the model reads it: ``count`` tokens, in the library's own form."""

    count: int
    native: Any  # Any: tokens of CTranslate2, a tensor of ExLlamaV3


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to generate. ``temperature`` 0 or ``top_k`` 1 is greedy; ``top_k`` 0 and ``top_p`` 1.0 cut nothing off.

    ``ignores_end``: go on to ``max_tokens`` where the model would end. ``scope`` names what may share cached prefixes: only
    prompts of the same scope do; empty = with no other prompt.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    beam_size: int = 1
    seed: int | None = None
    ignores_end: bool = False
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of the answer: ``tokens`` new tokens, whose text may come later (never half a character). A step without any
    says only that the model is still at it, so that the reader can be looked for.

    ``finish`` is set on the last step: ``stop`` (the model ended) or ``length``. ``cached_tokens`` of the prompt were not
    computed again; None = not known yet.
    """

    text: str
    tokens: int
    finish: str = ""
    cached_tokens: int | None = None


class TextModel(Protocol):
    """A loaded model. ``context_tokens`` is prompt and answer together; ``specials`` are the texts a template may use."""

    context_tokens: int
    specials: dict[str, str]

    def tokenise(self, text: str) -> Prompt:
        """Return the tokens of ``text``, special tokens recognised, none added."""

    def generate(self, prompt: Prompt, sampling: Sampling) -> Generator[Step, None, None]:
        """Yield steps; called in a worker thread, several at once. Closing it stops the generation.

        Raises RuntimeError or ValueError when the library refuses.
        """

    def stats(self) -> dict[str, int]:
        """Return what the library counts: kv_total_tokens, kv_used_tokens, kv_cached_tokens, kv_bytes; empty = nothing."""

    def flush(self) -> int | None:
        """Forget every cached prefix; return how many tokens that were. None = a generation runs, nothing was done."""

    def unload(self) -> None:
        """Give the memory back; return when that has been seen. Raises RuntimeError when it does not happen in time."""

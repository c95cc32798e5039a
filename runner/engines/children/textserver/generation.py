"""One generation: a worker thread that renders, tokenises and generates, and what of it reaches the client."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from runner.engines.children.slots import Pipe, Slots
from runner.engines.children.textserver.answers import Tally
from runner.engines.children.textserver.model import Prompt, Sampling, TextModel
from runner.engines.children.textserver.pieces import StopStrings
from runner.engines.children.web import Refusal
from wire import clock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """What to do: ``text`` makes the prompt (it may refuse), ``sampling`` says how for so many tokens of context left.

    ``field`` is what a prompt that is too long is blamed on.
    """

    text: Callable[[], str]
    sampling: Callable[[int], Sampling]
    stops: list[str]
    field: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The prompt is accepted; nothing has been sent before this."""


Result = Ready | str | Refusal
"""What a worker hands over: first Ready, then pieces of text; a Refusal instead of either ends it."""


class Generation:
    """One request on its way through a slot. ``tally`` and ``finish`` are final once ``read`` has returned None."""

    def __init__(self, model: TextModel, slots: Slots, task: Task) -> None:
        self._model = model
        self._slots = slots
        self._task = task
        self._pipe: Pipe[Result] = Pipe()
        self.tally = Tally()
        self.finish = "stop"

    async def start(self) -> None:
        """Wait for a slot and for the prompt to be accepted. Raises Refusal."""
        await self._slots.take()
        self._slots.start(self._work)
        await self.read()

    async def read(self) -> str | None:
        """Return the next piece of text, None at the end. Raises Refusal."""
        result = await self._pipe.get()
        if isinstance(result, Refusal):
            raise result
        return "" if isinstance(result, Ready) else result

    def leave(self) -> None:
        """Have the worker stop at its next step; fine when it has already ended."""
        self._pipe.leave()

    def _work(self) -> None:
        """In a worker thread."""
        try:
            prompt, sampling = self._prepare()
            if self._pipe.put(Ready()):
                self._generate(prompt, sampling)
        except Refusal as refusal:
            self._pipe.put(refusal)
        except (RuntimeError, ValueError, MemoryError) as error:
            # The library's own words: it sees tokens, not text.
            log.warning("generation failed: %s", error)
            self._pipe.put(Refusal(f"the engine failed: {error}", code="engine_failed", status=500))
        except BaseException:
            self._pipe.put(Refusal("the engine failed", code="engine_failed", status=500))
            raise
        finally:
            self._pipe.end()

    def _prepare(self) -> tuple[Prompt, Sampling]:
        started = clock.monotonic()
        prompt = self._model.tokenise(self._task.text())
        self.tally.tokenize_ms = 1000 * (clock.monotonic() - started)
        self.tally.prompt_tokens = prompt.count
        left = self._model.context_tokens - prompt.count
        if not prompt.count:
            raise Refusal("the prompt is empty", param=self._task.field)
        if left < 1:
            raise Refusal(
                f"the prompt has {prompt.count} tokens, the context {self._model.context_tokens}; shorten the prompt",
                param=self._task.field,
                code="context_length_exceeded",
                details={"n_prompt_tokens": prompt.count, "n_ctx": self._model.context_tokens},
            )
        return prompt, self._task.sampling(left)

    def _generate(self, prompt: Prompt, sampling: Sampling) -> None:
        stops, tally = StopStrings(self._task.stops), self.tally
        started = clock.monotonic()
        first_at = 0.0
        # The steps are a Python generator: closing it is what stops the library.
        with closing(self._model.generate(prompt, sampling)) as steps:
            for step in steps:
                if step.tokens or step.finish:
                    now = clock.monotonic()
                    first_at = first_at or now
                    tally.prompt_ms, tally.predicted_ms = 1000 * (first_at - started), 1000 * (now - first_at)
                tally.completion_tokens += step.tokens
                tally.cached_tokens = tally.cached_tokens if step.cached_tokens is None else step.cached_tokens
                self.finish = step.finish or self.finish
                text = stops.add(step.text)
                if (text and not self._pipe.put(text)) or self._pipe.is_left:
                    return
                if stops.hit:
                    self.finish = "stop"
                    return
        if rest := stops.finish():
            self._pipe.put(rest)

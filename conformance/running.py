"""Running the rows against a target: some at a time, each with its verdict."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence

from conformance.exchange import Answer
from conformance.limits import LIMITS
from conformance.rows.audio_images import transcribe
from conformance.table import Row, Surface
from conformance.target import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    EMBEDDINGS,
    IMAGES,
    MESSAGES,
    PROMPT,
    RERANK,
    RESPONSES,
    Target,
    show_body,
)  # fmt: skip
from conformance.verdicts import Finding, NotApplicable, Verdict, Violation

_OPTIONAL = frozenset({Surface.COMPLETIONS, Surface.EMBEDDINGS, Surface.RERANK, Surface.AUDIO, Surface.IMAGES})
"""Surfaces that hang on what the model is for: one that refuses them is no fault of the server."""
_CHANCE = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")
"""Numbers and ids: they differ from answer to answer where the fault is the same."""


async def run_rows(
    target: Target,
    rows: Sequence[Row],
    *,
    required: Iterable[Surface] = (),
    simultaneous: int = LIMITS.simultaneous,
    on_finding: Callable[[Finding], None] = lambda finding: None,
    engine: Target | None = None,
) -> list[Finding]:
    """Return a finding for each row, in their order. ``required``: surfaces whose absence is a failure, no reason to skip.

    ``engine``: what answers behind the server, asked itself whatever fails; the same fault there is the engine's.
    """
    turns = asyncio.Semaphore(simultaneous)
    presence = _Presence(target, frozenset(required))
    behind = None if engine is None else _Presence(engine, frozenset())

    async def run(row: Row) -> Finding:
        began = asyncio.get_running_loop().time()
        if row.is_slow:
            verdict, detail = await _judge(target, row, presence)
        else:
            async with turns:
                began = asyncio.get_running_loop().time()
                verdict, detail = await _judge(target, row, presence)
                if verdict is Verdict.FAIL and engine is not None and behind is not None:
                    verdict, detail = _compare(detail, *await _judge(engine, row, behind))
        finding = Finding(row.id, verdict, detail, asyncio.get_running_loop().time() - began)
        on_finding(finding)
        return finding

    return list(await asyncio.gather(*(run(row) for row in rows)))


async def _judge(target: Target, row: Row, presence: _Presence) -> tuple[Verdict, str]:
    if row.needs_script and not target.scripted:
        return Verdict.SKIPPED, "needs the scripted engine (--scripted)"
    try:
        async with asyncio.timeout(LIMITS.row_answers * target.timeout_s):
            if row.needs is not None:
                await presence.require(row.needs)
            await row.check(target)
    except Violation as violation:
        return Verdict.FAIL, str(violation)
    except NotApplicable as reason:
        return Verdict.SKIPPED, str(reason)
    except (OSError, TimeoutError) as error:
        return Verdict.FAIL, f"the connection failed: {str(error) or type(error).__name__}"
    return Verdict.OK, ""


def _compare(detail: str, verdict: Verdict, of_engine: str) -> tuple[Verdict, str]:
    """Return whose a failure is, given what came of the same row when the engine was asked itself."""
    if verdict is Verdict.OK:
        return Verdict.FAIL, f"{detail} (the engine itself fulfils it)"
    if verdict is Verdict.FAIL and _CHANCE.sub("#", of_engine) == _CHANCE.sub("#", detail):
        return Verdict.ENGINE, f"engine: {of_engine}"
    return Verdict.FAIL, f"{detail} (the engine itself: {of_engine})"


class _Presence:
    """Which surfaces are there: each is asked once, by the first row that needs it."""

    def __init__(self, target: Target, required: frozenset[Surface]) -> None:
        self._target = target
        self._required = required
        self._reasons: dict[Surface, asyncio.Task[str]] = {}

    async def require(self, surface: Surface) -> None:
        """Raise NotApplicable when the surface is not there, Violation when it has to be."""
        if surface not in self._reasons:
            self._reasons[surface] = asyncio.create_task(self._explain(surface))
        reason = await asyncio.shield(self._reasons[surface])
        if reason and surface in self._required:
            raise Violation(reason)
        if reason:
            raise NotApplicable(reason)

    async def _explain(self, surface: Surface) -> str:
        try:
            answer = await self._probe(surface)
        except NotApplicable as reason:
            return str(reason)
        if answer is None or answer.status < 400:
            return ""
        words = show_body(answer)[:160]
        if answer.status in {404, 405, 501}:
            return f"the server has no {answer.ask.path} ({answer.status}): {words}"
        if surface in _OPTIONAL and answer.status == 400:
            return f"the model does not do this ({answer.status}): {words}"
        return ""

    async def _probe(self, surface: Surface) -> Answer | None:
        target = self._target
        model = {"model": target.model}
        bodies = {
            Surface.CHAT: (CHAT, target.chat_body()),
            Surface.COMPLETIONS: (COMPLETIONS, target.completion_body()),
            Surface.RESPONSES: (RESPONSES, target.responses_body()),
            Surface.MESSAGES: (MESSAGES, target.messages_body()),
            Surface.COUNT_TOKENS: (COUNT_TOKENS, {**model, "messages": [{"role": "user", "content": "a"}]}),
            Surface.EMBEDDINGS: (EMBEDDINGS, {"model": target.model_for(EMBEDDINGS), "input": PROMPT}),
            Surface.RERANK: (RERANK, {"model": target.model_for(RERANK), "query": "a", "documents": ["a", "b"]}),
            Surface.IMAGES: (IMAGES, {"model": target.model_for(IMAGES), "prompt": "a llama"}),
        }
        if surface is Surface.AUDIO:
            return await transcribe(target)
        if surface not in bodies:
            return None
        path, body = bodies[surface]
        return await target.send(target.ask_json(path, body))

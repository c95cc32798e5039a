"""Report of a run: rows are asked, some at a time, each gets its verdict; the table for a person, JSON for a program."""

from __future__ import annotations

import asyncio
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any  # request bodies are JSON

from conformance.dialects import DIALECTS
from conformance.exchange import LIMITS, Answer, Finding, NotApplicable, Verdict, Violation
from conformance.rows.modalities import transcribe
from conformance.table import (  # fmt: skip
    COUNT_TOKENS,
    EMBEDDINGS,
    IMAGES,
    PROMPT,
    RERANK,
    Row,
    Surface,
    Target,
    show_body,
)

_WIDTHS = {"surface": 12, "requirement": 68, "clients": 36}
_DETAIL_INDENT = " " * 14


def format_table(rows: Sequence[Row], findings: Sequence[Finding]) -> str:
    """Return the table, one row per requirement, with the detail of what failed or was skipped below it."""
    lines = [_line("surface", "requirement", "breaks without it", "verdict"), ""]
    for row, finding in zip(rows, findings, strict=True):
        lines += _format_row(row, finding)
    return "\n".join(lines)


def _format_row(row: Row, finding: Finding) -> list[str]:
    requirement = textwrap.wrap(f"{row.requirement} [{row.id}]", _WIDTHS["requirement"]) or [""]
    clients = textwrap.wrap(row.clients, _WIDTHS["clients"]) or [""]
    height = max(len(requirement), len(clients))
    requirement += [""] * (height - len(requirement))
    clients += [""] * (height - len(clients))
    lines = [
        _line(row.surface if number == 0 else "", text, client, finding.verdict if number == 0 else "")
        for number, (text, client) in enumerate(zip(requirement, clients, strict=True))
    ]
    if finding.detail:
        mark = f"{_DETAIL_INDENT}→ "
        lines += textwrap.wrap(
            finding.detail,
            LIMITS.line_chars,
            initial_indent=mark,
            subsequent_indent=_DETAIL_INDENT + "  ",
            break_on_hyphens=False,
        )
    return lines


def _line(surface: str, requirement: str, clients: str, verdict: str) -> str:
    cells = zip((surface, requirement, clients), _WIDTHS.values(), strict=True)
    return ("  ".join(f"{text:<{width}}" for text, width in cells) + f"  {verdict}").rstrip()


def format_summary(rows: Sequence[Row], findings: Sequence[Finding]) -> str:
    """Return one line for each surface and one for all."""
    pairs = list(zip(rows, findings, strict=True))
    lines = [
        _summarise(surface, [finding for _, finding in group])
        for surface, group in groupby(pairs, key=lambda pair: pair[0].surface)
    ]
    return "\n".join([*lines, _summarise("all", list(findings))])


def _summarise(name: str, findings: Iterable[Finding]) -> str:
    count = Counter(finding.verdict for finding in findings)
    return (
        f"{name:<14}{count.total():>4} requirements:{count[Verdict.OK]:>5} ok{count[Verdict.FAIL]:>5} failed"
        f"{count[Verdict.ENGINE]:>5} failed by the engine{count[Verdict.SKIPPED]:>5} skipped"
    )


def format_json(rows: Sequence[Row], findings: Sequence[Finding], *, base_url: str, model: str) -> str:
    """Return everything as JSON: ``rows`` with id, surface, requirement, clients, verdict, detail, took_s."""
    listed = [
        {
            "id": row.id,
            "surface": row.surface,
            "requirement": row.requirement,
            "clients": row.clients,
            "verdict": finding.verdict,
            "detail": finding.detail,
            "took_s": round(finding.took_s, 3),
        }
        for row, finding in zip(rows, findings, strict=True)
    ]
    return json.dumps({"base_url": base_url, "model": model, "rows": listed}, indent=1, ensure_ascii=False)


# Surfaces that hang on what the model is for: one that refuses them is no fault of the server.
_OPTIONAL = frozenset({Surface.COMPLETIONS, Surface.EMBEDDINGS, Surface.RERANK, Surface.AUDIO, Surface.IMAGES})
# Numbers and ids: they differ from answer to answer where the fault is the same.
_CHANCE = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")


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
            if row.needed is not None:
                await presence.require(row.needed)
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
        bodies: dict[Surface, tuple[str, dict[str, Any]]] = {
            **{dialect.surface: (path, target.body(path)) for path, dialect in DIALECTS.items()},
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

"""The findings as a table for a person and as JSON for a program."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from conformance.limits import LIMITS
from conformance.table import Row
from conformance.verdicts import Finding, Verdict

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

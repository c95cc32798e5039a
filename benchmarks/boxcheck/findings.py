"""What a check found: lines for the reader, figures for the file, and a verdict for each thing that is demanded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Finding:
    """A demand and whether it was met; ``shown`` is what was measured."""

    demand: str
    passed: bool
    shown: str


@dataclass(slots=True)
class Section:
    """One check. Everything goes to ``write`` at once, so that a long run can be followed."""

    name: str
    write: Callable[[str], None]
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)
    seconds: float | None = None
    _began: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        """Note how long the check took."""
        self.seconds = round(time.monotonic() - self._began, 1)

    def line(self, text: str = "") -> None:
        """Print a line."""
        self.write(text)

    def table(self, rows: Sequence[Sequence[object]]) -> None:
        """Print a table; the first row is its head."""
        self.write(render_table(rows) + "\n")

    def keep(self, **figures: object) -> None:
        """Keep figures for the file; they must be plain JSON."""
        self.figures |= figures

    def judge(self, demand: str, *, passed: bool, shown: object = "") -> bool:
        """Note whether a demand was met; returns ``passed``."""
        finding = Finding(demand, passed, str(shown))
        self.findings.append(finding)
        self.write(f"  {'PASS' if passed else 'FAIL'}  {demand}" + (f": {finding.shown}" if finding.shown else ""))
        return passed

    @property
    def passed(self) -> bool:
        """Whether every demand was met, and there was one."""
        return bool(self.findings) and all(finding.passed for finding in self.findings)

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain JSON."""
        return {
            "passed": self.passed,
            "seconds": self.seconds,
            "findings": [{"demand": f.demand, "passed": f.passed, "shown": f.shown} for f in self.findings],
            "figures": self.figures,
        }


def render_table(rows: Sequence[Sequence[object]]) -> str:
    """Return a table as text, first column to the left, the others to the right, a rule below its head."""
    cells = [[show(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        padded = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(padded).rstrip())
    lines.insert(1, "  " + "─" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines)


def show(value: object) -> str:
    """Return a value for a table: floats with few digits, nothing as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)

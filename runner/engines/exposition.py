"""The text format of Prometheus, as far as the gauges and counters of an engine need it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one scrape: name to values, with the labels of each."""

    found: dict[str, list[tuple[dict[str, str], float]]]

    def total(self, *names: str) -> float | None:
        """Return the sum over all labels of the first of ``names`` that is there, or None."""
        for name in names:
            if name in self.found:
                return sum(value for _, value in self.found[name])
        return None

    def count(self, *names: str) -> int | None:
        """Return ``total`` as a whole number."""
        found = self.total(*names)
        return None if found is None else int(found)

    def labels(self, name: str) -> dict[str, str]:
        """Return the labels of the first sample called ``name``; nothing when there is none."""
        return next((labels for labels, _ in self.found.get(name, [])), {})


def read_samples(text: str, prefix: str) -> Samples:
    """Return the samples whose names begin with ``prefix``; buckets, other lines and values that are no number are left out."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in _parse_lines(text, prefix):
        found.setdefault(name, []).append((labels, value))
    return Samples(found)


def _parse_lines(text: str, prefix: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        if not line.startswith(prefix) or "_bucket{" in line or (match := _SAMPLE.match(line)) is None:
            continue
        name, labels, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if value == value and value not in (float("inf"), float("-inf")):
            yield name, dict(_LABEL.findall(labels or "")), value

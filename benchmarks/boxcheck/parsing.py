"""Reading what the node says: metrics, server-sent events, documents with fields that must be there. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_LISTENING = re.compile(r"api listening url=(\S+)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a Prometheus exposition."""

    name: str
    labels: Mapping[str, str]
    value: float


def read_metrics(text: str) -> list[Sample]:
    """Return the samples of an exposition in the text format. Raises ValueError for a line that is none."""
    samples = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        found = _SAMPLE.match(line.strip())
        if found is None:
            raise ValueError(f"no line of Prometheus: {line[:100]!r}")
        labels = {name: re.sub(r"\\(.)", _unescape, value) for name, value in _LABEL.findall(found["labels"] or "")}
        samples.append(Sample(found["name"], labels, float(found["value"])))
    return samples


def sum_samples(samples: Sequence[Sample], name: str, **labels: str) -> float:
    """Return the sum of all samples of a name that have these labels."""
    return sum(
        sample.value
        for sample in samples
        if sample.name == name and all(sample.labels.get(label) == value for label, value in labels.items())
    )


def read_events(body: bytes) -> list[dict[str, object]]:
    """Return the JSON objects of the ``data:`` lines of an event stream; comments, ``[DONE]`` and broken lines are left out."""
    events: list[dict[str, object]] = []
    for line in body.splitlines():
        if not line.startswith(b"data:"):
            continue
        try:
            found = json.loads(line[5:])
        except ValueError:
            continue
        if isinstance(found, dict):
            events.append(found)
    return events


def read_comments(body: bytes) -> dict[str, str]:
    """Return the ``name=value`` pairs of the comments of an event stream; later ones win."""
    pairs: dict[str, str] = {}
    for line in body.splitlines():
        if line.startswith(b":"):
            for part in line[1:].decode("utf-8", "replace").split(";"):
                name, is_pair, value = part.strip().partition("=")
                if is_pair:
                    pairs[name] = value
    return pairs


def missing_fields(example: object, found: object, path: str = "") -> list[str]:
    """Return the dotted paths of ``example`` that ``found`` lacks. Of lists, the first items are compared.

    A list of the example that has items needs one in ``found``, unless its items are plain words.
    """
    if isinstance(example, Mapping):
        if not isinstance(found, Mapping):
            return [path or "(the document)"]
        missing = []
        for name, inner in example.items():
            where = f"{path}.{name}".lstrip(".")
            missing += missing_fields(inner, found[name], where) if name in found else [where]
        return missing
    if isinstance(example, list):
        if not isinstance(found, list):
            return [path]
        if example and isinstance(example[0], Mapping):
            return missing_fields(example[0], found[0], f"{path}[0]") if found else [f"{path}[0]"]
    return []


def read_url(log: str) -> str | None:
    """Return the address that a node says it listens on, None when it has not said so yet."""
    found = _LISTENING.search(log)
    return found[1] if found else None


def shorten(text: str, limit: int) -> str:
    """Return a text in one line of at most ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _unescape(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]

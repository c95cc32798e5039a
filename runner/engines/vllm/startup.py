"""Reading vLLM's log while it loads: how far it is, what it took, and why it failed. Pure.

It has no endpoint for any of that. The patterns are those of versions 0.11 to 0.33; a line that none of them knows is
passed over, so a changed log costs progress and never a load.
"""

from __future__ import annotations

import re

from runner.engines.failure_words import FailureWords
from runner.engines.port import Progress, Report

_WEIGHTS_BEGIN, _WEIGHTS_END = 0.2, 0.7
_GRAPHS_BEGIN, _GRAPHS_END = 0.8, 0.95

_STAGES: tuple[tuple[str, str, float], ...] = (
    ("Resolved architecture", "reading the model's configuration", 0.05),
    ("Initializing a V1 LLM engine", "starting the engine process", 0.1),
    ("Starting to load model", "loading weights", _WEIGHTS_BEGIN),
    ("Loading weights took", "weights loaded", _WEIGHTS_END),
    ("Dynamo bytecode transform", "compiling", 0.72),
    ("torch.compile takes", "compiled", 0.76),
    ("KV cache size:", "setting up the KV cache", _GRAPHS_BEGIN),
    ("Graph capturing finished", "graphs captured", _GRAPHS_END),
    ("init engine (profile", "engine ready", 0.96),
    ("Starting vLLM", "opening the API", 0.98),
)
_SHARDS = re.compile(r"Loading \S+ checkpoint shards:.*?(\d+)/(\d+)")
_GRAPHS = re.compile(r"Capturing (?:CUDA|cuda) graphs?.*?(\d+)/(\d+)")
_WEIGHTS_SIZE = re.compile(r"[Mm]odel loading took ([\d.]+) Gi?B")
_KV_SIZE = re.compile(r"Available KV cache memory: ([\d.]+) GiB")


class StartupLog:
    """Fed with the lines of one start. ``weights_bytes`` and ``kv_bytes`` are what vLLM said it took, None = not said."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._reached = 0.0
        self._words = FailureWords()
        self.weights_bytes: int | None = None
        self.kv_bytes: int | None = None

    def feed(self, line: str) -> None:
        """Take one line."""
        self._words.feed(line)
        self._note_sizes(line)
        if match := _SHARDS.search(line):
            self._advance(f"loading weights ({match[1]} of {match[2]} files)", match, _WEIGHTS_BEGIN, _WEIGHTS_END)
        elif match := _GRAPHS.search(line):
            self._advance(f"capturing graphs ({match[1]} of {match[2]})", match, _GRAPHS_BEGIN, _GRAPHS_END)
        else:
            for words, stage, fraction in _STAGES:
                if words in line:
                    self._tell(stage, fraction)
                    return

    def failure(self) -> str:
        """Return why the start failed in vLLM's own words, an empty text when it gave no reason."""
        return self._words.best()

    def _advance(self, stage: str, match: re.Match[str], begin: float, end: float) -> None:
        done, of = int(match[1]), int(match[2])
        self._tell(stage, begin + (end - begin) * (done / of if of else 0.0))

    def _tell(self, stage: str, fraction: float) -> None:
        """Report, unless the line is one of a later process that repeats an earlier stage."""
        if fraction > self._reached:
            self._reached = fraction
            self._report(Progress(stage, round(fraction, 3)))

    def _note_sizes(self, line: str) -> None:
        if match := _WEIGHTS_SIZE.search(line):
            self.weights_bytes = _add(self.weights_bytes, match)
        elif match := _KV_SIZE.search(line):
            self.kv_bytes = _add(self.kv_bytes, match)


def _add(sum_so_far: int | None, match: re.Match[str]) -> int:
    """Add the GiB of one GPU to those of the others."""
    return (sum_so_far or 0) + int(float(match[1]) * 1024**3)

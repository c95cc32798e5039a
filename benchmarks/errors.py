"""The one error of this package: what stops a benchmark run, said so that the reader can act."""

from __future__ import annotations


class BenchmarkError(Exception):
    """The run cannot go on. The text says what to do."""

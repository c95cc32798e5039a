"""What every check is given: the models, a folder of its own, its options, and where to report."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.boxcheck.box import Box, open_box
from benchmarks.boxcheck.findings import Section
from benchmarks.boxcheck.models import VLLM_VARIABLE, ModelFolder
from benchmarks.runner import Progress

THREADS = ("--threads", "1")
"""One thread for each engine, so that the tiny models leave the machine's cores to everything else that is measured."""


@dataclass(frozen=True, slots=True)
class Options:
    """How much is done: load and unload ``cycles``, and the seconds that the load of fairness and of priority lasts."""

    cycles: int
    fairness_s: float
    priority_s: float


@dataclass(frozen=True, slots=True)
class Workbench:
    """For one check. ``folder`` is its own."""

    section: Section
    folder: Path
    models: ModelFolder
    options: Options
    progress: Progress

    def open(
        self,
        name: str = "box",
        *,
        environment: Mapping[str, str] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> AbstractAsyncContextManager[Box]:
        """Return a node with the data folder ``name``; ``settings`` become its settings.json."""
        data = self.folder / name
        data.mkdir(parents=True, exist_ok=True)
        if settings is not None:
            (data / "settings.json").write_bytes(msgspec.json.encode(settings))
        python = self.models.vllm_python
        given = {**({VLLM_VARIABLE: python} if python else {}), **(environment or {})}
        return open_box(data, models=self.models.path, environment=given, options=THREADS)

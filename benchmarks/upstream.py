"""The mock inference server as a child process, and the pace every source of chunks is told to keep."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.processes import Child
from benchmarks.toolchain import Tools

_CONTROL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How a stream is produced: ``chunks`` of them, ``delay_us`` apart, the first after ``first_us``."""

    chunks: int
    delay_us: int
    first_us: int = 0


class MockUpstream:
    """``native/mock_upstream.c``, started on a free loopback port."""

    def __init__(self, tools: Tools, *, log_dir: Path, cores: Sequence[int] = ()) -> None:
        self.child = Child("mock_upstream", [str(tools.mock_upstream), "0"], log_dir=log_dir, cores=cores, talks=True)
        self.port = int(self.child.read_line(_CONTROL_TIMEOUT_S).removeprefix("listening "))

    @property
    def url(self) -> str:
        """The base URL of the mock."""
        return f"http://127.0.0.1:{self.port}"

    def set_pace(self, pace: Pace) -> None:
        """Apply ``pace`` to the streams that start from now on."""
        self._control(f"chunks={pace.chunks}&delay_us={pace.delay_us}&first_us={pace.first_us}")

    def set_fault(self, fault: str) -> None:
        """Make every stream go wrong at its half: none, lose, duplicate, swap, foreign or cut."""
        if self._control(f"fault={fault}")["fault"] != fault:
            raise BenchmarkError(f"the mock knows no fault {fault!r}")

    def read_counters(self) -> dict[str, Any]:
        """Return ``requests``, ``chunks`` and ``aborted`` (streams whose reader left) since its start."""
        return self._control("")

    def stop(self) -> None:
        """End the process."""
        self.child.stop()

    def _control(self, query: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/ctl?{query}", timeout=_CONTROL_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

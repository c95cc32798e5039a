"""The mock inference server as a child process, and the pace every source of chunks is told to keep."""

from __future__ import annotations

import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
        query = f"chunks={pace.chunks}&delay_us={pace.delay_us}&first_us={pace.first_us}"
        urllib.request.urlopen(f"{self.url}/ctl?{query}", timeout=_CONTROL_TIMEOUT_S).close()

    def stop(self) -> None:
        """End the process."""
        self.child.stop()

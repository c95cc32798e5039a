"""One run of the C load client: what to send, what came of it, and whether that may be quoted."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.errors import BenchmarkError
from benchmarks.processes import pin_command

_GRACE_S = 40.0  # the client itself gives streams 15 s to end


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What the client does: ``connections`` at once for ``seconds``, as ``native/load.c`` describes."""

    connections: int
    seconds: float
    is_streaming: bool
    ramp_ms: int = 0
    warmup_ms: int = 0
    period_ms: int = 0
    prompt_bytes: int = 400


@dataclass(frozen=True, slots=True)
class Target:
    """Whom the client asks, and on which API path: that decides what it sends and how a stream has to end."""

    port: int
    path: str = "/v1/chat/completions"
    model: str = "mock"
    key: str = "none"


class Percentiles(msgspec.Struct, frozen=True):
    """Microseconds over ``count`` samples."""

    count: int
    p50: float
    p95: float
    p99: float
    max: float


class LoadResult(msgspec.Struct, frozen=True):
    """The line of JSON the client prints."""

    answered: int
    bad_status: int
    last_bad_status: int
    errors: int
    stuck: int
    chunks: int
    reads: int
    connects: int
    without_done: int
    lost: int
    duplicated: int
    reordered: int
    foreign: int
    ttfb_us: Percentiles
    latency_us: Percentiles
    transit_us: Percentiles
    gap_us: Percentiles
    elapsed_s: float
    bad_body: str

    @property
    def misplaced(self) -> int:
        """Chunks that were lost, doubled, reordered or given to another stream."""
        return self.lost + self.duplicated + self.reordered + self.foreign

    def find_problems(self) -> list[str]:
        """Return why no figure of this run may be quoted; empty when every answer came whole and in order."""
        problems = [
            f"{count} {word}"
            for count, word in (
                (self.errors, "broken connections"),
                (self.stuck, "answers that never ended"),
                (self.without_done, "streams without the event that ends them"),
                (self.lost, "chunks lost"),
                (self.duplicated, "chunks duplicated"),
                (self.reordered, "chunks reordered"),
                (self.foreign, "chunks of another stream"),
            )
            if count
        ]
        if self.bad_status:
            problems.append(f"{self.bad_status} answers with status {self.last_bad_status}: {self.bad_body[:160]}")
        if not self.answered:
            problems.append("no answer at all")
        return problems


def run_load(binary: Path, target: Target, spec: LoadSpec, *, cores: Sequence[int] = ()) -> LoadResult:
    """Run the load client to its end. Raises BenchmarkError when it fails to report."""
    argv = [str(binary), "-p", str(target.port), "-u", target.path, "-m", target.model, "-k", target.key]
    argv += ["-c", str(spec.connections), "-d", f"{spec.seconds:.3f}", "-b", str(spec.prompt_bytes)]
    argv += [
        "-r",
        str(spec.ramp_ms),
        "-w",
        str(spec.warmup_ms),
        "-P",
        str(spec.period_ms),
        *(["-s"] if spec.is_streaming else []),
    ]
    try:
        done = subprocess.run(
            pin_command(argv, cores), capture_output=True, text=True, timeout=spec.seconds + _GRACE_S, check=True
        )
    except subprocess.SubprocessError as error:
        raise BenchmarkError(f"the load client failed: {error}") from error
    return msgspec.json.decode(done.stdout, type=LoadResult)

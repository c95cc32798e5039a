"""Telemetry of the node: its GPUs, the memory that models share, and what the processes of an engine hold of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runner.limits import MIB
from runner.telemetry.gpus import NvmlProbe, find_cards, open_nvml, read_card
from runner.telemetry.memory import TreeMemory, measure_trees, read_host
from wire.bridge import GpuInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The GPUs, and the memory that models share: the sum over the GPUs, or that of the host (``kind``). In MiB.

    ``nvidia_count``: how many of ``gpus`` are NVIDIA's, which come first.
    """

    gpus: list[GpuInfo]
    kind: Literal["gpu", "host"]
    total_mb: int
    used_mb: int
    free_mb: int
    nvidia_count: int = 0

    @property
    def engine_ids(self) -> tuple[int, ...]:
        """The GPUs that one engine can have together: NVIDIA's, or those of others where there are none of these."""
        return tuple(gpu.index for gpu in self.gpus[: self.nvidia_count or None])

    @property
    def free_of_gpus(self) -> dict[int, int | None]:
        """What is free on each GPU; None where its driver does not tell."""
        return {
            gpu.index: gpu.memory_total_mb - gpu.memory_used_mb
            if gpu.memory_total_mb is not None and gpu.memory_used_mb is not None
            else None
            for gpu in self.gpus
        }


class Telemetry:
    """Reads the node. Calls block for milliseconds, so make them from a thread; they wait for each other."""

    def __init__(self, *, nvml: NvmlProbe | None, cards: Sequence[Path]) -> None:
        self._nvml = nvml
        self._cards = cards
        self._lock = threading.Lock()
        # Decided once: a GPU that falls silent later must not make its models be judged by the host's memory.
        self._has_gpu_memory = any(_is_sized(gpu) for gpu in self._read_gpus())

    def sample(self) -> Reading:
        with self._lock:
            gpus = self._read_gpus()
        if self._has_gpu_memory:
            sized = [gpu for gpu in gpus if _is_sized(gpu)]
            total_mb = sum(gpu.memory_total_mb or 0 for gpu in sized)
            free_mb = total_mb - sum(gpu.memory_used_mb or 0 for gpu in sized)
        else:
            total_mb, free_mb = (size // MIB for size in read_host())
        return Reading(
            gpus=gpus,
            kind="gpu" if self._has_gpu_memory else "host",
            total_mb=total_mb,
            used_mb=total_mb - free_mb,
            free_mb=free_mb,
            nvidia_count=len(gpus) - len(self._cards),
        )

    def measure(self, roots: Sequence[int]) -> TreeMemory:
        """Return what the processes ``roots`` and all that belongs to them hold.

        Reading the memory of a process takes the longer the more it maps: some 10 ms per 10 GB.
        """
        with self._lock:
            by_pid = self._nvml.process_bytes() if self._nvml is not None else None
        return measure_trees(roots, by_pid)

    def close(self) -> None:
        """Release the driver. Later samples show no NVIDIA GPUs."""
        with self._lock:
            if self._nvml is not None:
                self._nvml.close()

    def _read_gpus(self) -> list[GpuInfo]:
        gpus = self._nvml.sample() if self._nvml is not None else []
        first = max((gpu.index for gpu in gpus), default=-1) + 1
        return [*gpus, *(read_card(device, index=first + number) for number, device in enumerate(self._cards))]


def open_telemetry(*, sysfs: Path = Path("/sys/class/drm"), env: Mapping[str, str] = os.environ) -> Telemetry:
    """Return the telemetry of this node; blocks while drivers start. ``env`` may hold CUDA_VISIBLE_DEVICES.

    On a node without a GPU, or with one that has no memory of its own, the readings are those of the host.
    """
    return Telemetry(nvml=open_nvml(env.get("CUDA_VISIBLE_DEVICES")), cards=find_cards(sysfs))


def _is_sized(gpu: GpuInfo) -> bool:
    return gpu.memory_total_mb is not None and gpu.memory_used_mb is not None

"""Memory of the host, or of the container where that may use less (Linux documentation, "Control Group v2", memory)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes: all that this process may count on, and what of it could be taken now without anybody being swapped or killed."""

    total_bytes: int
    available_bytes: int


def read_host(*, cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> HostMemory:
    """Return the host's memory, less where a control group of this process (or one around it) has a limit."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for group in _groups(cgroups, membership):
        limit = _read_int(group / "memory.max")
        if limit is None or limit >= memory.total:
            continue
        total = min(total, limit)
        # Pages of files that were not used lately are given back on demand, so they count as free.
        held = (_read_int(group / "memory.current") or 0) - _read_inactive_files(group)
        available = min(available, max(0, limit - max(0, held)))
    return HostMemory(total_bytes=total, available_bytes=available)


def _groups(cgroups: Path, membership: Path) -> Iterator[Path]:
    """Yield the group of this process and all around it."""
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if path is None:
        return
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        yield cgroups.joinpath(*parts[:count])


def _read_inactive_files(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _read_int(path: Path) -> int | None:
    """Return the number in a file; None for ``max``, which is no limit, and for a file that is not there."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None

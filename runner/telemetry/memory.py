"""Memory of the host, of the container where that may use less, and of the processes of engines, on GPUs too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the Linux kernel


class HostMemory(NamedTuple):
    """Bytes: all that this process may count on, and what of it could be taken now without anybody being swapped or killed."""

    total_bytes: int
    available_bytes: int


def read_host(*, cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> HostMemory:
    """Return the host's memory, less where a control group of this process (or one around it) has a limit.

    Source: Linux documentation, "Control Group v2", memory.
    """
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for group in _groups(cgroups, membership):
        limit = _read_number(group / "memory.max")  # "max" is no limit
        if limit is None or limit >= memory.total:
            continue
        total = min(total, limit)
        # Pages of files that were not used lately are given back on demand, so they count as free.
        held = (_read_number(group / "memory.current") or 0) - (_read_number(group / "memory.stat", "inactive_file ") or 0)
        available = min(available, max(0, limit - max(0, held)))
    return HostMemory(total, available)


def _groups(cgroups: Path, membership: Path) -> Iterator[Path]:
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


def _read_number(path: Path, name: str = "") -> int | None:
    """Return the number behind a name at the start of a line, None where there is none."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return next((int(line.removeprefix(name)) for line in lines if line.startswith(name)), None)
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMemory:
    """What a set of processes holds. ``gpu_bytes`` is None where nobody can tell; ``pids`` are those that are alive."""

    host_bytes: int
    gpu_bytes: int | None
    pids: tuple[int, ...]

    @property
    def held_bytes(self) -> int:
        """What it holds of the memory that models share: of the GPUs where that is known, else of the host."""
        return self.gpu_bytes or self.host_bytes


def find_tree(roots: Sequence[int]) -> tuple[int, ...]:
    """Return the living processes of ``roots``: themselves, their descendants, and the sessions that they lead or led."""
    wanted = set(roots)
    parents = {
        process.pid: process.info["ppid"]
        for process in psutil.process_iter(["ppid", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
    }
    return tuple(sorted(pid for pid in parents if _belongs(pid, wanted, parents)))


def measure_host_bytes(pid: int, *, proc: Path = Path("/proc")) -> int:
    """Return the proportional set size of a process, its resident set where that is not to be had, 0 when it is gone."""
    # Pages that several processes share are divided between them, so that a sum over a tree counts each once.
    try:
        with (proc / str(pid) / "smaps_rollup").open("rb") as lines:
            for line in lines:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux, another user's, or gone
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def measure_trees(roots: Sequence[int], gpu_bytes_by_pid: Mapping[int, int | None] | None) -> TreeMemory:
    """Return what the trees of ``roots`` hold, given the driver's list of who uses GPUs (None = there is none)."""
    pids = find_tree(roots)
    return TreeMemory(
        host_bytes=sum(measure_host_bytes(pid) for pid in pids),
        gpu_bytes=_sum_gpu_bytes(pids, gpu_bytes_by_pid),
        pids=pids,
    )


def _belongs(pid: int, wanted: set[int], parents: Mapping[int, int]) -> bool:
    ancestor, seen = pid, set[int]()
    while ancestor in parents and ancestor not in seen:
        # A session still holds those whose parent has died, so that what outlives a killed engine is found.
        if ancestor in wanted or _session_of(ancestor) in wanted:
            return True
        seen.add(ancestor)
        ancestor = parents[ancestor]
    return ancestor in wanted


def _session_of(pid: int) -> int | None:
    if not hasattr(os, "getsid"):  # Windows
        return None
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _sum_gpu_bytes(pids: Sequence[int], by_pid: Mapping[int, int | None] | None) -> int | None:
    if by_pid is None:
        return None
    used = [by_pid[pid] for pid in pids if pid in by_pid]
    if not used and not _sees_all_processes():
        # Older drivers list process ids of the host, which are not those of a container: no match says nothing.
        return None
    known = [amount for amount in used if amount is not None]
    return sum(known) if len(known) == len(used) else None


def _sees_all_processes() -> bool:
    try:
        return Path("/proc/self/ns/pid").readlink().name == _INITIAL_PID_NAMESPACE
    except OSError:
        return True  # no namespaces here

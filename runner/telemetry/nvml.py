"""NVIDIA GPUs through NVML. Every call is optional: what the driver will not tell is None."""

from __future__ import annotations

import ctypes
import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from runner.limits import MIB
from wire.bridge import GpuInfo

log = logging.getLogger(__name__)

_LIBRARY = "libnvidia-ml.so.1"
_PROCESS_KINDS = ("Compute", "Graphics")
_INSUFFICIENT_SIZE = 7
_NOT_AVAILABLE = 2**64 - 1


class _OldProcessInfo(ctypes.Structure):
    """``nvmlProcessInfo_v1_t``: what drivers before 450 fill in, and the unversioned functions of all later ones."""

    _fields_ = (("pid", ctypes.c_uint), ("used_bytes", ctypes.c_ulonglong))


class NvmlProbe:
    """Reads the GPUs that ``visible`` (CUDA_VISIBLE_DEVICES, None = all) lets engines use.

    ``nvml`` is the ``pynvml`` module. Not for use from two threads at once.
    """

    def __init__(self, nvml: Any, *, visible: str | None = None) -> None:  # Any: pynvml has no type information
        self._nvml = nvml
        self._visible = visible
        self._is_open = False

    def open(self) -> bool:
        """Initialise NVML and return whether that worked; the reason against it is logged."""
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            log.info("no NVML telemetry: %s", error)
            return False
        self._is_open = True
        return True

    def close(self) -> None:
        """Release NVML; afterwards there are no GPUs."""
        if self._is_open:
            self._is_open = False
            self._read("nvmlShutdown")

    def driver_version(self) -> str | None:
        """Return the version of the driver."""
        return _text(self._read("nvmlSystemGetDriverVersion"))

    def sample(self) -> list[GpuInfo]:
        """Return one reading per GPU, about a millisecond each. ``index`` is NVML's."""
        return [self._sample_one(index, handle) for index, handle in self._handles()]

    def process_bytes(self) -> Mapping[int, int | None] | None:
        """Return ``{pid: bytes of GPU memory}`` over all GPUs, None for a process whose amount the driver does not tell.

        None when no GPU lists its processes. Process ids are those of this process's namespace on drivers that translate.
        """
        total: dict[int, int | None] = {}
        is_known = False
        for _, handle in self._handles():
            on_gpu: dict[int, int | None] = {}
            for kind in _PROCESS_KINDS:
                listed = self._list_processes(kind, handle)
                is_known = is_known or listed is not None
                # A process with contexts of both kinds is in both lists, each time with all it has.
                on_gpu.update(listed or {})
            for pid, used_bytes in on_gpu.items():
                before = total.get(pid, 0)
                total[pid] = None if before is None or used_bytes is None else before + used_bytes
        return total if is_known else None

    def _handles(self) -> list[tuple[int, Any]]:
        if not self._is_open:
            return []
        count = self._read("nvmlDeviceGetCount") or 0
        handles = [(index, self._read("nvmlDeviceGetHandleByIndex", index)) for index in range(count)]
        present = [(index, handle) for index, handle in handles if handle is not None]
        if self._visible is None:
            return present
        names = [(index, _text(self._read("nvmlDeviceGetUUID", handle)) or "") for index, handle in present]
        chosen = select_visible(self._visible, names)
        return [(index, handle) for index, handle in present if index in chosen]

    def _sample_one(self, index: int, handle: Any) -> GpuInfo:
        memory = self._read("nvmlDeviceGetMemoryInfo", handle)
        rates = self._read("nvmlDeviceGetUtilizationRates", handle)
        milliwatts = self._read("nvmlDeviceGetPowerUsage", handle)
        celsius = self._read("nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU)
        return GpuInfo(
            index=index,
            name=_text(self._read("nvmlDeviceGetName", handle)) or f"GPU {index}",
            memory_total_mb=memory.total // MIB if memory is not None else None,
            memory_used_mb=memory.used // MIB if memory is not None else None,
            utilization_percent=float(rates.gpu) if rates is not None else None,
            temperature_c=float(celsius) if celsius is not None else None,
            power_w=milliwatts / 1000 if milliwatts is not None else None,
        )

    def _list_processes(self, kind: str, handle: Any) -> dict[int, int | None] | None:
        for version in ("_v3", "_v2"):
            listed = self._read(f"nvmlDeviceGet{kind}RunningProcesses{version}", handle)
            if listed is not None:
                return {process.pid: process.usedGpuMemory for process in listed}
        return _list_unversioned(f"nvmlDeviceGet{kind}RunningProcesses", handle)

    def _read(self, name: str, *arguments: object) -> Any:  # Any: as above
        call: Callable[..., Any] | None = getattr(self._nvml, name, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            log.debug("NVML call failed call=%s error=%s", name, error)
            return None


def open_nvml(visible: str | None) -> NvmlProbe | None:
    """Return an open probe, or None. The bindings weigh 12 MB, so they are imported only where the driver's library exists."""
    if not _has_driver():
        return None
    probe = NvmlProbe(importlib.import_module("pynvml"), visible=visible)
    if not probe.open():
        return None
    if visible not in (None, "", "-1") and not probe.sample():
        log.warning("CUDA_VISIBLE_DEVICES selects no whole GPU, so memory is judged by that of the host")
    return probe


def select_visible(visible: str, gpus: list[tuple[int, str]]) -> set[int]:
    """Return the indexes, of ``(index, UUID)`` pairs, that a value of CUDA_VISIBLE_DEVICES selects.

    As CUDA reads it (CUDA C++ Programming Guide, environment variables): indexes or beginnings of UUIDs, up to the first that
    names no GPU, so that an empty text or -1 selects none; a GPU that is named twice leaves none at all. Indexes are in PCI
    order, as with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    chosen: set[int] = set()
    for word in (part.strip() for part in visible.split(",")):
        if word.isascii() and word.isdigit():
            matches = [index for index, _ in gpus if index == int(word)]
        else:
            matches = [index for index, uuid in gpus if word and uuid.lower().startswith(word.lower())]
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return set()
        chosen.add(matches[0])
    return chosen


def _list_unversioned(name: str, handle: Any) -> dict[int, int | None] | None:
    # pynvml calls the newest version under the plain name, so the old function is called here.
    try:
        call = getattr(ctypes.CDLL(_LIBRARY), name)
    except (OSError, AttributeError):
        return None
    count = ctypes.c_uint(0)
    status = call(handle, ctypes.byref(count), None)
    if status == 0:
        return {}
    if status != _INSUFFICIENT_SIZE:
        return None
    # More may start between the two calls.
    count.value += 8
    entries = (_OldProcessInfo * count.value)()
    if call(handle, ctypes.byref(count), entries) != 0:
        return None
    return {entry.pid: None if entry.used_bytes == _NOT_AVAILABLE else entry.used_bytes for entry in entries[: count.value]}


def _text(value: str | bytes | None) -> str | None:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _has_driver() -> bool:
    if sys.platform != "linux":
        return sys.platform == "win32"
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True

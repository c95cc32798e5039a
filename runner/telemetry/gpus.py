"""GPUs: NVIDIA's through NVML, AMD's through the files of the amdgpu driver. What a driver will not tell is None.

Source for the latter: Linux documentation, "GPU Driver Developer's Guide", amdgpu. AMD's own library is not used: importing it
fails in ways of its own where the driver is missing.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import re
import sys
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from runner.limits import MIB, limits
from wire.bridge import GpuInfo

log = logging.getLogger(__name__)

_LIBRARY = "libnvidia-ml.so.1"
_PROCESS_KINDS = ("Compute", "Graphics")
_INSUFFICIENT_SIZE = 7
_NOT_AVAILABLE = 2**64 - 1
_CARD = re.compile(r"card([0-9]+)")
_AMD = "0x1002"


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
        self._groups: dict[int, str] | None = None

    def open(self) -> bool:
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

    def sample(self) -> list[GpuInfo]:
        """Return one reading per GPU, about a millisecond each. ``index`` is NVML's."""
        handles = self._handles()
        if self._groups is None or not self._groups.keys() >= {index for index, _ in handles}:
            self._groups = self._find_groups(handles)  # nobody rewires them while the node runs
        return [self._sample_one(index, handle, self._groups[index]) for index, handle in handles]

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
        chosen = _select_visible(self._visible, names)
        return [(index, handle) for index, handle in present if index in chosen]

    def _find_groups(self, handles: list[tuple[int, Any]]) -> dict[int, str]:
        """Return the group of each GPU: those that NVLink joins, else those behind one PCI switch; empty = it is in none."""
        groups: dict[int, str] = {}
        for kind, is_joined in (("nvlink", self._is_linked), ("pci", self._is_behind_one_switch)):
            alone = [(index, handle) for index, handle in handles if index not in groups]
            for (index, handle), (later, other) in combinations(alone, 2):
                if is_joined(handle, other):
                    name, old = groups.get(index) or f"{kind}-{index}", groups.get(later)
                    groups |= {member: name for member, group in groups.items() if group == old} | {index: name, later: name}
        return {index: groups.get(index, "") for index, _ in handles}

    def _is_linked(self, one: Any, other: Any) -> bool:  # Any: as above
        kind = getattr(self._nvml, "NVML_P2P_CAPS_INDEX_NVLINK", None)
        return bool(self._read("nvmlDeviceGetP2PStatus", one, other, kind) == self._nvml.NVML_P2P_STATUS_OK)

    def _is_behind_one_switch(self, one: Any, other: Any) -> bool:  # Any: as above
        nearest = self._read("nvmlDeviceGetTopologyCommonAncestor", one, other)
        return bool(nearest is not None and nearest <= self._nvml.NVML_TOPOLOGY_MULTIPLE)

    def _sample_one(self, index: int, handle: Any, group: str) -> GpuInfo:
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
            gpu_id=_text(self._read("nvmlDeviceGetUUID", handle)) or "",
            vendor="nvidia",
            compute_capability=".".join(map(str, self._read("nvmlDeviceGetCudaComputeCapability", handle) or ())),
            driver_version=_text(self._read("nvmlSystemGetDriverVersion")) or "",
            runtime_version=_describe_cuda(self._read("nvmlSystemGetCudaDriverVersion")),
            group=group,
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
    # The bindings weigh 12 MB, so they are imported only where the driver's library exists.
    if not _has_driver():
        return None
    probe = NvmlProbe(importlib.import_module("pynvml"), visible=visible)
    if not probe.open():
        return None
    if visible not in (None, "", "-1") and not probe.sample():
        log.warning("CUDA_VISIBLE_DEVICES selects no whole GPU, so memory is judged by that of the host")
    return probe


def _describe_cuda(version: int | None) -> str:
    # 12020 is 12.2.
    return f"{version // 1000}.{version % 1000 // 10}" if version is not None else ""


def _select_visible(visible: str, gpus: list[tuple[int, str]]) -> set[int]:
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


def find_cards(sysfs: Path) -> list[Path]:
    """Return the device folders of AMD GPUs under ``/sys/class/drm``, in the order of their card numbers."""
    try:
        names = [(int(match[1]), path) for path in sysfs.iterdir() if (match := _CARD.fullmatch(path.name))]
    except OSError:
        return []
    return [path / "device" for _, path in sorted(names) if _is_gpu(path / "device")]


def read_card(device: Path, *, index: int) -> GpuInfo:
    """Return one reading of a device folder; what the driver does not tell is None."""
    total, used = _read_int(device / "mem_info_vram_total"), _read_int(device / "mem_info_vram_used")
    busy = _read_int(device / "gpu_busy_percent")
    millicelsius = _read_sensor(device, "temp1_input")
    # Older kernels and most cards give the average, some of the newer cards only the present value.
    microwatts = _read_sensor(device, "power1_average", "power1_input")
    return GpuInfo(
        index=index,
        name=_read_text(device / "product_name") or f"AMD GPU {_read_text(device / 'device') or index}",
        memory_total_mb=total // MIB if total is not None else None,
        memory_used_mb=used // MIB if used is not None else None,
        utilization_percent=float(busy) if busy is not None else None,
        temperature_c=millicelsius / 1000 if millicelsius is not None else None,
        power_w=microwatts / 1_000_000 if microwatts is not None else None,
        vendor="amd",
    )


def _is_gpu(device: Path) -> bool:
    return (
        _read_text(device / "vendor") == _AMD
        and (_read_int(device / "mem_info_vram_total") or 0) >= limits().connection.gpu_bytes
    )


def _read_sensor(device: Path, *names: str) -> int | None:
    try:
        folders = sorted((device / "hwmon").iterdir())
    except OSError:
        return None
    values = (_read_int(folder / name) for folder in folders for name in names)
    return next((value for value in values if value is not None), None)


def _read_int(path: Path) -> int | None:
    text = _read_text(path)
    try:
        return int(text) if text else None
    except ValueError:
        return None


def _read_text(path: Path) -> str:
    # A file of sysfs may exist and still refuse to be read while the card sleeps.
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""

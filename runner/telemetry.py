"""What the box's GPUs report, through NVML. No NVIDIA hardware, no GPUs; a field NVML will not give is None."""

from __future__ import annotations

import ctypes
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from wire.bridge import GpuInfo

log = logging.getLogger(__name__)

MIB = 1024 * 1024


class GpuProbe:
    """Reads the GPUs. ``nvml`` is the ``pynvml`` module, or None when there is no driver."""

    def __init__(self, nvml: Any) -> None:  # Any: pynvml has no type information
        self._nvml = nvml
        self.is_open = False

    def open(self) -> None:
        """Initialise NVML; a failure means "no GPUs" and is logged once."""
        if self._nvml is None:
            return
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            log.info("no GPU telemetry: %s", error)
            return
        self.is_open = True

    def close(self) -> None:
        """Release NVML."""
        if self.is_open:
            self.is_open = False
            self._read(self._nvml.nvmlShutdown)

    def sample(self) -> list[GpuInfo]:
        """Return one reading per GPU. Takes a millisecond or so per GPU: call it from a thread."""
        if not self.is_open:
            return []
        count = self._read(self._nvml.nvmlDeviceGetCount) or 0
        gpus = (self._sample_one(index) for index in range(count))
        return [gpu for gpu in gpus if gpu is not None]

    def _sample_one(self, index: int) -> GpuInfo | None:
        nvml = self._nvml
        handle = self._read(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            return None
        name = self._read(nvml.nvmlDeviceGetName, handle)
        memory = self._read(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._read(nvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = self._read(nvml.nvmlDeviceGetPowerUsage, handle)
        celsius = self._read(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        return GpuInfo(
            index=index,
            name=name.decode("utf-8", "replace") if isinstance(name, bytes) else name or f"GPU {index}",
            memory_total_mb=memory.total // MIB if memory is not None else None,
            memory_used_mb=memory.used // MIB if memory is not None else None,
            utilization_percent=float(rates.gpu) if rates is not None else None,
            temperature_c=float(celsius) if celsius is not None else None,
            power_w=milliwatts / 1000 if milliwatts is not None else None,
        )

    def _read(self, call: Callable[..., Any], *args: object) -> Any:  # Any: as above
        try:
            return call(*args)
        except self._nvml.NVMLError as error:
            log.debug("NVML call failed call=%s error=%s", call.__name__, error)
            return None


def open_gpu_probe() -> GpuProbe:
    """Return an open probe. The bindings weigh 12 MB, so they are imported only where the driver's library exists."""
    probe = GpuProbe(importlib.import_module("pynvml") if _has_driver() else None)
    probe.open()
    return probe


def _has_driver() -> bool:
    if sys.platform != "linux":
        return sys.platform == "win32"
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True

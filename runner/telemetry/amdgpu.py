"""AMD GPUs through the files of the amdgpu driver (Linux documentation, "GPU Driver Developer's Guide", amdgpu).

AMD's own library is not used: importing it fails in ways of its own where the driver is missing.
"""

from __future__ import annotations

import re
from pathlib import Path

from runner.limits import MIB, limits
from wire.bridge import GpuInfo

_CARD = re.compile(r"card([0-9]+)")
_AMD = "0x1002"


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

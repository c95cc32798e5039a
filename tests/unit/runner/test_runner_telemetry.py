"""Readings: every field may be missing, AMD's files, the limits of a container, and which GPUs the environment selects."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from runner.telemetry import open_telemetry
from runner.telemetry.amdgpu import find_cards, read_card
from runner.telemetry.host import read_host
from runner.telemetry.nvml import NvmlProbe, select_visible
from wire.bridge import GpuInfo

MIB = 1024 * 1024


class NVMLError(Exception):
    """Stands for pynvml's own."""


def make_driver(*missing: str) -> SimpleNamespace:
    """Return a driver with one GPU, like the ``pynvml`` module; calls named in ``missing`` fail."""

    def answer(name: str, value: object) -> object:
        def call(*_: object) -> object:
            if name in missing:
                raise NVMLError(f"{name} is not supported")
            return value

        return call

    values: dict[str, object] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": object(),
        "nvmlDeviceGetName": b"NVIDIA Test",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=24_576 * MIB, used=1024 * MIB),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=37),
        "nvmlDeviceGetPowerUsage": 71_500,
        "nvmlDeviceGetTemperature": 54,
    }
    calls = {name: answer(name, value) for name, value in values.items()}
    return SimpleNamespace(NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0, **calls)


def sample(driver: object) -> list[GpuInfo]:
    """Return one sample."""
    probe = NvmlProbe(driver)
    probe.open()
    try:
        return probe.sample()
    finally:
        probe.close()


def write_files(folder: Path, files: dict[str, str]) -> Path:
    """Write files below a folder and return it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return folder


def write_card(sysfs: Path, number: int, **files: str) -> Path:
    """Write the files of an AMD card with 16 GB, less those given as empty text."""
    usual = {
        "vendor": "0x1002\n",
        "device": "0x744c\n",
        "mem_info_vram_total": f"{16 * 1024 * MIB}\n",
        "mem_info_vram_used": f"{3 * 1024 * MIB}\n",
        "gpu_busy_percent": "42\n",
        "hwmon/hwmon5/temp1_input": "61000\n",
        "hwmon/hwmon5/power1_average": "187000000\n",
    }
    present = {
        name: text for name, text in (usual | {name.replace("__", "/"): text for name, text in files.items()}).items() if text
    }
    write_files(sysfs / f"card{number}" / "device", present)
    return sysfs


def test_an_nvidia_gpu_is_reported_in_mebibytes_celsius_and_watts() -> None:
    assert sample(make_driver()) == [
        GpuInfo(
            index=0, name="NVIDIA Test", memory_total_mb=24_576, memory_used_mb=1024, utilization_percent=37.0,
            temperature_c=54.0, power_w=71.5,
        )
    ]  # fmt: skip


def test_a_field_the_driver_does_not_give_is_none_and_the_rest_stays() -> None:
    (gpu,) = sample(make_driver("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetName"))
    assert (gpu.power_w, gpu.utilization_percent, gpu.name, gpu.temperature_c) == (None, None, "GPU 0", 54.0)


def test_a_driver_that_does_not_answer_means_no_gpus() -> None:
    assert sample(make_driver("nvmlInit")) == []
    assert sample(make_driver("nvmlDeviceGetCount")) == []
    assert sample(make_driver("nvmlDeviceGetHandleByIndex")) == []


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        ("0", {0}),
        (" 2 , 0 ", {0, 2}),
        ("GPU-b", {1}),
        ("gpu-CCCC", {2}),
        ("GPU-a,2", {0, 2}),
        ("1,9,0", {1}),
        ("GPU-", set()),
        ("", set()),
        ("-1", set()),
        ("0,,1", {0}),
        ("MIG-1234", set()),
        ("\u00b2", set()),
    ],
)
def test_gpus_are_selected_as_cuda_selects_them(visible: str, chosen: set[int]) -> None:
    assert select_visible(visible, [(0, "GPU-aaaa"), (1, "GPU-bbbb"), (2, "GPU-cccc")]) == chosen


def test_amd_gpus_are_read_from_the_files_of_their_driver(tmp_path: Path) -> None:
    write_card(tmp_path, 1, product_name="Radeon PRO W7900\n")
    write_card(tmp_path, 10)
    write_card(tmp_path, 0, vendor="0x8086\n")
    write_card(tmp_path, 2, mem_info_vram_total=f"{512 * MIB}\n")
    (tmp_path / "card1-DP-1").mkdir()
    (tmp_path / "renderD128").mkdir()
    reading = open_telemetry(sysfs=tmp_path, env={}).sample()
    amd = [gpu for gpu in reading.gpus if "NVIDIA" not in gpu.name]
    first = amd[0].index
    fields = {
        "memory_total_mb": 16_384, "memory_used_mb": 3072, "utilization_percent": 42.0, "temperature_c": 61.0, "power_w": 187.0,
    }  # fmt: skip
    assert amd == [
        GpuInfo(index=first, name="Radeon PRO W7900", **fields),  # type: ignore[arg-type]  # values of several types
        GpuInfo(index=first + 1, name="AMD GPU 0x744c", **fields),  # type: ignore[arg-type]
    ]
    assert reading.kind == "gpu"
    assert reading.total_mb == reading.used_mb + reading.free_mb >= 2 * 16_384


def test_an_amd_gpu_that_tells_little_still_counts(tmp_path: Path) -> None:
    write_card(tmp_path, 0, gpu_busy_percent="", hwmon__hwmon5__temp1_input="", hwmon__hwmon5__power1_average="")
    write_card(tmp_path, 1, gpu_busy_percent="N/A\n", hwmon__hwmon5__power1_average="", hwmon__hwmon5__power1_input="9000000\n")
    quiet, other = (read_card(device, index=number) for number, device in enumerate(find_cards(tmp_path)))
    assert (quiet.utilization_percent, quiet.temperature_c, quiet.power_w, quiet.memory_used_mb) == (None, None, None, 3072)
    assert (other.utilization_percent, other.temperature_c, other.power_w) == (None, 61.0, 9.0)


def test_an_amd_gpu_that_falls_silent_leaves_no_memory_to_give_away(tmp_path: Path) -> None:
    write_card(tmp_path, 0)
    telemetry = open_telemetry(sysfs=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert telemetry.sample().free_mb == 13_312
    (tmp_path / "card0" / "device" / "mem_info_vram_used").unlink()
    reading = telemetry.sample()
    assert (reading.kind, reading.total_mb, reading.free_mb) == ("gpu", 0, 0)


def test_a_box_without_drm_has_no_amd_gpus(tmp_path: Path) -> None:
    assert find_cards(tmp_path / "none") == []


def test_the_host_is_what_psutil_says_where_nothing_limits_it(tmp_path: Path) -> None:
    memory = read_host(cgroups=tmp_path, membership=tmp_path / "none")
    assert memory.total_bytes == psutil.virtual_memory().total
    assert memory.available_bytes == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize(
    ("line", "group"),
    [("0::/", ""), ("0::/box/engine", "box/engine"), ("9:cpu:/x\n0::/box/engine", "box"), ("0::/../box", "box")],
)
def test_a_container_has_no_more_than_its_limit(tmp_path: Path, line: str, group: str) -> None:
    membership = write_files(tmp_path, {"membership": line + "\n"}) / "membership"
    stat = f"anon 1\ninactive_file {100 * MIB}\nactive_file 3\n"
    limits = {"memory.max": f"{512 * MIB}\n", "memory.current": f"{300 * MIB}\n", "memory.stat": stat}
    write_files(tmp_path / "cgroup" / group, limits)
    memory = read_host(cgroups=tmp_path / "cgroup", membership=membership)
    assert (memory.total_bytes, memory.available_bytes) == (512 * MIB, 312 * MIB)


def test_a_limit_that_is_none_or_above_the_host_changes_nothing(tmp_path: Path) -> None:
    membership = write_files(tmp_path, {"membership": "0::/box/engine\n"}) / "membership"
    write_files(tmp_path / "cgroup" / "box", {"memory.max": "max\n", "engine/memory.max": f"{2**60}\n"})
    assert read_host(cgroups=tmp_path / "cgroup", membership=membership).total_bytes == psutil.virtual_memory().total


def test_a_container_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    membership = write_files(tmp_path, {"membership": "0::/\n"}) / "membership"
    write_files(tmp_path / "cgroup", {"memory.max": f"{64 * MIB}\n", "memory.current": f"{65 * MIB}\n"})
    assert read_host(cgroups=tmp_path / "cgroup", membership=membership).available_bytes == 0


def test_this_machine_can_be_read() -> None:
    telemetry = open_telemetry()
    reading, tree = telemetry.sample(), telemetry.measure([os.getpid()])
    telemetry.close()
    assert reading.total_mb == reading.used_mb + reading.free_mb > 0
    assert os.getpid() in tree.pids
    assert tree.host_bytes > MIB

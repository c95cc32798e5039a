"""GPU readings: every field may be missing, and a box without a driver reports nothing."""

from __future__ import annotations

from types import SimpleNamespace

from runner.telemetry import GpuProbe, open_gpu_probe
from wire.bridge import GpuInfo

MIB = 1024 * 1024


class NVMLError(Exception):
    """Stands for pynvml's own."""


def make_driver(**missing: bool) -> SimpleNamespace:
    """Return a driver with one GPU, like the ``pynvml`` module; calls named in ``missing`` fail."""

    def answer(name: str, value: object) -> object:
        def call(*_: object) -> object:
            if missing.get(name):
                raise NVMLError(f"{name} is not supported")
            return value

        call.__name__ = name
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
    probe = GpuProbe(driver)
    probe.open()
    try:
        return probe.sample()
    finally:
        probe.close()


def test_a_gpu_is_reported_in_mebibytes_celsius_and_watts() -> None:
    assert sample(make_driver()) == [
        GpuInfo(
            index=0, name="NVIDIA Test", memory_total_mb=24_576, memory_used_mb=1024, utilization_percent=37.0,
            temperature_c=54.0, power_w=71.5,
        )
    ]  # fmt: skip


def test_a_field_the_driver_does_not_give_is_none_and_the_rest_stays() -> None:
    (gpu,) = sample(make_driver(nvmlDeviceGetPowerUsage=True, nvmlDeviceGetUtilizationRates=True, nvmlDeviceGetName=True))
    assert (gpu.power_w, gpu.utilization_percent, gpu.name, gpu.temperature_c) == (None, None, "GPU 0", 54.0)


def test_a_driver_that_does_not_start_means_no_gpus() -> None:
    assert sample(make_driver(nvmlInit=True)) == []
    assert sample(make_driver(nvmlDeviceGetCount=True)) == []
    assert sample(make_driver(nvmlDeviceGetHandleByIndex=True)) == []
    assert sample(None) == []


def test_this_machine_can_be_probed() -> None:
    probe = open_gpu_probe()
    assert [gpu.index for gpu in probe.sample()] == list(range(len(probe.sample())))
    probe.close()
    assert probe.sample() == []

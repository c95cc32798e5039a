"""NVIDIA telemetry against a driver library of our own, through the real bindings, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from wire.bridge import GpuInfo

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "tests" / "fakes" / "engines" / "programs" / "fake_nvml.c"
MIB = 1024 * 1024

pytestmark = pytest.mark.timeout(240)

PROGRAM = """
import os, sys
import msgspec
from pathlib import Path
from runner.telemetry import open_telemetry

telemetry = open_telemetry(sysfs=Path(os.devnull))
reading, tree = telemetry.sample(), telemetry.measure([int(text) for text in sys.argv[1:]])
telemetry.close()
after = telemetry.sample()
sys.stdout.buffer.write(msgspec.json.encode({"reading": reading, "tree": tree, "after": after}))
"""


class Reading(msgspec.Struct):
    """What the child printed of a reading."""

    gpus: list[GpuInfo]
    kind: str
    total_mb: int
    used_mb: int
    free_mb: int
    driver_version: str | None


class Tree(msgspec.Struct):
    """What it printed of a measurement."""

    gpu_bytes: int | None
    pids: list[int]


class Printed(msgspec.Struct):
    """All that the child prints."""

    reading: Reading
    tree: Tree
    after: Reading
    log: str = ""


class Drivers:
    """Builds driver libraries, each once."""

    def __init__(self, compiler: str, folder: Path) -> None:
        self._compiler = compiler
        self._folder = folder

    def build(self, *defines: str) -> Path:
        """Return the folder of a library built with these definitions."""
        folder = self._folder / "-".join(defines)
        if not (folder / "libnvidia-ml.so.1").exists():
            folder.mkdir(exist_ok=True)
            flags = ["-shared", "-fPIC", "-Wall", "-Werror", *(f"-D{define}" for define in defines)]
            subprocess.run([self._compiler, *flags, "-o", folder / "libnvidia-ml.so.1", SOURCE], check=True, timeout=60)
        return folder


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Drivers:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler (cc) and Linux to build a driver library")
    return Drivers(compiler, tmp_path_factory.mktemp("drivers"))


@pytest.fixture
def engine() -> Iterator[psutil.Popen]:
    """Start a process with a child; both wait until their input ends."""
    program = "import subprocess, sys; child = subprocess.Popen(['cat']); print(child.pid, flush=True); child.wait()"
    process = psutil.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline()
        yield process
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def run_telemetry(library: Path, *roots: int, **env: str) -> Printed:
    """Return what telemetry says with a driver library in place."""
    surroundings = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    surroundings |= {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(ROOT)} | env
    command = [sys.executable, "-W", "error", "-c", PROGRAM, *map(str, roots)]
    done = subprocess.run(command, env=surroundings, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    printed = msgspec.json.decode(done.stdout, type=Printed)
    printed.log = done.stderr.decode()
    return printed


def gpu(index: int) -> GpuInfo:
    """Return what the driver says of a GPU."""
    return GpuInfo(
        index=index,
        name="Fake GPU 24GB",
        memory_total_mb=24_576,
        memory_used_mb=4096 * (index + 1),
        utilization_percent=10.0 * (index + 1),
        temperature_c=55.0,
        power_w=120.5,
    )


def test_two_gpus_are_reported_and_their_memory_summed(drivers: Drivers) -> None:
    printed = run_telemetry(drivers.build("WITH_V3", "WITH_V2", "WITH_V1"))
    reading = printed.reading
    assert reading.gpus == [gpu(0), gpu(1)]
    assert (reading.kind, reading.total_mb, reading.used_mb, reading.free_mb) == ("gpu", 49_152, 12_288, 36_864)
    assert (reading.driver_version, printed.log) == ("999.42-fake", "")
    # Once the driver is let go, the box does not turn into one without GPUs whose models are judged by host memory.
    assert (printed.after.gpus, printed.after.kind, printed.after.free_mb) == ([], "gpu", 0)


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [("0", [0]), ("1", [1]), ("1,0", [0, 1]), ("GPU-bbbb2222-0000", [1]), ("GPU-aaaa", [0]), ("0,7,1", [0])],
)
def test_the_environment_narrows_which_gpus_count(drivers: Drivers, visible: str, indexes: list[int]) -> None:
    reading = run_telemetry(drivers.build("WITH_V3", "WITH_V2", "WITH_V1"), CUDA_VISIBLE_DEVICES=visible).reading
    assert [gpu.index for gpu in reading.gpus] == indexes
    assert reading.total_mb == 24_576 * len(indexes)
    assert reading.used_mb == sum(4096 * (index + 1) for index in indexes)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_box_that_hides_its_gpus_is_judged_by_its_host(drivers: Drivers, visible: str) -> None:
    printed = run_telemetry(drivers.build("WITH_V3", "WITH_V2", "WITH_V1"), CUDA_VISIBLE_DEVICES=visible)
    assert (printed.reading.gpus, printed.reading.kind, printed.log) == ([], "host", "")
    assert printed.reading.total_mb > 0


def test_a_selection_that_names_no_whole_gpu_is_told_to_the_owner(drivers: Drivers) -> None:
    printed = run_telemetry(drivers.build("WITH_V3"), CUDA_VISIBLE_DEVICES="MIG-1234")
    assert (printed.reading.gpus, printed.reading.kind) == ([], "host")
    assert "CUDA_VISIBLE_DEVICES selects no whole GPU" in printed.log


@pytest.mark.parametrize("defines", [("WITH_V3",), ("WITH_V2",), ("WITH_V1",), ("WITH_V3", "WITH_V2", "WITH_V1")])
def test_gpu_memory_of_a_process_tree_is_found_whatever_lists_the_driver_has(
    drivers: Drivers, engine: psutil.Popen, defines: tuple[str, ...]
) -> None:
    (child,) = engine.children()
    # The engine uses both GPUs, its child one of them for computing and drawing, which is one amount and not two.
    listed = f"0:c:{engine.pid}:1000,1:c:{engine.pid}:500,1:c:{child.pid}:200,1:g:{child.pid}:200,0:c:{os.getpid()}:4000"
    tree = run_telemetry(drivers.build(*defines), engine.pid, FAKE_NVML_PROCESSES=listed).tree
    assert set(tree.pids) == {engine.pid, child.pid}
    assert tree.gpu_bytes == 1700 * MIB


def test_gpu_memory_is_unknown_where_the_driver_lists_no_processes(drivers: Drivers, engine: psutil.Popen) -> None:
    assert run_telemetry(drivers.build("BARE"), engine.pid).tree.gpu_bytes is None


def test_gpu_memory_is_unknown_where_the_driver_does_not_tell_the_amount(drivers: Drivers, engine: psutil.Popen) -> None:
    for defines in (("WITH_V3",), ("WITH_V1",)):
        tree = run_telemetry(drivers.build(*defines), engine.pid, FAKE_NVML_PROCESSES=f"0:c:{engine.pid}:-1").tree
        assert tree.gpu_bytes is None


def test_a_driver_that_refuses_everything_leaves_the_fields_empty_and_the_host_to_judge_by(drivers: Drivers) -> None:
    reading = run_telemetry(drivers.build("BARE")).reading
    assert reading.gpus == [GpuInfo(index=0, name="GPU 0"), GpuInfo(index=1, name="GPU 1")]
    assert (reading.kind, reading.driver_version) == ("host", None)
    assert reading.total_mb > 0


def test_a_driver_that_does_not_start_means_no_gpus(drivers: Drivers, engine: psutil.Popen) -> None:
    printed = run_telemetry(drivers.build("WITH_V3"), engine.pid, FAKE_NVML_BROKEN="1")
    assert (printed.reading.gpus, printed.reading.kind, printed.tree.gpu_bytes) == ([], "host", None)

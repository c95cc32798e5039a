"""What a node says of itself: its GPUs and memory, its models and their states, the metrics of its engines."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from runner.api.metrics import show_series
from runner.definitions.fields import ModelDefinition
from runner.definitions.plan import LoadPlan
from runner.definitions.settings import Fairness
from runner.engines.http_engine import read_samples
from runner.engines.port import CHAT, CONTINUATIONS, MESSAGES, POOL_RESPONSES, RESPONSES, Capabilities
from runner.engines.supervisor import EngineState, Supervisor
from runner.limits import limits
from runner.pool.models import Model, ModelEvent, Replica
from runner.queue import FairQueue, WaitBudget
from runner.report import list_endpoints, list_replicas, read_memory
from runner.serving.request import INFERENCE_PATHS
from runner.telemetry import Reading, open_telemetry
from runner.telemetry.gpus import NvmlProbe, find_cards, read_card
from runner.telemetry.memory import read_host
from tests.fakes.engine import FakeEngine
from wire.bridge import GpuInfo

MIB = 1024 * 1024


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
        "vendor": "0x1002\n", "device": "0x744c\n", "mem_info_vram_total": f"{16 * 1024 * MIB}\n",
        "mem_info_vram_used": f"{3 * 1024 * MIB}\n", "gpu_busy_percent": "42\n", "hwmon/hwmon5/temp1_input": "61000\n",
        "hwmon/hwmon5/power1_average": "187000000\n",
    }  # fmt: skip
    present = {
        name: text for name, text in (usual | {name.replace("__", "/"): text for name, text in files.items()}).items() if text
    }
    write_files(sysfs / f"card{number}" / "device", present)
    return sysfs


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
        "vendor": "amd",
    }  # fmt: skip
    assert amd == [
        GpuInfo(index=first, name="Radeon PRO W7900", **fields),  # type: ignore[arg-type]  # values of several types
        GpuInfo(index=first + 1, name="AMD GPU 0x744c", **fields),  # type: ignore[arg-type]
    ]
    assert reading.kind == "gpu"
    assert reading.total_mb == reading.used_mb + reading.free_mb >= 2 * 16_384


def test_an_amd_gpu_that_tells_little_still_counts_and_one_that_falls_silent_leaves_no_memory(tmp_path: Path) -> None:
    write_card(tmp_path, 0, gpu_busy_percent="", hwmon__hwmon5__temp1_input="", hwmon__hwmon5__power1_average="")
    write_card(tmp_path, 1, gpu_busy_percent="N/A\n", hwmon__hwmon5__power1_average="", hwmon__hwmon5__power1_input="9000000\n")
    quiet, other = (read_card(device, index=number) for number, device in enumerate(find_cards(tmp_path)))
    assert (quiet.utilization_percent, quiet.temperature_c, quiet.power_w, quiet.memory_used_mb) == (None, None, None, 3072)
    assert (other.utilization_percent, other.temperature_c, other.power_w) == (None, 61.0, 9.0)
    telemetry = open_telemetry(sysfs=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert telemetry.sample().free_mb == 2 * 13_312
    for card in ("card0", "card1"):
        (tmp_path / card / "device" / "mem_info_vram_used").unlink()
    reading = telemetry.sample()
    assert (reading.kind, reading.total_mb, reading.free_mb) == ("gpu", 0, 0)
    assert find_cards(tmp_path / "none") == []


class Driver:
    """NVML with ``count`` GPUs, of which pairs are joined by NVLink or lie behind one PCI switch; None = it does not tell."""

    NVMLError = RuntimeError
    NVML_TEMPERATURE_GPU = NVML_P2P_STATUS_OK = 0
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_TOPOLOGY_MULTIPLE = 2, 20

    def __init__(self, count: int, *, linked: str | None = "", near: str | None = "") -> None:
        self._count, self._linked, self._near = count, linked, near
        self.asked = 0

    def nvmlInit(self) -> None: ...  # noqa: N802  # NVML's names

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self._count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:  # noqa: N802
        self.asked += 1
        if self._linked is None:
            raise RuntimeError
        return 0 if kind == self.NVML_P2P_CAPS_INDEX_NVLINK and f"{one}{other}" in self._linked.split() else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:  # noqa: N802
        if self._near is None:
            raise RuntimeError
        return 10 if f"{one}{other}" in self._near.split() else 40


@pytest.mark.parametrize(
    ("linked", "near", "groups"),
    [
        ("", "", ["", "", "", ""]),
        (None, None, ["", "", "", ""]),
        ("", "01 23", ["pci-0", "pci-0", "pci-2", "pci-2"]),
        ("01 02 03 12 13 23", "01 23", ["nvlink-0"] * 4),
        ("12", "01 03", ["pci-0", "nvlink-1", "nvlink-1", "pci-0"]),
        ("02 12", None, ["nvlink-1", "nvlink-1", "nvlink-1", ""]),
        ("03", "", ["nvlink-0", "", "", "nvlink-0"]),
    ],
)
def test_gpus_that_are_joined_share_a_group(linked: str | None, near: str | None, groups: list[str]) -> None:
    probe = NvmlProbe(driver := Driver(4, linked=linked, near=near))
    probe.open()
    assert [gpu.group for gpu in probe.sample()] == groups
    asked = driver.asked
    assert [gpu.group for gpu in probe.sample()] == groups
    assert driver.asked == asked > 0, "nobody rewires GPUs while a node runs"


@pytest.mark.parametrize(
    ("backend", "options", "gpu_ids", "device"),
    [
        ("gguf", {}, (), ""), ("gguf", {"device": "cpu"}, (), "cpu"), ("gguf", {"gguf_n_gpu_layers": 0}, (0,), "cpu"),
        ("gguf", {"gguf_n_gpu_layers": 9}, (0,), ""), ("ct2", {}, (), "cpu"), ("whisper", {"device": "cuda"}, (1,), ""),
        ("vllm", {"device": "cpu"}, (), "cpu"), ("vllm", {}, (0, 1), ""),
    ],
)  # fmt: skip
def test_gateways_are_told_which_models_use_no_gpu(
    backend: str, options: dict[str, object], gpu_ids: tuple[int, ...], device: str
) -> None:
    model = served(make_model(replicas=1))
    model.replicas[0] = Replica(
        LoadPlan(model_id="m", backend=backend, options=options, gpu_ids=gpu_ids), model.replicas[0].supervisor
    )
    (info,) = list_replicas([model])
    assert (info.device, info.gpus) == (device, list(gpu_ids))


@pytest.mark.parametrize(("nvidia_count", "ids"), [(0, (0, 1)), (1, (0,)), (2, (0, 1))])
def test_an_engine_has_gpus_of_one_maker(nvidia_count: int, ids: tuple[int, ...]) -> None:
    gpus = [GpuInfo(index=0, name="first"), GpuInfo(index=1, name="second")]
    reading = Reading(gpus=gpus, kind="gpu", total_mb=2, used_mb=1, free_mb=1, nvidia_count=nvidia_count)
    assert reading.engine_ids == ids


def test_the_host_is_what_psutil_says_where_nothing_limits_it(tmp_path: Path) -> None:
    membership = write_files(tmp_path, {"membership": "0::/box/engine\n"}) / "membership"
    write_files(tmp_path / "cgroup" / "box", {"memory.max": "max\n", "engine/memory.max": f"{2**60}\n"})
    for cgroups, named in ((tmp_path, tmp_path / "none"), (tmp_path / "cgroup", membership)):
        memory = read_host(cgroups=cgroups, membership=named)
        assert memory.total_bytes == psutil.virtual_memory().total
        assert memory.available_bytes == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    write_files(tmp_path / "cgroup" / "box", {"memory.max": f"{64 * MIB}\n", "memory.current": f"{65 * MIB}\n"})
    assert read_host(cgroups=tmp_path / "cgroup", membership=membership).available_bytes == 0
    telemetry = open_telemetry()
    reading, tree = telemetry.sample(), telemetry.measure([os.getpid()])
    telemetry.close()
    assert reading.total_mb == reading.used_mb + reading.free_mb > 0
    assert (os.getpid() in tree.pids, tree.host_bytes > MIB) == (True, True)


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


def make_model(name: str = "m", *, replicas: int = 0, slots: int = 2, translate: tuple[str, ...] = ()) -> Model:
    queue = FairQueue(slots=1, limits=Fairness(), budget=WaitBudget(1), weight_of=lambda _tenant: 1.0)
    definition = ModelDefinition(model_id=name, backend="gguf", target_inflight=3, translate=translate)
    model = Model(definition, queue, lambda: None)
    plan = LoadPlan(model_id=name, backend="gguf", slots=slots)
    for _ in range(replicas):
        supervisor = Supervisor(FakeEngine(), silent_s=1, on_change=lambda: None)
        supervisor._become(EngineState.LOADED)
        model.replicas.append(Replica(plan, supervisor))
    return model


def served(model: Model) -> Model:
    model.apply(ModelEvent.LOAD)
    model.serve(load_s=1.0)
    return model


async def test_gateways_are_not_told_of_what_they_are_to_translate_nor_of_what_goes() -> None:
    every = set(INFERENCE_PATHS)
    for paths, translate, told in (
        ((CHAT, RESPONSES, MESSAGES), (), {CHAT, RESPONSES, MESSAGES, POOL_RESPONSES}),
        ((CHAT, RESPONSES, MESSAGES), ("responses",), {CHAT, MESSAGES, POOL_RESPONSES}),
        ((CHAT, RESPONSES, MESSAGES), ("messages", "responses"), {CHAT, POOL_RESPONSES}),
        ((), (), set()), ((), ("messages",), every - {MESSAGES}),  # a server that names no paths
    ):  # fmt: skip
        model = served(make_model(replicas=2, translate=translate))
        for replica in model.replicas:
            replica.supervisor.engine.capabilities = Capabilities(paths)  # type: ignore[misc]  # a test's engine
        assert set(list_replicas([model])[0].endpoints) == told
        assert not paths or list_endpoints([model]) == sorted(told)
        model.apply(ModelEvent.UNLOAD)
        continuing = Capabilities(paths, continuation={})
        assert (CONTINUATIONS in continuing.declared_endpoints) == (CHAT in paths)
        assert ([info.state for info in list_replicas([model])], list_endpoints([model])) == (["unloading"] * 2, [])
    assert (list_replicas([make_model()]), list_endpoints([make_model()]), read_memory(None, [make_model()])) == ([], [], None)


def test_a_kept_model_is_marked_and_one_that_could_not_be_loaded_again_says_why() -> None:
    there, gone = served(make_model("there", replicas=1)), make_model("gone")
    failed = make_model("failed")
    failed.apply(ModelEvent.LOAD)
    failed.apply(ModelEvent.FAIL, error="the engine's words")
    desired = {"there": "an old problem", "gone": "", "failed": "4 attempts failed", "unknown": "There is no such model"}
    found = {info.model: (info.state, info.kept, info.detail) for info in list_replicas([there, gone, failed], desired)}
    assert found == {
        "there": ("loaded", True, ""), "gone": ("loading", True, "the node is about to load it again"),
        "failed": ("failed", True, "4 attempts failed"), "unknown": ("failed", True, "There is no such model"),
    }  # fmt: skip
    assert not list_replicas([there])[0].kept
    given_up = list_replicas([there, failed], desired, {"there": 7, "failed": 8, "unknown": 9})
    assert {info.model: info.gave_up_ms for info in given_up} == {"there": None, "gone": None, "failed": 8, "unknown": 9}


TEXT = """\
# HELP e:running Requests that run.
# TYPE e:running gauge
e:running{engine="0",model_name="a \\"b\\""} 2.0
e:running{engine="1",model_name="a \\"b\\""} 3
e:config_info{block_size="16",note="x{y} 1"} 1.0 1795288626000
e:wait_bucket{le="1.0"} 4
e:nan NaN
e:infinite +Inf
e:plain 7e2
other:thing 1
e:broken{ 1
"""


def test_samples_are_summed_over_labels_of_any_text_and_what_is_no_number_is_left_out() -> None:
    samples = read_samples(TEXT, "e:")
    assert (samples.total("e:running"), samples.count("e:absent", "e:plain"), samples.total("e:absent")) == (5.0, 700, None)
    assert samples.labels("e:config_info") == {"block_size": "16", "note": "x{y} 1"}
    assert samples.labels("e:absent") == {}
    assert set(samples.found) == {"e:running", "e:config_info", "e:plain"}


WAITING = '# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine="0",model_name="x"} 2\n'


def test_what_is_not_known_or_not_in_this_format_shows_nothing_and_one_engine_cannot_fill_the_page() -> None:
    for text in (
        "", "vllm:num_requests_waiting{ 1\n", "vllm:num_requests_waiting nothing\n",
        "# TYPE vllm:num_requests_waiting poem\nvllm:num_requests_waiting 1\n",
        "secret_of_the_engine 1\nvllm:unheard_of 1\nvllm_requests_total 1\nmuster_runner_info 1\n",
        WAITING + "#" * limits().engines.shown_bytes,
    ):  # fmt: skip
        assert show_series([("a", 0, text)]) == []
    most = limits().engines.shown_samples
    lines = "".join(f'vllm:request_success_total{{finished_reason="{number}"}} 1\n' for number in range(2 * most))
    text = "# TYPE vllm:request_success_total counter\n" + lines
    (first, second) = show_series([("a", 0, text + WAITING), ("b", 0, WAITING)])
    assert (len(first.samples), [sample.labels["model"] for sample in second.samples]) == (most, ["b"])

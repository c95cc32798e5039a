"""What a box says of itself to its gateways: every replica once, sums of what is known, nothing of what is not there."""

from __future__ import annotations

from dataclasses import replace

from runner.admission import FairQueue, QueueLimits, WaitBudget
from runner.definitions.definition import ModelDefinition
from runner.definitions.plan import LoadPlan
from runner.engines.port import CHAT, MESSAGES, POOL_RESPONSES, RESPONSES, Capabilities
from runner.engines.supervisor import EngineState, Supervisor
from runner.limits import limits
from runner.pool import LoadProgress, Model, ModelEvent, Replica
from runner.report import list_endpoints, list_replicas, read_memory
from runner.serving.headers import INFERENCE_PATHS
from runner.telemetry import Reading, TreeMemory
from tests.fakes.scripted_engine import FakeEngine

MIB = 1024 * 1024
READING = Reading(gpus=[], kind="gpu", total_mb=1000, used_mb=400, free_mb=600, driver_version=None, at=0.0)


def make_model(name: str = "m", *, replicas: int = 0, slots: int = 2, translate: tuple[str, ...] = ()) -> Model:
    queue = FairQueue(slots=1, limits=QueueLimits(), budget=WaitBudget(1), weight_of=lambda _tenant: 1.0)
    definition = ModelDefinition(model_id=name, backend="gguf", target_inflight=3, translate=translate)
    model = Model(definition, queue, lambda: None)
    plan = LoadPlan(model_id=name, backend="gguf", slots=slots)
    for _ in range(replicas):
        supervisor = Supervisor(FakeEngine(), silent_s=1, on_change=lambda: None)
        supervisor.state = EngineState.LOADED
        model.replicas.append(Replica(plan, supervisor))
    return model


def served(model: Model) -> Model:
    model.apply(ModelEvent.LOAD)
    model.serve(load_s=1.0)
    return model


def test_a_model_that_nobody_wants_is_not_reported() -> None:
    assert list_replicas([make_model()]) == []
    assert list_endpoints([make_model()]) == []
    assert read_memory(None, [make_model()]) is None


async def test_a_model_that_is_being_loaded_counts_as_one_with_its_progress() -> None:
    model = make_model(replicas=1)
    model.apply(ModelEvent.LOAD)
    model.load = LoadProgress(stage="reading weights " * 100, fraction=0.56789, expected_s=1000.0)
    (info,) = list_replicas([model])
    assert (info.model, info.state, info.engine, info.slots, info.progress) == ("m", "loading", "gguf", 3, 0.568)
    assert info.detail is not None
    assert len(info.detail) == limits().connection.detail_chars
    assert info.eta_s is not None
    assert 0 < info.eta_s <= 1000
    assert list_endpoints([model]) == []


async def test_a_model_that_failed_says_why_whether_or_not_it_has_replicas() -> None:
    model = make_model()
    model.apply(ModelEvent.LOAD)
    model.apply(ModelEvent.FAIL, error="out of memory")
    (info,) = list_replicas([model])
    assert (info.state, info.detail, info.progress, info.eta_s) == ("failed", "out of memory", None, None)
    lost = served(make_model(replicas=1))
    lost.replicas[0].supervisor.state, lost.replicas[0].supervisor.last_error = EngineState.FAILED, "it died"
    lost.engines_changed()
    (info,) = list_replicas([lost])
    assert (info.state, info.detail) == ("failed", "it died")


async def test_every_replica_is_reported_with_what_runs_on_it_and_what_it_holds() -> None:
    model = served(make_model(replicas=2))
    first, second = model.replicas
    first.active, first.memory = 1, TreeMemory(host_bytes=70 * MIB, gpu_bytes=None, pids=())
    second.memory = TreeMemory(host_bytes=70 * MIB, gpu_bytes=50 * MIB, pids=())
    second.weights_bytes, second.kv_bytes = 40 * MIB, 5 * MIB
    first.plan = replace(first.plan, context_tokens=2048)
    infos = list_replicas([model])
    assert [(info.state, info.engine, info.slots, info.active) for info in infos] == [
        ("loaded", "gated", 2, 1), ("loaded", "gated", 2, 0),
    ]  # fmt: skip
    assert [(info.memory_mb, info.weights_mb, info.kv_mb) for info in infos] == [(70, None, None), (50, 40, 5)]
    assert [info.endpoints for info in infos] == [[CHAT, POOL_RESPONSES], [CHAT, POOL_RESPONSES]]
    assert [info.context_tokens for info in infos] == [2048, None]
    assert list_endpoints([model, served(make_model("other", replicas=1))]) == [CHAT, POOL_RESPONSES]


async def test_what_gateways_are_to_translate_they_are_not_told_of() -> None:
    paths = (CHAT, RESPONSES, MESSAGES)
    for translate, told in (((), [*paths]), (("responses",), [CHAT, MESSAGES]), (("messages", "responses"), [CHAT])):
        model = served(make_model(replicas=1, translate=translate))
        model.replicas[0].supervisor.engine.capabilities = Capabilities(paths)  # type: ignore[misc]  # a test's engine
        assert list_replicas([model])[0].endpoints == [*told, POOL_RESPONSES]
        assert list_endpoints([model]) == sorted([*told, POOL_RESPONSES])


async def test_of_a_server_that_names_no_paths_everything_is_told_but_what_is_to_be_translated() -> None:
    for translate in ((), ("messages",)):
        model = served(make_model(replicas=1, translate=translate))
        model.replicas[0].supervisor.engine.capabilities = Capabilities(())  # type: ignore[misc]  # a test's engine
        told = set(list_replicas([model])[0].endpoints)
        assert told == (set(INFERENCE_PATHS) - {MESSAGES} if translate else set())


async def test_a_model_on_its_way_out_says_so_for_each_replica() -> None:
    model = served(make_model(replicas=2))
    model.apply(ModelEvent.UNLOAD)
    assert {info.state for info in list_replicas([model])} == {"unloading"}
    assert list_endpoints([model]) == []


async def test_memory_is_that_of_the_machine_with_the_models_parts_of_it() -> None:
    model = served(make_model(replicas=2))
    memory = read_memory(READING, [model])
    assert memory is not None
    assert (memory.kind, memory.total_mb, memory.used_mb, memory.weights_mb, memory.kv_mb) == ("gpu", 1000, 400, None, None)
    model.replicas[0].weights_bytes, model.replicas[0].kv_bytes = 30 * MIB, MIB
    model.replicas[1].weights_bytes = 30 * MIB
    memory = read_memory(replace(READING, used_mb=500), [model])
    assert memory is not None
    assert (memory.used_mb, memory.weights_mb, memory.kv_mb) == (500, 60, 1)


def test_a_kept_model_is_marked_and_one_that_could_not_be_loaded_again_says_why() -> None:
    there, gone = served(make_model("there", replicas=1)), make_model("gone")
    failed = make_model("failed")
    failed.apply(ModelEvent.LOAD)
    failed.apply(ModelEvent.FAIL, error="the engine's words")
    desired = {"there": "an old problem", "gone": "", "failed": "4 attempts failed", "unknown": "There is no such model"}
    found = {info.model: (info.state, info.kept, info.detail) for info in list_replicas([there, gone, failed], desired)}
    assert found == {
        "there": ("loaded", True, ""),
        "gone": ("loading", True, "the node is about to load it again"),
        "failed": ("failed", True, "4 attempts failed"),
        "unknown": ("failed", True, "There is no such model"),
    }
    assert not list_replicas([there])[0].kept
    given_up = list_replicas([there, failed], desired, {"there": 7, "failed": 8, "unknown": 9})
    assert {info.model: info.gave_up_ms for info in given_up} == {"there": None, "gone": None, "failed": 8, "unknown": 9}

"""Load tasks and observations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runner.definitions.plan import Observation
from runner.ledger import TaskRow, TaskState, history
from tests.fakes.ledgers import T0, opened
from tests.fakes.limits import set_runner_limits

TASK = TaskRow(
    task_id="load-1", model_id="org/model", state=TaskState.LOADING, stage="reading weights", fraction=0.25, started_at=T0
)
SEEN = Observation(
    backend="llamacpp", model_id="m", plan_key="k", weights_bytes=10, kv_bytes=2, measured_bytes=13, load_s=1.5, loaded_at=T0
)


async def test_a_task_reads_back_as_it_was_saved_last(tmp_path: Path) -> None:
    done = replace(
        TASK, state=TaskState.COMPLETED, fraction=None, finished_at=T0 + 9, result={"gpuMemoryUsedMB": 38500, "ä": [1.5, None]}
    )
    async with opened(tmp_path) as ledger:
        assert await ledger.read_task("load-1") is None
        await ledger.save_task(TASK)
        assert await ledger.read_task("load-1") == TASK
        await ledger.save_task(done)
    async with opened(tmp_path) as ledger:
        assert await ledger.read_task("load-1") == done


async def test_unfinished_tasks_are_interrupted_and_finished_ones_are_not(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.save_task(replace(TASK, task_id="late", started_at=T0 + 1))
        await ledger.save_task(TASK)
        failed = replace(TASK, task_id="failed", state=TaskState.FAILED, error="out of memory", finished_at=T0 + 1)
        await ledger.save_task(failed)
    async with opened(tmp_path) as ledger:
        interrupted = await ledger.interrupt_tasks(T0 + 50)
        assert interrupted == [
            replace(
                TASK,
                task_id=name,
                started_at=at,
                state=TaskState.INTERRUPTED,
                finished_at=T0 + 50,
                error=history.INTERRUPTED,
            )
            for name, at in (("load-1", T0), ("late", T0 + 1))
        ]
        assert [await ledger.read_task(task.task_id) for task in interrupted] == interrupted
        assert await ledger.read_task("failed") == failed
        assert await ledger.interrupt_tasks(T0 + 60) == []


async def test_the_newest_tasks_are_kept_and_running_ones_always(tmp_path: Path) -> None:
    set_runner_limits(ledger={"tasks": 3})
    done = replace(TASK, state=TaskState.COMPLETED)
    async with opened(tmp_path) as ledger:
        await ledger.save_task(TASK)
        for number in range(2, 7):
            await ledger.save_task(replace(done, task_id=f"load-{number}", started_at=T0 + number))
        names = [task.task_id for task in await ledger.recent_tasks(10)]
        assert names == ["load-6", "load-5", "load-4", "load-1"]
        assert [task.task_id for task in await ledger.recent_tasks(2)] == ["load-6", "load-5"]


async def test_observations_come_newest_first_and_of_one_backend(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.add_observation(SEEN)
        await ledger.add_observation(replace(SEEN, load_s=2.5))
        await ledger.add_observation(replace(SEEN, backend="vllm", plan_key="v", load_s=9.0))
        assert await ledger.observations("llamacpp") == [replace(SEEN, load_s=2.5), SEEN]
        assert await ledger.observations("llamacpp", 1) == [replace(SEEN, load_s=2.5)]
        assert await ledger.observations("nobody") == []


async def test_the_last_load_of_the_same_plan_is_the_expected_time(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        assert await ledger.last_load_s("m", "k") is None
        await ledger.add_observation(SEEN)
        await ledger.add_observation(replace(SEEN, load_s=2.5))
        await ledger.add_observation(replace(SEEN, plan_key="other", load_s=99.0))
        assert await ledger.last_load_s("m", "k") == 2.5


async def test_observations_are_bounded_per_plan_and_in_all(tmp_path: Path) -> None:
    set_runner_limits(ledger={"observations_of_plan": 3, "observations": 10})
    async with opened(tmp_path) as ledger:
        await ledger.add_observation(replace(SEEN, plan_key="seldom", load_s=7.0))
        for number in range(9):
            await ledger.add_observation(replace(SEEN, load_s=float(number)))
        assert [seen.load_s for seen in await ledger.observations("llamacpp")] == [8.0, 7.0, 6.0, 7.0]
        for number in range(20):
            await ledger.add_observation(replace(SEEN, plan_key=f"k{number}", load_s=100.0))
        assert len(await ledger.observations("llamacpp")) == 10

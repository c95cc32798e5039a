"""The real runner process with the real tiny model, against a scripted gateway."""

from __future__ import annotations

import json
import re
import signal
import tempfile
from http import HTTPStatus
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.runners.process import PATIENT, RunningBox, is_alive, run_box
from tests.fakes.scripted_gateway import TOKEN, ConnectedBox, run_gateway
from tests.fakes.waiting import eventually
from wire import bridge, frames

pytestmark = pytest.mark.timeout(180)

QUESTION: dict[str, object] = {"messages": [{"role": "user", "content": "What is a generator?"}], "temperature": 0}
LONG = QUESTION | {"stream": True, "max_tokens": 1900, "ignore_eos": True, "n_probs": 1000}
"""Many megabytes with the probabilities: no buffer takes the rest of what nobody reads, so it cannot have ended."""


def read_events(body: bytes) -> list[dict[str, object]]:
    """Return the JSON of every event but ``[DONE]``."""
    lines = [line[6:] for line in body.split(b"\n\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


async def slots_taken(box: ConnectedBox, *, at_most: int) -> None:
    """Wait until telemetry reports no more than so many active requests in the engine's slots."""
    seen = sum(isinstance(message, bridge.Telemetry) for message in box.messages)
    while True:
        report = await box.expect(bridge.Telemetry, skip=seen)
        if report.current_load <= at_most and report.replicas[0].active <= at_most:
            return
        seen += 1


async def test_a_box_registers_with_its_loaded_model_and_streams_an_answer(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_box(tmp_path, gateway.url, "--provider", "home lab", program=PATIENT):
        box = await gateway.accept()
        assert box.secret == TOKEN
        assert box.path == "/v1/worker/connect?provider=home%20lab"
        assert box.register.protocol_version == bridge.MUSTER_V1
        assert (box.register.worker_name, box.register.models) == ("box-under-test", ["muster-tiny"])
        assert box.register.replicas[0].state == "loaded"
        answer = await (await box.open(QUESTION | {"stream": True, "max_tokens": 60})).finish()
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert all(piece.endswith(b"\n\n") for piece in answer.pieces)
    assert answer.body.endswith(b"data: [DONE]\n\n")
    events = read_events(answer.body)
    assert all(event["choices"] for event in events), "the usage chunk that nobody asked for stays in the box"
    assert answer.end.error == ""
    assert answer.end.usage is not None
    assert answer.end.usage.completion_tokens >= 20


async def test_requests_of_its_own_port_are_in_the_load_that_a_node_reports_and_in_what_it_leaves_unfinished(
    tmp_path: Path,
) -> None:
    own_port = ("--api-port", "0", "--data", str(tmp_path / "data"))
    async with (
        run_gateway() as gateway,
        run_box(tmp_path, gateway.url, *own_port, env={"MUSTER_RUNNER_DRAIN_S": "0.1"}, program=PATIENT) as running,
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
    ):
        node = await gateway.accept()
        listening = re.search(r"api listening url=(http://\S+)", running.log_text())
        assert listening is not None, running.log_text()
        body = LONG | {"model": "muster-tiny"}
        async with client.stream("POST", f"{listening[1]}/v1/chat/completions", json=body) as reply:
            assert reply.status_code == HTTPStatus.OK
            seen = 0
            while (await node.expect(bridge.Telemetry, skip=seen)).current_load != 1:
                seen += 1
            running.signal(signal.SIGTERM)
            assert await running.exit_status() == 0
        assert "leaving with requests unfinished load=1" in running.log_text()


async def test_cancel_ends_the_stream_and_frees_the_slot_of_the_engine(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_box(tmp_path, gateway.url, "--max-concurrent", "1"):
        box = await gateway.accept()
        await box.declares("muster-tiny")
        stream = await box.open(LONG, window_bytes=4000)
        while (await stream.next()).kind != frames.DATA:
            pass
        await stream.cancel()
        end = await stream.expect_end()
        assert end.error == "cancelled"
        # One slot only: this answer proves that llama.cpp has dropped the long one.
        answer = await (await box.open(QUESTION | {"max_tokens": 4})).finish()
        assert answer.end.usage is not None
        await slots_taken(box, at_most=0)


async def test_the_box_comes_back_after_a_drop_and_a_lost_session_stops_its_work(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_box(tmp_path, gateway.url, "--max-concurrent", "1"):
        box = await gateway.accept()
        await box.declares("muster-tiny")
        stream = await box.open(LONG, window_bytes=2000)
        while (await stream.next()).kind != frames.DATA:
            pass
        box.socket.transport.abort()
        again = await gateway.accept()
        assert again.register.instance_id == box.register.instance_id
        answer = await (await again.open(QUESTION | {"max_tokens": 4})).finish()
        assert answer.end.error == ""


async def test_a_silent_gateway_is_left_and_dialled_again(tmp_path: Path) -> None:
    async with (
        run_gateway() as gateway,
        run_box(tmp_path, gateway.url, env={"MUSTER_OFFLINE_AFTER_S": "0.7"}) as process,
    ):
        gateway.pings = False
        await gateway.accept()
        await gateway.accept()
        assert "nothing heard" in process.log_text()


@pytest.mark.parametrize("how", ["http", "close", "name"])
async def test_a_refused_credential_or_name_is_explained_in_one_line_and_not_hammered(tmp_path: Path, how: str) -> None:
    async with run_gateway() as gateway:
        gateway.refusal, gateway.close_code = HTTPStatus.FORBIDDEN if how == "http" else None, 1008
        words = "refuses this box's credential"
        if how == "name":
            gateway.close_reason, words = bridge.NAME_TAKEN, "start one of them with another --name"
        async with run_box(tmp_path, gateway.url) as process:
            await eventually(lambda: words in process.log_text(), "the refusal is explained")
            assert "; retrying every 30 s" in process.log_text()
            assert (gateway.attempts, TOKEN in process.log_text()) == (1, False)


async def test_sigterm_drains_what_runs_refuses_the_rest_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_box(tmp_path, gateway.url) as process:
        box = await gateway.accept()
        await box.declares("muster-tiny")
        stream = await box.open(QUESTION | {"stream": True, "max_tokens": 30}, window_bytes=500)
        assert (await stream.next()).kind == frames.HEAD
        children = process.children()
        assert children
        process.signal(signal.SIGTERM)
        await box.expect(bridge.Draining)
        late = await (await box.open(QUESTION)).expect_end()
        assert (late.error, late.retryable) == ("busy", True)
        await stream.credit(1 << 20)
        assert (await stream.expect_end()).error == ""
        assert await process.exit_status() == 0
        assert not any(is_alive(child) for child in children)
        await box.expect_loss()


async def test_the_owner_takes_the_box_back_and_lends_it_again_by_signal(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_box(tmp_path, gateway.url) as process:
        box = await gateway.accept()
        process.signal(signal.SIGUSR1)
        assert (await box.expect(bridge.ModeChange)).mode == "spare_off"
        process.signal(signal.SIGUSR2)
        assert (await box.expect(bridge.ModeChange, skip=1)).mode == "spare_on"
        box.socket.transport.abort()
        again = await gateway.accept()
        assert (await again.expect(bridge.ModeChange)).mode == "spare_on"


async def test_a_killed_engine_is_withdrawn_restarted_and_declared_again(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_box(tmp_path, gateway.url) as process:
        box = await gateway.accept()
        await box.declares("muster-tiny")
        stream = await box.open(LONG, window_bytes=2000)
        while (await stream.next()).kind != frames.DATA:
            pass
        declared = sum(isinstance(message, bridge.ModelsUpdate) for message in box.messages)
        only = await engine_of(process)
        only.kill()
        await stream.credit(1 << 30)
        end = await stream.expect_end()
        assert (end.error, end.retryable) == ("engine_failed", False)
        assert (await box.expect(bridge.ModelsUpdate, skip=declared)).models == []
        assert (await box.expect(bridge.ModelsUpdate, skip=declared + 1)).models == ["muster-tiny"]
        answer = await (await box.open(QUESTION | {"max_tokens": 4})).finish()
        assert answer.status == 200
        assert (await engine_of(process)).pid != only.pid


async def test_a_killed_runner_leaves_nothing_for_ever_and_no_runner_clears_up_after_a_living_one(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # the name of a socket in it has to be short
        await check_what_runners_leave(tmp_path, Path(shared))


async def check_what_runners_leave(tmp_path: Path, shared: Path) -> None:
    def left() -> set[str]:
        return {folder.name for folder in shared.iterdir()}

    async with run_gateway() as gateway:
        async with run_box(tmp_path, gateway.url, env={"TMPDIR": str(shared)}) as first:
            await gateway.accept()
            (of_first,) = left()
            async with run_box(tmp_path, gateway.url, "--data", str(tmp_path / "data"), env={"TMPDIR": str(shared)}):
                await gateway.accept()
                assert left() == {of_first}  # a runner with a folder of its own needs none here
            async with run_box(tmp_path, gateway.url, env={"TMPDIR": str(shared)}) as second:
                await gateway.accept()
                assert len(left()) == 2
                child = await engine_of(second)
                second.signal(signal.SIGKILL)
                await eventually(lambda: not is_alive(child), "the engine dies with it")
            first.signal(signal.SIGKILL)
        assert len(left()) == 2
        async with run_box(tmp_path, gateway.url, env={"TMPDIR": str(shared)}):
            await gateway.accept()
            assert len(left()) == 1
            assert of_first not in left()


async def test_the_gateways_of_the_ack_are_dialled_too(tmp_path: Path) -> None:
    async with run_gateway() as first, run_gateway() as second:
        first.more_gateways = [first.url + "/", second.url, "ftp://nonsense"]
        async with run_box(tmp_path, first.url):
            one, two = await first.accept(), await second.accept()
            assert one.register.instance_id == two.register.instance_id
            await two.declares("muster-tiny")
            assert (await (await two.open(QUESTION | {"max_tokens": 2})).finish()).status == 200
            assert first.arrivals.empty()


async def test_graceful_shutdown_finishes_what_runs_and_the_box_dials_again(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_box(tmp_path, gateway.url):
        box = await gateway.accept()
        await box.declares("muster-tiny")
        stream = await box.open(QUESTION | {"stream": True, "max_tokens": 20}, window_bytes=500)
        assert (await stream.next()).kind == frames.HEAD
        await box.send(bridge.GracefulShutdown(reason="restart", drain_timeout_secs=20))
        late = await (await box.open(QUESTION)).expect_end()
        assert (late.error, late.retryable) == ("busy", True)
        await stream.credit(1 << 20)
        assert (await stream.expect_end()).error == ""
        await box.expect_loss()
        await gateway.accept()


async def engine_of(process: RunningBox) -> psutil.Process:
    """Return the engine process, once there is exactly one."""
    await eventually(lambda: len(process.children()) == 1, "one engine process runs")
    return process.children()[0]


async def test_a_box_tells_each_session_once_what_loads_of_its_models_take_and_may_set(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_box(tmp_path, gateway.url, program=PATIENT):
        for _ in range(2):
            box = await gateway.accept()
            reports = [await box.expect(bridge.Telemetry, skip=number) for number in range(2)]
            told = [report.memory.models for report in reports if report.memory is not None]
            assert told[0] is not None
            (facts,) = told[0]
            assert (facts.name, facts.backend, facts.state, facts.loaded_replicas) == ("muster-tiny", "gguf", "loaded", 1)
            assert facts.estimate_source in {"observed_load_delta", "model_artifact_size"}
            assert facts.estimate_mb
            assert (facts.target_inflight, facts.configured_target_inflight) == (4, 4)
            assert facts.load_constraints["gguf_n_ctx"]["minimum"] == 1
            assert told[1] is None or told[1] != told[0], "what has not changed is not said again"
            await box.socket.close()

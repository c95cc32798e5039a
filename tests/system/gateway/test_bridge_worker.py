"""Workers of bridge v1 through a whole gateway: each frame of ModelRelay's wire page, and how sessions begin and end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from core.db.threads import run_upkeep
from core.limits import limits
from gateway.errors import ForwardedRequestFailed, RequestInterrupted, RequestTimeout, RequeueExhausted, ShuttingDown
from gateway.services.models import disallow_model
from nodes.links.relay import RelayLink
from nodes.models import NodeCredential
from nodes.services.credentials import trust_models
from nodes.services.drains import drain_node
from tests.fakes.bridge_worker import BridgeWorker
from tests.fakes.engine import CallState
from tests.fakes.fleet import CHAT_PATH, MESSAGES_PATH, Fleet, Rows
from tests.fakes.limits import set_limits

pytestmark = [pytest.mark.django_db, pytest.mark.asyncio(loop_factories=["virtual"]), pytest.mark.timeout(120)]
Dial = Callable[..., Awaitable[BridgeWorker]]
WHOLE = json.dumps({
    "id": "c1", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
})  # fmt: skip


def piece(text: str, finish: str | None = None) -> str:
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": finish}
    chunk = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(chunk)}\n\n"


@pytest.fixture
async def dial(fleet: Fleet) -> AsyncIterator[Dial]:
    """Dials workers, and has them vanish at the end."""
    workers: list[BridgeWorker] = []

    async def make(**options: Any) -> BridgeWorker:
        workers.append(await BridgeWorker.dial(fleet, **options))
        return workers[-1]

    yield make
    for worker in workers:
        await worker.close()


@pytest.mark.parametrize("version", ["2026-04-bridge-v1", "1", None])
async def test_a_worker_is_acknowledged_in_the_words_of_its_own_version(dial: Dial, version: str | None) -> None:
    worker = await dial(version=version)
    (ack,) = worker.frames
    assert list(ack) == ["type", "worker_id", "models", "protocol_version"], "warnings are left out where there are none"
    assert (ack["models"], ack["protocol_version"]) == (["m"], version or "2026-04-bridge-v1")
    assert ack["worker_id"].startswith("node_")


async def test_a_worker_of_another_version_and_one_that_says_something_else_first_are_closed(dial: Dial) -> None:
    for register in ('{"type":"register","protocol_version":"2"}', '{"type":"pong","current_load":0}', "no json"):
        assert (await dial(register=register)).closed == (1002, "worker registration protocol error")


async def test_a_request_travels_as_text_and_its_answer_comes_back_as_the_worker_said_it(fleet: Fleet, dial: Dial) -> None:
    worker = await dial()
    answer = fleet.ask()
    request = await worker.next_request()
    assert list(request) == ["type", "request_id", "model", "endpoint_path", "is_streaming", "body", "headers"]
    assert (request["model"], request["endpoint_path"], request["is_streaming"]) == ("m", CHAT_PATH, False)
    assert json.loads(request["body"])["max_tokens"] == answer.number
    assert not {"authorization", "x-api-key", "content-length", "accept-encoding", "connection"} & set(request["headers"])
    worker.complete(request, WHOLE)
    row = await answer.row()
    assert (answer.status, json.loads(answer.client.body)) == (200, json.loads(WHOLE))
    assert (row["state"], row["prompt_tokens"], row["completion_tokens"]) == ("completed", 3, 1)


async def test_an_error_of_the_backend_keeps_its_status_and_an_error_frame_sends_the_request_elsewhere(
    fleet: Fleet, dial: Dial
) -> None:
    worker = await dial()
    refused = fleet.ask()
    request = await worker.next_request()
    worker.complete(request, '{"error":{"message":"no such parameter","type":"invalid_request_error"}}', status=400)
    await refused.done()
    assert (refused.status, "no such parameter" in refused.client.body.decode()) == (400, True)
    failed = fleet.ask()
    request = await worker.next_request(count=2)
    other = await dial(name="other")
    worker.say({"type": "error", "request_id": request["request_id"], "code": "backend_gone", "message": "connection refused"})
    again = await other.next_request()
    assert again["request_id"] == f"{request['request_id']}.2", "a late frame of the first attempt names another"
    other.complete(again, WHOLE)
    assert ((await failed.row())["state"], failed.status) == ("completed", 200)


async def test_a_stream_is_passed_on_piece_by_piece_and_ends_with_its_completion(fleet: Fleet, dial: Dial) -> None:
    worker = await dial()
    answer = fleet.ask(stream=True)
    request = await worker.next_request()
    assert request["is_streaming"] is True
    worker.chunk(request, piece("one"))
    await fleet.settle()
    assert b"one" in answer.client.body
    assert not answer.is_over
    worker.chunk(request, piece(" two", "stop") + "data: [DONE]\n\n")
    worker.complete(request, kind="text/event-stream")
    assert ((await answer.row())["state"], answer.client.body.count(b"[DONE]")) == ("completed", 1)


async def test_a_dialect_that_the_worker_does_not_speak_goes_to_it_as_it_is(fleet: Fleet, dial: Dial) -> None:
    worker = await dial()
    answer = fleet.ask(path=MESSAGES_PATH)
    request = await worker.next_request()
    assert request["endpoint_path"] == MESSAGES_PATH
    said = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "hi"}],
            "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}  # fmt: skip
    worker.complete(request, json.dumps(said))
    await answer.done()
    assert (answer.status, json.loads(answer.client.body)["content"]) == (200, said["content"])


async def test_a_client_that_leaves_is_told_to_the_worker_whose_slot_is_free_at_once(fleet: Fleet, dial: Dial) -> None:
    worker = await dial()
    answer, waiting = fleet.ask(stream=True), fleet.ask()
    request = await worker.next_request()
    worker.chunk(request, piece("one"))
    await fleet.settle()
    answer.leave()
    second = await worker.next_request(count=2)
    (cancel,) = worker.of_kind("cancel")
    assert list(cancel.items())[1:] == [("request_id", request["request_id"]), ("reason", "client_disconnect")]
    worker.chunk(request, piece("late"))  # it was under way
    worker.complete(second, WHOLE)
    assert ((await answer.row())["state"], (await waiting.row())["state"]) == ("cancelled", "completed")
    assert worker.closed is None


async def test_a_request_that_takes_too_long_is_cancelled_as_a_timeout(fleet_rows: Rows) -> None:
    set_limits(gateway={"request_s": 50.0})
    async with Fleet(rows=fleet_rows) as fleet:
        worker = await BridgeWorker.dial(fleet)
        answer = fleet.ask()
        await worker.next_request()
        await answer.done()
        assert (answer.status, answer.error_code) == (504, RequestTimeout.code)
        assert [cancel["reason"] for cancel in worker.of_kind("cancel")] == ["timeout"]
        assert worker.pings == 3, "it was heard all the time"
        await worker.close()


async def test_a_worker_is_asked_for_its_models_where_the_operator_wants_that(fleet_rows: Rows) -> None:
    set_limits(nodes={"bridge_refresh_s": 20.0})
    async with Fleet(rows=fleet_rows) as fleet:
        worker = await BridgeWorker.dial(fleet, models=["tight"])
        await fleet.until(lambda: worker.of_kind("models_refresh"))
        assert worker.texts[-1] == '{"type":"models_refresh","reason":"periodic"}'
        worker.say({"type": "models_update", "models": ["m"], "current_load": 0})
        await fleet.settle()
        answer = fleet.ask("m")
        worker.complete(await worker.next_request(), WHOLE)
        await answer.done()
        assert answer.status == 200
        await worker.close()


async def test_a_worker_whose_backend_was_away_serves_once_that_says_its_models(fleet: Fleet, dial: Dial) -> None:
    worker = await dial(name="early", models=["*"])
    ack, asked = worker.frames
    assert (ack["models"], "it is asked again" in ack["warnings"][0]) == ([], True)
    assert asked == {"type": "models_refresh", "reason": "no models"}
    began = fleet.loop.time()
    await fleet.until(lambda: len(worker.of_kind("models_refresh")) == 2)
    assert fleet.loop.time() - began <= limits().nodes.bridge_ping_interval_s + limits().gateway.tick_s
    worker.say({"type": "models_update", "models": ["m"], "current_load": 0})
    await fleet.settle()
    answer = fleet.ask()
    worker.complete(await worker.next_request(), WHOLE)
    await answer.done()
    assert (answer.status, "*" in fleet.runtime.catalogue.models) == (200, False)


async def test_what_a_trusted_worker_brings_is_served_without_a_click_and_what_was_taken_back_is_not(
    fleet: Fleet, dial: Dial
) -> None:
    credential = await run_upkeep(NodeCredential.objects.get)
    await fleet.operate(trust_models, credential_id=credential.pk, trusts=True)
    worker = await dial(name="trusted", models=["brought"], slots=2)
    await fleet.until(lambda: "brought" in fleet.runtime.catalogue.models and fleet.runtime.catalogue.models["brought"].allowed)
    answer = fleet.ask("brought")
    worker.complete(await worker.next_request(), WHOLE)
    await answer.done()
    assert answer.status == 200
    await fleet.operate(disallow_model, name="brought")
    worker.say({"type": "models_update", "models": ["brought", "brought-too"], "current_load": 0})
    await fleet.until(lambda: "brought-too" in fleet.runtime.catalogue.models)
    await fleet.advance(limits().gateway.sweep_s)
    assert not fleet.runtime.catalogue.models["brought"].allowed
    await fleet.operate(trust_models, credential_id=credential.pk, trusts=False)


async def test_a_worker_that_answers_no_ping_is_given_up_and_its_request_goes_to_another(fleet: Fleet, dial: Dial) -> None:
    silent = await dial()
    answer = fleet.ask()
    await silent.next_request()
    silent.link.stall()
    other = await dial(name="other")
    again = await other.next_request()
    other.complete(again, WHOLE)
    assert ((await answer.row())["attempts"], answer.status) == (2, 200)
    assert fleet.loop.time() - answer.asked_at <= limits().nodes.bridge_pong_window_s + 5
    silent.link.resume()
    await fleet.until(lambda: silent.closed is not None)
    assert silent.closed == (1000, "worker heartbeat timed out")


async def test_a_drained_worker_finishes_takes_nothing_new_and_is_closed(fleet: Fleet, dial: Dial) -> None:
    worker = await dial(name="drained", slots=2)
    answer = fleet.ask()
    request = await worker.next_request()
    await fleet.operate(drain_node, node_id=worker.node_id, reason="new fans", timeout_s=60.0)
    await fleet.until(lambda: worker.of_kind("graceful_shutdown"))
    (told,) = worker.of_kind("graceful_shutdown")
    assert list(told) == ["type", "reason", "drain_timeout_secs"]
    assert (told["reason"], told["drain_timeout_secs"]) == ("new fans", pytest.approx(60, abs=2))
    later = fleet.ask()
    worker.complete(request, WHOLE)
    await answer.done()
    assert answer.status == 200
    await fleet.until(lambda: worker.closed is not None)
    assert worker.closed == (1000, "graceful shutdown complete")
    assert len(worker.of_kind("request")) == 1
    await later.done()
    assert later.status == 503


async def test_the_request_that_a_fourth_worker_cannot_finish_is_cancelled_as_given_up(fleet: Fleet, dial: Dial) -> None:
    answer = fleet.ask()
    for number in range(4):
        worker = await dial(name=f"rig-{number}")
        request = await worker.next_request()
        if number < 3:
            worker.link.cut()
            continue
        await fleet.operate(drain_node, node_id=worker.node_id, reason="", timeout_s=1.0)
        await answer.done()
        assert [(one["request_id"], one["reason"]) for one in worker.of_kind("cancel")] == [
            (request["request_id"], "requeue_exhausted")
        ]
    assert RequeueExhausted.default_message in answer.client.body.decode()
    assert answer.status == 503


async def test_a_gateway_that_stops_says_so_lets_finish_and_says_what_it_cuts(fleet_rows: Rows) -> None:
    set_limits(gateway={"shutdown_grace_s": 5.0})
    async with Fleet(rows=fleet_rows) as fleet:
        worker = await BridgeWorker.dial(fleet, slots=2)
        idle = await BridgeWorker.dial(fleet, name="idle", models=["tight"])
        short, long = fleet.ask(), fleet.ask(stream=True)
        await worker.next_request(count=2)
        first, second = sorted(worker.of_kind("request"), key=lambda one: one["is_streaming"])
        stopping = fleet.loop.create_task(fleet.stop_gateway())
        await fleet.settle()
        assert worker.texts[-1] == '{"type":"graceful_shutdown","reason":"server shutdown","drain_timeout_secs":5}'
        worker.complete(first, WHOLE)
        worker.chunk(second, piece("one"))
        await stopping
        assert (short.status, (await long.row())["state"]) == (200, "interrupted")
        assert long.error_code == RequestInterrupted.code == ShuttingDown.code
        assert [(one["request_id"], one["reason"]) for one in worker.of_kind("cancel")] == [
            (second["request_id"], "server_shutdown")
        ]
        assert worker.closed == (1000, "graceful shutdown timed out")
        assert idle.closed == (1000, "graceful shutdown complete")
        for one in (worker, idle):
            await one.close()


# our own runner as a worker

AS_WORKER = ("--protocol", "bridge-v1")


async def test_our_runner_works_for_a_server_that_speaks_bridge_v1_alone(fleet: Fleet) -> None:
    node = await fleet.add_node(slots=2, options=AS_WORKER)
    assert isinstance(node.gateway_link, RelayLink)
    assert (node.gateway_link.session.speaks_muster, node.gateway_link.max_concurrent) == (False, 2)
    streamed, plain = fleet.ask(stream=True), fleet.ask()
    first, second = await fleet.next_call(streamed), await fleet.next_call(plain)
    for call in (first, second):
        call.emit(2)
        await fleet.settle()
        call.finish()
    assert [(await one.row())["state"] for one in (streamed, plain)] == ["completed", "completed"]
    assert streamed.pieces == [(first.ident, 0), (first.ident, 1)]
    assert plain.pieces == [(second.ident, 0), (second.ident, 1)]
    node.load("tight")
    await fleet.until(lambda: node.gateway_link.models == {"m", "tight"})
    await fleet.advance(100.0)
    assert len(node.links) == 1, "a server that pings seldom is not left"


async def test_our_runner_stops_what_a_server_cancels_and_says_what_its_engine_does(fleet: Fleet) -> None:
    node = await fleet.add_node(options=AS_WORKER)
    left = fleet.ask(stream=True)
    call = await fleet.next_call(left)
    call.emit()
    await fleet.settle()
    left.leave()
    await fleet.until(lambda: call.ended_at is not None)
    assert call.state is CallState.CANCELLED
    broken = fleet.ask(stream=True)
    call = await fleet.next_call(broken)
    call.emit()
    await fleet.settle()
    call.fail()
    assert ((await broken.row())["state"], broken.error_code) == ("failed", ForwardedRequestFailed.code)
    assert (node.queue.active, node.gateway_link.active) == (0, 0)


async def test_our_runner_that_leaves_a_server_finishes_and_gets_nothing_new(fleet: Fleet) -> None:
    leaving = await fleet.add_node(options=AS_WORKER, slots=2)
    running = fleet.ask()
    call = await fleet.next_call(running)
    leaving.leave()
    await fleet.until(lambda: leaving.gateway_link is None or not leaving.gateway_link.models)
    other = await fleet.add_node(options=AS_WORKER)
    later = fleet.ask()
    assert fleet.find_node(await fleet.next_call(later)) is other
    call.emit()
    call.finish()
    assert (await running.row())["state"] == "completed"
    await fleet.until(lambda: not leaving.is_running)


async def test_our_runner_comes_back_to_a_server_that_was_restarted(fleet: Fleet) -> None:
    node = await fleet.add_node(options=AS_WORKER)
    await fleet.stop_gateway()
    await fleet.start_gateway()
    await fleet.until(lambda: node.gateway_link is not None)
    answer = fleet.ask()
    call = await fleet.next_call(answer)
    call.emit()
    call.finish()
    await answer.done()
    assert answer.status == 200

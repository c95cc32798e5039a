"""SIGTERM at the wrong moment: what runs is finished, nothing new is taken, nothing is left behind or forgotten."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.runners.api_process import DEADLINE_S, ApiBox, run_api_box
from tests.fakes.runners.process import is_alive

pytestmark = pytest.mark.timeout(180)

SMALL_BUFFER = (socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * 1024)
LONG: dict[str, object] = {"model": "a", "stream": True, "max_tokens": 200, "ignore_eos": True, "n_probs": 1000}
"""Some 15 MB, far more than lies between the box and a client that does not read: it ends when the client has read on."""


def children(box: ApiBox) -> list[psutil.Process]:
    return psutil.Process(box.process.pid).children(recursive=True)


def test_while_the_box_leaves_an_answer_is_finished_and_nothing_new_is_taken(tmp_path: Path) -> None:
    with run_api_box(tmp_path, models=("a",), env={"MUSTER_RUNNER_DRAIN_S": "600"}) as box:
        box.ensure_loaded("a")
        engines = children(box)
        body = {**LONG, "messages": [{"role": "user", "content": "Explain the gateway."}]}
        has_begun, reads_on, whole = threading.Event(), threading.Event(), bytearray()

        def read() -> None:
            transport = httpx.HTTPTransport(socket_options=[SMALL_BUFFER])
            with (
                httpx.Client(base_url=box.url, timeout=DEADLINE_S, trust_env=False, transport=transport) as client,
                client.stream("POST", "/v1/chat/completions", json=body) as reply,
            ):
                for chunk in reply.iter_raw():
                    whole.extend(chunk)
                    has_begun.set()
                    reads_on.wait(DEADLINE_S)

        reader = threading.Thread(target=read)
        reader.start()
        assert has_begun.wait(DEADLINE_S)
        box.process.send_signal(signal.SIGTERM)
        box.wait_for(lambda: box.client.get("/health").json(), lambda health: health["status"] == "unhealthy")
        asked = box.client.post("/v1/chat/completions", json={"model": "a", "messages": []})
        assert (asked.status_code, asked.json()["error"]["code"]) == (503, "unavailable")
        operation = box.flush("all")
        assert (operation.status_code, operation.json()["error"]["code"]) == (503, "unavailable")
        reads_on.set()
        reader.join(DEADLINE_S)
        assert whole.endswith(b"data: [DONE]\n\n")
        assert box.process.wait(DEADLINE_S) == 0
        assert not any(is_alive(engine) for engine in engines)


def test_a_load_under_way_is_ended_and_its_task_says_so_after_the_restart(tmp_path: Path) -> None:
    replies: list[httpx.Response] = []
    with run_api_box(tmp_path, models=("a",)) as box:
        replies.append(box.load("a"))
        task_id = replies[0].json()["taskId"]
        box.wait_for(lambda: {"engines": children(box)}, lambda seen: seen["engines"])
        engines = children(box)
        box.process.send_signal(signal.SIGTERM)
        assert box.process.wait(DEADLINE_S) == 0
        assert not any(is_alive(engine) for engine in engines)
        assert "Traceback" not in box.log_text()
    with run_api_box(tmp_path) as again:
        # A tiny model may have been there just before the signal.
        assert again.client.get(f"/v1/models/load/{task_id}").json()["status"] in {"interrupted", "completed"}
        again.ensure_loaded("a")


def test_a_folder_that_cannot_hold_data_ends_the_box_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a folder")
    with pytest.raises(AssertionError) as ended, run_api_box(tmp_path, models=("a",)):
        pass
    assert "the runner ended with 2" in str(ended.value)
    assert f"{tmp_path / 'data'} cannot hold the ledger" in str(ended.value)
    assert "Traceback" not in str(ended.value)

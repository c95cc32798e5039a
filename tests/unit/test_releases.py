"""Nodes and servers of older releases: their recorded frames mean today what they meant then, and their ledgers open.

``tools/release_fixture.py`` makes what is replayed.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from core.limits import NodeLimits
from nodes.session import FrameDropped, OpenRequest, ServerSession
from runner.session import ClientSession
from tests.fakes.ledgers import Clock, begin_op, opened
from wire import frames

RELEASES = sorted((Path(__file__).parents[1] / "fixtures" / "releases").iterdir())
release = pytest.mark.parametrize("folder", RELEASES, ids=lambda folder: str(folder.name))


def read_links(folder: Path) -> dict[int, list[dict[str, Any]]]:
    links: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in (folder / "frames.jsonl").read_text(encoding="utf-8").splitlines():
        frame = json.loads(line)
        links[frame["link"]].append(frame)
    return links


class Replay:
    """Today's two halves of a link, each fed what the other side of the recording said. Any ProtocolError ends it."""

    def __init__(self) -> None:
        self.server, self.client = ServerSession(NodeLimits()), ClientSession()
        self.seen: Counter[str] = Counter()
        self.answers: dict[int, bytes] = defaultdict(bytes)

    def take(self, frame: dict[str, Any]) -> None:
        text, data = frame.get("text"), base64.b64decode(frame.get("data", ""))
        if frame["from"] == "node":
            for effect in self.server.receive_bytes(data) if text is None else self.server.receive_text(text):
                assert not isinstance(effect, FrameDropped)
                self.seen[type(effect).__name__] += 1
                self.answers[getattr(effect, "stream", 0)] += getattr(effect, "data", b"")
        elif text is not None:
            self.seen[type(self.client.receive_text(text)).__name__] += 1
        else:
            self._open_or_cancel(data)
            for done in self.client.receive_bytes(data):
                self.seen[type(done).__name__] += 1

    def _open_or_cancel(self, data: bytes) -> None:
        frame = frames.decode_frame(data)
        if frame.kind == frames.OPEN:
            meta, first = frames.decode_open(frame.payload)
            request = OpenRequest(
                request_id=meta.request_id, attempt=frame.attempt, model=meta.model, path=meta.path, body=first,
                headers={}, is_streaming=True, deadline_ms=1000, tenant="",
            )  # fmt: skip
            assert self.server.open_stream(request)[0] == frame.stream
        elif frame.kind == frames.CANCEL:
            self.server.cancel_stream(frame.stream, "client_disconnected")


@release
def test_each_side_of_today_understands_every_frame_of_the_other_side_of_then(folder: Path) -> None:
    seen: Counter[str] = Counter()
    texts = b""
    for link in read_links(folder).values():
        replay = Replay()
        for frame in link:
            replay.take(frame)
        assert replay.server.dropped_frames == 0
        seen += replay.seen
        texts += b"".join(replay.answers.values())
    of_nodes = {"Registered", "HeadArrived", "DataArrived", "StreamEnded", "AnswerArrived", "LoadReported", "TelemetryArrived"}
    of_servers = {"RegisterAck", "Opened", "Ping", "PolicyOffer", "OpCommand"}
    assert of_nodes | of_servers | {"OperationReported"} <= set(seen), seen
    assert b"[DONE]" in texts


@release
async def test_the_ledger_of_a_node_is_opened_with_all_that_it_knows(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "node", tmp_path / "node")
    async with opened(tmp_path / "node") as ledger:
        now = Clock().now
        again = await begin_op(ledger, "op_done", slot="load:tiny", fence=9, expires_at=now + 60, operation="model-load")
        assert again == {"state": "succeeded"}  # what it answered then: it is not done twice
        running = await ledger.find_op("op_open", 1)
        assert running is not None
        assert await ledger.read_fact("fixture") == folder.name
        assert not await ledger.spend_ticket("ticket-1", expires_at=now + 60, report="{}")

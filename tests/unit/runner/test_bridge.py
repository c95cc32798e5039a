"""The node's half of bridge v1: which text goes out and in, to the byte where a server may read it strictly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.bridge import BridgeSession
from runner.session import Cancelled, Opened, Stream
from wire import bridge, frames
from wire.bridge import BRIDGE_V1, ProtocolError
from wire.frames import End, Head

EVENTS = {"content-type": "text/event-stream"}


def register() -> bridge.Register:
    return bridge.Register(worker_name="worker", models=["m"], max_concurrent=1, agent_version="9", instance_id="i")


def accepted(version: str | None = BRIDGE_V1) -> BridgeSession:
    session = BridgeSession()
    session.register(register())
    session.receive_text(bridge.encode_message(bridge.RegisterAck(worker_id="w", models=["m"], protocol_version=version)))
    return session


def open_request(session: BridgeSession, name: str = "r", *, stream: bool = False) -> Stream:
    request = bridge.Request(
        request_id=name, model="m", endpoint_path="/v1/chat/completions", is_streaming=stream, body='{"a":"\u00e4"}',
        headers={"content-type": "application/json"},
    )  # fmt: skip
    effects = session.receive_text(bridge.encode_message(request))
    assert isinstance(effects, list)
    (effect,) = effects
    assert isinstance(effect, Opened)
    assert effect.body == '{"a":"\u00e4"}'.encode()
    return effect.stream


def said(text: str) -> Any:
    return json.loads(text)


def test_the_first_frame_and_all_others_have_every_field_that_a_strict_server_reads() -> None:
    session = BridgeSession()
    assert session.register(register()) == (
        '{"type":"register","worker_name":"worker","models":["m"],"max_concurrent":1,'
        '"protocol_version":"2026-04-bridge-v1","current_load":0}'
    )
    assert session.encode(bridge.Pong(timestamp_unix_ms=5)) == '{"type":"pong","current_load":0,"timestamp_unix_ms":5}'
    assert session.encode(bridge.ModelsUpdate(models=["n"])) == '{"type":"models_update","models":["n"],"current_load":0}'


def test_what_bridge_v1_has_no_word_for_is_left_unsaid_and_a_node_that_is_away_declares_no_model() -> None:
    session = accepted()
    for message in (bridge.Telemetry(), bridge.LogTail(query_id="q", lines=[]), bridge.UsageReport(reports=[])):
        assert session.encode(message) == ""
    assert said(session.encode(bridge.ModeChange(mode="spare_off")))["models"] == []
    assert said(session.encode(bridge.ModelsUpdate(models=["m", "n"])))["models"] == []
    assert said(session.encode(bridge.ModeChange(mode="spare_on")))["models"] == ["m", "n"]
    assert said(session.encode(bridge.Draining()))["models"] == []


@pytest.mark.parametrize("version", [BRIDGE_V1, "1", None])
def test_a_server_of_any_name_for_the_version_is_taken_and_one_of_another_protocol_is_not(version: str | None) -> None:
    session = accepted(version)
    assert session.ack is not None
    for text in (bridge.encode_message(session.ack), '{"type":"node_notice","status":"x","mode":"spare_on"}', "no json"):
        with pytest.raises(ProtocolError):
            session.receive_text(text)
    with pytest.raises(ProtocolError):
        session.receive_bytes(b"x")
    with pytest.raises(ProtocolError):
        accepted("2026-11-muster-v1")
    with pytest.raises(ProtocolError):
        BridgeSession().receive_text(bridge.encode_message(bridge.Ping()))


def test_a_whole_answer_is_one_completion_however_the_relay_posts_it() -> None:
    usage = bridge.TokenCounts(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    for in_one in (True, False):
        session = accepted()
        stream, head, end = open_request(session), Head(status=201, headers={"content-type": "a/b"}), End(usage=usage)
        if in_one:
            texts = [session.say_frame(stream.reply(head, "h\u00e4".encode(), end))]
        else:
            texts = [session.say_frame(one) for one in (stream.head(201, head.headers), stream.data(b"h\xc3"))]
            texts += [session.say_frame(one) for one in (stream.data(b"\xa4"), stream.end(end))]
        assert [text for text in texts if text][:-1] == []
        answer = said(texts[-1])
        assert answer.pop("token_counts")["total_tokens"] == 3
        assert answer == {
            "type": "response_complete", "request_id": "r", "status_code": 201, "headers": {"content-type": "a/b"},
            "body": "h\u00e4",
        }  # fmt: skip
        assert session.streams == []


def test_pieces_of_a_stream_go_out_as_they_come_and_never_end_within_a_character() -> None:
    session = accepted()
    stream = open_request(session, stream=True)
    assert session.say_frame(stream.head(200, EVENTS)) == ""
    assert said(session.say_frame(stream.data(b"data: h\xc3"))) == {
        "type": "response_chunk", "request_id": "r", "chunk": "data: h",
    }  # fmt: skip
    assert said(session.say_frame(stream.data(b"\xa4\n\n")))["chunk"] == "\u00e4\n\n"
    end = said(session.say_frame(stream.end(End())))
    assert (end["status_code"], end["body"]) == (200, "")


@pytest.mark.parametrize(("error", "status"), [("busy", 503), ("timeout", 504), ("engine_failed", 502)])
def test_a_failure_is_a_status_with_words_and_in_a_stream_that_began_the_status_alone(error: str, status: int) -> None:
    session = accepted()
    stream = open_request(session)
    answer = said(session.say_frame(stream.end(End(error=error, message="no room"))))
    assert (answer["status_code"], said(answer["body"])["error"]["message"]) == (status, "no room")
    stream = open_request(session, "s", stream=True)
    session.say_frame(stream.head(200, EVENTS))
    session.say_frame(stream.data(b"data: x\n\n"))
    answer = said(session.say_frame(stream.end(End(error=error))))
    assert (answer["status_code"], answer["body"]) == (status, "")


def test_an_answer_that_is_no_text_is_refused_and_a_refused_stream_is_no_stream() -> None:
    session = accepted()
    stream = open_request(session)
    answer = said(session.say_frame(stream.reply(Head(status=200, headers={"content-type": "audio/wav"}), b"\xff\xfe", End())))
    assert (answer["status_code"], "is no text" in answer["body"]) == (502, True)
    stream = open_request(session, stream=True)
    session.say_frame(stream.head(400, EVENTS))
    assert session.say_frame(stream.data(b"no")) == ""
    answer = said(session.say_frame(stream.end(End())))
    assert (answer["status_code"], answer["body"]) == (400, "no")


def test_a_cancelled_request_is_heard_of_no_more_and_one_that_comes_twice_ends_the_session() -> None:
    session = accepted()
    stream = open_request(session)
    late = stream.data(b"late")
    cancel = bridge.encode_message(bridge.Cancel(request_id="r", reason="timeout"))
    assert session.receive_text(cancel) == [Cancelled(stream)]
    assert session.receive_text(cancel) == []
    assert (session.say_frame(late), stream.is_open, session.streams) == ("", False, [])
    open_request(session, "again")
    with pytest.raises(ProtocolError, match="twice"):
        open_request(session, "again")
    assert len(session.close()) == 1


def test_frames_that_do_not_travel_from_a_node_are_refused() -> None:
    session = accepted()
    stream = open_request(session)
    with pytest.raises(ProtocolError):
        session.say_frame(frames.encode_frame(frames.CREDIT, stream.ident, 1, b""))

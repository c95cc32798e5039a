"""The playground as an operator uses it: a real browser, the real gateway, a box that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from gateway.services import allow_model, create_tenant
from tests.fakes.control_process import ServerProcess
from tests.fakes.nodes import ACTOR, make_credential
from tests.fakes.scripted_box import Stream
from tests.rings.browser.conftest import NodeThread, Visit, find_violations, in_database

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

MODEL = "llama-3.1-8b-instruct"
HOSTILE = "</script><img src=x onerror=alert(1)>"
TOOL_CALL: tuple[dict[str, Any], ...] = (
    {"id": "call_1", "function": {"name": "get_weather", "arguments": ""}},
    {"function": {"arguments": '{"city":'}},
    {"function": {"arguments": '"Bern"}'}},
)


class AnsweringNode(NodeThread):
    """A node that answers chat completions piece by piece."""

    def say(self, stream: Stream, **delta: Any) -> None:
        """Send one chunk of a chat completion."""
        chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        self.run(self.box.data(stream, f"data: {json.dumps(chunk)}\n\n".encode()))

    def finish(self, stream: Stream) -> None:
        """Send the ending, with a count of tokens."""
        ending = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}}
        for data in (json.dumps(ending), json.dumps(usage), "[DONE]"):
            self.run(self.box.data(stream, f"data: {data}\n\n".encode()))
        self.run(self.box.end(stream))


def prepare() -> str:
    create_tenant(name="default", actor=ACTOR)
    allow_model(name=MODEL, actor=ACTOR)
    allow_model(name="unserved", actor=ACTOR)
    return make_credential("attic")[1]


@pytest.fixture
def attic(visit: Visit, gateway: ServerProcess) -> Iterator[AnsweringNode]:
    """A box that answers, and an operator on the page, who came by the navigation."""
    box = AnsweringNode(gateway, in_database(prepare), MODEL)
    visit.sign_in()
    visit.page.get_by_role("link", name="Playground").click()
    expect(visit.page.locator("#pg-code")).to_contain_text("curl")
    yield box
    box.close()


def fact(page: Page, name: str) -> Any:  # Playwright's locator
    return page.locator(f"[data-fact={name}]")


def watch_an_answer(page: Page, attic: AnsweringNode) -> None:
    """Ask by the keyboard; see text, reasoning and a tool call come, and the numbers."""
    page.get_by_label("Prompt", exact=True).fill(f"Tell me {HOSTILE}")
    page.keyboard.press("Control+Enter")
    stream = attic.run(attic.box.stream())
    attic.run(attic.box.head(stream, content_type="text/event-stream"))
    attic.say(stream, role="assistant", reasoning_content="Let me think.")
    attic.say(stream, content=f"Once upon a time {HOSTILE}")
    expect(page.locator("#pg-text")).to_have_text(f"Once upon a time {HOSTILE}")  # before the end
    expect(page.locator("#pg-reasoning-text")).to_have_text("Let me think.")
    expect(page.locator("#pg-status")).to_have_text("Answering…")
    for part in TOOL_CALL:
        attic.say(stream, tool_calls=[{"index": 0, **part}])
    attic.finish(stream)
    expect(page.locator("#pg-status")).to_have_text("Done.")
    expect(page.locator("#pg-calls li")).to_have_count(1)
    expect(page.locator("#pg-calls pre")).to_have_text('{\n  "city": "Bern"\n}')
    shown = {"prompt": "11", "completion": "7", "node": "attic", "model": MODEL, "finish": "tool_calls", "state": "completed"}
    for name, text in shown.items():
        expect(fact(page, name)).to_have_text(text)
    for name in ("first", "rate", "queue", "total"):
        expect(fact(page, name)).not_to_have_text("–")


def stop_an_answer(page: Page, attic: AnsweringNode) -> str:
    """Stop by the keyboard in the middle; see that the request ended as cancelled. Returns the address of its page."""
    page.get_by_role("button", name="Send").click()
    stream = attic.run(attic.box.stream())
    attic.run(attic.box.head(stream, content_type="text/event-stream"))
    attic.say(stream, content="It goes on and")
    expect(page.locator("#pg-text")).to_have_text("It goes on and")
    expect(page.locator("#pg-stop")).to_be_focused()
    page.keyboard.press("Enter")
    assert attic.run(attic.box.cancelled(stream)) == "client_disconnect"
    expect(page.locator("#pg-status")).to_have_text("Stopped.")
    expect(page.locator("#pg-send")).to_be_focused()
    expect(fact(page, "state")).to_contain_text("cancelled")
    return str(fact(page, "request").get_by_role("link").get_attribute("href"))


def test_asking_watching_and_stopping(visit: Visit, attic: AnsweringNode) -> None:
    page = visit.page
    watch_an_answer(page, attic)
    assert find_violations(page) == []
    record_page = stop_an_answer(page, attic)
    visit.awaited.append("400 (Bad Request)")  # what the browser itself reports of a refusal
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Tools as JSON").fill("[{")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#pg-tools-error")).to_contain_text("not JSON")
    expect(page.get_by_label("Tools as JSON")).to_be_focused()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert find_violations(page) == []
    assert page.locator("#playground img[src=x], #playground script").count() == 0
    visit.open(record_page)
    expect(page.get_by_text("cancelled").first).to_be_visible()


STREAMS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "chat": ("data: ", [{"choices": [{"delta": {"role": "assistant", "reasoning": "hm "}}]},
        {"choices": [{"delta": {"content": "Grüße 🦙"}}]}, {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c1",
        "function": {"name": "f", "arguments": ""}}]}}]}, {"choices": [{"delta": {"tool_calls": [{"index": 0,
        "function": {"arguments": '{"a":1}'}}]}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4}}]),
    "messages": ("event: x\r\ndata:", [{"type": "message_start", "message": {"usage": {"input_tokens": 3,
        "output_tokens": 1}}}, {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking",
        "thinking": ""}}, {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm "}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}}, {"type": "ping"},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Grüße 🦙"}},
        {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "id": "c1", "name": "f",
        "input": {}}}, {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta",
        "partial_json": '{"a":1}'}}, {"type": "message_delta", "delta": {"stop_reason": "stop"},
        "usage": {"output_tokens": 4}}, {"type": "message_stop"}]),
    "responses": ("data: ", [{"type": "response.created", "response": {"status": "in_progress", "error": None}},
        {"type": "response.reasoning_text.delta", "output_index": 0, "delta": "hm "}, {"type": "response.output_text.delta",
        "output_index": 1, "delta": "Grüße 🦙"}, {"type": "response.output_item.added", "output_index": 2,
        "item": {"type": "function_call", "call_id": "c1", "name": "f"}}, {"type": "response.function_call_arguments.delta",
        "output_index": 2, "delta": '{"a":1}'}, {"type": "response.completed", "response": {"status": "stop",
        "usage": {"input_tokens": 3, "output_tokens": 4}}}]),
}  # fmt: skip
READ = """
async ([surface, text, size]) => {
    const { Answer, EventCutter } = await import("/static/muster/playground-stream.js");
    const answer = new Answer(surface);
    const cutter = new EventCutter();
    for (let at = 0; at < text.length; at += size) {
        cutter.feed(text.slice(at, at + size)).forEach((event) => answer.takeEvent(event));
    }
    const calls = answer.calls.filter(Boolean);
    return { ...answer, calls, pieces: 0 };
}
"""
BREAKS = {
    "chat": ('data: {"error":{"message":"gone","code":"REQUEST_INTERRUPTED"}}\n\n', "REQUEST_INTERRUPTED"),
    "messages": ('event: error\ndata: {"type":"error","error":{"type":"api_error","message":"gone"}}\n\n', "api_error"),
    "responses": ('data: {"type":"response.failed","response":{"error":{"code":"server_error","message":"gone"}}}\n\n',
        "server_error"),
}  # fmt: skip


def test_every_surface_is_read_however_its_stream_is_cut(visit: Visit) -> None:
    visit.open("/sign-in/")
    for surface, (head, events) in STREAMS.items():
        end = "\r\n\r\n" if "\r" in head else "\n\n"
        text = ": ping\n\n" + "".join(f"{head}{json.dumps(event, ensure_ascii=False)}{end}" for event in events)
        text += "data: [DONE]\n\n" if surface == "chat" else ""
        for size in (1, 7, 10_000):
            answer = visit.page.evaluate(READ, [surface, text, size])
            assert (answer["text"], answer["reasoning"], answer["finish"], answer["isEnded"]) == (
                "Grüße 🦙", "hm ", "stop", True,
            )  # fmt: skip
            assert answer["calls"] == [{"id": "c1", "name": "f", "text": '{"a":1}'}]
            assert (answer["usage"], answer["error"]) == ({"prompt": 3, "completion": 4}, None)
        text, code = BREAKS[surface]
        answer = visit.page.evaluate(READ, [surface, text, 10_000])
        assert (answer["error"]["message"], answer["error"]["code"], answer["isEnded"]) == ("gone", code, False)

"""The admin as an operator meets it: a real browser, the real server, no complaint on any page."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from django.contrib.sessions.models import Session
from django.db.models.functions import Now
from playwright.sync_api import Page, WebSocketRoute, expect

from gateway.models import RequestRecord
from gateway.routing import Target
from gateway.services.models import allow_model, create_alias
from gateway.services.tenants import create_tenant
from nodes.models import Node
from nodes.pages import TABS
from tests.fakes.control_process import ServerProcess, free_port
from tests.fakes.engines.scripted_server import run_engine, stream_words
from tests.fakes.nodes import ACTOR, make_credential, make_key, make_node, make_presence, make_record
from tests.fakes.runners.process import run_box
from tests.fakes.scripted_box import Stream
from tests.fakes.waiting import wait_until
from tests.rings.browser.conftest import NodeThread, Visit, find_violations, in_database
from wire.bridge import GpuInfo, MemoryInfo, ModelsUpdate, ReplicaInfo, Telemetry

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

LISTS = (
    "nodes/node", "nodes/nodecredential", "nodes/provider", "gateway/model", "gateway/modelalias", "gateway/requestrecord",
    "gateway/apikey", "gateway/tenant", "gateway/gatewayprocess", "controlplane/user", "governance/admintoken",
    "governance/auditevent",
)  # fmt: skip
POLYGLOT = "\"'></title></script><img src=x onerror=alert(1)><svg onload=alert(2)>{{constructor.constructor('alert(3)')()}}"


def make_hostile_rows() -> tuple[Node, RequestRecord]:
    text = POLYGLOT
    credential, _ = make_credential(text[:80])
    node = make_node(
        text[:120], credential=credential, gpu_name=text, owner_name=text, agent_version=text[:60], model_names=[text]
    )
    values: dict[str, Any] = {"protocol": text[:40], "peer_address": text[:64], "last_error": text, "reported_status": "error"}
    make_presence(node, connected=True, **values)
    make_key(text[:80], tenant=text[:80])
    allow_model(name=text, actor=ACTOR)
    create_alias(name=text, targets=[Target(text)], tenant_name=text[:80], actor=ACTOR)
    return node, make_record(model=text, node_name=text[:120], tenant=text[:80], key_name=text[:80])


def test_text_from_boxes_never_runs(visit: Visit) -> None:
    node, record = in_database(make_hostile_rows)
    visit.sign_in()
    pages = [f"/admin/{name}/" for name in LISTS]
    pages += [f"/admin/nodes/node/{node.pk}/change/", f"/admin/nodes/node/{node.pk}/change/drain/"]
    pages += [f"/admin/gateway/requestrecord/{record.pk}/change/", "/admin/gateway/requestrecord/?state=wrong"]
    for path in pages:
        visit.open(path)
        expect(visit.page.locator("#content")).to_be_visible()
        assert visit.page.locator("#content img[src=x], #content svg[onload]").count() == 0


def test_a_list_is_followed_without_a_reload_and_holds_still_under_a_hand(visit: Visit) -> None:
    node = in_database(lambda: make_node("attic"))
    in_database(lambda: make_presence(node, age_s=-3600))
    visit.sign_in()
    page = visit.page
    visit.open("/admin/nodes/node/")
    table = page.locator("#result_list")
    expect(table).to_contain_text("ready")
    page.evaluate("window.isSamePage = true")
    in_database(lambda: make_presence(make_node("aft"), age_s=-3600))
    in_database(lambda: Node.objects.filter(pk=node.pk).update(draining=True))
    expect(table).to_contain_text("aft")
    expect(table).to_contain_text("draining")
    table.get_by_role("link", name="attic").focus()
    in_database(lambda: make_presence(make_node("able"), age_s=-3600))
    in_database(lambda: Node.objects.filter(pk=node.pk).update(draining=False, cordoned=True))
    expect(table).to_contain_text("cordoned")
    expect(table.locator("tbody th")).to_have_text(["aft", "attic"])
    assert page.evaluate("window.isSamePage")
    assert find_violations(page) == []


def test_a_page_says_since_when_nothing_has_come_and_stops_saying_so_when_something_comes(visit: Visit) -> None:
    is_cut = True

    def pass_on(socket: WebSocketRoute) -> None:
        socket.connect_to_server().on_message(lambda message: None if is_cut else socket.send(message))

    visit.sign_in()
    visit.page.route_web_socket(re.compile("/ws/overview"), pass_on)
    visit.page.clock.install()
    visit.open("/admin/")
    note = visit.page.get_by_role("status").filter(has_text="Not live: nothing has come from the control plane since")
    expect(note).to_have_count(0)
    visit.page.clock.fast_forward(16_000)
    expect(note).to_be_visible()
    assert find_violations(visit.page, ".silent") == []
    is_cut = False
    expect(note).to_be_hidden()


def test_a_page_whose_reader_was_signed_out_says_so_and_leads_to_the_way_in(visit: Visit) -> None:
    visit.sign_in()
    visit.page.evaluate("location.hash = 'content'")  # as a link within the page leaves it
    in_database(lambda: Session.objects.all().delete())
    note = visit.page.get_by_role("status").filter(has_text="Not live: you were signed out at")
    expect(note).to_be_visible()
    assert find_violations(visit.page, ".silent") == []
    note.get_by_role("link", name="Sign in again").click()
    expect(visit.page.get_by_label("Username")).to_be_visible()


LLAMA = ReplicaInfo(model="llama-3.1-8b-instruct", state="loaded", engine="llama.cpp", slots=4, active=1)
LOADING = ReplicaInfo(model="qwen3-14b", state="loading", engine="vllm", detail="reading weights", progress=0.07, eta_s=37.2)
WHISPER = ReplicaInfo(model="whisper-large-v3", state="failed", engine="faster-whisper", detail="model.bin ends after 12 MiB")


class LoadingNode(NodeThread):
    """A node that reports what it loads."""

    def say(self, *replicas: ReplicaInfo, **fields: Any) -> None:
        told = Telemetry(current_load=1, queue_depth=3, avg_wait_ms=420, replicas=list(replicas), **fields)
        self.run(self.box.send(told))


@pytest.fixture
def attic(visit: Visit, gateway: ServerProcess) -> Iterator[LoadingNode]:
    """A node on the socket of a gateway, and an operator who looks at its page."""
    secret = in_database(lambda: make_credential("attic")[1])
    box = LoadingNode(gateway, secret, LLAMA.model, replicas=[LLAMA])
    visit.sign_in()
    visit.open(f"/admin/nodes/node/{in_database(Node.objects.get).pk}/change/")
    yield box
    box.close()


def table(page: Page, caption: str) -> Any:  # Playwright's locator
    return page.locator("#node table").filter(has=page.locator("caption", has_text=re.compile(f"^{caption}$")))


def test_the_page_follows_a_load_without_a_reload(visit: Visit, attic: LoadingNode) -> None:
    page = visit.page
    expect(table(page, "Loaded").get_by_role("row").nth(1)).to_contain_text("llama-3.1-8b-instruct")
    page.evaluate("window.notReloaded = true")
    attic.say(LLAMA, LOADING, WHISPER, available=["nomic-embed-text-v1.5"])
    bar = table(page, "Loading").get_by_role("progressbar")
    expect(bar).to_have_attribute("value", "7")
    expect(table(page, "Loading")).to_contain_text("reading weights")
    expect(table(page, "Loading")).to_contain_text("37 s")
    expect(table(page, "Failed")).to_contain_text("model.bin ends after 12 MiB")
    expect(page.locator("#node")).to_contain_text("3 waiting on the node, 0.42 s on average")
    expect(page.get_by_role("link", name="1 more model could be loaded")).to_be_visible()
    attic.say(LLAMA, ReplicaInfo(model="qwen3-14b", state="loaded", engine="vllm", slots=8))
    attic.run(attic.box.send(ModelsUpdate(models=["llama-3.1-8b-instruct", "qwen3-14b"])))
    expect(table(page, "Loaded")).to_contain_text("0 / 8")
    expect(table(page, "Loading")).to_have_count(0)
    assert page.evaluate("window.notReloaded")
    declared = Node.objects.filter(model_names=["llama-3.1-8b-instruct", "qwen3-14b"])
    wait_until(lambda: in_database(declared.exists), what="the models declared are stored")


def test_words_of_a_box_never_become_markup(visit: Visit, attic: LoadingNode) -> None:
    evil = "<img src=x onerror=alert(1)>'\"</script><script>alert(2)</script>"
    attic.say(
        ReplicaInfo(model=evil, state="loading", engine=evil[:40], detail=evil), gpus=[GpuInfo(index=0, name=evil)],
        available=[evil], memory=MemoryInfo(kind=evil[:40], total_mb=10, used_mb=3),
    )  # fmt: skip
    expect(table(visit.page, "Loading")).to_contain_text("onerror=alert(1)")
    assert visit.page.locator("#node img[src=x], #node script:not([src])").count() == 0
    node = in_database(Node.objects.get)
    for tab in TABS:
        visit.open(f"/admin/nodes/node/{node.pk}/tab/{tab}/")
        assert visit.page.locator("#content img[src=x]").count() == 0


def test_the_tabs_of_a_node_are_walked_by_keyboard_and_its_log_comes_from_the_node(visit: Visit, attic: LoadingNode) -> None:
    page = visit.page
    for name in ("Models", "Requests", "Events", "Log"):
        link = page.get_by_role("navigation", name="Pages of attic").get_by_role("link", name=name, exact=True)
        link.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("navigation", name="Pages of attic").locator("[aria-current=page]")).to_have_text(name)
        assert find_violations(page) == []
    log = page.get_by_role("region", name="Log of the runner")
    expect(log).to_contain_text("scripted: <b>all is well</b>")
    assert find_violations(page) == []


def test_may_i_reboot_this_node_is_two_clicks_from_overview_and_the_answer_follows_the_drain(
    visit: Visit, attic: LoadingNode
) -> None:
    page = visit.page
    visit.open("/admin/")
    page.get_by_role("link", name="attic").first.click()
    answer = page.locator(".mst-power")
    expect(answer).to_contain_text("Not yet.")
    answer.get_by_role("link", name="Drain it, so that it may go").click()
    page.get_by_role("button", name="Drain").click()
    expect(page.locator("#node-head")).to_contain_text("draining")
    page.evaluate("window.notReloaded = true")
    attic.say(LLAMA)
    in_database(lambda: Node.objects.update(drained_at=Now()))
    attic.run(attic.box.send(Telemetry(current_load=0, replicas=[LLAMA])))
    expect(answer).to_contain_text("Yes. It gets no new work, and nothing runs on it.")
    expect(page.locator("#node-head")).to_contain_text("safe to power off since")
    assert page.evaluate("window.notReloaded")
    assert find_violations(page) == []


def test_many_nodes_are_cordoned_by_keyboard_after_one_question(visit: Visit) -> None:
    in_database(lambda: [make_presence(make_node(name), age_s=-3600) for name in ("aft", "attic")])
    visit.sign_in()
    page = visit.page
    visit.open("/admin/nodes/node/")
    for box in page.locator("#result_list input[name=_selected_action]").all():
        box.focus()
        page.keyboard.press("Space")
    page.locator("select[name=action]").select_option("cordon_nodes")
    page.get_by_role("button", name="Run").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#content")).to_contain_text("Cordon: 2 nodes?")
    assert find_violations(page) == []
    page.get_by_role("button", name="Cordon").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#result_list")).to_contain_text("cordoned")
    assert in_database(lambda: Node.objects.filter(cordoned=True).count()) == 2


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
        chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        self.run(self.box.data(stream, f"data: {json.dumps(chunk)}\n\n".encode()))

    def finish(self, stream: Stream) -> None:
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
def desk(visit: Visit, gateway: ServerProcess) -> Iterator[AnsweringNode]:
    box = AnsweringNode(gateway, in_database(prepare), MODEL)
    visit.sign_in()
    visit.page.get_by_role("link", name="Playground").click()
    expect(visit.page.locator("#pg-code")).to_contain_text("curl")
    yield box
    box.close()


def fact(page: Page, name: str) -> Any:  # Playwright's locator
    return page.locator(f"[data-fact={name}]")


def watch_an_answer(page: Page, desk: AnsweringNode) -> None:
    """Ask by the keyboard; see text, reasoning and a tool call come, and the numbers."""
    page.get_by_label("Prompt", exact=True).fill(f"Tell me {HOSTILE}")
    page.keyboard.press("Control+Enter")
    stream = desk.run(desk.box.stream())
    desk.run(desk.box.head(stream, content_type="text/event-stream"))
    desk.say(stream, role="assistant", reasoning_content="Let me think.")
    desk.say(stream, content=f"Once upon a time {HOSTILE}")
    expect(page.locator("#pg-text")).to_have_text(f"Once upon a time {HOSTILE}")  # before the end
    expect(page.locator("#pg-reasoning-text")).to_have_text("Let me think.")
    expect(page.locator("#pg-status")).to_have_text("Answering…")
    for part in TOOL_CALL:
        desk.say(stream, tool_calls=[{"index": 0, **part}])
    desk.finish(stream)
    expect(page.locator("#pg-status")).to_have_text("Done.")
    expect(page.locator("#pg-calls li")).to_have_count(1)
    expect(page.locator("#pg-calls pre")).to_have_text('{\n  "city": "Bern"\n}')
    shown = {"prompt": "11", "completion": "7", "node": "attic", "model": MODEL, "finish": "tool_calls", "state": "completed"}
    for name, text in shown.items():
        expect(fact(page, name)).to_have_text(text)
    for name in ("first", "rate", "queue", "total"):
        expect(fact(page, name)).not_to_have_text("–")


def stop_an_answer(page: Page, desk: AnsweringNode) -> str:
    """Stop by the keyboard in the middle; see that the request ended as cancelled. Returns the address of its page."""
    page.get_by_role("button", name="Send").click()
    stream = desk.run(desk.box.stream())
    desk.run(desk.box.head(stream, content_type="text/event-stream"))
    desk.say(stream, content="It goes on and")
    expect(page.locator("#pg-text")).to_have_text("It goes on and")
    expect(page.locator("#pg-stop")).to_be_focused()
    page.keyboard.press("Enter")
    assert desk.run(desk.box.cancelled(stream)) == "client_disconnect"
    expect(page.locator("#pg-status")).to_have_text("Stopped.")
    expect(page.locator("#pg-send")).to_be_focused()
    expect(fact(page, "state")).to_contain_text("cancelled")
    return str(fact(page, "request").get_by_role("link").get_attribute("href"))


def test_asking_watching_and_stopping(visit: Visit, desk: AnsweringNode) -> None:
    page = visit.page
    watch_an_answer(page, desk)
    assert find_violations(page) == []
    record_page = stop_an_answer(page, desk)
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


@contextmanager
def runner_with_tickets(folder: Path, gateway: ServerProcess, secret: str, *origins: str) -> Iterator[None]:
    """A real runner whose port clients with tickets reach, before an engine that says three words."""
    loop, port = asyncio.new_event_loop(), free_port()
    thread, stack = Thread(target=loop.run_forever, daemon=True), AsyncExitStack()
    thread.start()

    async def start() -> None:
        engine = await stack.enter_async_context(run_engine())
        engine.models = [MODEL]
        usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
        engine.handler = lambda request, _body: stream_words(request, 3, 0.0, usage=usage)
        options = ["--backend", engine.url, "--data", str(folder / "node"), "--api-port", str(port)]
        options += ["--ticket-url", f"http://127.0.0.1:{port}", "--ticket-origins", ",".join(["https://app.example", *origins])]
        url = f"http://127.0.0.1:{gateway.port}"
        await stack.enter_async_context(run_box(folder, url, *options, env={"MUSTER_TOKEN": secret}))

    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        yield
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


@pytest.mark.parametrize("is_let_in", [True, False])
def test_with_a_ticket_the_page_asks_the_node_itself_where_that_lets_it_in_and_else_says_why_not(
    visit: Visit, gateway: ServerProcess, tmp_path: Path, is_let_in: bool
) -> None:
    page, secret = visit.page, in_database(prepare)
    visit.sign_in()
    visit.open("/admin/playground/")
    expect(page.get_by_label("Straight to the node")).to_be_disabled()
    expect(page.locator("#pg-ticket-hint")).to_contain_text("No node takes clients with tickets")
    with runner_with_tickets(tmp_path, gateway, secret, *([visit.url] if is_let_in else [])):
        ready = Node.objects.filter(ticket_error="", model_names=[MODEL]).exclude(ticket_url="")
        wait_until(lambda: in_database(ready.exists), what="the gateway has looked at the node's URL")
        visit.open("/admin/playground/")
        page.get_by_label("Straight to the node").check()
        page.get_by_label("Prompt", exact=True).fill("Hello")
        if not is_let_in:
            visit.awaited += ["has been blocked by CORS policy", "Failed to load resource"]
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#pg-status")).to_have_text("Done.")
        expect(page.locator("#pg-text")).to_have_text("word0 word1 word2 ")
        expect(fact(page, "way")).to_contain_text("the node itself" if is_let_in else f"--ticket-origins {visit.url}")
        expect(fact(page, "state")).to_have_text("completed")
        expect(fact(page, "node")).to_have_text("box-under-test")
        assert find_violations(page) == []
    endpoints = in_database(lambda: list(RequestRecord.objects.filter(state="completed").values_list("endpoint", flat=True)))
    assert endpoints == ["/v1/tickets" if is_let_in else "/v1/chat/completions"]


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

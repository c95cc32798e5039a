"""The admin as an operator meets it: a real browser, the real server, no complaint on any page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.sessions.models import Session
from playwright.sync_api import Page, WebSocketRoute, expect

from gateway.models import RequestRecord
from gateway.routing import Target
from gateway.services import allow_model, create_alias
from nodes.models import Node
from tests.fakes.control_process import ServerProcess
from tests.fakes.nodes import ACTOR, make_credential, make_node, make_presence
from tests.fakes.tenants import make_key, make_record
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
    expect(table).to_contain_text("available")
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


LLAMA = ReplicaInfo(
    model="llama-3.1-8b-instruct",
    state="loaded",
    engine="llama.cpp",
    slots=4,
    active=1,
    memory_mb=9_420,
    weights_mb=7_610,
    kv_mb=1_280,
)
WHISPER = ReplicaInfo(model="whisper-large-v3", state="failed", engine="faster-whisper", detail="model.bin ends after 12 MiB")
GPUS = [
    GpuInfo(
        index=number,
        name="NVIDIA RTX 4090",
        memory_total_mb=24_564,
        memory_used_mb=used,
        utilization_percent=busy,
        temperature_c=61.0,
        power_w=288.4,
    )
    for number, used, busy in ((0, 15_200, 87.0), (1, 640, 0.0))
]
MEMORY = MemoryInfo(total_mb=49_128, used_mb=15_840, weights_mb=7_610, kv_mb=1_280)
AVAILABLE = ["qwen3-30b-a3b-instruct-q4_k_m", "phi-4-mini", "nomic-embed-text-v1.5"]


class LoadingNode(NodeThread):
    """A node that reports what it loads."""

    def say(self, **fields: Any) -> None:
        """Send telemetry; what is not given is as it was."""
        values = {"gpus": GPUS, "memory": MEMORY, "available": AVAILABLE, "queue_depth": 3, "avg_wait_ms": 420, **fields}
        self.run(self.box.send(Telemetry(current_load=1, **values)))

    def load(self, done: float, *, stage: str = "reading weights") -> None:
        """Say how far the load of a second model is."""
        detail = ReplicaInfo(
            model="qwen3-14b", state="loading", engine="vllm", detail=stage, progress=done, eta_s=40 * (1 - done)
        )
        self.say(replicas=[LLAMA, detail, WHISPER])

    def declare(self, *models: str) -> None:
        """Replace the models that it serves."""
        self.run(self.box.send(ModelsUpdate(models=list(models))))


@pytest.fixture
def attic(visit: Visit, gateway: ServerProcess) -> Iterator[LoadingNode]:
    """A box on the socket of a gateway, and an operator who looks at its page."""
    secret = in_database(lambda: make_credential("attic")[1])
    box = LoadingNode(gateway, secret, LLAMA.model, replicas=[LLAMA])
    visit.sign_in()
    visit.open(f"/admin/nodes/node/{in_database(Node.objects.get).pk}/change/")
    yield box
    box.close()


def table(page: Page, caption: str) -> Any:  # Playwright's locator
    return page.locator("#box table").filter(has=page.locator("caption", has_text=re.compile(f"^{caption}$")))


def test_the_page_follows_a_load_without_a_reload(visit: Visit, attic: LoadingNode) -> None:
    page = visit.page
    expect(table(page, "Loaded").get_by_role("row").nth(1)).to_contain_text("llama-3.1-8b-instruct")
    page.evaluate("window.notReloaded = true")
    attic.load(0.07)
    bar = table(page, "Loading").get_by_role("progressbar")
    expect(bar).to_have_attribute("value", "7")
    expect(table(page, "Loading")).to_contain_text("reading weights")
    expect(table(page, "Loading")).to_contain_text("37 s")
    expect(table(page, "Failed")).to_contain_text("model.bin ends after 12 MiB")
    expect(page.locator("#box")).to_contain_text("3 waiting on the node, 0.42 s on average")
    expect(page.locator("#box .mst-chips")).to_contain_text("nomic-embed-text-v1.5")
    expect(page.locator("#box h2 small").first).to_contain_text("live")
    attic.say(replicas=[LLAMA, ReplicaInfo(model="qwen3-14b", state="loaded", engine="vllm", slots=8, memory_mb=9_000)])
    attic.declare("llama-3.1-8b-instruct", "qwen3-14b")
    expect(table(page, "Loaded")).to_contain_text("0 / 8")
    expect(table(page, "Loading")).to_have_count(0)
    assert page.evaluate("window.notReloaded")
    declared = Node.objects.filter(model_names=["llama-3.1-8b-instruct", "qwen3-14b"])
    wait_until(lambda: in_database(declared.exists), what="the models declared are stored")


def test_words_of_a_box_never_become_markup(visit: Visit, attic: LoadingNode) -> None:
    evil = "<img src=x onerror=alert(1)>'\"</script><script>alert(2)</script>"
    attic.say(
        replicas=[ReplicaInfo(model=evil, state="loading", engine=evil[:40], detail=evil)],
        gpus=[GpuInfo(index=0, name=evil)],
        available=[evil],
        memory=MemoryInfo(kind=evil[:40], total_mb=10, used_mb=3),
    )
    expect(table(visit.page, "Loading")).to_contain_text("onerror=alert(1)")
    assert visit.page.locator("#box img[src=x], #box script:not([src])").count() == 0

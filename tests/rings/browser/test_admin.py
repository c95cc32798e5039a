"""The admin as an operator meets it: a real browser, the real server, no complaint on any page."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.sessions.models import Session
from django.utils import timezone
from playwright.sync_api import WebSocketRoute, expect

from gateway.models import ApiKey, RequestRecord
from gateway.routing import Target
from gateway.services import allow_model, create_alias
from nodes.models import Node
from tests.rings.browser.conftest import Visit, find_violations, in_database
from tests.system.gateway_admin.factories import ACTOR, make_gateway, make_key, make_record
from wire.contract import RequestState

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

LISTS = (
    "nodes/node",
    "nodes/nodecredential",
    "nodes/provider",
    "gateway/model",
    "gateway/modelalias",
    "gateway/requestrecord",
    "gateway/apikey",
    "gateway/tenant",
    "gateway/gatewayprocess",
    "controlplane/user",
    "governance/admintoken",
    "governance/auditevent",
)
FIND_CUT_OFF = """() => [...document.querySelectorAll("html, #changelist *")]
    .filter((box) => box.tagName === "HTML" || ["auto", "scroll"].includes(getComputedStyle(box).overflowX))
    .filter((box) => box.scrollWidth > box.clientWidth)
    .map((box) => `${box.tagName} ${box.className} shows ${box.clientWidth} of ${box.scrollWidth}`)"""
"""What can only be seen by scrolling to the side."""
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


def make_one_of_each() -> None:
    make_presence(make_node("a-box-with-quite-a-long-name-for-a-phone"))
    key, _ = make_key("nightly evaluation")
    ApiKey.objects.filter(pk=key.pk).update(last_used_at=timezone.now())
    make_gateway()
    allow_model(name="tiny", actor=ACTOR)
    create_alias(name="gpt-4o-mini", targets=[Target("tiny")], actor=ACTOR)
    make_record(state=RequestState.RUNNING, asked_model="gpt-4o-mini", key_name="nightly evaluation of the assistant")
    times = {"latency_ms": 9_999, "ttfb_ms": 9_000, "queue_ms": 8_000}
    make_record(state=RequestState.FAILED, error_code="FORWARDED_REQUEST_FAILED", is_streaming=True, **times)


def find_node() -> Node:
    return in_database(Node.objects.get)


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


def test_what_waits_and_why_is_followed_without_a_reload(visit: Visit) -> None:
    node = in_database(lambda: make_node("attic", model_names=["tiny"], cordoned=True))
    in_database(lambda: make_presence(node, age_s=-3600))  # a box that falls silent meanwhile would be another obstacle
    visit.sign_in()
    page, queued = visit.page, visit.page.locator("[data-live=queued]")
    expect(queued).to_have_text("0")

    # Of a gateway that is heard from all along: requests of lost ones are ended by the others.
    alive = in_database(lambda: make_gateway(silent_s=-3600))
    record = in_database(lambda: make_record(state=RequestState.QUEUED, age_s=9, gateway_id=alive.pk))
    expect(queued).to_have_text("1")
    expect(page.locator("#problems")).to_contain_text("Only attic has tiny, and it is cordoned. Uncordon attic")

    visit.open("/admin/gateway/requestrecord/")
    expect(page.locator("#result_list, table").first).to_contain_text("cordoned")
    visit.open(f"/admin/gateway/requestrecord/{record.pk}/change/")
    expect(page.locator("#request")).to_contain_text("It waits: Only attic has tiny, and it is cordoned.")
    in_database(lambda: Node.objects.update(cordoned=False, draining=True))
    expect(page.locator("#request")).to_contain_text("and it is being drained")
    in_database(lambda: RequestRecord.objects.update(state="failed", error_code="NODE_DRAINING"))
    expect(page.locator("#request")).to_contain_text("Every box that serves the model was being held back.")
    assert find_violations(page) == []


SLOW = """const ask = window.fetch;
window.fetch = async (place, options) => {
    await new Promise((answer, giveUp) => {
        setTimeout(answer, 3000);
        options.signal.addEventListener("abort", () => giveUp(options.signal.reason));
    });
    return ask(place, options);
};"""
"""A control plane that takes three seconds for every answer."""


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


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_pages_fit_the_screen(visit: Visit, width: int) -> None:
    in_database(make_one_of_each)
    visit.sign_in()
    visit.page.set_viewport_size({"width": width, "height": 800})
    names = ("nodes/node", "gateway/requestrecord", "gateway/apikey")
    for path in ("/admin/", *(f"/admin/{name}/" for name in names), "/admin/gateway/apikey/add/"):
        visit.open(path)
        assert visit.page.evaluate(FIND_CUT_OFF) == []
    if width == 1440:
        keys = visit.page.locator("#result_list")
        visit.open("/admin/gateway/apikey/")
        expect(keys.get_by_role("link", name="Revoke")).to_be_in_viewport(ratio=1)
        for name in ("gateway/requestrecord", "gateway/modelalias", "gateway/apikey", "governance/webhookendpoint"):
            visit.open(f"/admin/{name}/")
            assert find_violations(visit.page) == []


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

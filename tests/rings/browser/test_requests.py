"""Requests and usage in a real browser: chips by the keyboard, the live list, the file, the waterfall, and what axe finds."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone
from playwright.sync_api import Page, expect

from gateway.services.rollups import roll_up_requests
from tests.fakes.nodes import make_event, make_record
from tests.rings.browser.conftest import AXE, Visit, find_violations, in_database, press
from wire.contract import RequestState

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]
LIST = "/admin/gateway/requestrecord/"


def find_all(page: Page) -> list[str]:
    """Return everything that axe-core finds in the whole page, of any impact, in the light and of colours in the dark."""
    colours = find_violations(page, "html")
    page.evaluate(AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations'], preload: false})")["violations"]
    return colours + [f"{one['id']} {node['target']}" for one in found for node in one["nodes"]]


def fits(page: Page, width: int) -> bool:
    page.set_viewport_size({"width": width, "height": 800})
    wide = page.evaluate("document.documentElement.scrollWidth")
    page.set_viewport_size({"width": 1280, "height": 900})
    return bool(wide <= width)


def fail_one() -> None:
    make_record(
        state=RequestState.FAILED, error_code="FORWARDED_REQUEST_FAILED", status_code=502, engine_error="out of memory",
        age_s=3, finished_at=timezone.now(), latency_ms=3010, queue_ms=1000, ttfb_ms=2000, attempts=1, node_name="attic",
        is_streaming=True,
    )  # fmt: skip
    make_event(state="failed", status_code=502).save(force_insert=True)
    roll_up_requests()


def test_from_the_failed_ones_to_the_words_of_the_engine_by_the_keyboard(visit: Visit) -> None:
    page = visit.page
    in_database(fail_one)
    in_database(make_record)
    visit.sign_in()
    visit.open(LIST)
    expect(page.locator("#result_list tbody tr")).to_have_count(2)
    assert find_all(page) == []
    assert fits(page, 320)
    page.get_by_text("State", exact=True).first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Failed", exact=True)).to_be_visible()
    assert find_all(page) == []
    page.keyboard.press("Escape")
    expect(page.get_by_role("link", name="Failed", exact=True)).to_be_hidden()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#result_list tbody tr")).to_have_count(1)
    expect(page.locator("#result_list")).to_contain_text("out of memory")
    expect(page.locator("mst-chart canvas")).to_be_visible()
    page.get_by_role("link", name="Remove the filter State: Failed").click()
    expect(page.locator("#result_list tbody tr")).to_have_count(2)
    page.locator("summary", has_text="Model").click()
    expect(page.get_by_label("Model", exact=True)).to_be_focused()
    page.keyboard.type("none such")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Nothing matches")).to_be_visible()
    visit.open(f"{LIST}?state=wrong")
    page.locator("#result_list tbody a").first.click()
    expect(page.locator("#request")).to_contain_text("The engine's fault.")
    expect(page.locator("#request .mst-said")).to_contain_text("out of memory")
    widths = [bar.get_attribute("width") or "" for bar in page.locator(".mst-waterfall rect").all()]
    assert [round(float(width.rstrip("%"))) for width in widths[:3]] == [0, 33, 33]
    assert find_all(page) == []
    assert fits(page, 320)
    page.get_by_text("Ask the same again with curl").click()
    press(page, "Copy")
    expect(page.locator("#request-curl")).to_contain_text("$MUSTER_KEY")
    page.get_by_role("link", name="Same error").click()
    expect(page.locator("#result_list tbody tr")).to_have_count(1)


def test_new_requests_come_marked_and_wait_while_the_page_is_paused_or_in_hand(visit: Visit) -> None:
    page = visit.page
    in_database(make_record)
    visit.sign_in()
    visit.open(LIST)
    page.evaluate("window.isSamePage = true")
    in_database(lambda: make_record(model="second"))
    expect(page.locator("#result_list tbody tr.mst-new")).to_contain_text("second")
    press(page, "Pause the updates of this page")
    in_database(lambda: make_record(model="third"))
    page.get_by_role("button", name="Updates are paused: go on").click()
    expect(page.locator("#result_list tbody tr").first).to_contain_text("third")
    page.locator("#result_list tbody a").first.focus()
    in_database(lambda: make_record(model="fourth"))
    held = page.get_by_role("button", name="1 new request: show it")
    expect(held).to_be_visible()
    expect(page.locator("#result_list")).not_to_contain_text("fourth")
    assert find_violations(page) == []
    held.click()
    expect(page.locator("#result_list tbody tr").first).to_contain_text("fourth")
    assert page.evaluate("window.isSamePage")


def test_what_is_filtered_is_a_file(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    in_database(lambda: make_record(tenant="acme", created_at=timezone.now() - timedelta(hours=2)))
    in_database(lambda: make_record(tenant="globex"))
    visit.sign_in()
    visit.open(f"{LIST}?tenant=acme")
    with page.expect_download() as coming:
        page.get_by_role("link", name="Export CSV").click()
    coming.value.save_as(tmp_path / "requests.csv")
    lines = (tmp_path / "requests.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert ",acme," in lines[1]


def test_usage_has_nothing_that_keeps_somebody_out(visit: Visit) -> None:
    page = visit.page
    in_database(fail_one)
    visit.sign_in()
    page.get_by_role("link", name="Usage", exact=True).click()
    expect(page.locator("#usage-totals")).to_contain_text("Requests")
    expect(page.locator("mst-chart canvas")).to_be_visible()
    assert find_all(page) == []
    assert fits(page, 320)
    page.get_by_role("navigation", name="By", exact=True).get_by_role("link", name="Model").click()
    expect(page.get_by_role("navigation", name="By", exact=True).locator("[aria-current]")).to_have_text("Model")

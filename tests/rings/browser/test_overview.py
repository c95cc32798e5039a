"""Overview in a real browser: charts that are seen, read and changed by hand and keyboard, and that move by themselves."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from gateway.models import UsageEvent
from gateway.services.rollups import roll_up_requests
from tests.fakes.nodes import make_event, make_node, make_presence
from tests.rings.browser.conftest import Visit, find_violations, in_database

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]


def add_requests(count: int, **changes: object) -> None:
    UsageEvent.objects.bulk_create([make_event(ago_s=600, ttft_ms=200, **changes) for _ in range(count)])
    roll_up_requests()


def test_a_chart_is_drawn_can_be_read_as_a_table_and_grows_while_it_is_looked_at(visit: Visit) -> None:
    gpu = {"index": 0, "name": "NVIDIA L4", "memory_total_mb": 24_576, "memory_used_mb": 6_144, "utilization_percent": 40.0}
    in_database(lambda: make_presence(make_node("attic"), age_s=-3600, gpus=[gpu]))
    in_database(lambda: add_requests(3))
    visit.sign_in()
    page = visit.page
    visit.open("/admin/?range=1h")
    chart = page.locator("mst-chart[data-name=requests]")
    over = chart.locator(".u-over")
    expect(over).to_be_visible()
    assert "Served: 3 in all" in str(chart.get_by_role("img").get_attribute("aria-label"))
    assert find_violations(page) == []

    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2)
    expect(chart.locator(".mst-plot-tip")).to_contain_text("Failed")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    whole = chart.get_by_role("button", name="Whole time")
    expect(whole).to_be_visible()

    chart.locator("summary").focus()
    page.keyboard.press("Enter")
    served = chart.locator("tbody td:nth-child(2)")
    expect(served.filter(has_text="3")).to_have_count(1)
    in_database(lambda: add_requests(4))
    expect(served.filter(has_text="7")).to_have_count(1)
    expect(whole).to_be_visible()
    assert find_violations(page) == []

    failed = chart.get_by_role("button", name="Failed")
    failed.focus()
    page.keyboard.press("Enter")
    expect(failed).to_have_attribute("aria-pressed", "false")
    whole.press("Enter")
    expect(whole).to_be_hidden()
    link = chart.locator("tbody a").first
    assert "since=" in str(link.get_attribute("href"))


def test_the_page_fits_a_narrow_phone_and_says_in_words_that_there_is_nothing(visit: Visit) -> None:
    visit.sign_in()
    visit.page.set_viewport_size({"width": 320, "height": 700})
    visit.open("/admin/?range=15min")
    expect(visit.page.get_by_text("No request ended in this time.")).to_be_visible()
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 320
    assert find_violations(visit.page) == []

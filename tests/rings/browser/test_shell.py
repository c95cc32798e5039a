"""What stands around every page, in a real browser: no fault of access on any, on a phone, in the dark, by keyboard alone."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from playwright.sync_api import Page, expect

from controlplane.navigation import ENTRIES, Entry
from gateway.services.models import allow_model, remember_models
from nodes.models import NodeCredential
from nodes.services.credentials import create_provider
from tests.fakes.nodes import ACTOR, make_gateway, make_key, make_node, make_presence, make_record
from tests.rings.browser.conftest import Visit, find_violations, in_database
from wire import clock

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

EVERY_IMPACT = ("minor", "moderate", "serious", "critical")
DESK, PHONE, SMALLEST = {"width": 1280, "height": 900}, {"width": 390, "height": 844}, {"width": 320, "height": 640}


def make_rows() -> None:
    make_gateway()
    node = make_node("rack-2")
    make_presence(node, age_s=1)
    make_key("ci-bot", tenant="research")
    allow_model(name="llama-3", actor=ACTOR)
    make_record(finished_at=clock.now() - timedelta(seconds=1), node_name="rack-2")


def is_wider_than_window(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


@pytest.mark.parametrize("entry", ENTRIES, ids=[str(entry.label) for entry in ENTRIES])
def test_no_page_of_an_entry_has_a_fault_of_access(visit: Visit, entry: Entry) -> None:
    in_database(make_rows)
    visit.sign_in()
    found = []
    for tab in entry.tabs:
        for size in (DESK, PHONE):
            visit.page.set_viewport_size(size)  # type: ignore[arg-type]
            visit.open(tab.url)
            found += find_violations(visit.page, "html", is_dark_too=size is DESK, impacts=EVERY_IMPACT)
        visit.page.set_viewport_size(SMALLEST)  # type: ignore[arg-type]
        assert not is_wider_than_window(visit.page), tab.url
    assert found == []


def test_the_palette_is_used_by_keyboard_alone(visit: Visit) -> None:
    in_database(make_rows)
    visit.sign_in()
    page = visit.page
    page.wait_for_load_state()  # by then its scripts have run
    page.keyboard.press("Control+k")
    palette = page.get_by_role("dialog", name="Search")
    options = palette.get_by_role("option")
    expect(options.first).to_have_text(re.compile("Overview"))
    page.keyboard.type("drain rack-2")
    expect(options).to_have_count(1)
    expect(options).to_have_attribute("aria-selected", "true")
    assert find_violations(page, "html", impacts=EVERY_IMPACT) == []
    page.keyboard.press("Enter")
    page.wait_for_url("**/change/drain/")
    page.wait_for_load_state()
    page.keyboard.press("Control+k")
    page.keyboard.type("nothing of the kind")
    expect(palette.get_by_role("status")).to_have_text("Nothing found for “nothing of the kind”.")
    page.keyboard.press("Escape")
    expect(palette).to_be_hidden()
    page.keyboard.press("Control+k")
    page.keyboard.type("rack-2")
    expect(options.first).to_contain_text("Node")
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    expect(options.nth(1)).to_have_attribute("aria-selected", "true")
    assert visit.complaints == []


def test_the_sidebar_is_a_drawer_on_a_phone_and_folds_on_a_desk(visit: Visit) -> None:
    visit.sign_in()
    page, sidebar = visit.page, visit.page.get_by_role("navigation", name="Main")
    page.wait_for_load_state()  # by then its scripts have run
    page.get_by_role("button", name="Narrow the sidebar").click()
    page.reload()
    assert page.evaluate("document.querySelector('#sidebar').offsetWidth") < 80
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    expect(sidebar).to_be_hidden()
    page.get_by_role("button", name="Menu").focus()
    page.keyboard.press("Enter")
    expect(sidebar.get_by_role("link", name="Overview")).to_be_focused()
    assert find_violations(page, "html", impacts=EVERY_IMPACT) == []
    page.keyboard.press("Escape")
    expect(sidebar).to_be_hidden()
    expect(page.get_by_role("button", name="Menu")).to_be_focused()


def test_the_theme_is_kept_and_a_page_holds_still_while_it_is_paused(visit: Visit) -> None:
    in_database(make_rows)
    visit.sign_in()
    page = visit.page
    page.get_by_label("Theme").click()
    page.get_by_role("button", name="Dark").click()
    visit.open("/approvals/")
    assert page.evaluate("document.documentElement.classList.contains('dark')")
    visit.open("/admin/nodes/node/")
    page.get_by_role("button", name="Pause the updates of this page").click()
    in_database(lambda: make_presence(make_node("rack-3"), age_s=1))
    page.evaluate("dispatchEvent(new Event('visibilitychange'))")
    expect(page.get_by_role("link", name="rack-3")).to_have_count(0)
    page.get_by_role("button", name="Updates are paused: go on").click()
    page.mouse.move(0, 0)
    expect(page.get_by_role("link", name="rack-3")).to_have_count(1)


def test_a_node_is_added_by_keyboard_alone(visit: Visit) -> None:
    in_database(lambda: create_provider(name="local", actor=ACTOR))
    visit.sign_in()
    visit.open("/admin/nodes/node/setup/")
    page = visit.page
    page.get_by_label("Name").focus()
    page.keyboard.type("rack-2")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Waiting for the node to connect.")).to_be_visible()

    def connect() -> None:
        make_presence(make_node("rack-2", credential=NodeCredential.objects.get(), model_names=["llama3"]))
        remember_models(names=["llama3"])

    in_database(connect)
    tick = page.get_by_role("checkbox", name="llama3")
    expect(tick).to_be_checked()
    tick.focus()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Allow")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Ask it something")).to_be_focused()


def test_who_comes_by_keyboard_skips_to_the_content(visit: Visit) -> None:
    visit.sign_in()
    visit.open("/admin/system/")
    visit.page.keyboard.press("Tab")
    expect(visit.page.get_by_role("link", name="Skip to the content")).to_be_focused()
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator("#main")).to_be_focused()

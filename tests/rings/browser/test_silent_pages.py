"""A page that follows something says when what it shows may be old."""

from __future__ import annotations

import re

import pytest
from django.contrib.sessions.models import Session
from playwright.sync_api import WebSocketRoute, expect

from core.models import User
from tests.rings.browser.conftest import Visit, find_violations, in_database

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]


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


def test_a_page_whose_reader_may_not_see_it_any_more_says_so(visit: Visit) -> None:
    visit.sign_in()
    in_database(lambda: User.objects.update(is_staff=False))
    note = visit.page.get_by_role("status").filter(has_text="Not live: you may not see this any more, since")
    expect(note).to_be_visible()
    expect(note.get_by_role("link", name="Load the page again")).to_be_visible()

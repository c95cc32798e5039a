"""Signing in as people do it, in a real Chromium with an authenticator made of software."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import CDPSession, Page, expect

from core.models import User
from governance.models import ApproverKey
from governance.services.people import create_invitation
from tests.fakes.control_process import ROOT
from tests.fakes.policies import make_people, make_policy, make_statement
from tests.rings.browser.conftest import PASSWORD, Visit, in_database, press
from wire.optoken.approval import digest_words, encode_bytes

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.browser, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Reader:
    """A fingerprint reader in the browser."""

    session: CDPSession
    ident: str

    def know_nobody(self) -> None:
        """Find the wrong finger from now on."""
        self.session.send("WebAuthn.setUserVerified", {"authenticatorId": self.ident, "isUserVerified": False})


@pytest.fixture
def authenticator(visit: Visit) -> Iterator[Reader]:
    """A fingerprint reader in the browser that always finds its owner."""
    session = visit.page.context.new_cdp_session(visit.page)
    session.send("WebAuthn.enable")
    options = {
        "protocol": "ctap2",
        "transport": "internal",
        "hasResidentKey": True,
        "hasUserVerification": True,
        "isUserVerified": True,
        "automaticPresenceSimulation": True,
    }
    added = session.send("WebAuthn.addVirtualAuthenticator", {"options": options})
    yield Reader(session, added["authenticatorId"])
    session.detach()


@pytest.fixture
def at_home(visit: Visit) -> Visit:
    """The browser at the address that passkeys belong to."""
    visit.url = visit.url.replace("127.0.0.1", "localhost")
    return visit


def invite(name: str) -> str:
    """The path of an invitation of a new person."""

    def make() -> str:
        person = User.objects.create_user(name, first_name="Grace", last_name="Hopper", is_staff=True)
        return create_invitation(user=person, actor="user:ada")[1]

    return f"/sign-in/invitation/{in_database(make)}"


def expect_no_sideways_scrolling(page: Page) -> None:
    """The page fits its window, once its style sheet is there."""
    page.wait_for_load_state()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_an_invited_person_makes_a_passkey_and_signs_in_with_it_again(at_home: Visit, authenticator: Reader) -> None:
    page = at_home.page
    at_home.open(invite("grace"))
    expect(page.get_by_role("heading", level=1)).to_have_text("Welcome, Grace Hopper")
    page.get_by_label("Name of this passkey").fill("blue laptop")
    page.get_by_role("button", name="Make a passkey and sign in").click()
    expect(page.get_by_role("rowheader")).to_contain_text("blue laptop")
    page.get_by_role("button", name="Sign out").click()
    press(page, "Sign in with a passkey")
    page.wait_for_url("**/admin/")
    assert in_database(lambda: ApproverKey.objects.get().last_used_at is not None)


def test_a_second_passkey_on_one_device_and_a_person_who_cancels_are_told_in_words(
    at_home: Visit, authenticator: Reader
) -> None:
    page = at_home.page
    at_home.open(invite("grace"))
    page.get_by_role("button", name="Make a passkey and sign in").click()
    press(page, "Make a passkey", exact=True)
    expect(page.locator("[data-fault]")).to_contain_text("holds a passkey of yours")
    page.get_by_role("button", name="Sign out").click()
    authenticator.know_nobody()
    press(page, "Sign in with a passkey")
    expect(page.locator("[data-fault]")).to_contain_text("no passkey for this site here")
    expect(page.get_by_role("button", name="Sign in with a passkey")).to_be_enabled()


def test_at_another_address_the_page_leads_to_the_right_one(visit: Visit) -> None:
    visit.open("/sign-in/?next=/admin/nodes/")
    link = visit.page.get_by_role("link", name="Open this page there")
    expect(link).to_have_attribute("href", re.compile(r"http://localhost:\d+/sign-in/\?next=/admin/nodes/"))
    expect(visit.page.get_by_role("button", name="Sign in with a passkey")).to_be_hidden()


def test_a_password_session_that_makes_a_passkey_may_act_at_once(at_home: Visit, authenticator: Reader) -> None:
    page = at_home.page
    at_home.open("/sign-in/?next=/sign-in/keys")
    page.get_by_label("Username").fill("ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in", exact=True).click()
    press(page, "Make a passkey")
    expect(page.get_by_text("It signs you in from now on")).to_be_visible()
    expect(page.get_by_text("This session is read-only")).to_have_count(0)


def test_every_page_fits_a_telephone(at_home: Visit, authenticator: Reader) -> None:
    page, path = at_home.page, invite("grace")
    page.set_viewport_size({"width": 360, "height": 740})
    for where in ("/sign-in/", path):
        at_home.open(where)
        expect_no_sideways_scrolling(page)
    page.get_by_role("button", name="Make a passkey and sign in").click()
    expect(page.get_by_role("rowheader")).to_be_visible()
    expect_no_sideways_scrolling(page)
    page.get_by_role("link", name="Remove").click()
    expect(page.get_by_text("This is your last passkey")).to_be_visible()
    expect_no_sideways_scrolling(page)
    at_home.open("/sign-in/totp")
    expect(page.get_by_role("img", name="QR code")).to_be_visible()
    expect_no_sideways_scrolling(page)


def test_the_offline_page_reads_a_statement_from_a_disk_and_from_the_server(at_home: Visit) -> None:
    page = at_home.page
    statement = make_statement(make_policy(make_people(3)))
    for where in (
        (ROOT / "governance/static/governance/offline.html").as_uri(),
        f"{at_home.url}/static/governance/offline.html",
    ):
        page.goto(where)
        page.get_by_label("Statement").fill(encode_bytes(statement.raw))
        expect(page.locator(".words")).to_have_text(digest_words(statement.digest))
        expect(page.get_by_role("row", name="params.modelId")).to_contain_text("org/model")
        expect(page.get_by_role("row", name="digest", exact=False).last).to_contain_text(statement.digest.hex())
        page.get_by_label("Statement").fill(encode_bytes(statement.raw.replace(b",", b", ", 1)))
        expect(page.locator(".bad")).to_contain_text("Do not sign this")
        expect(page.locator(".words")).to_have_count(0)

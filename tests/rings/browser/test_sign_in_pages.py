"""Signing in as people do it, in a real Chromium with an authenticator made of software."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import CDPSession, expect

from core.models import User
from governance.models import ApproverKey
from governance.services.people import create_invitation
from tests.fakes.control_process import ROOT
from tests.fakes.policies import make_people, make_policy, make_statement
from tests.rings.browser.conftest import Visit, in_database, press
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

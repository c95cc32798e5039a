"""Approving as people do it: several browsers, each with a passkey of its own, against the real server."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from django.conf import settings
from playwright.sync_api import Browser, CDPSession, Locator, Page, ViewportSize, expect

from controlplane.live import CloseCode
from core.models import User
from core.roles import Role
from governance.members import change_roles
from governance.models import ApproverKey, Operation, OperationRun
from governance.operations import policies as freezes
from governance.operations import runs
from governance.people import create_invitation
from governance.states import RunEvent
from nodes.models import NodePresence
from tests.fakes.control_process import ROOT, ServerProcess
from tests.fakes.governed_team import (
    Identity,
    Member,
    Team,
    make_box,
    make_governed,
    make_team,
    open_session,
    propose_load,
    propose_token,
)
from tests.fakes.policies import make_people, make_policy, make_statement
from tests.rings.browser.conftest import DESK, Chromium, Visit, find_violations, in_database, open_visit, press
from wire.optoken.approval import canonical, decode_bytes, digest_words, encode_bytes

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

OURS = "pubKeyCredParams"
"""What Chromium warns of: that we take no RSA keys."""
PHONE: ViewportSize = {"width": 360, "height": 800}
LOAD_FORM = "/approvals/propose?operation=model-load"


@dataclass(frozen=True)
class Site:
    """The server, under the name that its passkeys are bound to."""

    url: str
    browser: Browser

    def visit(self) -> Visit:
        return open_visit(self.browser, self.url, ignored=OURS)

    def visit_as(self, user: User) -> Visit:
        visit = self.visit()
        key = in_database(lambda: open_session(user).session.session_key or "")
        visit.page.context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": key, "url": visit.url}])
        return visit


@pytest.fixture
def site(chromium: Chromium, control: ServerProcess, transactional_db: None, settings: Any) -> Iterator[Site]:
    settings.PUBLIC_URL = control.public_url
    with chromium.lend() as browser:
        yield Site(control.public_url, browser)


def add_device(visit: Visit) -> tuple[CDPSession, str]:
    session = visit.page.context.new_cdp_session(visit.page)
    session.send("WebAuthn.enable")
    options = {
        "protocol": "ctap2", "transport": "internal", "hasResidentKey": True, "hasUserVerification": True,
        "isUserVerified": True, "automaticPresenceSimulation": True,
    }  # fmt: skip
    return session, session.send("WebAuthn.addVirtualAuthenticator", {"options": options})["authenticatorId"]


def put_passkey(visit: Visit, member: Member) -> None:
    session, device = add_device(visit)
    key = member.passkey.private_key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    credential = {
        "credentialId": base64.b64encode(decode_bytes(member.passkey.keyid)).decode(), "isResidentCredential": False,
        "rpId": member.passkey.rp_id, "privateKey": base64.b64encode(key).decode(), "signCount": 0,
    }  # fmt: skip
    session.send("WebAuthn.addCredential", {"authenticatorId": device, "credential": credential})


def accept_invitation(site: Site, name: str) -> Visit:
    def invite() -> str:
        user = change_roles(person=User.objects.create_user(name), roles=[Role.APPROVER], actor="system:test")
        return create_invitation(user=user, actor="system:test")[1]

    visit = site.visit()
    add_device(visit)
    visit.open(f"/sign-in/invitation/{in_database(invite)}")
    visit.page.get_by_role("button", name=re.compile("passkey")).click()
    expect(visit.page.get_by_role("heading", name="My keys")).to_be_visible()
    return visit


def path_of(operation: Operation) -> str:
    return f"/approvals/{operation.pk}/"


def approve_here(page: Page) -> None:
    expect(page.locator("#own-verdict")).to_contain_text("Same six words")
    page.get_by_role("button", name="Approve with a passkey").click()
    expect(page.get_by_text("Your approval is recorded.")).to_be_visible()


def approve_button(page: Page) -> Locator:
    return page.get_by_role("button", name="Approve with a passkey")


def run_due() -> None:
    in_database(runs.run_due)


def test_from_an_invitation_to_a_token_that_two_others_approved(site: Site) -> None:
    others = in_database(lambda: make_team("ana", "cleo"))
    ana, ben, cleo = site.visit_as(others[0].user), accept_invitation(site, "ben"), site.visit_as(others[1].user)
    put_passkey(cleo, others[1])
    ana.open("/approvals/policy")
    expect(ana.page.get_by_role("heading", name="No policy is in force yet")).to_be_visible()
    ana.page.get_by_role("link", name="Draft the first policy").click()
    ana.page.get_by_label("Why?").fill("so that nobody acts alone")
    ana.page.get_by_role("button", name="Submit for approval").click()
    expect(ana.page.get_by_text("You asked for this and cannot approve it")).to_be_visible()
    draft = in_database(Operation.objects.get)
    for visit in (ben, cleo):
        visit.open("/approvals/")
        visit.page.get_by_role("link", name=re.compile("Put version 1")).click()
        approve_here(visit.page)
    run_due()
    expect(ana.page.locator("[data-live=runs]")).to_contain_text("Version 1 is in force")
    expect(ana.page.get_by_role("columnheader", name="Now")).to_be_visible()
    ana.page.reload()  # by now everything is as it was asked for
    expect(ana.page.get_by_role("columnheader", name="Asked for")).to_be_visible()
    expect(ana.page.get_by_role("columnheader", name="Now")).to_have_count(0)
    ana.open("/approvals/propose?operation=admin-token-mint")
    field = ana.page.locator("[name='param-name'], [name='param-']")
    field.fill("ci" if field.get_attribute("name") == "param-name" else '{"name": "ci"}')
    ana.page.get_by_label("Why?").fill("for the nightly build")
    ana.page.get_by_role("button", name="Preview").click()
    expect(ana.page.get_by_text("Nothing is sent yet")).to_be_visible()
    ana.page.get_by_role("button", name="Request approval").click()
    expect(ana.page.locator("#own-verdict")).to_contain_text("Same six words")
    expect(approve_button(ana.page)).to_be_hidden()
    operation = in_database(lambda: Operation.objects.exclude(pk=draft.pk).get())
    assert ana.page.locator("#own-words").text_content() == digest_words(bytes.fromhex(operation.digest))
    for number, visit in enumerate((ben, cleo), start=1):
        visit.open(path_of(operation))
        approve_here(visit.page)
        expect(ana.page.locator("[data-live=approvals]")).to_contain_text(f"{number} of 2 approvals")
    run_due()
    ana.page.get_by_role("button", name="Show the token").click()
    expect(ana.page.locator("#secret")).to_have_text(re.compile("^msa_"))
    ben.open("/sign-in/keys")
    ben.page.get_by_label("You: ben").click()
    press(ben.page, "Sign out", exact=True)
    press(ben.page, "Sign in with a passkey")
    ben.page.wait_for_url(lambda url: "/sign-in/" not in url)
    assert in_database(lambda: ApproverKey.objects.get(user__username="ben").last_used_at is not None)
    assert [visit.complaints for visit in (ana, ben, cleo)] == [[], [], []]


@pytest.fixture
def team(site: Site) -> Team:
    return in_database(lambda: make_governed("ana", "ben", "cleo"))


@pytest.fixture
def operation(team: Team) -> Operation:
    return in_database(lambda: propose_token(team[0]))


REMEMBER = """() => {
    const places = [...document.querySelectorAll("#signed .members, #reason, #server-words")];
    const before = places.map((place) => place.innerHTML);
    window.putBack = () => {
        places.forEach((place, index) => { place.innerHTML = before[index]; });
        document.getElementById("own-verdict").textContent = document.getElementById("approve-fault").textContent = "";
    };
    window.member = (name) => document.querySelector(`[data-member="${name}"]`);
}"""
CHANGES = (
    "member('requestedBy').textContent = 'cleo'",
    "member('targets').firstElementChild.textContent = 'another'",
    "member('params').textContent = '{\"name\": \"cd\"}'",
    'member(\'params\').textContent = \'{"name": "x", "name": "ci"}\'',  # the last of two is what a parser takes
    "member('notAfter').textContent += '0'",
    "member('maxUses').textContent = '1.0'",
    "member('params').hidden = true",
    "member('class').after(member('class').cloneNode(true))",
    "member('operation').append('\u202e')",
    "document.getElementById('reason').textContent = 'all is well'",
    "document.getElementById('server-words').textContent = 'babab-babab-babab-babab-babab-babab'",
)


SIGNABLE: list[dict[str, object]] = [
    {"b": 1, "a": [True, False, -5, 2**53 - 1], "A": {"10": "x", "9": "y", "_": {}}},
    {"text": 'Grüße, \u4e16\u754c \U0001f600 "quoted" back\\slash /', "empty": "", "none": [], "__proto__": "p"},
]
UNSIGNABLE = ["1.5", "null", "1e999", "9007199254740993", "-0.0", '"\\u202e"', '"\\u00a0"', '"\\u0007"', '{"\u00e9": 1}']
CANONICAL = """async (text) => {
    const { canonical } = await import("/static/governance/statement.js");
    try { return canonical(JSON.parse(text)); } catch (error) { return error.constructor.name; }
}"""


def test_a_page_signs_only_what_it_shows_and_writes_it_as_the_verifier_does(
    site: Site, team: Team, operation: Operation
) -> None:
    ben = site.visit_as(team[1].user)
    put_passkey(ben, team[1])
    posts: list[str] = []
    ben.page.on("request", lambda request: posts.append(request.url) if request.method == "POST" else None)
    ben.open(path_of(operation))
    expect(ben.page.locator("#own-verdict")).to_contain_text("Same six words")
    for value in SIGNABLE:
        assert ben.page.evaluate(CANONICAL, json.dumps(value)) == canonical(value).decode()
    assert [ben.page.evaluate(CANONICAL, text) for text in UNSIGNABLE] == ["Untrustworthy"] * len(UNSIGNABLE)
    for change in CHANGES:
        ben.page.evaluate(REMEMBER)
        ben.page.evaluate(change)
        approve_button(ben.page).click()
        expect(ben.page.locator("#own-verdict")).to_contain_text("Do not approve")
        expect(ben.page.locator("#approve-fault")).to_contain_text("Do not approve")
        ben.page.evaluate("window.putBack()")
    assert posts == []
    assert not in_database(operation.decisions.exists)
    assert ben.complaints == []


ONE_SCREEN: ViewportSize = {"width": 1280, "height": 800}
TAB_STOPS = 60
"""More than any of these pages has before its button."""


def propose_real_load(team: Team) -> Operation:
    node = make_box(Identity("attic"))
    replicas = [
        {"model": "old", "state": "loaded", "memory_mb": 4096, "active": 3},
        {"model": "m", "state": "loading", "memory_mb": 6144},
    ]
    NodePresence.objects.update(memory={"total_mb": 10_240, "used_mb": 8192}, replicas=replicas)
    return propose_load(team[0], node.runner_id, params={"modelId": "m", "evictModel": "old"}, reason="Research needs m.")


def find_bottom(page: Page, what: Locator) -> float:
    box = what.bounding_box()
    assert box is not None
    return float(box["y"] + box["height"] + page.evaluate("scrollY"))


def test_an_approval_fits_one_screen_and_two_of_a_phone_and_needs_no_mouse(site: Site, team: Team) -> None:
    load = in_database(lambda: propose_real_load(team))
    ben, cleo = site.visit_as(team[1].user), site.visit_as(team[2].user)
    put_passkey(ben, team[1])
    put_passkey(cleo, team[2])
    ben.page.set_viewport_size(ONE_SCREEN)
    ben.open(path_of(load))
    expect(ben.page.locator("#own-verdict")).to_contain_text("Same six words, computed here ✓")
    page, words = ben.page, in_database(lambda: digest_words(bytes.fromhex(load.digest)))
    parts = ["h1", "#reason", ".steps", ".membar", "#server-words", "[data-action=reject] summary", "[data-live=approvals]"]
    for part in parts:
        assert find_bottom(page, page.locator(part).first) <= ONE_SCREEN["height"], part
    assert page.locator("body").inner_text().count(words) == 1, "the six words stand there once"
    for _ in range(TAB_STOPS):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('[data-action=approve]') !== null"):
            break
    page.keyboard.press("Enter")
    expect(page.get_by_text("Your approval is recorded.")).to_be_visible()
    cleo.page.set_viewport_size(PHONE)
    cleo.open(path_of(load))
    expect(cleo.page.locator("#own-verdict")).to_contain_text("Same six words")
    assert find_bottom(cleo.page, approve_button(cleo.page)) <= 2 * PHONE["height"]
    approve_button(cleo.page).click()
    expect(cleo.page.get_by_text("Your approval is recorded.")).to_be_visible()
    assert ben.complaints == cleo.complaints == []


def test_the_steps_follow_a_run_and_leave_the_focus_where_it_is(site: Site, team: Team) -> None:
    load = in_database(lambda: propose_real_load(team))
    in_database(lambda: team.sign(load))
    run = in_database(lambda: OperationRun.objects.get(operation=load))
    run_due()
    ana = site.visit_as(team[0].user)
    ana.open(path_of(load))
    now = ana.page.locator("[aria-current=step]")
    expect(now).to_contain_text("Accepted")
    ana.page.locator(".proof > summary").focus()
    in_database(lambda: runs.note_progress(run_id=run.pk, stage="reading weights", fraction=0.62, eta_s=48.0))
    expect(now).to_contain_text("Reading weights: now 62 %")
    expect(now).to_contain_text("about 48 s left")
    message = "CUDA out of memory, 6 GiB wanted"
    in_database(lambda: runs.finish_run(run.pk, runs.RunEnd(RunEvent.FAIL, "out_of_memory", message)))
    expect(ana.page.locator(".step.is-wrong")).to_contain_text("Failed: Reading weights")
    expect(ana.page.locator(".said")).to_contain_text("CUDA out of memory")
    assert ana.page.evaluate("document.activeElement.closest('.proof') !== null")
    ana.page.locator(".said").get_by_role("link", name="Propose it again").click()
    expect(ana.page.locator("[data-preview-into]")).to_contain_text("Load m on attic")
    expect(ana.page.locator("[data-preview-into]")).to_contain_text("fits")
    assert ana.complaints == []


def test_a_policy_is_edited_with_its_reach_beside_it(site: Site, team: Team) -> None:
    ana = site.visit_as(team[0].user)
    ana.open("/approvals/policy/draft")
    shown = ana.page.locator("[data-preview-into]")
    expect(shown).to_contain_text("Nothing yet.")
    ana.page.get_by_label("A number and people for each operation").check()
    rule = ana.page.get_by_role("group", name="Flushing caches", exact=True)
    rule.get_by_role("spinbutton").fill("3")
    expect(ana.page.locator("#fault-cache-flush")).to_contain_text("Leave one person to spare: with 3 people at most 2")
    rule.get_by_role("spinbutton").fill("1")
    expect(ana.page.locator("#fault-cache-flush")).to_be_empty()
    expect(shown.get_by_role("row", name=re.compile("^Flushing caches"))).to_contain_text("needs 1 more now: needs 2 more")
    assert find_violations(ana.page, "html", is_dark_too=False) == []
    ana.page.get_by_label("Alone (solo)").check()
    expect(shown).to_contain_text("⚠ alone")
    assert ana.complaints == []


KNOCK = """(url) => new Promise((tell) => {
    const socket = new WebSocket(url);
    socket.onmessage = () => tell("let in");
    socket.onclose = (event) => tell(event.code);
})"""


def list_pages(team: Team, operation: Operation) -> list[str]:
    def fill() -> list[str]:
        make_box(Identity("attic"))
        done = propose_token(team[0], params={"name": "deploy"})
        team[1].approve(done)
        team[2].approve(done)
        runs.run_due()
        team[2].approve(operation)
        freezes.freeze(user=team[1].user, reason="strange loads in the attic")
        return [path_of(operation), path_of(done)]

    return [
        *in_database(fill), "/approvals/", "/approvals/history", "/approvals/propose", "/approvals/policy", LOAD_FORM,
        "/approvals/policy/draft", "/approvals/freeze", f"/approvals/op_{'0' * 32}/",
    ]  # fmt: skip


def test_pages_fit_a_phone_and_have_no_serious_barrier(site: Site, team: Team, operation: Operation) -> None:
    stranger, ben = site.visit(), site.visit_as(team[1].user)
    stranger.open(path_of(operation))
    assert "/sign-in/?next=/approvals/" in stranger.page.url
    assert (
        stranger.page.evaluate(KNOCK, f"{site.url.replace('http', 'ws')}/ws/operations/{operation.pk}") == CloseCode.SIGNED_OUT
    )
    paths = list_pages(team, operation)
    # Between them these have every colour of the style sheet: states, impacts, proofs, runs, tables, forms, notes.
    dark = {paths[0], paths[1], "/approvals/policy", LOAD_FORM}
    for path in paths:
        ben.page.set_viewport_size(DESK)
        ben.open(path)
        assert find_violations(ben.page, "html", is_dark_too=path in dark) == []
        ben.page.set_viewport_size(PHONE)
        assert ben.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path


def test_the_offline_page_reads_a_statement_from_a_disk_and_from_the_server(site: Site) -> None:
    page = site.visit().page
    statement = make_statement(make_policy(make_people(3)))
    for where in (
        (ROOT / "governance/static/governance/offline.html").as_uri(),
        f"{site.url}/static/governance/offline.html",
    ):
        page.goto(where)
        page.get_by_label("Statement").fill(encode_bytes(statement.raw))
        expect(page.locator(".words")).to_have_text(digest_words(statement.digest))
        expect(page.get_by_role("row", name="params.modelId")).to_contain_text("org/model")
        expect(page.get_by_role("row", name="digest", exact=False).last).to_contain_text(statement.digest.hex())
        page.get_by_label("Statement").fill(encode_bytes(statement.raw.replace(b",", b", ", 1)))
        expect(page.locator(".bad")).to_contain_text("Do not sign this")
        expect(page.locator(".words")).to_have_count(0)

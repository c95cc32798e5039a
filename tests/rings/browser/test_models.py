"""Models in a real browser: from the catalogue to a first question in few clicks, and pages that a program finds in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.utils import timezone
from playwright.sync_api import Locator, Page, expect

from core.models import User
from gateway.models import Model
from gateway.routing import Target
from gateway.services.models import allow_model, create_alias
from governance.models import Operation, OperationRun
from governance.operations import runs
from governance.states import RunState
from nodes.models import NodePresence
from tests.fakes.control_process import ServerProcess
from tests.fakes.governed_team import Identity, Team, make_box, make_due, make_governed, open_session
from tests.fakes.nodes import ACTOR, make_node, make_presence
from tests.rings.browser.conftest import AXE, Chromium, Visit, in_database, open_visit

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]
QWEN = "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf"


@pytest.fixture
def team(control: ServerProcess, transactional_db: None, settings: Any) -> Team:
    settings.PUBLIC_URL = control.public_url
    return in_database(make_governed)


@pytest.fixture
def asker(team: Team, chromium: Chromium, control: ServerProcess) -> Iterator[Visit]:
    """The browser of the first of the team, who may see and change everything."""

    def sign_in() -> str:
        user = User.objects.get(pk=team[0].user.pk)
        user.is_superuser = True
        user.save(update_fields=["is_superuser"])
        return open_session(user).session.session_key or ""

    with chromium.lend() as browser:
        visit = open_visit(browser, control.public_url)
        cookie: Any = {"name": django_settings.SESSION_COOKIE_NAME, "value": in_database(sign_in), "url": visit.url}
        visit.page.context.add_cookies([cookie])
        yield visit
        visit.page.context.close()
        assert visit.complaints == []


def make_rig() -> Identity:
    rig = Identity()
    make_box(rig, age_s=-3600.0, keeps_models=True)
    NodePresence.objects.update(memory={"kind": "gpu", "total_mb": 24576, "used_mb": 4096})
    return rig


def run_load(operation: Operation, **values: Any) -> None:
    OperationRun.objects.filter(operation=operation).update(**values)


def find_all(page: Page) -> list[str]:
    """Return whatever axe-core finds in the whole page, of any level."""
    page.wait_for_load_state()
    page.evaluate(AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations'], preload: false})")["violations"]
    return [f"{page.url}: {one['id']} {one['impact']} {[node['target'] for node in one['nodes']][:3]}" for one in found]


def test_a_model_of_the_catalogue_is_asked_for_in_four_clicks_and_followed_to_its_first_question(
    asker: Visit, team: Team
) -> None:
    in_database(make_rig)
    page, clicks = asker.page, list[str]()

    def click(what: Locator) -> None:
        clicks.append(what.inner_text().split("\n")[-1])
        what.click()

    asker.open("/admin/")
    click(page.get_by_role("link", name="Models").first)
    click(page.get_by_role("navigation", name="Pages of Models").get_by_role("link", name="Catalogue"))
    click(page.get_by_role("link", name="Deploy Qwen3 8B as Q4_K_M"))
    expect(page.get_by_role("radio", name="rig fits")).to_be_checked()
    click(page.get_by_role("button", name="Request approval"))
    loads = page.locator(".mst-loads")
    expect(loads).to_contain_text("waits for approval")
    assert clicks == ["Models", "Catalogue", "Deploy", "Request approval"]
    page.evaluate("window.isSamePage = true")
    operation = in_database(lambda: Operation.objects.get(operation="model-load"))

    def approve() -> None:
        team.sign(operation)
        make_due(operation)
        runs.run_due()
        run_load(operation, state=RunState.EXECUTING.value, stage="downloading (1.0 of 2.0 MB)", fraction=0.5, eta_s=9.0)

    in_database(approve)
    expect(loads).to_contain_text("downloading (1.0 of 2.0 MB) · about 9 s left")
    expect(loads.get_by_role("progressbar")).to_have_attribute("value", "50")
    assert find_all(page) == []
    done = {"state": RunState.SUCCEEDED.value, "ended_at": timezone.now(), "result": {"modelId": QWEN}}
    in_database(lambda: run_load(operation, **done))
    expect(loads.get_by_role("link", name="Allow it, so that clients may ask it")).to_be_visible()
    in_database(lambda: allow_model(name=QWEN, actor=ACTOR))
    expect(loads.get_by_role("link", name="Ask it something")).to_be_visible()
    assert page.evaluate("window.isSamePage"), "all of it without a reload"


def test_pages_of_models_are_in_order_for_programs_and_narrow_screens(asker: Visit) -> None:
    def make_rows() -> Model:
        make_rig()
        make_presence(make_node("attic"), age_s=-3600.0, available_models=["shelf"], replicas=[
            {"model": "big", "state": "loading", "progress": 0.43}])  # fmt: skip
        create_alias(name="gpt-4o", targets=[Target(allow_model(name="m", actor=ACTOR).name)], actor=ACTOR)
        return Model.objects.get(name="m")

    row = in_database(make_rows)
    tabs = ("overview", "limits", "routing", "compatibility", "code")
    pages = ["", "catalogue/?q=qwen3", f"load/?model={QWEN}", *(f"{row.pk}/change/?tab={tab}" for tab in tabs)]
    problems = []
    for path in pages:
        for scheme, width in (("light", 1280), ("dark", 1280), ("light", 320)):
            asker.page.set_viewport_size({"width": width, "height": 900})
            asker.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]  # one of the two
            asker.open(f"/admin/gateway/model/{path}")
            expect(asker.page.locator("#content")).to_be_visible()
            over = asker.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            problems += [f"{path} {width}: {over} px too wide"] if over > 0 else []
            problems += [f"{scheme} {width} {one}" for one in find_all(asker.page)]
    assert problems == []

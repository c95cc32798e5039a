"""``./muster up``: the line that it prints streams an answer, an approval loads a model, pages open, a drain empties the node.

Each is proven in detail elsewhere. Here is shown that the parts, as they are shipped, work together.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from benchmarks.govcheck.fleet import MODEL, Fleet, open_fleet
from tools.browsers import find_chromium

pytestmark = pytest.mark.timeout(300)
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """A running installation with its own node, before anybody may approve anything."""
    with open_fleet() as running:
        yield running


@pytest.fixture
def page() -> Iterator[Page]:
    """A page of a real browser; nothing is downloaded."""
    program = find_chromium()
    if not program:
        pytest.skip("there is no Chromium on this machine; ./muster test installs one")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"]).new_page()
        opened.set_default_timeout(30_000)
        expect.set_options(timeout=30_000)
        yield opened
    asyncio._set_running_loop(None)  # Playwright leaves its own behind in this thread, where Django's ORM would refuse to work


def test_the_lines_that_up_prints_stream_an_answer_when_pasted(fleet: Fleet) -> None:
    said = (fleet.directory / "up.log").read_text().partition("Try it:")[2]
    lines = [line.strip() for line in said.splitlines() if line.strip().startswith(("export ", "curl "))]
    assert len(lines) == 2, said
    answer = subprocess.run(["sh", "-ec", "\n".join(lines)], cwd="/", capture_output=True, text=True, timeout=60, check=True)
    events = [line for line in answer.stdout.splitlines() if line.startswith("data: ")]
    assert len(events) > 3
    assert events[-1] == "data: [DONE]"
    look = "SELECT state FROM gateway_requestrecord WHERE state = 'completed'"
    assert fleet.wait(lambda: fleet.query(look), within_s=WITHIN_S, what="the record is complete") == [("completed",)]


def test_the_pages_open_and_show_the_node_the_model_and_the_request(fleet: Fleet, page: Page) -> None:
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("response", lambda reply: complaints.append(f"{reply.status} {reply.url}") if reply.status >= 400 else None)
    address = fleet.ready["public_url"]
    page.goto(f"{address}/sign-in/?next=/admin/")
    page.get_by_label("Username").fill("admin")
    page.get_by_label("Password").fill(fleet.ready["admin"]["password"])
    page.get_by_role("button", name="Sign in", exact=True).click()
    expect(page.locator("#overview")).to_contain_text("1 of 1")
    page.goto(f"{address}/admin/nodes/node/")
    expect(page.locator("#result_list")).to_contain_text("local")
    page.goto(f"{address}/admin/gateway/requestrecord/")
    expect(page.locator("#result_list")).to_contain_text(fleet.ready["model"])
    page.goto(f"{address}/approvals/")
    expect(page.locator("h1").first).to_be_visible()
    assert complaints == []


def test_two_signatures_load_a_model_that_answers_and_one_drains_its_node(fleet: Fleet) -> None:
    fleet.enrol()
    (loaded,) = fleet.run("model-load", modelId=MODEL)
    assert (loaded["state"], loaded["attempt"]) == ("succeeded", 1)
    fleet.wait(lambda: fleet.chat(MODEL).status_code == 200 or None, within_s=WITHIN_S, what="the model answers")
    asked = fleet.propose("node-drain", timeout_s=5)
    fleet.approve(asked, fleet.people[2:])
    (drained,) = fleet.await_runs(asked["op_id"])
    assert drained["state"] == "succeeded"
    refused = fleet.wait(lambda: fleet.chat(MODEL).json().get("error"), within_s=WITHIN_S, what="the gateway has heard of it")
    assert refused["code"] == "NODE_DRAINING"

"""A real Chromium against the control plane's real process.

Playwright keeps an event loop in the thread of the test while it has the browser. So rows are made and read by
``in_database``, in a thread without a loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from threading import Thread
from typing import Any, TypeVar

import pytest
from django.db import connection
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Dialog,
    Page,
    Playwright,
    ViewportSize,
    expect,
    sync_playwright,
)
from pytest_django import DjangoDbBlocker

from core.models import User
from tests.fakes.control_process import ServerProcess, free_port, serve_control, serve_gateway
from tests.fakes.scripted_box import ScriptedBox
from tools.browsers import find_chromium
from wire.bridge import ReplicaInfo

expect.set_options(timeout=30_000)

Result = TypeVar("Result")
PASSWORD = "a password for tests only"
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
_NO_COMPLAINTS = ("pubKeyCredParams", "WebSocket is closed before the connection is established")
"""Chromium would have RSA keys offered as well, for old devices; no verifier of ours reads them. And it notes that a page was
left while its socket was still being opened."""
DESK: ViewportSize = {"width": 1280, "height": 900}
REPORTER = """
document.addEventListener("securitypolicyviolation", (event) => {
    console.error(`CSP violation: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});
"""


@dataclass
class Visit:
    """One operator's browser. ``complaints`` is everything a healthy page never says; ``awaited``: what a test provokes."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    awaited: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        self.page.goto(self.url + path)

    def sign_in(self, name: str = "ada") -> None:
        self.open("/sign-in/?next=/admin/")
        self.page.get_by_label("Username").fill(name)
        self.page.get_by_label("Password").fill(PASSWORD)
        self.page.get_by_role("button", name="Sign in", exact=True).click()
        self.page.wait_for_selector("#overview")

    def refuse_dialog(self, dialog: Dialog) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def note_console(self, message: ConsoleMessage) -> None:
        known = (*_NO_COMPLAINTS, *self.awaited)
        if message.type in {"error", "warning"} and not any(words in message.text for words in known):
            self.complaints.append(f"{message.type}: {message.text}")


@dataclass
class Chromium:
    """The one browser of all tests of this folder, which have it one after the other."""

    playwright: Playwright
    program: str
    loop: asyncio.AbstractEventLoop
    started: Browser | None = None

    @contextmanager
    def lend(self) -> Iterator[Browser]:
        """Lend the browser to one test, and close the windows that the test left open. A browser that died is replaced.

        Only meanwhile does Playwright's loop count as the one that runs in this thread: beside a loop that runs, Django refuses
        its ORM and no other loop can be started.
        """
        asyncio._set_running_loop(self.loop)
        try:
            if self.started is None or not self.started.is_connected():
                self.started = self.playwright.chromium.launch(executable_path=self.program, args=["--no-sandbox"])
            yield self.started
            for context in self.started.contexts:
                context.close()
        finally:
            asyncio._set_running_loop(None)


@pytest.fixture(scope="package")
def chromium() -> Iterator[Chromium]:
    """Chromium of the system: nothing is downloaded."""
    program = find_chromium()
    if not program:
        pytest.skip("there is no Chromium on this machine; ./muster test installs one")
    with sync_playwright() as playwright:
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        shared = Chromium(playwright, program, loop)
        yield shared
        asyncio._set_running_loop(loop)
        if shared.started is not None:
            shared.started.close()


@pytest.fixture
def browser(chromium: Chromium, control: ServerProcess, transactional_db: None) -> Iterator[Browser]:
    User.objects.create_superuser("ada", password=PASSWORD)
    with chromium.lend() as lent:
        yield lent


class NodeThread:
    """A scripted node on an event loop of its own: Playwright keeps one in the thread of the test."""

    def __init__(
        self, gateway: ServerProcess, secret: str, model: str, *, replicas: Sequence[ReplicaInfo] | None = None
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        url = f"ws://127.0.0.1:{gateway.port}/v1/worker/connect"
        dialled = ScriptedBox.dial(url, secret=secret, name="attic", models=[model], max_concurrent=4, replicas=replicas)
        self.box = self.run(dialled)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def die(self) -> None:
        """Vanish as a killed process does."""
        self._loop.call_soon_threadsafe(self.box.die)

    def close(self) -> None:
        self.run(self.box.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


def press(page: Page, name: str, *, exact: bool = False) -> None:
    """Press a button that a script of its page serves: a page that was come to by a click shows it before that has run."""
    button = page.get_by_role("button", name=name, exact=exact)
    expect(button).to_be_visible()
    page.wait_for_load_state()
    button.click()


def find_violations(
    page: Page, part: str = "#content", *, is_dark_too: bool = True, impacts: Sequence[str] = ("serious", "critical")
) -> list[str]:
    """Return what axe-core finds in a part of the page, of such impacts, in the light, and of colours in the dark."""
    page.wait_for_load_state()
    page.evaluate(AXE)
    found = []
    for scheme, rules in (("light", "{}"), ("dark", "{runOnly: ['color-contrast']}"))[: 1 + is_dark_too]:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        page.evaluate(f"document.documentElement.classList.toggle('dark', {str(scheme == 'dark').lower()})")
        page.evaluate("document.getAnimations().forEach((change) => change.cancel())")  # colours half-way are nobody's
        run = f"axe.run('{part}', {{...{rules}, resultTypes: ['violations'], preload: false}})"
        found += [
            f"{page.url} {scheme}: {violation['id']} {node['target']} {node['failureSummary']}"
            for violation in page.evaluate(run)["violations"]
            for node in violation["nodes"]
            if violation["impact"] in impacts
        ]
    return found


def in_database(work: Callable[[], Result]) -> Result:
    """Return what ``work`` returns. It may use the ORM and the services."""

    def run() -> Result:
        try:
            return work()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result(30)


@pytest.fixture(scope="package")
def gateway_port() -> int:
    """Where the gateway will listen, once a test needs one: the control plane is told before."""
    return free_port()


@pytest.fixture(scope="package")
def control(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker, tmp_path_factory: pytest.TempPathFactory, gateway_port: int
) -> Iterator[ServerProcess]:
    """The control plane, for all tests of this folder: it keeps nothing between requests."""
    log = tmp_path_factory.mktemp("control") / "control.log"
    env = {"MUSTER_PLAYGROUND_GATEWAY_URL": f"http://127.0.0.1:{gateway_port}"}
    with django_db_blocker.unblock(), serve_control(log, env=env) as server:
        yield server


@pytest.fixture(scope="package")
def gateway(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker, tmp_path_factory: pytest.TempPathFactory, gateway_port: int
) -> Iterator[ServerProcess]:
    """A gateway, for all tests of this folder: nodes dial it, and are gone when their test is over."""
    log = tmp_path_factory.mktemp("gateway") / "gateway.log"
    env = {"MUSTER_DIRECT_ALLOW_LOOPBACK": "true"}  # for nodes that take tickets on this machine
    with django_db_blocker.unblock(), serve_gateway(log, port=gateway_port, env=env) as server:
        yield server


def open_visit(browser: Browser, url: str, *, ignored: str | None = None) -> Visit:
    """Open a browser of its own: other cookies, another device. What it warns of is noted, but for ``ignored``."""
    context = browser.new_context(viewport=DESK, base_url=url)
    context.add_init_script(REPORTER)
    page = context.new_page()
    page.set_default_timeout(30_000)
    visiting = Visit(page, url)
    page.on("console", lambda message: None if ignored and ignored in message.text else visiting.note_console(message))
    page.on("pageerror", lambda error: visiting.complaints.append(f"page error: {error}"))
    page.on("dialog", visiting.refuse_dialog)
    return visiting


@pytest.fixture
def visit(browser: Browser, control: ServerProcess) -> Iterator[Visit]:
    visiting = open_visit(browser, control.url)
    yield visiting
    visiting.page.context.close()
    assert visiting.complaints == []

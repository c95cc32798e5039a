"""A browser on an installation of the demo, signed in with the passkey that the demo made: for pictures, checks and timings."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from controlplane.launcher.console import LauncherError, progress
from controlplane.launcher.environment import ROOT
from controlplane.launcher.files import read_json
from controlplane.launcher.installation import installation_path
from tools.browsers import ensure_chromium

DESK, PHONE = (1440, 900), (390, 844)
_PLAYS = "The demo plays"
_PATIENCE_MS = 120_000
_PATHS = """(links) => links.map((link) => new URL(link.href))
    .filter((url) => url.origin === location.origin).map((url) => url.pathname)"""


@dataclass(frozen=True, slots=True)
class Demo:
    """An installation of the demo that plays. ``url``: of its pages, without a slash at the end."""

    data: Path
    url: str
    gateway_url: str

    @property
    def passkey(self) -> dict[str, str]:
        found = read_json(self.data / "demo-fleet.json").get("passkey")
        if not isinstance(found, dict):
            raise LauncherError(f"{self.data} is no installation of the demo: start it with ./muster demo fleet --data DIR")
        return {str(name): str(value) for name, value in found.items()}


@contextmanager
def open_demo(data: Path, *, requests: float = 40.0) -> Iterator[Demo]:
    """Return the demo that plays on ``data``, started for the block unless it runs. Raises LauncherError."""
    running = installation_path(data).exists() and (data / "demo-fleet.json").exists()
    process = None if running else _start(data, requests)
    try:
        described = read_json(installation_path(data))
        yield Demo(data, str(described["public_url"]).rstrip("/"), str(described["gateway_url"]))
    finally:
        if process is not None:
            process.send_signal(signal.SIGTERM)
            process.communicate()  # what it still says is read, or it could not end


def _start(data: Path, requests: float) -> subprocess.Popen[str]:
    progress(f"Starting the demo on {data}")
    words = ["demo", "fleet", "--data", str(data), "--port", "0", "--gateway-port", "0", "--requests", str(requests)]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "muster"), *words], stdout=subprocess.PIPE, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line.rstrip())
        if line.startswith(_PLAYS):
            return process
    process.communicate()
    raise LauncherError(f"the demo did not start: {' / '.join(said[-3:])}")


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Return a Chromium for the block. Raises LauncherError when there is none."""
    program = ensure_chromium()
    if not program:
        raise LauncherError("there is no Chromium, and none could be installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser: Browser, demo: Demo, *, size: tuple[int, int] = DESK, is_dark: bool = False) -> Page:
    """Return a page in a window of its own, signed in as the administrator, by passkey."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if is_dark else "light", base_url=demo.url,
        locale="en-GB", timezone_id="UTC", reduced_motion="reduce", has_touch=size[0] < 600,
    )  # fmt: skip
    context.set_default_timeout(_PATIENCE_MS)
    context.set_default_navigation_timeout(_PATIENCE_MS)
    page = context.new_page()
    add_passkey(page, demo)
    page.goto("/sign-in/?next=/admin/", wait_until="domcontentloaded")
    page.get_by_role("button", name="passkey").first.click()
    page.wait_for_url(lambda url: "/sign-in" not in url)
    return page


def add_passkey(page: Page, demo: Demo) -> None:
    """Put the administrator's passkey into a virtual authenticator of this page (Chrome DevTools Protocol, WebAuthn)."""
    kept = demo.passkey
    tools = page.context.new_cdp_session(page)
    tools.send("WebAuthn.enable")
    options = {
        "protocol": "ctap2", "transport": "internal", "hasResidentKey": True, "hasUserVerification": True,
        "isUserVerified": True, "automaticPresenceSimulation": True,
    }  # fmt: skip
    made = tools.send("WebAuthn.addVirtualAuthenticator", {"options": options})
    credential = {
        "credentialId": _standard(kept["credential_id"]), "isResidentCredential": True, "rpId": "localhost",
        "privateKey": _standard(kept["private_key"]), "userHandle": base64.b64encode(kept["user"].encode()).decode(),
        "signCount": 1,
    }  # fmt: skip
    tools.send("WebAuthn.addCredential", {"authenticatorId": made["authenticatorId"], "credential": credential})


def _standard(text: str) -> str:
    return base64.b64encode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))).decode()


def list_pages(page: Page) -> list[tuple[str, str]]:
    """Return name and path of every page that the navigation leads to: each entry, and each tab of it."""
    found: dict[str, str] = {}
    page.goto("/admin/", wait_until="domcontentloaded")
    for path in _read_links(page, "nav a[href], aside a[href], #nav-sidebar a[href]"):
        page.goto(path, wait_until="domcontentloaded")
        for other in (path, *_read_links(page, ".mst-tabs a[href], nav[aria-label] a[href]")):
            found.setdefault(other, other)
    return [(name, path) for path, name in found.items()]


def _read_links(page: Page, selector: str) -> list[str]:
    paths = page.eval_on_selector_all(selector, _PATHS)
    return list(dict.fromkeys(path for path in paths if path.startswith(("/admin/", "/approvals/")) and "logout" not in path))

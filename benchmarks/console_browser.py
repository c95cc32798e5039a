"""What ``./muster bench console --browser`` does: axe and Lighthouse over every page, and the flows that people time.

Lighthouse is no dependency: npm fetches it into a cache of the user's, where npm is there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from playwright.sync_api import Browser, Error, Page, sync_playwright

from benchmarks.errors import BenchmarkError
from controlplane.launcher.console import LauncherError
from tools.browsers import find_chromium
from tools.demo_browser import DESK, PHONE, Demo, add_passkey, list_pages, open_browser, open_demo, open_page

ROOT = Path(__file__).resolve().parent.parent
LIGHTHOUSE = "lighthouse@13"
ACCESSIBILITY, BEST_PRACTICES = 100, 95
"""Floors of Lighthouse's scores. That of axe is no violation of any rule, those of best practice included."""
_LOOKS = (("wide", DESK, False), ("phone", PHONE, False), ("dark", DESK, True))
_ROWS = "#result_list th a, main table tbody a[href*='/change/'], main a[href^='/approvals/0'], main a[href^='/approvals/op_']"


def look(wanted: Sequence[str], data: Path | None) -> int:
    """Do what is wanted, of axe, lighthouse and flows, on the demo on ``data``; return the exit status."""
    missed: list[str] = []
    try:
        with (
            tempfile.TemporaryDirectory(prefix="muster-console-") as folder,
            open_demo(data or Path(folder) / "data") as demo,
        ):
            with open_browser() as browser:
                if "axe" in wanted:
                    missed += check_axe(browser, demo)
                if "flows" in wanted:
                    missed += time_flows(browser, demo)
                paths = list_paths(open_page(browser, demo)) if "lighthouse" in wanted else []
            if paths:  # it starts a Chromium of its own, and Playwright runs one at a time
                missed += check_lighthouse(demo, paths)
    except (LauncherError, BenchmarkError) as error:
        print(f"muster bench: {error}", file=sys.stderr)
        return 2
    print("\n" + ("\n".join(f"MISSED  {one}" for one in missed) or "every floor is met"))
    return 1 if missed else 0


def list_paths(page: Page) -> list[str]:
    """Return the path of every page that the navigation leads to, and of the page of one row of each."""
    found: dict[str, None] = {}
    for _, path in list_pages(page):
        found.setdefault(path)
        page.goto(path, wait_until="domcontentloaded")
        rows = page.eval_on_selector_all(_ROWS, "links => links.map((link) => new URL(link.href).pathname)")
        for row in (one for one in rows if one.startswith(path) and one != path):
            found.setdefault(row)
            break
    return list(found)


# axe


def check_axe(browser: Browser, demo: Demo) -> list[str]:
    """Print how many violations axe finds on each page, wide, on a phone and in the dark; return what they are."""
    script = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    found: dict[str, dict[str, list[str]]] = {}
    for name, size, is_dark in _LOOKS:
        page = open_page(browser, demo, size=size, is_dark=is_dark)
        for path in list(found) or list_paths(page):
            found.setdefault(path, {})[name] = _find_violations(page, path, script)
            print(f"  {name:6} {len(found[path][name]):3}  {path}", flush=True)
        page.context.close()
    print(f"\naxe, violations of any level\n{'':70}" + "".join(f"{name:>8}" for name, _, _ in _LOOKS))
    for path, by_look in found.items():
        print(f"{path:70}" + "".join(f"{len(by_look.get(name, [])):8}" for name, _, _ in _LOOKS), flush=True)
    return [f"axe {path} {name}: {one}" for path, by_look in found.items() for name, all_ in by_look.items() for one in all_]


def _find_violations(page: Page, path: str, script: str) -> list[str]:
    try:
        page.goto(path, wait_until="domcontentloaded")
        page.wait_for_timeout(500)
        page.evaluate(script)
        violations = page.evaluate("axe.run(document, {resultTypes: ['violations'], preload: false})")["violations"]
        too_wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    except Error as error:
        return [str(error).splitlines()[0]]
    found = [f"{one['id']} ({one['impact']}): {node['target'][-1]}" for one in violations for node in one["nodes"][:3]]
    return [*found, *(["the page is wider than its window"] if too_wide else [])]


# Lighthouse


def check_lighthouse(demo: Demo, paths: Sequence[str]) -> list[str]:
    """Print Lighthouse's scores of each page; return those that miss their floor."""
    program = _find_lighthouse()
    if program is None:
        return ["Lighthouse was not run: npm is not there. Install Node.js, which brings it, and try again"]
    missed = []
    print(f"\nLighthouse, desktop\n{'':70}{'accessibility':>15}{'best practices':>16}", flush=True)
    with _signed_in_chromium(demo) as port:
        for path in paths:
            audited = _audit(program, f"{demo.url}{path}", port)
            if audited is None:
                missed.append(f"Lighthouse {path}: it gave no result")
                continue
            scores, failed = audited
            print(f"{path:70}{scores['accessibility']:15}{scores['best-practices']:16}", flush=True)
            for name, floor in (("accessibility", ACCESSIBILITY), ("best-practices", BEST_PRACTICES)):
                if scores[name] < floor:
                    missed.append(f"Lighthouse {path}: {name} {scores[name]}, at least {floor}: {', '.join(failed[name])}")
    return missed


def _find_lighthouse() -> Path | None:
    npm = shutil.which("npm")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "muster-lighthouse"
    program = cache / "node_modules" / ".bin" / "lighthouse"
    if npm is None:
        return None
    if not program.exists():
        print(f"fetching {LIGHTHOUSE} into {cache}", flush=True)
        command = [npm, "install", "--prefix", str(cache), "--no-audit", "--no-fund", "--loglevel=error", LIGHTHOUSE]
        if subprocess.run(command, check=False).returncode:
            raise BenchmarkError(f"npm could not fetch {LIGHTHOUSE}; what it said stands above")
    return program


@contextmanager
def _signed_in_chromium(demo: Demo) -> Iterator[int]:
    """Return the port at which a Chromium takes commands, whose cookies are those of the administrator."""
    with tempfile.TemporaryDirectory(prefix="muster-chromium-") as profile:
        options = ["--headless=new", "--no-sandbox", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
        chromium = subprocess.Popen([find_chromium(), *options], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            told = Path(profile) / "DevToolsActivePort"
            until = time.monotonic() + 30
            while not told.exists() or not told.read_text().strip():
                if time.monotonic() > until:
                    raise BenchmarkError("Chromium did not start")
                time.sleep(0.1)
            port = int(told.read_text().split()[0])
            with sync_playwright() as playwright:
                browser = playwright.chromium.connect_over_cdp(f"http://127.0.0.1:{port}")
                page = browser.contexts[0].new_page()
                add_passkey(page, demo)
                page.goto(f"{demo.url}/sign-in/?next=/admin/")
                page.get_by_role("button", name="passkey").first.click()
                page.wait_for_url(lambda url: "/sign-in" not in url)
                page.close()
            yield port
        finally:
            chromium.terminate()
            chromium.wait()


def _audit(program: Path, url: str, port: int) -> tuple[dict[str, int], dict[str, list[str]]] | None:
    command = [
        str(program), url, f"--port={port}", "--preset=desktop", "--only-categories=accessibility,best-practices",
        "--output=json", "--quiet", "--disable-storage-reset",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return None
    scores, failed = {}, {}
    for name, category in report["categories"].items():
        scores[name] = round(100 * (category["score"] or 0))
        failed[name] = [
            one["id"]
            for one in category["auditRefs"]
            if one["weight"] and report["audits"][one["id"]]["score"] not in {None, 1}
        ]
    return scores, failed


# Flows


@dataclass
class Walk:
    """One person's way through the pages: every click is counted, and typing is not."""

    page: Page
    demo: Demo
    clicks: int = 0
    began: float = field(default_factory=time.monotonic)

    def press(self, words: str, *, within: str = "body") -> None:
        """Click what says ``words``."""
        self.page.locator(within).locator("a:visible, button:visible, summary:visible").filter(has_text=words).first.click()
        self.clicks += 1
        self.page.wait_for_load_state()

    def choose(self, selector: str) -> None:
        self.page.locator(selector).first.click()
        self.clicks += 1
        self.page.wait_for_load_state()

    def see(self, words: str) -> None:
        self.page.get_by_text(words).first.wait_for(state="visible")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


@dataclass(frozen=True, slots=True)
class Flow:
    """A flow and its target: at most so many clicks and seconds, from Overview."""

    name: str
    clicks: int
    seconds: float
    go: Callable[[Walk], None]


def _make_key(walk: Walk) -> None:
    walk.press("Access", within="nav")
    walk.choose("a[href$='/apikey/add/']:visible")
    walk.page.locator("main [name=name]").first.fill(f"timed {int(time.time())}")
    walk.page.locator("main select[name=tenant]").select_option(label="support-bot")
    walk.press("Create", within="main")
    walk.press("Send", within="main")
    walk.see("You asked")


def _find_words(walk: Walk) -> None:
    walk.choose("main a[href*='requestrecord'][href*='state=']")
    walk.choose("main tbody tr:has-text('the engine failed') a[href*='/requestrecord/']")
    walk.see("The engine said")


def _ask_reboot(walk: Walk) -> None:
    walk.choose("main a[href*='/nodes/node/'][href$='/change/']:text-is('gaia')")
    walk.see("May I power it off")


def _deploy(walk: Walk) -> None:
    walk.press("Models", within="nav")
    walk.press("Catalogue")
    walk.press("Deploy", within="main")
    walk.press("Request approval", within="main")
    operation = walk.page.locator("main a[href^='/approvals/']").first
    operation.wait_for()
    op_id = str(operation.get_attribute("href")).strip("/").rpartition("/")[2]
    manage = [sys.executable, str(ROOT / "muster"), "manage", "--data", str(walk.demo.data), "demo_fleet"]
    subprocess.run([*manage, f"--data={walk.demo.data}", "--sign", op_id], check=True, stdout=subprocess.DEVNULL)
    walk.page.get_by_text("clients may ask it").or_(walk.page.get_by_text("Ask it something")).first.wait_for(timeout=60_000)


def _add_node(walk: Walk) -> None:
    walk.press("Nodes", within="nav")
    walk.press("Add node", within="main")
    walk.page.locator("main [name=name]").first.fill(f"timed-{int(time.time())}")
    walk.press("Show the command", within="main")
    walk.see("What the node has reached")
    lines = walk.page.locator("main").inner_text().splitlines()
    command = next(line for line in lines if line.startswith("./muster node ")).split()
    with tempfile.TemporaryDirectory(prefix="muster-node-") as folder:
        options = [*command[1 : command.index("--data")], "--data", folder]
        node = subprocess.Popen(
            [sys.executable, str(ROOT / "muster"), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            walk.page.get_by_text("Waiting for the node to connect").first.wait_for(state="hidden", timeout=90_000)
        finally:
            node.terminate()
            node.wait()


FLOWS = (
    Flow("node ready", 3, 90, _add_node),
    Flow("key to first answer", 4, 60, _make_key),
    Flow("failed request to the engine's words", 2, 60, _find_words),
    Flow("may I reboot this node", 2, 60, _ask_reboot),
    Flow("catalogue load, with one approval", 4, 120, _deploy),
)


def time_flows(browser: Browser, demo: Demo) -> list[str]:
    """Print clicks and seconds of each flow; return those that miss their target or could not be walked."""
    missed = []
    print(f"\nflows, from Overview\n{'':40}{'clicks':>8}{'target':>8}{'seconds':>9}{'target':>8}", flush=True)
    for flow in FLOWS:
        page = open_page(browser, demo)
        page.set_default_timeout(30_000)
        page.goto("/admin/")
        walk = Walk(page, demo)
        try:
            flow.go(walk)
        except (Error, StopIteration, subprocess.CalledProcessError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            missed.append(f"flow {flow.name}: stopped after {walk.clicks} clicks at {page.url}: {why}")
            print(f"{flow.name:40}{'could not be walked':>33}", flush=True)
        else:
            print(f"{flow.name:40}{walk.clicks:8}{flow.clicks:8}{walk.seconds:9.1f}{flow.seconds:8.0f}", flush=True)
            if walk.clicks > flow.clicks or walk.seconds > flow.seconds:
                missed.append(f"flow {flow.name}: {walk.clicks} clicks, {walk.seconds:.0f} s")
        page.context.close()
    return missed

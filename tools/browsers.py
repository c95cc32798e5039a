"""A Chromium for the tests of the pages: one that is there, else one installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from controlplane.launcher.console import complain, progress

VARIABLE = "MUSTER_TEST_CHROMIUM"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MAC_PATHS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
_PLAYWRIGHT_PATTERNS = ("chromium-*/chrome-linux*/chrome", "chromium-*/chrome-mac*/Chromium.app/Contents/MacOS/Chromium")


def find_chromium() -> str:
    """Return the path of a Chromium or Chrome on this machine, or an empty text."""
    named = os.environ.get(VARIABLE, "")
    if named:
        return named
    for name in _NAMES:
        if found := shutil.which(name):
            return found
    for path in _MAC_PATHS:
        if os.access(path, os.X_OK):
            return path
    for base in _playwright_homes():
        for pattern in _PLAYWRIGHT_PATTERNS:
            if matches := sorted(base.glob(pattern)):
                return str(matches[-1])
    return ""


def ensure_chromium() -> str:
    """Return a Chromium, installing one when there is none; an empty text when that does not work (said on the terminal)."""
    found = find_chromium()
    if found:
        return found
    progress("Installing Chromium for the tests of the pages")
    for command in _install_commands():
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False).returncode == 0:
            found = find_chromium()
            if found:
                progress(f"Chromium is {found}")
                return found
    complain("no Chromium could be installed: tests of the pages will be skipped. Install chromium or google-chrome")
    return ""


def _install_commands() -> list[list[str]]:
    commands = []
    if os.geteuid() == 0 and shutil.which("apt-get"):
        options = ["-o", "DPkg::Lock::Timeout=120", "-qq", "-y", "--no-install-recommends"]
        install = "DEBIAN_FRONTEND=noninteractive apt-get " + " ".join(options) + " install chromium"
        commands.append(["sh", "-c", f"{install} || {{ apt-get -qq update && {install}; }}"])
    commands.append([sys.executable, "-m", "playwright", "install", "chromium"])
    return commands


def _playwright_homes() -> list[Path]:
    named = os.environ.get("PLAYWRIGHT_BROWSERS_PATH")
    homes = [Path(named)] if named and named != "0" else []
    return [*homes, Path.home() / ".cache/ms-playwright", Path.home() / "Library/Caches/ms-playwright"]

"""What ``manage.py check --deploy`` says of an installation as docs/operate.md sets one up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.fakes.control_process import ROOT

PRODUCTION = {
    "MUSTER_SECRET_KEY": "0123456789abcdef" * 4,
    "MUSTER_DEBUG": "off",
    "MUSTER_BEHIND_TLS": "true",
    "MUSTER_ALLOWED_HOSTS": "muster.example.com",
    "MUSTER_CSRF_TRUSTED_ORIGINS": "https://muster.example.com",
    "MUSTER_PUBLIC_URL": "https://muster.example.com",
}


@pytest.mark.parametrize(("proxies", "found"), [("127.0.0.1", ""), ("", "controlplane.W001")])
def test_a_production_environment_has_no_warning_and_one_without_its_proxy_has(proxies: str, found: str) -> None:
    settings = {**PRODUCTION, "MUSTER_TRUSTED_PROXIES": proxies}
    ended = subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert (ended.returncode, found in ended.stderr) == (1 if found else 0, True), ended.stderr


def test_a_proxy_that_is_no_address_stops_the_start_with_one_line() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "controlplane.serve_control"],
        cwd=ROOT, env={**os.environ, "MUSTER_TRUSTED_PROXIES": "proxy.example"},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert ended.returncode != 0
    assert "MUSTER_TRUSTED_PROXIES" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr

"""What pip is configured to use reaches uv, and the count shown to the person is right."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from controlplane.launcher.environment import SETS, lock_file
from controlplane.launcher.installer import (
    count_pins,
    describe_step,
    install,
    parse_pip_settings,
    run_installer,
    uv_environment,
    uv_options,
)


def test_variables_win_over_install_files_and_those_over_global_files() -> None:
    lines = [
        ":env:.find-links='/from/variable'",
        "global.find-links='/from/global'",
        "install.index-url='https://install.example/simple'",
        "global.index-url='https://global.example/simple'",
        "global.cert='/etc/ca.pem'",
    ]
    assert parse_pip_settings(lines) == {
        "find-links": "/from/variable",
        "index-url": "https://install.example/simple",
        "cert": "/etc/ca.pem",
    }


def test_lines_that_are_no_settings_of_install_are_left_out() -> None:
    assert parse_pip_settings(["", "list.format='columns'", "nonsense", "global.cert=not quoted"]) == {}


def test_every_index_of_pip_is_handed_to_uv() -> None:
    settings = {
        "index-url": "https://a/simple",
        "extra-index-url": "https://b/simple\nfile:///c",
        "find-links": "/wheels",
        "no-index": "true",
        "trusted-host": "a",
    }
    options = uv_options(settings)
    assert options[:2] == ["--index-strategy", "unsafe-best-match"]
    assert options[2:] == [
        *("--default-index", "https://a/simple"),
        *("--extra-index-url", "https://b/simple"),
        *("--extra-index-url", "file:///c"),
        *("--find-links", "/wheels"),
        *("--allow-insecure-host", "a"),
        "--no-index",
    ]


def test_certificates_and_the_time_limit_of_pip_hold_for_uv() -> None:
    assert uv_environment({"cert": "/ca.pem", "default-timeout": "180"}) == {
        "SSL_CERT_FILE": "/ca.pem",
        "UV_HTTP_TIMEOUT": "180",
    }
    assert uv_environment({}) == {}


def test_pins_of_other_systems_are_not_counted() -> None:
    lines = [
        "a==1 \\",
        "    --hash=sha256:00",
        "b==2 ; sys_platform == 'win32' \\",
        "# via a",
        "c==3 ; sys_platform != 'win32'",
    ]
    assert count_pins("\n".join(lines)) == 2


def test_each_lock_file_holds_everything_of_the_smaller_ones() -> None:
    def pins(name: str) -> set[str]:
        return {line.split(" ")[0] for line in lock_file(name).read_text().splitlines() if "==" in line and line[0].isalnum()}

    for bigger, held in SETS.items():
        for smaller in held:
            assert pins(smaller) <= pins(bigger), f"{bigger}.txt lacks pins of {smaller}.txt: run requirements/lock.sh"


def test_an_installer_that_fails_leaves_its_last_words() -> None:
    program = "print('Collecting a'); print('DEBUG noise'); print('no network'); raise SystemExit(3)"
    assert run_installer([sys.executable, "-c", program], os.environ, 1) == "downloading… / Collecting a / no network"


def test_an_installer_that_succeeds_has_no_last_words() -> None:
    assert run_installer([sys.executable, "-c", "print('fine')"], os.environ, 1) is None


def test_a_step_says_what_is_counted_and_counts_no_single_package() -> None:
    step = describe_step("packages", found=104, total=103, seconds=2.4, last="Downloaded twisted")
    assert step == "  packages (found 103 of 103), 2 s: Downloaded twisted"
    assert describe_step("the installer uv", found=0, total=1, seconds=4.0, last="downloading…") == (
        "  the installer uv, 4 s: downloading…"
    )


@pytest.mark.parametrize("has_uv", [True, False])
def test_whatever_installs_takes_nothing_without_a_hash_that_was_locked(tmp_path: Path, *, has_uv: bool) -> None:
    """Both ways in turn: uv is said to fail where it is there, so that pip has to do it."""
    calls, python = tmp_path / "calls", tmp_path / "python"
    answers = "exit 0" if has_uv else "exit 1"
    python.write_text(f"""#!/bin/sh
echo "$@" >> {calls}
case "$*" in
    "-m uv --version") {answers} ;;
    "-m uv pip install"*) exit 1 ;;
esac
""")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    lock, uv_lock = tmp_path / "lock.txt", tmp_path / "uv.txt"
    lock.write_text("one==1 --hash=sha256:00\n")
    uv_lock.write_text("uv==1 --hash=sha256:00\n")
    install(python, lock, uv_lock)
    installs = [call for call in calls.read_text().splitlines() if " install " in call]
    assert [call.split()[1] for call in installs] == (["uv", "pip"] if has_uv else ["pip", "uv", "pip"])
    assert all("--require-hashes" in call.split() for call in installs)

"""What is pasted on a machine to make a node of it."""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from nodes.services.enrolment import Platform, Software, is_local, write_commands

GATEWAY, TOKEN = "https://gateway.example.com", "msw_x"
OURS = [one for one in Software if one not in {Software.MODELRELAY, Software.AGENT}]


def write(software: Software, name: str = "rack-2") -> dict[Platform, str]:
    commands = write_commands(software, gateway=GATEWAY, token=TOKEN, provider="lab", name=name)
    return {command.platform: command.text for command in commands}


@pytest.mark.parametrize("software", OURS)
def test_every_way_names_gateway_credential_and_provider(software: Software) -> None:
    ways = write(software)
    assert set(ways) == set(Platform)
    for text in ways.values():
        assert {GATEWAY, TOKEN, "lab", "rack-2"} <= set(re.split(r"[\s=<>'\"]+", text))


@pytest.mark.parametrize("software", [Software.MODELRELAY, Software.AGENT])
def test_programs_of_others_get_address_and_credential(software: Software) -> None:
    (text,) = write(software).values()
    assert GATEWAY in text
    assert TOKEN in text


@pytest.mark.parametrize(
    "name", ["a'; touch pwned; '", "$(touch pwned)", "`touch pwned`", "a\nEND\ntouch pwned", 'x" %h \\ <&>']
)
def test_a_name_is_nothing_but_a_name_in_a_shell_and_in_the_files_that_it_writes(name: str, tmp_path: Path) -> None:
    ways, plain = write(Software.OURS, name), " ".join(name.split())
    assert plain in shlex.split(ways[Platform.TERMINAL])
    program = ways[Platform.LAUNCHD].replace("launchctl", "true")
    subprocess.run(["sh", "-c", program], cwd=tmp_path, env={"HOME": str(tmp_path), "PATH": os.defpath}, check=True)
    written = plistlib.loads((tmp_path / "Library/LaunchAgents/muster.node.plist").read_bytes())
    assert written["EnvironmentVariables"]["MUSTER_NAME"] == plain
    program = ways[Platform.SYSTEMD].replace("sudo ", "").replace("/etc/", f"{tmp_path}/").replace("systemctl", "true")
    (tmp_path / "systemd" / "system").mkdir(parents=True)
    subprocess.run(["sh", "-c", program], cwd=tmp_path, env={"PATH": os.environ["PATH"]}, check=True)
    unit = (tmp_path / "systemd/system/muster-node.service").read_text()
    quoted = plain.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    assert f'Environment="MUSTER_NAME={quoted}"' in unit.splitlines()
    assert not (tmp_path / "pwned").exists()


def test_a_container_reaches_what_listens_on_its_machine() -> None:
    assert "MUSTER_BACKEND_URL=http://host.docker.internal:11434" in write(Software.OLLAMA)[Platform.DOCKER]


def test_the_credential_is_in_no_file_that_everybody_may_read() -> None:
    unit = write(Software.OLLAMA)[Platform.SYSTEMD].partition("[Unit]")[2]
    assert TOKEN not in unit


@pytest.mark.parametrize(
    ("url", "local"), [("http://127.0.0.1:8080", True), ("http://localhost", True), ("http://[::1]", True), (GATEWAY, False)]
)
def test_an_address_of_this_machine_is_told_from_others(url: str, local: bool) -> None:
    assert is_local(url) is local

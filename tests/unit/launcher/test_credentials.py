"""The credentials file is whole or it is not used."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from controlplane.launcher.credentials import describe_command, read_credentials, require_credentials, run_credentials
from controlplane.launcher.errors import LauncherError

WHOLE = {
    "admin": {"username": "admin", "password": "p"},
    "admin_token": "msa_x",
    "api_key": "mst_x",
    "model": "muster-tiny",
    "worker_secret": "msw_a",
    "node_token": "msw_b",
    "local_node_token": "msw_c",
}


def _write(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**WHOLE, **changes}))
    return path


def test_whole_credentials_are_read(tmp_path: Path) -> None:
    found = require_credentials(_write(tmp_path / "c.json"))
    assert (found.username, found.password, found.local_node_token) == ("admin", "p", "msw_c")


def test_a_password_that_the_operator_changed_is_empty_and_no_fault(tmp_path: Path) -> None:
    assert require_credentials(_write(tmp_path / "c.json", admin={"username": "admin", "password": ""})).password == ""


@pytest.mark.parametrize("changes", [{"api_key": ""}, {"api_key": None}, {"admin": "admin"}, {"admin": {"username": "admin"}}])
def test_anything_missing_is_one_line(tmp_path: Path, changes: dict[str, object]) -> None:
    path = _write(tmp_path / "c.json", **changes)
    assert read_credentials(path) is None
    with pytest.raises(LauncherError, match="incomplete: delete it"):
        require_credentials(path)


def test_the_credentials_are_shown_all_together_or_one_bare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path / "credentials.json")
    assert run_credentials(tmp_path, None) == 0
    assert {"username admin", "password p", "api_key mst_x"} <= {
        " ".join(line.split()) for line in capsys.readouterr().out.splitlines()
    }
    assert run_credentials(tmp_path, "api_key") == 0
    assert capsys.readouterr().out == "mst_x\n"


def test_without_credentials_the_command_says_what_makes_them(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"credentials\.json is missing.*\./muster up"):
        run_credentials(tmp_path, None)


def test_the_command_that_is_printed_can_be_pasted_in_any_folder(tmp_path: Path) -> None:
    data = tmp_path / "it's here"
    data.mkdir()
    _write(data / "credentials.json")
    shown = subprocess.run(
        ["sh", "-c", f"{describe_command(data)} api_key"], cwd="/", capture_output=True, text=True, check=True
    )
    assert shown.stdout == "mst_x\n"

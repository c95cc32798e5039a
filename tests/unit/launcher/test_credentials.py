"""The credentials file is whole or it is not used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controlplane.launcher.credentials import read_credentials, require_credentials
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

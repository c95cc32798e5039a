"""``muster service``: what it writes for systemd and launchd, what it tells them, and what it leaves alone."""

from __future__ import annotations

import configparser
import plistlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from controlplane.launcher import services
from controlplane.launcher.console import LauncherError
from controlplane.launcher.services import MARK, Scope, run_service, write_plist, write_units


@pytest.fixture
def scope(tmp_path: Path) -> Scope:
    return Scope(tmp_path / "units", tmp_path / "settings", tmp_path / "data", "", ("systemctl", "--user"))


class Manager:
    """systemctl, as far as we ask it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str]) -> int:
        self.asked.append(" ".join(command))
        return 0


def test_a_node_keeps_its_credential_out_of_the_unit_and_of_every_command_line(scope: Scope) -> None:
    manager = Manager()
    words = ["install", "node", "--instance", "rack", "--gateway", "https://g.example.com", "--token", "msw_x$y"]
    assert run_service(words, manager, scope) == 0

    settings, unit = scope.settings / "node-rack.env", scope.units / "muster-node@.service"
    assert settings.read_text().splitlines()[2:] == [
        f'MUSTER_NODE_OPTIONS="--gateway https://g.example.com --name rack --data {scope.data}/node-rack"',
        'MUSTER_TOKEN="msw_x\\$y"',
    ]
    assert settings.stat().st_mode & 0o777 == 0o600
    assert "msw_x" not in unit.read_text()
    assert f"EnvironmentFile={scope.settings}/node-%i.env" in unit.read_text()
    assert manager.asked == [
        "systemctl --user daemon-reload",
        "systemctl --user enable --now muster-node@rack.service",
    ]


def test_settings_and_units_that_somebody_changed_stay(scope: Scope) -> None:
    run_service(["install", "server"], Manager(), scope)
    settings, unit = scope.settings / "server.env", scope.units / "muster-gateway.service"
    written = settings.read_text()
    assert "MUSTER_SECRET_KEY=" in written
    unit.write_text(unit.read_text().replace(f"{MARK}\n", "").replace("RestartSec=5", "RestartSec=1"))

    run_service(["install", "server"], Manager(), scope)

    assert settings.read_text() == written
    assert "RestartSec=1" in unit.read_text()


def test_the_servers_wait_for_the_tables_and_stop_with_their_target(scope: Scope) -> None:
    units = write_units("server", [], scope)
    for part in ("control", "gateway", "worker"):
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(units[f"muster-{part}.service"])
        assert (parser["Unit"]["Requires"], parser["Unit"]["PartOf"]) == ("muster-migrate.service", "muster.target")
        assert parser["Service"]["ExecStart"].endswith(f"-m controlplane.serve_{part}")
        assert parser["Install"]["WantedBy"] == "muster.target"


def test_uninstalling_takes_the_units_and_leaves_data_and_settings(scope: Scope, capsys: pytest.CaptureFixture[str]) -> None:
    manager = Manager()
    run_service(["install", "up", "--port", "9000"], manager, scope)
    unit = scope.units / "muster-up.service"
    assert f"up --data {scope.data} --port 9000" in unit.read_text()
    assert run_service(["uninstall", "up"], manager, scope) == 0
    assert not unit.exists()
    assert manager.asked[-2:] == ["systemctl --user disable --now muster-up.service", "systemctl --user daemon-reload"]
    assert f"What stays: {scope.data}" in capsys.readouterr().out


def test_one_of_several_nodes_leaves_the_unit_to_the_others(scope: Scope) -> None:
    for name in ("a", "b"):
        run_service(["install", "node", "--instance", name, "--standalone"], Manager(), scope)
    run_service(["uninstall", "node", "--instance", "a"], Manager(), scope)
    assert (scope.units / "muster-node@.service").exists()
    assert not (scope.settings / "node-a.env").exists(), "it held a credential"
    run_service(["uninstall", "node", "--instance", "b"], Manager(), scope)
    assert not (scope.units / "muster-node@.service").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["install", "server", "--port", "1"], "write it into server.env"),
        (["status", "up", "--port", "1"], "takes no --port"),
        (["install", "node", "--instance", "a/b"], "is no name"),
        (["install", "node", "--owner", "Ada L"], "holds no blank: 'Ada L'"),
    ],
)
def test_what_cannot_be_kept_running_so_is_refused_in_words(scope: Scope, words: list[str], said: str) -> None:
    with pytest.raises(LauncherError, match=said):
        run_service(words, Manager(), scope)
    assert not scope.units.exists()


def test_a_manager_that_refuses_is_said(scope: Scope) -> None:
    with pytest.raises(LauncherError, match=r"systemctl --user daemon-reload failed"):
        run_service(["install", "up"], lambda _command: 1, scope)


def test_a_program_that_the_user_of_the_service_cannot_reach_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "home"
    closed.mkdir(mode=0o700)
    with pytest.raises(LauncherError, match="where everybody may read"):
        services.refuse_unreadable(closed / "muster", "muster")


def test_launchd_gets_the_words_and_the_credential_apart(tmp_path: Path) -> None:
    name, text = write_plist("node", ["--token", "t", "--gateway", "http://g"], instance="mac", logs=tmp_path, data=tmp_path)
    body = plistlib.loads(text)
    assert body["Label"] == name == "dev.muster.node.mac"
    assert body["ProgramArguments"][-6:] == ["--gateway", "http://g", "--name", "mac", "--data", f"{tmp_path}/node-mac"]
    assert body["EnvironmentVariables"]["MUSTER_TOKEN"] == "t"
    assert "t" not in body["ProgramArguments"]
    assert (body["KeepAlive"], body["RunAtLoad"]) == ({"SuccessfulExit": False}, True)

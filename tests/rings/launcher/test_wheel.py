"""The built wheel outside the checkout: what it holds, what it says without extras, and what people get from it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.launcher.environment import ROOT
from tools.package import installed
from tools.package.__main__ import CHECKS
from tools.package.checks import Check, NotHere, Passed, Workplace, open_workplace

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    with open_workplace(ROOT, tmp_path_factory.mktemp("dist")) as place:
        yield place


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_packages_pass_what_this_machine_can_check(check: Check, place: Workplace) -> None:
    outcome = check.run(place)
    assert isinstance(outcome, Passed | NotHere), outcome


def test_an_installed_node_names_the_extra_that_a_command_lacks_and_the_place_of_its_data(place: Workplace) -> None:
    muster = place.make_once("runner", installed.make_node) / "bin" / "muster"
    here = place.make_folder("somewhere")
    (here / "runner").mkdir()
    (here / "runner" / "__init__.py").write_text("raise SystemExit('the wrong runner')\n")

    def say(*words: str) -> tuple[int, str]:
        variables = {"HOME": str(here), "XDG_DATA_HOME": f"{here}/kept", "PATH": os.defpath}
        ended = subprocess.run([muster, *words], cwd=here, env=variables, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout + ended.stderr

    python = muster.with_name("python")
    wanted = f"muster: muster up needs packages that are not installed here: {python} -m pip install 'muster[server]'\n"
    assert say("up") == (1, wanted)
    assert say("test") == (1, "muster: muster test is for whoever changes Muster: it works in a clone of the repository\n")
    assert f"{here}/kept/muster/credentials.json is missing" in say("credentials")[1]
    status, help_text = say("node", "--help")
    assert (status, "--gateway" in help_text) == (0, True)
    assert not Path(here, "kept").exists()


def test_an_installed_node_starts_on_windows_and_whatever_else_is_refused_there_in_words(place: Workplace) -> None:
    muster = place.make_once("runner", installed.make_node) / "bin" / "muster"
    variables = {"HOME": str(place.make_folder("windows")), "PATH": os.defpath, "PYTHONPATH": str(ROOT / "tests/fakes/windows")}

    def say(*words: str) -> tuple[int, str]:
        ended = subprocess.run([muster, *words], cwd="/", env=variables, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout + ended.stderr

    for words, status, said in (
        (("node", "--standalone"), 2, "on Windows give --backend URL"),
        (("node", "--help"), 0, "--backend URL"),
        (("--help",), 0, "muster COMMAND --help"),
        (("down",), 0, "Not running: "),
        (("up",), 1, "muster: muster up runs on Linux and macOS. On Windows there is the node"),
    ):
        ended = say(*words)
        assert (ended[0], said in ended[1], "Traceback" in ended[1]) == (status, True, False), ended[1]

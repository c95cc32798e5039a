"""Parts are restarted when they die, given up when they cannot start, and stopped in order."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controlplane.launcher.errors import LauncherError, StopRequested
from controlplane.launcher.part import PartSpec
from controlplane.launcher.processes import Command, identify
from controlplane.launcher.supervise import Supervisor, describe_status

_RUN = "import time; time.sleep(60)"
_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


def _spec(
    name: str, program: str, *, is_ready: Callable[[int], bool] = lambda _pid: True, patience_s: float = 30.0
) -> PartSpec:
    command = Command(argv=[sys.executable, "-c", program], env=os.environ, cwd=Path("/"))
    return PartSpec(name=name, command=lambda: command, is_ready=is_ready, stop_deadline_s=patience_s)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path, on_change=lambda: None)
    yield made
    made.stop([tuple(made.parts)])


def _run_until(supervisor: Supervisor, condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "the condition did not come true in time"
        supervisor.check()
        supervisor.sleep(0.02)


def test_a_part_that_dies_is_started_again(supervisor: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    supervisor.start([_spec("part", _RUN)])
    supervisor.wait_ready(["part"], lambda _name: None)
    first = supervisor.pids["part"]
    os.kill(first, signal.SIGKILL)
    _run_until(supervisor, lambda: supervisor.pids.get("part", first) != first)
    assert "part was killed by SIGKILL, starting it again in 0.0 s" in capsys.readouterr().err


def test_a_part_that_cannot_start_is_given_up_with_its_last_words(supervisor: Supervisor) -> None:
    supervisor.start([_spec("part", "raise SystemExit('the disk is full')", is_ready=lambda _pid: False)])
    with pytest.raises(LauncherError, match="part keeps dying: the disk is full"):
        supervisor.wait_ready(["part"], lambda _name: None)


def test_what_a_dead_part_had_started_goes_with_it(supervisor: Supervisor, tmp_path: Path) -> None:
    program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    supervisor.start([_spec("part", program, is_ready=lambda _pid: (tmp_path / "child").exists())])
    supervisor.wait_ready(["part"], lambda _name: None)
    _run_until(supervisor, lambda: bool((tmp_path / "child").read_text()))
    child = int((tmp_path / "child").read_text())
    os.kill(supervisor.pids["part"], signal.SIGKILL)
    _run_until(supervisor, lambda: identify(child) is None)


def test_parts_stop_in_the_order_given(supervisor: Supervisor, tmp_path: Path) -> None:
    def program(name: str) -> str:
        return f"""
import signal, sys, time
def leave(*_):
    open({str(tmp_path / "order")!r}, "a").write("{name} ")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("listening", flush=True)
time.sleep(60)
"""

    def listens(name: str) -> Callable[[int], bool]:
        return lambda _pid: "listening" in (tmp_path / f"{name}.log").read_text()

    supervisor.start([_spec(name, program(name), is_ready=listens(name)) for name in ("a", "b", "c")])
    supervisor.wait_ready(["a", "b", "c"], lambda _name: None)
    supervisor.stop([("c",), ("a",), ("b",)])
    assert (tmp_path / "order").read_text() == "c a b "
    assert supervisor.pids == {}


def test_a_part_that_does_not_stop_is_killed(supervisor: Supervisor, tmp_path: Path) -> None:
    def is_deaf(_pid: int) -> bool:
        return "deaf" in (tmp_path / "part.log").read_text()

    supervisor.start([_spec("part", _STUBBORN, is_ready=is_deaf, patience_s=0.2)])
    supervisor.wait_ready(["part"], lambda _name: None)
    began = time.monotonic()
    supervisor.stop([("part",)])
    assert time.monotonic() - began < 30.0
    assert supervisor.pids == {}


def test_a_program_that_does_not_exist_is_one_line(supervisor: Supervisor) -> None:
    command = Command(argv=["/nowhere/program"], env={}, cwd=Path("/"))
    spec = PartSpec(name="part", command=lambda: command, is_ready=lambda _pid: True)
    with pytest.raises(LauncherError, match="cannot start part: No such file"):
        supervisor.start([spec])


def test_a_part_that_is_never_ready_is_given_up(supervisor: Supervisor) -> None:
    command = Command(argv=[sys.executable, "-c", _RUN], env=os.environ, cwd=Path("/"))
    supervisor.start([PartSpec(name="part", command=lambda: command, is_ready=lambda _pid: False, start_deadline_s=0.2)])
    with pytest.raises(LauncherError, match="part is not ready after 0 s"):
        supervisor.wait_ready(["part"], lambda _name: None)


def test_a_part_that_is_late_is_named_with_its_last_line_until_it_is_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = Supervisor(tmp_path, on_change=lambda: None, late_after_s=0.1)
    said: list[str] = []

    def is_ready(_pid: int) -> bool:
        said.append(capsys.readouterr().out)
        lines = [line for line in "".join(said).splitlines() if "Still waiting for part after " in line]
        return len(lines) >= 2 and lines[-1].endswith(" s. Last line: reading the weights")

    (tmp_path / "part.log").write_text("what an earlier start had said\n")
    try:
        supervisor.start([_spec("part", f"print('reading the weights', flush=True); {_RUN}", is_ready=is_ready)])
        _run_until(supervisor, lambda: "reading" in (tmp_path / "part.log").read_text())
        supervisor.wait_ready(["part"], lambda _name: None)
        assert supervisor.parts["part"].is_ready
    finally:
        supervisor.stop([("part",)])


def test_a_part_that_was_ready_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor(tmp_path, on_change=lambda: None, late_after_s=0.0)
    try:
        supervisor.start([_spec("part", _RUN)])
        supervisor.wait_ready(["part"], lambda _name: None)
        capsys.readouterr()
        supervisor.check()
        assert capsys.readouterr().out == ""
    finally:
        supervisor.stop([("part",)])


def test_a_signal_ends_the_watch(supervisor: Supervisor) -> None:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)}
    try:
        supervisor.listen_for_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequested):
            supervisor.run()
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in kept.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("status", "words"), [(1, "ended with status 1"), (-9, "was killed by SIGKILL"), (-99, "was killed by signal 99")]
)
def test_how_a_part_ended_is_said_in_words(status: int, words: str) -> None:
    assert describe_status(status) == words


def test_a_part_that_had_ended_before_the_stop_is_stopped_like_the_others(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, on_change=lambda: None)
    supervisor.start([_spec("ended", _RUN), _spec("running", _RUN)])
    supervisor.wait_ready(["ended", "running"], lambda _name: None)
    ended = supervisor.pids["ended"]
    os.kill(ended, signal.SIGKILL)
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
    supervisor.stop([("ended", "running")])
    assert supervisor.pids == {}

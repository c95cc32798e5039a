"""Parts are restarted when they die, given up when they cannot start, stopped in order; nothing of theirs is left."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from controlplane.launcher.environment import ROOT
from controlplane.launcher.errors import LauncherError, StopRequested
from controlplane.launcher.files import write_json
from controlplane.launcher.leftovers import end_leftovers
from controlplane.launcher.part import PartSpec
from controlplane.launcher.ports import claim_port
from controlplane.launcher.processes import (
    Command,
    find_by_directory,
    find_by_variable,
    identify,
    is_alive,
    read_command_line,
    send,
    send_group,
    spawn,
    wait_gone,
)
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


_PARENT = """
import os, subprocess, sys, time
from pathlib import Path
from controlplane.launcher.processes import Command, spawn
command = Command(argv=[sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ, cwd=Path("/"))
child = spawn(command, subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(60)
"""
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc or prctl, which only Linux has")


_LISTENER = """
import contextlib, signal, socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
listener.listen()
while sys.argv[2] == "serves":
    with contextlib.suppress(OSError):  # of who has left
        listener.accept()[0].sendall(b"served")
signal.pause()
"""


@linux_only
def test_who_dials_while_a_killed_listener_is_replaced_waits_and_is_served() -> None:
    claims: list[socket.socket] = []
    with ExitStack() as held:
        port = claim_port("127.0.0.1", 0, option="--gateway-port", held=held, claims=claims)
        number = claims[0].fileno()

        def listen(word: str) -> subprocess.Popen[bytes]:
            argv = [sys.executable, "-c", _LISTENER, str(number), word]
            return spawn(Command(argv=argv, env=os.environ, cwd=Path("/"), sockets=(number,)), subprocess.DEVNULL)

        first = listen("waits")
        assert wait_gone(lambda: _takes_connections(port), 30)
        first.kill()
        first.wait()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            second = listen("serves")
            try:
                assert client.recv(6) == b"served"
            finally:
                second.kill()
                second.wait()


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
    except ConnectionRefusedError:
        return False
    return True


def test_an_identity_belongs_to_one_process_only() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        identity = identify(child.pid)
        assert identity
        assert is_alive(child.pid, identity)
        assert not is_alive(os.getpid(), identity)
        assert not is_alive(child.pid, "the process that had this id before")
    finally:
        child.kill()
        child.communicate()
    assert identify(child.pid) is None


@linux_only
def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    identity = identify(child.pid) or "gone already"
    assert wait_gone(lambda: not is_alive(child.pid, identity), 30.0)
    child.wait()


@linux_only
def test_a_child_dies_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    with parent, parent.stdout as output:
        child = int(output.readline())
        identity = identify(child)
        assert identity
        parent.kill()
        parent.wait()
    assert wait_gone(lambda: not is_alive(child, identity), 30.0)


@linux_only
def test_processes_are_found_by_directory_and_by_variable(tmp_path: Path) -> None:
    command = Command(argv=[sys.executable, "-c", "input()"], env={"MUSTER_RUN_ID": str(tmp_path)}, cwd=tmp_path)
    read_end, write_end = os.pipe()
    child = subprocess.Popen(command.argv, env=dict(command.env), cwd=command.cwd, stdin=read_end)
    try:
        assert find_by_directory(tmp_path) == [child.pid]
        assert wait_gone(lambda: find_by_variable("MUSTER_RUN_ID", str(tmp_path)) == [child.pid], 30.0)
        assert find_by_variable("MUSTER_RUN_ID", "another") == []
        assert "input()" in read_command_line(child.pid)
    finally:
        os.close(write_end)
        os.close(read_end)
        child.kill()
        child.wait()
    assert find_by_directory(tmp_path) == []


def test_a_child_has_its_own_group_and_no_input(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stream:
        program = "import os, sys; print(os.getpgid(0) == os.getpid(), repr(sys.stdin.read()))"
        child = spawn(Command(argv=[sys.executable, "-c", program], env=os.environ, cwd=tmp_path), stream)
    assert child.wait(timeout=30) == 0
    assert log.read_text() == "True ''\n"


def test_signalling_what_is_gone_is_no_error() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    child.wait()
    send(child.pid, signal.SIGTERM)
    send_group(child.pid, signal.SIGTERM)


@pytest.mark.parametrize(("hard", "raised"), [("4096", 4096), ("100000", 65_536)], ids=["as far as it may", "bounded"])
def test_what_we_start_may_open_as_many_files_as_the_system_lets_us(hard: str, raised: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < int(hard):
        pytest.skip(f"needs a hard limit of {hard} open files, and this one is lower")
    asked = (
        "import resource, subprocess, sys\n"
        "from controlplane.launcher.processes import raise_file_limit\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
        "raise_file_limit()\n"
        "show = 'import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))'\n"
        "subprocess.run([sys.executable, '-c', show], check=True)\n"
    )
    answer = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == f"({raised}, {hard})"


_SLEEP = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run that is called like ``tmp_path``; it ends well when its input does."""
    environment = {**os.environ, "MUSTER_RUN_ID": str(tmp_path)}
    child = subprocess.Popen(_SLEEP, start_new_session=True, env=environment, stdin=subprocess.PIPE)
    try:
        # The kernel shows the environment of a process a moment after its program has replaced ours.
        if sys.platform == "linux":
            assert wait_gone(lambda: find_by_variable("MUSTER_RUN_ID", str(tmp_path)) == [child.pid], 30.0)
        yield child
    finally:
        child.kill()
        child.communicate()


def _record(path: Path, pid: int, identity: str | None, run_id: str = "no run") -> Path:
    write_json(path, {"run_id": run_id, "children": {"control": {"pid": pid, "identity": identity}}})
    return path


def test_a_child_of_an_earlier_run_is_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    end_leftovers(_record(tmp_path / "children.json", sleeper.pid, identify(sleeper.pid)))
    assert sleeper.wait(timeout=30) != 0


def test_a_stranger_with_the_same_id_is_left_alone(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    end_leftovers(_record(tmp_path / "children.json", sleeper.pid, "boot/12345"))
    sleeper.communicate(timeout=30)
    assert sleeper.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the environment of a process")
def test_a_grandchild_is_found_by_its_run(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    end_leftovers(_record(tmp_path / "children.json", 1, "nobody", run_id=str(tmp_path)))
    assert sleeper.wait(timeout=30) != 0


def test_a_missing_or_broken_record_is_no_error(tmp_path: Path) -> None:
    end_leftovers(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{")
    end_leftovers(tmp_path / "broken.json")

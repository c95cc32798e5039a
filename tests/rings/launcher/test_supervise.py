"""Parts are restarted when they die, given up when they cannot start, stopped in order; nothing of theirs is left."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from controlplane.launcher import processes
from controlplane.launcher.console import LauncherError, StopRequested
from controlplane.launcher.environment import ROOT
from controlplane.launcher.files import write_json
from controlplane.launcher.ports import claim_port
from controlplane.launcher.supervisor import PartSpec, Supervisor, describe_status
from controlplane.launcher.up import end_leftovers
from tests.fakes.limits import set_limits
from tests.fakes.waiting import wait_until

RUN = "import signal; signal.alarm(60); signal.pause()"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {RUN}"
PARENT = """
import os, signal, subprocess, sys
from pathlib import Path
from controlplane.launcher.processes import Command, spawn
command = Command(argv=[sys.executable, "-c", "import signal; signal.alarm(60); signal.pause()"], env=os.environ, cwd=Path("/"))
print(spawn(command, subprocess.DEVNULL).pid, flush=True)
signal.alarm(60); signal.pause()
"""
FORKING = """
import json, os, signal, socket, sys
from pathlib import Path
from controlplane.launcher.processes import Command, fork, preload
kept, closed = socket.socket(), socket.socket()
os.environ["OF_THE_PARENT"] = "1"
loaded = {}
print("waits in a buffer", end="")
preloaded = preload({"AT_LOAD": "1"}, lambda: loaded.update(seen=os.environ["AT_LOAD"]))
command = Command(
    argv=["program", "of", "ours"], env={"OF_THE_CHILD": "1"}, cwd=Path(sys.argv[1]), sockets=(kept.fileno(),),
    program=("program", str(kept.fileno()), str(closed.fileno()), *sys.argv[2:]),
)
sys.path.insert(0, sys.argv[1])
with open(Path(sys.argv[1], "log"), "ab") as log:
    child = fork(command, log)
print(json.dumps([preloaded, "AT_LOAD" in os.environ, child.pid]), flush=True)
if "stays" in sys.argv:
    signal.alarm(60); signal.pause()
print(child.wait(), child.poll())
"""
PROGRAM = """
import json, os, signal, stat, sys
def is_open(number):
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False
def main():
    numbers = [is_open(int(word)) for word in sys.argv[1:3]]
    environment = sorted(name for name in os.environ if name.startswith(("AT_LOAD", "OF_THE")))
    handlers = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    title = open("/proc/self/cmdline").read().rstrip("\\0 ")
    print(json.dumps([sys.argv, numbers, environment, os.getcwd(), title, handlers, os.getsid(0) == os.getpid()]))
    match sys.argv[3]:
        case "fails":
            raise ValueError("it cannot go on")
        case "leaves":
            sys.exit(4)
        case "ends":
            return 5
    signal.alarm(60); signal.pause()
"""
LEAVING = """
import signal, sys
def leave(*_):
    open(sys.argv[2], "a").write(sys.argv[1] + " ")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("listening", flush=True)
signal.alarm(60); signal.pause()
"""
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc or prctl, which only Linux has")


def python(*words: str, **options: object) -> processes.Command:
    return processes.Command(argv=[sys.executable, "-c", *words], **{"env": os.environ, "cwd": Path("/"), **options})  # type: ignore[arg-type]


def make_spec(
    name: str, *words: str, is_ready: Callable[[int], bool] = lambda _pid: True, starts_s: float = 60.0, stops_s: float = 30.0
) -> PartSpec:
    command = partial(python, *words)
    return PartSpec(name=name, command=command, is_ready=is_ready, start_deadline_s=starts_s, stop_deadline_s=stops_s)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    set_limits(launcher={"late_s": 0.1})
    made = Supervisor(tmp_path, on_change=lambda: None)
    yield made
    made.stop([tuple(made.parts)])


def start(supervisor: Supervisor, *specs: PartSpec) -> None:
    """Start parts and wait until they are ready."""
    supervisor.start(list(specs))
    supervisor.wait_ready([spec.name for spec in specs], lambda _name: None)


def watch_until(supervisor: Supervisor, condition: Callable[[], bool]) -> None:
    def is_so() -> bool:
        supervisor.check()
        return condition()

    wait_until(is_so)


def test_a_part_that_dies_is_started_again_and_what_it_had_started_goes_with_it(
    supervisor: Supervisor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "part.log"
    start(supervisor, make_spec("part", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{PARENT}"))
    wait_until(lambda: log.read_text().endswith("\n"))
    first, child = supervisor.pids["part"], int(log.read_text())
    os.kill(first, signal.SIGKILL)
    watch_until(supervisor, lambda: supervisor.pids.get("part", first) != first and processes.identify(child) is None)
    watch_until(supervisor, lambda: supervisor.parts["part"].is_ready)
    said = capsys.readouterr()
    assert "part was killed by SIGKILL, starting it again in 0.0 s" in said.err
    assert "part is back (process " in said.out + said.err
    assert [describe_status(status) for status in (1, -99)] == ["ended with status 1", "was killed by signal 99"]


def test_a_part_that_cannot_start_or_is_never_ready_is_given_up_with_its_last_words(supervisor: Supervisor) -> None:
    for program, starts_s, words in (
        ("raise SystemExit('the disk is full')", 60.0, "part keeps dying: the disk is full"),
        (RUN, 0.2, "part is not ready after 0 s"),
    ):
        supervisor.start([make_spec("part", program, is_ready=lambda _pid: False, starts_s=starts_s)])
        with pytest.raises(LauncherError, match=words):
            supervisor.wait_ready(["part"], lambda _name: None)
        supervisor.stop([("part",)])
    nowhere = processes.Command(argv=["/nowhere/program"], env={}, cwd=Path("/"))
    with pytest.raises(LauncherError, match="cannot start part: No such file"):
        supervisor.start([PartSpec(name="part", command=lambda: nowhere, is_ready=lambda _pid: True)])


def test_parts_stop_in_the_order_given_also_one_that_had_ended_or_does_not_stop(supervisor: Supervisor, tmp_path: Path) -> None:
    order = tmp_path / "order"

    def says(name: str, word: str) -> Callable[[int], bool]:
        return lambda _pid: word in (tmp_path / f"{name}.log").read_text()

    parts = [make_spec(name, LEAVING, name, str(order), is_ready=says(name, "listening")) for name in "abc"]
    deaf = make_spec("deaf", DEAF, is_ready=says("deaf", "deaf"), stops_s=0.2)
    start(supervisor, *parts, deaf, make_spec("ended", RUN))
    ended = supervisor.pids["ended"]
    os.kill(ended, signal.SIGKILL)
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
    supervisor.stop([("c",), ("deaf", "ended"), ("a",), ("b",)])
    assert (order.read_text(), supervisor.pids) == ("c a b ", {})


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


# processes

LISTENER = """
import contextlib, signal, socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
listener.listen()
while sys.argv[2] == "serves":
    with contextlib.suppress(OSError):  # of who has left
        listener.accept()[0].sendall(b"served")
signal.pause()
"""


def takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
    except ConnectionRefusedError:
        return False
    return True


@linux_only
def test_who_dials_while_a_killed_listener_is_replaced_waits_and_is_served() -> None:
    claims: list[socket.socket] = []
    with ExitStack() as held:
        port = claim_port("127.0.0.1", 0, option="--gateway-port", held=held, claims=claims)
        number = claims[0].fileno()
        first = processes.spawn(python(LISTENER, str(number), "waits", sockets=(number,)), subprocess.DEVNULL)
        wait_until(lambda: takes_connections(port))
        first.kill()
        first.wait()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            second = processes.spawn(python(LISTENER, str(number), "serves", sockets=(number,)), subprocess.DEVNULL)
            try:
                assert client.recv(6) == b"served"
            finally:
                second.kill()
                second.wait()


@linux_only
def test_what_is_spawned_has_its_own_group_and_no_input_and_a_zombie_is_not_alive(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stream:
        child = processes.spawn(python("import os, sys; print(os.getpgid(0) == os.getpid(), repr(sys.stdin.read()))"), stream)
    identity = processes.identify(child.pid) or "gone already"
    assert processes.wait_gone(lambda: not processes.is_alive(child.pid, identity), 30.0)
    assert (child.wait(timeout=30), log.read_text()) == (0, "True ''\n")
    processes.send(child.pid, signal.SIGTERM)  # of what is gone: no error
    processes.send_group(child.pid, signal.SIGTERM)


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


# children that are forks of us


@linux_only
@pytest.mark.parametrize(("how", "status"), [("ends", 5), ("leaves", 4), ("fails", 1)])
def test_a_fork_runs_its_program_as_if_it_had_been_executed(tmp_path: Path, how: str, status: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path), how], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    buffered, _, said = ran.stdout.partition("[")
    state, ended = said.splitlines()
    assert (buffered, state.split(", ")[:2]) == ("waits in a buffer", ["true", "false"]), ran.stderr
    assert ended == f"{status} {status}"
    first, *rest = (tmp_path / "log").read_text().splitlines()
    argv, sockets, environment, folder, title, has_defaults, leads = json.loads(first)
    assert (argv[0], argv[3]) == ("program", how)
    assert sockets == [True, False], "only the sockets that it was to have are open in it"
    assert environment == ["OF_THE_CHILD"]
    assert (folder, title, has_defaults, leads) == (str(tmp_path), "program of ours", True, True)
    assert ("ValueError: it cannot go on" in "\n".join(rest)) == (how == "fails")


@linux_only
def test_a_fork_does_not_outlive_us(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    argv = [sys.executable, "-c", FORKING, str(tmp_path), "runs", "stays"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(json.loads("[" + parent.stdout.readline().partition("[")[2])[2])
        identity = processes.identify(pid)
        assert identity
        wait_until((tmp_path / "log").read_text)
        parent.kill()
    wait_until(lambda: not processes.is_alive(pid, identity))


def test_nothing_is_shared_that_cannot_be_loaded() -> None:
    def fail() -> None:
        raise LauncherError(os.environ["AT_LOAD"])

    assert not processes.preload({"AT_LOAD": "1"}, fail)
    assert "AT_LOAD" not in os.environ


# what an earlier run has left


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run that is called like ``tmp_path``; it ends well when its input does."""
    argv = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    environment = {**os.environ, "MUSTER_RUN_ID": str(tmp_path)}
    child = subprocess.Popen(argv, start_new_session=True, env=environment, stdin=subprocess.PIPE, cwd=tmp_path)
    try:
        # The kernel shows the environment of a process a moment after its program has replaced ours.
        if sys.platform == "linux":
            wait_until(lambda: processes.find_by_variable("MUSTER_RUN_ID", str(tmp_path)) == [child.pid])
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("known_by", ["its id", pytest.param("its run", marks=linux_only)])
def test_a_child_of_an_earlier_run_is_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes], known_by: str) -> None:
    child: dict[str, object] = {"pid": sleeper.pid, "identity": processes.identify(sleeper.pid)}
    record = {"run_id": "no run", "children": {"control": child}}
    if known_by == "its run":
        record = {"run_id": str(tmp_path), "children": {"control": {"pid": 1, "identity": "nobody"}}}
    write_json(tmp_path / "children.json", record)
    end_leftovers(tmp_path / "children.json")
    assert sleeper.wait(timeout=30) != 0


@linux_only
def test_a_stranger_with_the_same_id_is_left_alone(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    identity = processes.identify(sleeper.pid)
    assert identity
    assert processes.is_alive(sleeper.pid, identity)
    assert not processes.is_alive(os.getpid(), identity)
    assert not processes.is_alive(sleeper.pid, "the process that had this id before")
    assert processes.find_by_directory(tmp_path) == [sleeper.pid]
    assert processes.find_by_variable("MUSTER_RUN_ID", "another") == []
    assert "sys.stdin.read()" in processes.read_command_line(sleeper.pid)
    stranger = {"pid": sleeper.pid, "identity": "boot/12345"}
    write_json(tmp_path / "children.json", {"run_id": "no run", "children": {"control": stranger}})
    (tmp_path / "broken.json").write_text("{")
    for name in ("children.json", "missing.json", "broken.json"):
        end_leftovers(tmp_path / name)
    sleeper.communicate(timeout=30)
    assert (sleeper.returncode, processes.identify(sleeper.pid), processes.find_by_directory(tmp_path)) == (0, None, [])

"""No stranger is taken for a child of ours, and no child outlives us."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from controlplane.launcher.environment import ROOT
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

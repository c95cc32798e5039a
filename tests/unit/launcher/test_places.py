"""What an installation keeps on its disk: its places, private files, logs, locks and credentials."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.launcher import locks
from controlplane.launcher.credentials import describe_command, read_credentials, require_credentials, run_credentials
from controlplane.launcher.environment import ROOT
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.files import read_json, read_or_create_secret, write_json, write_private
from controlplane.launcher.locks import FileLock, LockHeld, acquire_patiently, read_holder
from controlplane.launcher.logs import open_log, read_last_line, read_tail, rotate
from controlplane.launcher.places import (
    check_data,
    choose_place,
    find_missing,
    is_open_to_others,
    lock_path,
    prepare_data,
    remove_unused,
)
from core.limits import limits


@pytest.fixture
def open_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="muster-test-", dir="/tmp") as name:
        path = Path(name)
        path.chmod(0o711)
        yield path


def test_a_new_directory_is_made_with_its_folders(open_directory: Path) -> None:
    data = prepare_data(open_directory / "a" / "b")
    assert {entry.name for entry in data.iterdir()} == {"logs", "models", "node", "run"}
    assert (data / "logs").stat().st_mode & 0o777 == 0o700
    assert data.stat().st_mode & 0o066 == 0


def test_a_directory_that_was_there_keeps_its_mode(open_directory: Path) -> None:
    ours = open_directory / "mine"
    ours.mkdir(mode=0o700)
    prepare_data(ours)
    assert ours.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_written_is_one_line(open_directory: Path) -> None:
    (open_directory / "file").write_text("")
    with pytest.raises(LauncherError, match=r"cannot write to .*--data DIR"):
        prepare_data(open_directory / "file")


def test_everything_lies_under_an_open_directory(open_directory: Path) -> None:
    data = prepare_data(open_directory / "d")
    place, note = choose_place(data)
    assert note == ""
    assert place.postgres == data / "postgres"
    assert place.sockets == data / "sockets"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as another user")
def test_under_root_a_closed_directory_gets_an_open_place_and_keeps_it(open_directory: Path) -> None:
    closed = open_directory / "closed"
    closed.mkdir(mode=0o700)
    data = prepare_data(closed / "d")
    place, note = choose_place(data)
    assert str(data) in note
    assert is_open_to_others(place.postgres.parent)
    assert closed.stat().st_mode & 0o777 == 0o700
    assert choose_place(data)[0] == place


def test_a_long_path_gets_short_sockets(open_directory: Path) -> None:
    data = prepare_data(open_directory / ("x" * 90))
    place, _ = choose_place(data)
    assert len(str(place.sockets)) < 80
    assert choose_place(data)[0].sockets == place.sockets
    place.make_socket_directory()
    place.sockets.rmdir()


def test_sockets_of_somebody_else_are_refused(open_directory: Path) -> None:
    data = prepare_data(open_directory / "d")
    place, _ = choose_place(data)
    place.sockets.symlink_to(open_directory)
    with pytest.raises(LauncherError, match="belongs to somebody else"):
        place.make_socket_directory()


@pytest.mark.parametrize(
    ("names", "is_empty"),
    [
        ([], True), (["lost+found"], False), (["models", "node"], False), (["up.lock", "logs", "run", "postgres"], False),
        (["credentials.json", "notes.txt"], False), (["secret_key", "up.log"], False),
    ],
)  # fmt: skip
def test_an_empty_folder_and_one_of_an_installation_are_taken(open_directory: Path, names: list[str], is_empty: bool) -> None:
    for name in names:
        (open_directory / name).touch()
    assert check_data(open_directory) is is_empty
    assert check_data(open_directory / "not" / "there")


@pytest.mark.parametrize(
    ("names", "shown"),
    [(["api.md"], "(api.md)"), (["up.lock", "logs", "b", "a", "d", "c"], "(a, b, c and more)"), ([".git"], "(.git)")],
)
def test_a_folder_of_other_things_is_refused_with_their_names(open_directory: Path, names: list[str], shown: str) -> None:
    for name in names:
        (open_directory / name).touch()
    with pytest.raises(LauncherError) as refusal:
        check_data(open_directory)
    assert str(refusal.value).startswith(f"{open_directory} is not empty and holds no installation of Muster {shown}.")
    assert "--data DIR" in str(refusal.value)


def test_what_a_start_that_failed_had_made_is_removed(open_directory: Path) -> None:
    wanted = open_directory / "a" / "b"
    made = find_missing(wanted)
    data = prepare_data(wanted)
    lock_path(data).touch()
    remove_unused(data, made)
    assert list(open_directory.iterdir()) == []


def test_what_a_start_that_failed_had_written_stays(open_directory: Path) -> None:
    data = prepare_data(open_directory / "d")
    (data / "logs" / "postgres.log").write_text("no space left")
    remove_unused(data, [data])
    assert (data / "logs" / "postgres.log").exists()


def test_a_secret_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    first = read_or_create_secret(path)
    assert len(first) >= 43
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_or_create_secret(path) == first


def test_an_empty_secret_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("\n")
    assert read_or_create_secret(tmp_path / "secret")


def test_a_file_that_was_open_to_others_is_closed_when_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("old")
    path.chmod(0o644)
    write_json(path, {"new": 1})
    assert read_json(path) == {"new": 1}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "directory"
    target.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_private(target, "text")
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("content", ["", "[1]", "{broken", '"text"'])
def test_what_is_no_object_reads_as_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    assert read_json(path) == {}
    assert read_json(tmp_path / "missing") == {}


def test_a_grown_log_is_kept_once_and_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "part.log"
    with open_log(path) as log:
        log.write(b"x" * (limits().launcher.log_bytes + 1))
        log.flush()
        rotate(path)
        log.write(b"after\n")
    assert path.read_bytes() == b"after\n"
    assert path.with_name("part.log.1").stat().st_size == limits().launcher.log_bytes + 1
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_last_line_that_says_something_is_found(tmp_path: Path) -> None:
    path = tmp_path / "part.log"
    assert read_last_line(path) == "nothing in its log"
    path.write_text("first\nlast words\n\n  \n")
    assert read_last_line(path) == "last words"


def test_only_what_was_written_since_is_read(tmp_path: Path) -> None:
    path = tmp_path / "part.log"
    path.write_text("old ready.\n")
    before = path.stat().st_size
    path.write_text("old ready.\nnew\n")
    assert read_tail(path, since=before) == "new\n"
    path.write_text("cut\n")
    assert read_tail(path, since=before) == "cut\n"


_HOLD = """
import sys, time
from pathlib import Path
from controlplane.launcher.locks import FileLock
FileLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_holder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path):
        assert read_holder(path) == os.getpid()
        with pytest.raises(LockHeld) as refused:
            FileLock(path).acquire()
        assert refused.value.holder == str(os.getpid())
    assert read_holder(path) is None
    with FileLock(path):
        assert read_holder(path) == os.getpid()


def test_a_holder_killed_with_9_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout is not None
    with holder, holder.stdout as output:
        assert output.readline() == b"held\n"
        assert read_holder(path) == holder.pid
        holder.kill()
        holder.wait()
        assert read_holder(path) is None
        with FileLock(path):
            pass


class Clock:
    """Stands in for the clock: time passes while somebody sleeps, and only then."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_waiting_for_a_lock_ends_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    clock = Clock()
    monkeypatch.setattr(locks, "clock", clock)
    waited_for: list[str] = []
    with FileLock(path), pytest.raises(LockHeld):
        acquire_patiently(FileLock(path), deadline_s=5.0, on_wait=waited_for.append)
    assert waited_for == [str(os.getpid())]
    assert 5.0 <= clock.now < 6.0


def test_a_missing_file_has_no_holder(tmp_path: Path) -> None:
    assert read_holder(tmp_path / "none") is None


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

"""Where an installation keeps its things."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.launcher.errors import LauncherError
from controlplane.launcher.places import (
    check_data,
    choose_place,
    find_missing,
    is_open_to_others,
    lock_path,
    prepare_data,
    remove_unused,
)


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

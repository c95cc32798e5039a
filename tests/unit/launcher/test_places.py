"""Where an installation keeps its things."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.launcher.errors import LauncherError
from controlplane.launcher.places import choose_place, is_open_to_others, prepare_data


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

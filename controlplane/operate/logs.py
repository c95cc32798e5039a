"""``muster logs``: the log files of ``up`` in one stream, or the journal of the services."""

from __future__ import annotations

import os
import shutil
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from controlplane.launcher.console import LauncherError, say
from controlplane.operate.installation import Installation, Kind
from core.limits import limits
from wire import clock

_UNITS = "muster*"


@dataclass(frozen=True, slots=True)
class LogOptions:
    """``part``: a part of ``up`` or a unit of systemd; empty = all."""

    part: str = ""
    follow: bool = False
    lines: int = 0


def run_logs(installation: Installation, options: LogOptions) -> int:
    """Print the end of the logs, and what comes with ``follow``. Raises LauncherError when there are none here."""
    most = options.lines or limits().console.log_lines
    folder = installation.data / "logs"
    if installation.kind is Kind.SERVICES or not folder.is_dir():
        _show_journal(options, most)
    found = sorted(folder.glob("*.log"))
    names = [path.stem for path in found]
    if options.part and options.part not in names:
        raise LauncherError(f"there is no log of {options.part} in {folder}; there are {', '.join(names) or 'none'}")
    chosen = [path for path in found if options.part in ("", path.stem)]
    width = max((len(path.stem) for path in chosen), default=0) if len(chosen) > 1 else 0
    for path in chosen:
        for line in read_end(path, most if len(chosen) == 1 else max(1, most // len(chosen))):
            say(_name(path, line, width))
    if options.follow:
        _follow(chosen, width)
    return 0


def read_end(path: Path, most: int) -> list[str]:
    """Return the last lines of a file."""
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - limits().launcher.log_bytes))
        return [line.decode(errors="replace").rstrip() for line in deque(stream, maxlen=most)]


def _follow(paths: list[Path], width: int) -> None:
    places = {path: path.stat().st_size for path in paths}
    while True:
        clock.sleep(limits().console.log_poll_s)
        for path, place in places.items():
            try:
                size = path.stat().st_size
                # One that is shorter was rotated: it begins anew.
                with path.open("rb") as stream:
                    stream.seek(place if place <= size else 0)
                    new = stream.read()
            except OSError:
                continue
            whole, newline, rest = new.rpartition(b"\n")
            places[path] = (place if place <= size else 0) + len(new) - len(rest)
            for line in whole.split(b"\n") if newline else ():
                say(_name(path, line.decode(errors="replace"), width))


def _name(path: Path, line: str, width: int) -> str:
    return f"{path.stem:<{width}} | {line}" if width else line


def _show_journal(options: LogOptions, most: int) -> NoReturn:
    program = shutil.which("journalctl")
    if program is None:
        raise LauncherError(
            "there are no log files here: the services write to standard error, ask what runs them (docker compose logs, "
            "kubectl logs), or name the directory of an installation with --data DIR"
        )
    unit = f"muster-{options.part.removeprefix('muster-')}*" if options.part else _UNITS
    os.execv(program, [program, f"--unit={unit}", f"--lines={most}", "--no-pager", *(["--follow"] if options.follow else [])])  # noqa: S606  # no shell is wanted

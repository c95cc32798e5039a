"""A check of a package: a function of a workplace that returns what it found, and how all of them are run and told."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

from controlplane.launcher.console import LauncherError, progress, say
from wire import clock


@dataclass(frozen=True, slots=True)
class Passed:
    """``found``: figures that a reader wants, such as sizes; may be empty."""

    found: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """``why``: what is wrong and where, one thing a line."""

    why: str


@dataclass(frozen=True, slots=True)
class NotHere:
    """A check that this machine cannot run. ``why``: what it lacks."""

    why: str


Outcome = Passed | Failed | NotHere


class CheckFailed(Exception):
    """Raised anywhere in a check, it is a ``Failed`` with these words."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table. ``text``: what holds when it passed."""

    name: str
    text: str
    run: Callable[[Workplace], Outcome]


@dataclass(slots=True)
class Workplace:
    """What checks share. ``root``: of the checkout; ``folder``: theirs alone, gone at the end; ``out``: kept artefacts."""

    root: Path
    folder: Path
    out: Path
    _made: dict[str, Path] = field(default_factory=dict)

    def make_folder(self, name: str) -> Path:
        """Return a new empty folder, whose path others may enter too."""
        made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        made.chmod(0o755)
        return made

    def make_once(self, name: str, make: Callable[[Workplace], Path]) -> Path:
        """Return what ``make`` made, of which several checks need the same, such as the wheel."""
        if name not in self._made:
            self._made[name] = make(self)
        return self._made[name]

    def call(
        self,
        *words: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        within_s: float = 600.0,
    ) -> str:
        """Run a program and return what it printed. Raises CheckFailed with its last lines, or when it takes too long."""
        command = [str(word) for word in words]
        shown = " ".join([Path(command[0]).name, *command[1:]])[:120]
        try:
            ended = subprocess.run(
                command, cwd=cwd or self.root, env=dict(env) if env is not None else None, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=within_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"`{shown}` did not end within {within_s:.0f} s") from None
        except OSError as error:
            raise CheckFailed(f"`{shown}` could not be started: {error.strerror}") from None
        if ended.returncode:
            last = "\n".join(ended.stdout.strip().splitlines()[-12:])
            raise CheckFailed(f"`{shown}` ended with status {ended.returncode}:\n{last}")
        return ended.stdout


def find_program(name: str) -> str | None:
    """Return the path of a program of our environment, or of this machine."""
    own = Path(sys.executable).with_name(name)
    return str(own) if own.exists() else shutil.which(name)


def format_bytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def run_checks(root: Path, table: Sequence[Check], words: Sequence[str]) -> int:
    """Run the rows that ``words`` choose and tell each outcome. Returns 1 when one failed. Raises LauncherError."""
    options = _read_options(table, words)
    if options.list:
        for check in table:
            say(f"{check.name:<22} {check.text}")
        return 0
    chosen = [check for check in table if not options.only or check.name in options.only]
    results: list[tuple[Check, Outcome, float]] = []
    with open_workplace(root, options.out.resolve()) as place:
        for number, check in enumerate(chosen, 1):
            progress(f"{number} of {len(chosen)} {check.name}: {check.text}")
            began = clock.monotonic()
            with _say_still_running(check.name):
                outcome = _run(check, place)
            results.append((check, outcome, clock.monotonic() - began))
            _tell(*results[-1])
    counts = {kind: sum(isinstance(outcome, kind) for _, outcome, _ in results) for kind in (Passed, Failed, NotHere)}
    say(f"{counts[Passed]} passed, {counts[Failed]} failed, {counts[NotHere]} could not run here")
    for check, outcome, _ in results:
        match outcome:
            case Failed(why) | NotHere(why):
                sign = "FAILED  " if isinstance(outcome, Failed) else "not here"
                say(f"{sign} {check.name}: {why.splitlines()[0] if why else ''}")
            case Passed():
                pass
    return 1 if counts[Failed] else 0


def _read_options(table: Sequence[Check], words: Sequence[str]) -> argparse.Namespace:
    names = [check.name for check in table]
    parser = argparse.ArgumentParser(prog="muster package", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the checks and what each holds")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run only these checks")
    parser.add_argument(
        "--out", type=Path, default=Path("dist"), metavar="DIR", help="what is built is kept here (default: %(default)s)"
    )
    options = parser.parse_args(list(words))
    if unknown := sorted(set(options.only) - set(names)):
        raise LauncherError(f"there is no check {', '.join(unknown)}; there are {', '.join(names)}")
    return options


@contextmanager
def open_workplace(root: Path, out: Path) -> Iterator[Workplace]:
    """Make a workplace, and remove its folder at the end. Raises LauncherError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LauncherError(f"cannot make {out}: {error.strerror}. Choose another --out DIR") from None
    with tempfile.TemporaryDirectory(prefix="muster-package-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # noqa: S103  # some checks are run by another user
        yield Workplace(root=root, folder=Path(folder), out=out)


def _run(check: Check, place: Workplace) -> Outcome:
    try:
        return check.run(place)
    except CheckFailed as error:
        return Failed(str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return Failed(f"{type(error).__name__}: {error}")


def _tell(check: Check, outcome: Outcome, seconds: float) -> None:
    match outcome:
        case Passed(found):
            sign, text = "passed", found
        case Failed(why):
            sign, text = "FAILED", why
        case NotHere(why):
            sign, text = "could not run here", why
        case _:
            assert_never(outcome)
    first, *more = text.splitlines() or [""]
    say(f"  {sign:<8} {seconds:6.1f} s  {first}")
    for line in more:
        say(f"                     {line}")


@contextmanager
def _say_still_running(name: str) -> Iterator[None]:
    """Say every 20 seconds that a check still runs."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(20.0):
            progress(f"  {name} is still running")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()

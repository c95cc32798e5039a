"""``python -m benchmarks.govcheck`` (``./muster bench governance``): governed operations on a whole installation of its own.

The exit status is 0 when every demand was met, 1 when one was not, 2 when a check could not be made. SIGTERM ends the
installation too.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import msgspec

from benchmarks.boxcheck.findings import Section
from benchmarks.errors import BenchmarkError
from benchmarks.govcheck import kills, refusals, stolen, trail
from benchmarks.govcheck.fleet import Fleet, open_fleet
from benchmarks.runner import Progress

Check = Callable[[Section, Fleet, Progress, argparse.Namespace], None]
CHECKS: Mapping[str, Check] = {
    "refusals": lambda section, fleet, _progress, _options: refusals.run(section, fleet),
    "kills": lambda section, fleet, progress, options: kills.run(section, fleet, progress, cases=_choose(options.kill)),
    "audit": lambda section, fleet, _progress, _options: trail.run(section, fleet),
    # Last: it plants rows in the database that no honest control plane would hold.
    "stolen": lambda section, fleet, _progress, _options: stolen.run(section, fleet),
}


def _choose(victims: str) -> list[tuple[str, str]]:
    wanted = [name.strip() for name in victims.split(",") if name.strip()]
    if unknown := sorted(set(wanted) - set(kills.VICTIMS)):
        raise BenchmarkError(f"--kill does not know {', '.join(unknown)}; it knows {', '.join(kills.VICTIMS)}")
    return [case for case in kills.EVERY if case[0] in wanted]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="muster bench governance", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAMES", help=f"comma list of checks ({', '.join(CHECKS)})")
    parser.add_argument(
        "--kill", default=",".join(kills.VICTIMS), metavar="PARTS", help="whom the check kills kills (default: %(default)s)"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="keep the installation's files and logs in DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


def check_governance(arguments: argparse.Namespace, progress: Progress) -> int:
    """Make the checks, print and write what they found; return the exit status. Raises BenchmarkError."""
    wanted = [name.strip() for name in arguments.only.split(",") if name.strip()]
    if unknown := sorted(set(wanted) - set(CHECKS)):
        raise BenchmarkError(f"--only does not know {', '.join(unknown)}; it knows {', '.join(CHECKS)}")
    sections: list[Section] = []
    progress.show("starting an installation")
    with open_fleet(arguments.data.resolve() if arguments.data else None) as fleet:
        progress.show("people, the first policy, and the node that trusts it")
        fleet.enrol()
        for name in [name for name in CHECKS if not wanted or name in wanted]:
            progress.show(name)
            section = Section(name, lambda text: print(text, flush=True))
            section.line(f"\n== {name}\n")
            CHECKS[name](section, fleet, progress, arguments)
            section.close()
            sections.append(section)
    progress.finish()
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode([section.as_dict() for section in sections])))
    return 0 if all(section.passed for section in sections) else 1


def _leave(number: int, _frame: FrameType | None) -> None:
    """End this program the way an exception does, so that the installation it has started is stopped on the way out."""
    raise SystemExit(128 + number)


def main(argv: Sequence[str]) -> int:
    """Run the command line."""
    arguments = build_parser().parse_args(argv)
    progress = Progress()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        return check_governance(arguments, progress)
    except (BenchmarkError, AssertionError) as error:
        progress.finish()
        print(f"govcheck: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

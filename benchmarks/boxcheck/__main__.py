"""``python -m benchmarks.boxcheck`` (``./muster bench node``): checks with figures on the real stand-alone node.

Each check starts nodes of its own. The exit status is 0 when every demand was met, 1 when one was not, 2 when a check could
not be made.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.boxcheck import cycles, fairness, fit, isolation, kills, limits, priority, walk
from benchmarks.boxcheck.findings import Section
from benchmarks.boxcheck.models import ModelFolder, prepare_models
from benchmarks.boxcheck.workbench import Options, Workbench
from benchmarks.errors import BenchmarkError
from benchmarks.report import describe_machine
from benchmarks.runner import Progress

FORMAT = 1
Check = Callable[[Workbench], Awaitable[None]]
CHECKS: Mapping[str, Check] = {
    "walk": walk.run,
    "isolation": isolation.run,
    "fairness": fairness.run,
    "priority": priority.run,
    "limits": limits.run,
    "cycles": cycles.run,
    "kills": kills.run,
    "fit": fit.run,
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="muster bench box", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAMES", help=f"comma list of checks ({', '.join(CHECKS)})")
    parser.add_argument("--cycles", type=_positive, default=200, help="loads and unloads (default: %(default)s)")
    parser.add_argument(
        "--seconds",
        type=_positive,
        default=40,
        help="how long clients compete, in fairness and in priority (default: %(default)s)",
    )
    parser.add_argument(
        "--vllm", action="store_true", help="vLLM too: set MUSTER_VLLM_PYTHON, or have ./muster test --vllm first"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="keep the nodes' files and logs in DIR (default: nowhere)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


def choose(only: str) -> list[str]:
    """Return the names of the checks to make, in their own order. Raises BenchmarkError for unknown ones."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = sorted(set(names) - set(CHECKS))
    if unknown:
        raise BenchmarkError(f"--only does not know {', '.join(unknown)}; it knows {', '.join(CHECKS)}")
    return [name for name in CHECKS if not names or name in names]


def check_box(arguments: argparse.Namespace, progress: Progress) -> int:
    """Make the checks, print and write what they found; return the exit status."""
    names = choose(arguments.only)
    options = Options(cycles=arguments.cycles, fairness_s=float(arguments.seconds), priority_s=float(arguments.seconds))
    with ExitStack() as stack:
        root = arguments.data
        if root is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-boxcheck-")))
        root = root.resolve()
        progress.show("copying the tiny models")
        models = prepare_models(root / "models", with_vllm=arguments.vllm)
        sections = [_make(name, root, models, options, progress) for name in names]
    progress.finish()
    _summarise(sections)
    if arguments.json:
        _write(arguments.json, sections)
    return 0 if all(section.passed for section in sections) else 1


def _make(name: str, root: Path, models: ModelFolder, options: Options, progress: Progress) -> Section:
    """Make one check; what stops it is a demand that was not met."""
    section = Section(name, lambda text: print(text, flush=True))
    section.line(f"\n== {name}\n")
    bench = Workbench(section, _fresh(root / name), models, options, progress)
    try:
        asyncio.run(_call(CHECKS[name], bench))
    except (BenchmarkError, AssertionError, aiohttp.ClientError, OSError, KeyError, TimeoutError) as error:
        section.judge("the check ran to its end", passed=False, shown=f"{type(error).__name__}: {error}")
    section.close()
    return section


async def _call(check: Check, bench: Workbench) -> None:
    await check(bench)


def _fresh(folder: Path) -> Path:
    """Return a folder that no earlier run has left anything in: what a node learnt there would change what it predicts."""
    number = 1
    while (made := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    made.mkdir(parents=True)
    return made


def _summarise(sections: Sequence[Section]) -> None:
    print("\n== summary\n")
    for section in sections:
        missed = [finding for finding in section.findings if not finding.passed]
        met = f"{len(section.findings) - len(missed)} of {len(section.findings)}"
        print(f"  {'PASS' if section.passed else 'FAIL'}  {section.name} ({met})")
        for finding in missed:
            print(f"          {finding.demand}: {finding.shown}")


def _write(path: Path, sections: Sequence[Section]) -> None:
    document = {
        "format": FORMAT,
        "machine": describe_machine(),
        "checks": {section.name: section.as_dict() for section in sections},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    print(f"\nwritten: {path}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = build_parser().parse_args(argv)
    progress = Progress()
    try:
        return check_box(arguments, progress)
    except BenchmarkError as error:
        progress.finish()
        print(f"muster bench box: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.finish()
        print("muster bench box: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

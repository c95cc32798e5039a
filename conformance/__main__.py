"""``./muster conformance``: check a server against what clients require of it. Exit status 0 only when nothing failed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.exchange import LIMITS, Ask, Finding, Verdict, Violation
from conformance.report import format_json, format_summary, format_table, run_rows
from conformance.table import EMBEDDINGS, IMAGES, MODELS, RERANK, TRANSCRIPTIONS, Row, Surface, Target, list_rows

KEY_VARIABLE = "MUSTER_API_KEY"
_OTHER_MODELS = {"embeddings": EMBEDDINGS, "rerank": RERANK, "audio": TRANSCRIPTIONS, "images": IMAGES}
_EPILOG = f"""\
The key may also be in {KEY_VARIABLE}. Exit status: 0 nothing failed, 1 something failed, 2 nothing could be checked.

With --scripted the model must be the scripted engine, which does what the prompt tells it to (tool calls, thoughts, refusals,
errors, cuts): start it with `python -m conformance.engine`, put a node in front of it with `./muster node --backend URL`,
allow the model "scripted", and ask for that. Without it, requirements that only such an engine can show are skipped.

With --engine-url a requirement that the server does not fulfil is checked against the engine without the server. The same fault
there is listed as `engine` with its words, counted apart, and leaves the exit status alone. Give it for paths that the engine
answers itself: of a translated answer the server is the author.
"""


def main(argv: Sequence[str]) -> int:
    """Run the table and print it. Returns the exit status."""
    options = _read_options(argv)
    try:
        rows = list_rows(options.only)
    except ValueError as error:
        return _cannot_run(str(error))
    if options.list:
        print("\n".join(f"{row.id:<36} {row.requirement}" for row in rows))
        return 0
    if not (options.base_url and options.api_key and options.model):
        return _cannot_run(f"--base-url, --api-key (or {KEY_VARIABLE}) and --model are needed")
    target = Target(
        base_url=_trim(options.base_url),
        api_key=options.api_key,
        model=options.model,
        scripted=options.scripted,
        silence_s=options.silence_s,
        timeout_s=options.timeout_s,
        models=dict(options.model_for),
    )
    return asyncio.run(_run(target, rows, options))


def _read_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="muster conformance", description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", metavar="URL", help="of the server, with or without /v1")
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get(KEY_VARIABLE))
    parser.add_argument("--model", metavar="NAME", help="the model to ask")
    parser.add_argument(
        "--model-for", metavar="SURFACE=NAME", type=_model_for, action="append", default=[],
        help=f"another model for one of {', '.join(_OTHER_MODELS)}; may be repeated",
    )  # fmt: skip
    parser.add_argument("--scripted", action="store_true", help="the model is the scripted engine")
    parser.add_argument("--engine-url", metavar="URL", help="of the engine behind it, to be asked itself whatever fails")
    parser.add_argument("--engine-model", metavar="NAME", help="the model's name there (default: the same)")
    parser.add_argument("--engine-key", metavar="KEY", default="none", help="a key of the engine's, where it asks for one")
    parser.add_argument(
        "--only", metavar="A,B", type=lambda text: text.split(","), default=[], help="surfaces, or beginnings of ids"
    )
    parser.add_argument(
        "--require",
        metavar="A,B",
        type=_surfaces,
        default=[],
        help="surfaces that must be there: without them it fails, or `all`",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the findings there as well")
    parser.add_argument("--list", action="store_true", help="print the requirements and leave")
    parser.add_argument(
        "--jobs", type=int, default=LIMITS.simultaneous, metavar="N", help="requests at a time (default: %(default)s)"
    )
    parser.add_argument("--timeout-s", type=float, default=120.0, metavar="S", help="for one answer (default: %(default)g)")
    parser.add_argument(
        "--silence-s",
        type=float,
        default=11.0,
        metavar="S",
        help="of the engine where keep-alives are awaited (default: %(default)g)",
    )
    return parser.parse_args(argv)


def _trim(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _model_for(text: str) -> tuple[str, str]:
    surface, _, name = text.partition("=")
    if surface not in _OTHER_MODELS or not name:
        raise argparse.ArgumentTypeError(f"give SURFACE=NAME with one of {', '.join(_OTHER_MODELS)}")
    return _OTHER_MODELS[surface], name


def _surfaces(text: str) -> list[Surface]:
    if text == "all":
        return list(Surface)
    try:
        return [Surface(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"the surfaces are {', '.join(Surface)}") from None


async def _run(target: Target, rows: Sequence[Row], options: argparse.Namespace) -> int:
    began = asyncio.get_running_loop().time()
    try:
        headers = (("authorization", f"Bearer {target.api_key}"),)
        listed = await target.send_fresh(Ask("GET", MODELS, headers))
    except Violation as error:
        return _cannot_run(f"{target.base_url}: {error}")
    if listed.status in {401, 403}:
        return _cannot_run(f"{target.base_url} refuses the key ({listed.status})")
    progress = _Progress(len(rows))
    engine = None
    if options.engine_url:
        engine = Target(
            base_url=_trim(options.engine_url),
            api_key=options.engine_key,
            model=options.engine_model or target.model,
            scripted=target.scripted,
            timeout_s=target.timeout_s,
        )
    findings = await run_rows(
        target, rows, required=options.require, simultaneous=options.jobs, on_finding=progress.note, engine=engine
    )
    progress.clear()
    print(format_table(rows, findings))
    print()
    print(format_summary(rows, findings))
    print(f"{target.base_url}, model {target.model}, {asyncio.get_running_loop().time() - began:.1f} s")
    if options.json:
        options.json.write_text(format_json(rows, findings, base_url=target.base_url, model=target.model), encoding="utf-8")
    verdicts = {finding.verdict for finding in findings}
    if Verdict.FAIL in verdicts:
        return 1
    return 0 if Verdict.OK in verdicts else _cannot_run("every requirement was skipped")


class _Progress:
    """Says on standard error how far it is: in place on a terminal, else every so many rows."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._failed = 0
        self._is_terminal = sys.stderr.isatty()

    def note(self, finding: Finding) -> None:
        """Count a finding."""
        self._done += 1
        self._failed += finding.verdict is Verdict.FAIL
        text = f"{self._done} of {self._total} checked, {self._failed} failed"
        if self._is_terminal:
            print(f"\r{text}  {finding.row_id:<40.40}", end="", file=sys.stderr, flush=True)
        elif self._done % max(1, self._total // 10) == 0:
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Make room for the table."""
        if self._is_terminal:
            print("\r" + " " * 90 + "\r", end="", file=sys.stderr, flush=True)


def _cannot_run(words: str) -> int:
    print(f"cannot check: {words}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)

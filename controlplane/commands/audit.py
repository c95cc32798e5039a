"""The command ``audit``: check the audit log, export it, prove what it says of an operation, sign a checkpoint."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from django.conf import settings
from django.core.management import CommandError

from controlplane.commands import Options, command
from core.limits import limits
from governance import checkpoints
from governance.audit import log_size, read_log
from governance.errors import GovernanceError
from governance.operations.queries import read_evidence
from wire import COMMAND, auditlog, clock
from wire.auditlog import USAGE_STATUS, AuditLogError, LogKey, Record, Status, Verdict, Verifier
from wire.ids import format_id, parse_id


def _add_actions(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    verify = actions.add_parser("verify")
    verify.add_argument("file", nargs="?", type=Path, help="an export; without one, the database is checked")
    verify.add_argument("--key", action="append", default=[], help="another key of the log, such as the one before this")
    actions.add_parser("export").add_argument("file", type=Path)
    prove = actions.add_parser("prove")
    prove.add_argument("operation", metavar="OPID")
    prove.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    actions.add_parser("checkpoint")


@command(
    "audit",
    "verify: check the whole log, or an export of it. Status 0 good, 1 broken, 2 shorter than a checkpoint or a witness "
    "says, 3 a signature that does not hold or a log that was rewritten, 4 unwitnessed: no checkpoint at all. "
    "export: write it to a file. "
    "prove: what the log holds of an operation, to be checked elsewhere. checkpoint: sign the log as it is now.",
    _add_actions,
)
def audit(options: Options) -> tuple[str, int]:
    """Run one of the actions; ``verify`` ends with the statuses 0 to 4 of ``auditlog.Status``. Raises CommandError."""
    try:
        match options["action"]:
            case "verify":
                return _verify(options["file"], [LogKey.parse(text) for text in options["key"]])
            case "export":
                return f"Wrote {export_log(options['file'])} records to {options['file']}", 0
            case "prove":
                return _prove(options["operation"], options["out"]), 0
            case _:
                return _sign_checkpoint(), 0
    except (AuditLogError, GovernanceError, OSError) as error:
        raise CommandError(str(error), returncode=USAGE_STATUS) from error


def _verify(file: Path | None, more_keys: list[LogKey]) -> tuple[str, int]:
    keys = [*checkpoints.log_keys(), *more_keys]
    verdict = verify_database(keys) if file is None else verify_file(file, keys)
    lines = list(verdict.lines())
    if not keys:
        lines.append("There is no log key, so no checkpoints are made: set MUSTER_LOG_KEY.")
    elif verdict.status is Status.GOOD and verdict.size and not verdict.sealed:
        lines.append(f"This log is minutes old. Its first checkpoint is made soon, or now by {COMMAND} audit checkpoint.")
    return "\n".join(lines), int(verdict.status)


def _prove(op_id: str, out: Path | None) -> str:
    ident = parse_id("op", op_id)
    printed = op_id if ident is None else format_id("op", ident)  # a bare UUID is an operation as well
    proof = checkpoints.prove_operation(printed, now=clock.now())
    text = json.dumps(proof | {"operation": read_evidence(printed)}, indent=1)
    if out is None:
        return text
    out.write_text(text + "\n", encoding="utf-8")
    return ""


def _sign_checkpoint() -> str:
    if checkpoints.log_key() is None:
        raise CommandError("There is no log key: set MUSTER_LOG_KEY.", returncode=USAGE_STATUS)
    made = checkpoints.make_checkpoint(now=clock.now()) or checkpoints.latest_checkpoint()
    return made.note if made else "The audit log is empty."


def verify_database(keys: Iterable[LogKey]) -> Verdict:
    """Judge the log in the database, at one moment of it."""
    verifier = Verifier(keys=keys, origin=settings.GOVERNANCE_LOG_ORIGIN, check=checkpoints.check_signature)
    for record in show_progress(read_log(), total=log_size()):
        verifier.feed(record)
    verdict = verifier.finish()
    # One so young that its first checkpoint is not due yet is good.
    is_young = verdict.status is Status.UNWITNESSED and not checkpoints.is_first_due(now=clock.now())
    return replace(verdict, status=Status.GOOD) if is_young else verdict


def verify_file(file: Path, keys: list[LogKey]) -> Verdict:
    """Judge an export by these keys, without any by those that it names itself. Raises AuditLogError, OSError."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        origin, own_keys, size = auditlog.read_header(next(lines, ""))
        verifier = Verifier(keys=keys or own_keys, origin=origin, size_claimed=size, check=checkpoints.check_signature)
        for record in show_progress(auditlog.read_records(lines), total=size):
            verifier.feed(record)
    return verifier.finish()


def export_log(file: Path) -> int:
    """Write the whole log as JSON lines. Returns how many records. Raises OSError."""
    size, written = log_size(), 0
    with file.open("w", encoding="utf-8") as lines:
        header = auditlog.render_header(origin=settings.GOVERNANCE_LOG_ORIGIN, keys=checkpoints.log_keys(), size=size)
        lines.write(header + "\n")
        for record in show_progress(read_log(), total=size):
            lines.write(auditlog.render(record) + "\n")
            written += 1
    return written


def show_progress(records: Iterable[Record], *, total: int) -> Iterator[Record]:
    """Pass records on, with percent and time left on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield from records
        return
    started_s = clock.monotonic()
    for number, record in enumerate(records, 1):
        yield record
        if number % limits().console.audit_progress_records == 0:
            share = min(1.0, number / max(total, number))
            left_s = (clock.monotonic() - started_s) * (1 - share) / share
            sys.stderr.write(f"\r{share:4.0%}, {left_s:.0f} s left ")
            sys.stderr.flush()
    sys.stderr.write("\r\033[K")

"""``./muster trust`` (``python -m runner.operations.trust``): what the owner of a box confirms, renews and forgets on the box.

Nothing here talks to the box: it finds what was changed in its data folder at its next heartbeat, or when it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.ledger import FILE_NAME
from runner.limits import limits
from runner.operations import fingerprint
from runner.operations.governance import BOX_FACT
from runner.operations.op_keys import FOLDER_NAME, OpKeys, TooManyKeys
from runner.operations.witness import FACT as WITNESS_FACT
from wire import clock
from wire.optoken.approval import ApprovalError, Policy, policy_words, read_policy

SOON = "A running box takes it over within 5 seconds."

EPILOG = """\
The fingerprint is that of the first policy. Get it from an approver, not from the control plane that it protects you from: that
is what makes this step worth anything. Type all twelve words, or the 64 digits.
"""


class Refusal(Exception):
    """What was asked for cannot be done; the text says why and what would help."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the ledger of a box says. ``runner_id`` and ``level``: as of its last start, "" = it has not been started."""

    runner_id: str = ""
    level: str = ""
    first: Policy | None = None
    newest: Policy | None = None
    witness: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked; return the exit status: 0, or 2 when it was refused."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    given = options.data or os.environ.get("MUSTER_DATA", "")
    try:
        if not given:
            raise Refusal("where does the box keep its data? Give --data DIR or set MUSTER_DATA")
        data = Path(given).expanduser().resolve()
        if not data.is_dir():
            raise Refusal(f"there is no folder {data}; start the box with --data {data} first")
        text = _act(options, data)
    except (Refusal, ValueError, TooManyKeys, ApprovalError) as error:
        sys.stderr.write(f"trust: {error}\n")
        return 2
    except (OSError, sqlite3.Error) as error:
        sys.stderr.write(f"trust: the data folder cannot be used: {error}; run this as the user that the box runs as\n")
        return 2
    sys.stdout.write(text + "\n")
    return 0


def _act(options: argparse.Namespace, data: Path) -> str:
    asked = [name for name in ("show", "renew_key", "forget") if getattr(options, name)]
    if len(asked) + bool(options.fingerprint) != 1:
        raise Refusal("give a fingerprint, or one of --show, --renew-key and --forget")
    if options.show:
        return show(data)
    if options.renew_key:
        return renew_key(data)
    if options.forget:
        return forget(data)
    return confirm(data, options.fingerprint)


def confirm(data: Path, parts: Sequence[str]) -> str:
    """Write down the fingerprint of the first policy. Raises Refusal, ValueError and OSError."""
    wanted = fingerprint.parse_fingerprint(parts)
    first = None if fingerprint.is_asked_to_forget(data) else read_known(data).first
    if first is not None and fingerprint.fingerprint_matches(wanted, first.raw):
        return "This box follows that policy already; nothing was changed."
    if first is not None:
        raise Refusal(
            f"this box follows another policy, whose first version is {_words(first)}. To enrol it anew, run --forget first; "
            "a new version of the same policy is taken over by itself"
        )
    fingerprint.write_trusted(data, wanted)
    return f"Confirmed: the first policy of this box is {wanted}. {SOON}"


def renew_key(data: Path) -> str:
    """Make another key for operation tokens. Raises Refusal, TooManyKeys and OSError."""
    keys = OpKeys(data / FOLDER_NAME)
    if not keys.list_kids():
        raise Refusal("the box has made no key of its own yet; it does so when it starts at level 1 or 2")
    kid = keys.renew(clock.unix_s())
    return f"Made the key {kid}; those before it are good for 24 h more. {SOON}"


def forget(data: Path) -> str:
    """Have the box forget its policy and what it witnessed. Raises OSError."""
    fingerprint.ask_to_forget(data)
    return (
        "The box forgets its policy and the audit checkpoint it saw, and tells the control plane so. It carries out nothing "
        f"until a fingerprint is confirmed again. {SOON}"
    )


def show(data: Path) -> str:
    """Return what the box is and believes. Raises OSError and sqlite3.Error."""
    known = read_known(data)
    confirmed = fingerprint.read_trusted(data)
    kids = OpKeys(data / FOLDER_NAME).list_kids()
    if known.newest is None:
        policy = "none pinned" + (
            f"; confirmed and waiting to be offered: {confirmed}" if confirmed else "; run ./muster trust"
        )
    else:
        first = known.first or known.newest
        policy = f"{known.newest.ref.id} version {known.newest.ref.version}, {_words(known.newest)}"
        policy += f"\nconfirmed   version 1, {_words(first)}, sha256 {first.ref.sha256}"
    lines = [
        f"runner id   {known.runner_id or 'not known; the box has not been started with this folder'}",
        f"level       {known.level or 'not known'}",
        f"policy      {policy}",
        f"op keys     {', '.join(kids) or 'none of its own'}",
        f"witnessed   {known.witness or 'no audit checkpoint yet'}",
    ]
    if fingerprint.is_asked_to_forget(data):
        lines.append("about to forget policy and checkpoint, when the box runs")
    return "\n".join(lines)


def read_known(data: Path) -> Known:
    """Return what the ledger in ``data`` says, while a box may be using it. Raises sqlite3.Error."""
    path = data / FILE_NAME
    if not path.is_file():
        return Known()
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=limits().ledger.busy_s)) as connection:
        if connection.execute("PRAGMA user_version").fetchone()[0] < 2:
            return Known()  # of an earlier version of this program, which pinned nothing
        facts = dict(connection.execute("SELECT name, value FROM facts"))
        documents = [row[0] for row in connection.execute("SELECT document FROM policies ORDER BY version")]
    box, seen = json.loads(facts.get(BOX_FACT, "{}")), json.loads(facts.get(WITNESS_FACT, "{}"))
    policies = [read_policy(document) for document in documents]
    return Known(
        runner_id=box.get("runnerId", ""),
        level=box.get("level", ""),
        first=policies[0] if policies else None,
        newest=policies[-1] if policies else None,
        witness=f"{seen['origin']}, {seen['size']} entries, root {seen['root']}" if seen else "",
    )


def _words(policy: Policy) -> str:
    return policy_words(policy.ref.sha256)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./muster trust",
        description="Confirm on a box whose approvals it follows, and look after its keys.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("fingerprint", nargs="*", metavar="WORDS|HEX", help="the fingerprint of the first policy")
    parser.add_argument("--data", default="", metavar="DIR", help="the data folder of the box (default: MUSTER_DATA)")
    parser.add_argument("--show", action="store_true", help="print runner id, level, policy, keys and witnessed checkpoint")
    parser.add_argument("--renew-key", action="store_true", help="make another key for tokens; the old ones stay good for 24 h")
    parser.add_argument("--forget", action="store_true", help="forget policy and checkpoint, to enrol the box anew")
    return parser


if __name__ == "__main__":
    sys.exit(main())

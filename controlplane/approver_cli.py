"""``./muster keys`` and ``./muster approve``: an approver's key file, and approving with it from any machine.

Nothing that the server shows is believed: the statement is decoded here, its digest computed here, and that digest is signed.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from core.limits import limits
from wire import COMMAND
from wire.optoken.approval import ApprovalError, Statement, decode_bytes, digest_words, encode_bytes, read_statement


class Refusal(Exception):
    """Something the person must put right; the text says what."""


def main(argv: Sequence[str]) -> int:
    """Run one command. Exit status: 0 done, 1 refused or failed, 130 interrupted. Trouble is one line on standard error."""
    options = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], str] = options.run
    try:
        sys.stdout.write(run(options) + "\n")
    except (Refusal, ApprovalError, OSError, httpx.HTTPError) as trouble:
        sys.stderr.write(f"muster: {trouble}\n")
        return 1
    except EOFError:
        sys.stderr.write("muster: there is no terminal to ask on; --help names the option that answers\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="muster")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    keys = commands.add_parser("keys", help="make or show an approver's key file").add_subparsers(metavar="WHAT", required=True)
    new = keys.add_parser("new", help="make a key file and print its public line, which is what you register")
    new.add_argument("--name", required=True, help="your username on the control plane")
    new.add_argument("--dir", type=Path, default=default_folder(), help="where key files are (default: %(default)s)")
    new.add_argument("--no-passphrase", action="store_true", help="do not ask for one; whoever reads the file can then approve")
    new.set_defaults(run=make_key)
    show = keys.add_parser("show", help="print the public lines of your key files")
    show.add_argument("--dir", type=Path, default=default_folder(), help="where key files are (default: %(default)s)")
    show.set_defaults(run=show_keys)
    approve = commands.add_parser("approve", help="read what an operation is, in words, and sign it with a key file")
    approve.add_argument("operation", metavar="OPERATION", help="id of the operation")
    approve.add_argument("--url", required=True, help="address of the control plane")
    approve.add_argument("--token-file", type=Path, required=True, metavar="FILE", help="file with an admin token of yours")
    approve.add_argument("--key", type=Path, required=True, metavar="FILE", help="your key file")
    approve.add_argument("--approver", metavar="NAME", help="your username (default: the name of the key file)")
    approve.add_argument("--words", metavar="WORDS", help="do not ask; sign if these are the six words")
    approve.set_defaults(run=approve_operation)
    return parser


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "muster" / "keys"


# Key files


def make_key(options: argparse.Namespace) -> str:
    """Write a new key file (mode 0600) and its public line beside it; return what to do with the line."""
    name = str(options.name)
    if not name or "/" in name or not name.isprintable() or name.startswith("."):
        raise Refusal("a name is your username: letters, digits and @ . + - _")
    folder: Path = options.dir
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{name}.key"
    key = Ed25519PrivateKey.generate()
    passphrase = b"" if options.no_passphrase else ask_new_passphrase()
    encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    try:
        write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    except FileExistsError:
        raise Refusal(f"{path} exists already. A key is never overwritten; choose another --dir or --name") from None
    line = write_line(key, name)
    path.with_suffix(".pub").write_text(line + "\n")
    return f"Made {path}. Register this line on the page My keys, or have an administrator do it:\n{line}"


def ask_new_passphrase() -> bytes:
    """Return the passphrase that was typed twice; empty when none is wanted. Raises Refusal when they differ."""
    first = getpass.getpass("Passphrase for the key file (empty for none): ")
    if first and getpass.getpass("Once more: ") != first:
        raise Refusal("the two passphrases differ; nothing was made")
    return first.encode()


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner reads. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_line(key: Ed25519PrivateKey, name: str) -> str:
    """Return the public line of a key: ``ed25519``, the SPKI DER in base64url, a name."""
    return f"ed25519 {encode_bytes(public_bytes(key))} {name}"


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def show_keys(options: argparse.Namespace) -> str:
    folder: Path = options.dir
    lines = [path.read_text().strip() for path in sorted(folder.glob("*.pub"))]
    return "\n".join(lines) or f"There is no key file in {folder}. Make one: {COMMAND} keys new --name YOUR-USERNAME"


def read_key(path: Path) -> Ed25519PrivateKey:
    """Return the key in a file, asking for its passphrase when it has one. Raises Refusal."""
    content = path.read_bytes()
    if path.stat().st_mode & 0o077:
        raise Refusal(f"others can read {path}. Make it yours alone: chmod 600 {path}")
    passphrase = getpass.getpass(f"Passphrase of {path}: ").encode() if b"ENCRYPTED" in content else None
    try:
        key = load_pem_private_key(content, passphrase)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise Refusal(f"{path} cannot be opened: no key file, or another passphrase") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise Refusal(f"{path} is no Ed25519 key. Make one: {COMMAND} keys new")
    return key


# Approving


def approve_operation(options: argparse.Namespace) -> str:
    """Show an operation, ask, sign its digest and hand the proof in; return how it stands then."""
    token = options.token_file.read_text().strip()
    with httpx.Client(
        base_url=options.url, headers={"Authorization": f"Bearer {token}"}, timeout=limits().console.approve_s
    ) as client:
        path = f"/api/v1/operations/{options.operation}"
        statement = read_operation(call(client, "GET", path), asked_for=options.operation)
        sys.stdout.write(describe(statement))
        confirm(statement, options.words)
        key = read_key(options.key)
        proof = make_proof(statement, key, approver=options.approver or options.key.stem)
        stands = call(client, "POST", f"{path}/approvals", {"proof": proof})
    return f"Approved. The operation is {find_state(stands)} now."


def call(client: httpx.Client, method: str, path: str, body: object = None) -> dict[str, object]:
    """Return the object that the control plane answers with. Raises Refusal in its words, httpx.HTTPError without any."""
    response = client.request(method, path, json=body)
    try:
        answer = response.json() if len(response.content) <= limits().console.approve_answer_bytes else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise Refusal(f"{client.base_url} answered {response.status_code} and nothing that can be read; is it a control plane?")
    if response.is_error:
        error = answer.get("error")
        said = error.get("message") if isinstance(error, dict) else None
        raise Refusal(f"refused ({response.status_code}): {make_plain(said) or 'no reason was given'}")
    return answer


def make_plain(said: object) -> str:
    """Return a text of the control plane without anything that a terminal would act on; "" for what is no text."""
    return (
        "".join(c if c.isprintable() else " " for c in said[: limits().console.approve_error_chars])
        if isinstance(said, str)
        else ""
    )


def read_operation(answer: dict[str, object], *, asked_for: str) -> Statement:
    """Return the statement that was sent. Raises ApprovalError for bytes that nobody may sign, Refusal for a lie."""
    statement = read_statement(decode_bytes(answer.get("statement_b64")))
    if bare_id(statement.op_id) != bare_id(asked_for):
        raise Refusal("the control plane sent another operation than the one asked for. Do not sign; tell the others")
    said = answer.get("digest")
    if isinstance(said, str) and said != statement.digest.hex():
        raise Refusal("the control plane names another digest than its statement has. Do not sign; tell the others")
    return statement


def bare_id(text: str) -> str:
    """Return an operation's id without what its two spellings differ in: ``op_`` and 32 hex digits, or a UUID."""
    return text.lower().removeprefix("op_").replace("-", "")


def describe(statement: Statement) -> str:
    """Return every field of a statement in words, one a line, and the six words of its digest."""
    rest = "the rest is left alone" if statement.stops_on_failure else "the rest goes on"
    fields = [
        ("Operation", f"{statement.operation} (class {statement.op_class})"),
        *(("On", target) for target in statement.targets),
        *((f"With {name}", write_value(value)) for name, value in sorted(statement.params.items())),
        ("Asked for by", f"{statement.requested_by}, {write_time(statement.requested_at)}"),
        ("From", write_time(statement.not_before)),
        ("Until", write_time(statement.not_after)),
        ("Times", f"at most {statement.max_uses}"),
        *([("If one fails", rest)] if len(statement.targets) > 1 else []),
        ("Policy", f"{statement.policy.id} version {statement.policy.version}, {statement.policy.sha256}"),
        ("Reason", f"digest {statement.reason_digest}"),
        ("Operation id", statement.op_id),
        ("Digest", statement.digest.hex()),
        ("Six words", digest_words(statement.digest)),
    ]
    width = max(len(label) for label, _ in fields)
    return "".join(f"{label:<{width}}  {value}\n" for label, value in fields)


def write_value(value: object) -> str:
    # A text that looks like none is JSON too, so that 1 and "1" look different.
    if isinstance(value, str):
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            return value
    return json.dumps(value, ensure_ascii=False)


def write_time(at: int) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at} s after 1970"


def confirm(statement: Statement, words: str | None) -> None:
    """Return when the person wants to sign. Raises Refusal when not, or when ``words`` are others."""
    actual = digest_words(statement.digest)
    if words is not None:
        if "-".join(words.lower().replace("-", " ").split()) != actual:
            raise Refusal(f"these are not the six words of this operation, which are {actual}. Nothing was signed")
        return
    if not sys.stdin.isatty():
        raise Refusal("nobody is here to be asked. Give the six words that you compared: --words WORDS")
    if input("Sign exactly this? Type y for yes: ").strip().lower() not in {"y", "yes"}:
        raise Refusal("nothing was signed")


def make_proof(statement: Statement, key: Ed25519PrivateKey, *, approver: str) -> dict[str, str]:
    """Return the approver's signature over the digest of the statement, as a node reads it."""
    return {
        "type": "ed25519",
        "approver": approver,
        "keyid": hashlib.sha256(public_bytes(key)).hexdigest()[:32],
        "signature": encode_bytes(key.sign(statement.digest)),
    }


def find_state(answer: dict[str, object]) -> str:
    """Return how the operation stands, as the control plane says."""
    summary = answer.get("summary")
    state = summary.get("state") if isinstance(summary, dict) else answer.get("state")
    return make_plain(state) or "recorded"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

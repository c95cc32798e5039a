"""``python -m runner.operations.sign``: make an operation token from a key file, for owners' scripts. Prints JSON."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.limits import limits
from runner.operations.keys import UnusableKey, read_key
from wire import clock
from wire.ids import new_uuid7
from wire.optoken.op_token import Binding, Grant, NotCanonical, encode_token, params_digest, sign_jwt, sign_l0, sign_l1
from wire.optoken.verifier import Level, Operation

EPILOG = """\
An L1 token covers every member of the request body: give each as --param NAME=VALUE (modelId comes from --model). A value that
is JSON is taken as such (4096, true, ["a"]); anything else is text; text that looks like JSON needs quotes: 'tag="1"'.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a token; return the exit status: 0, or 2 for a key or option that cannot be used."""
    options = _make_parser().parse_args(arguments)
    try:
        key = read_key(options.key)
        token = make_token(options, key)
    except (UnusableKey, NotCanonical, ValueError) as error:
        sys.stderr.write(f"sign: {error}\n")
        return 2
    claims = token["opToken"]
    assert isinstance(claims, dict)
    text = sign_jwt(key, claims) if options.jwt else encode_token(token) if options.base64url else json.dumps(token)
    sys.stdout.write(text + "\n")
    return 0


def make_token(options: argparse.Namespace, key: bytes) -> dict[str, object]:
    """Return the token that the options describe. Raises ValueError for options that do not go together."""
    now = int(clock.unix_s())
    grant = Grant(
        operation=options.operation,
        model_id=options.model,
        signers=options.signer,
        nonce=secrets.token_hex(16),
        issued_at=now,
    )
    if options.level is Level.L0:
        return sign_l0(key, grant)
    if not options.runner_id:
        raise ValueError("--level L1 needs --runner-id, the node that the token is for")
    params = dict(_read_param(text) for text in options.param) | {"modelId": options.model}
    binding = Binding(
        audience=options.runner_id,
        params_digest=params_digest(params),
        op_id=options.op_id or new_uuid7().hex,
        fence=options.fence or clock.unix_ms(),
        expires_at=now + limits().operations.signed_life_s,
        kid=options.kid,
    )
    return sign_l1(key, grant, binding)


def _read_param(text: str) -> tuple[str, object]:
    name, found, value = text.partition("=")
    if not (name and found):
        raise ValueError(f"--param is NAME=VALUE, not {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _read_level(text: str) -> Level:
    if text == Level.L2:
        raise argparse.ArgumentTypeError(
            "an L2 token carries the proofs of approvers, which no key file can make; only L0 and L1"
        )
    return Level(text)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="muster sign",
        description="Make an operation token for a node.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--key", type=Path, required=True, metavar="FILE", help="the key file that the node has too")
    parser.add_argument("--operation", type=Operation, choices=list(Operation), required=True)
    parser.add_argument("--model", metavar="ID", help="the model; left out for a flush that names none")
    parser.add_argument("--signer", action="append", default=[], required=True, metavar="NAME", help="once per approver")
    parser.add_argument("--level", type=_read_level, choices=[Level.L0, Level.L1], default=Level.L0)
    parser.add_argument("--runner-id", default="", metavar="ID", help="L1: the node that the token is for")
    parser.add_argument("--kid", default="", metavar="KID", help="L1: the name of the key where the node has a folder of keys")
    parser.add_argument("--op-id", default="", metavar="ID", help="L1: the approval; the same one is carried out once")
    parser.add_argument(
        "--fence", type=int, default=0, metavar="N", help="L1: above the model's last (default: milliseconds now)"
    )
    parser.add_argument("--param", action="append", default=[], metavar="NAME=VALUE", help="L1: a member of the request body")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--jwt", action="store_true", help="print a compact JWT (HS256) instead of JSON")
    shape.add_argument("--base64url", action="store_true", help="print one base64url text instead of JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())

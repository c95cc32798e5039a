"""The command ``ca``: make the internal CA of nodes, show it, export it, replace it, sign for a program of an operator's."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

from django.core.management import CommandError

from controlplane.commands import ACTOR, Options, command
from nodes.services.certificates import (
    create_authority,
    describe_authorities,
    read_authorities,
    rotate_authority,
    sign_request,
)
from wire import COMMAND


def _add_actions(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("create", help="make it, for the hosts that MUSTER_DIRECT_HOSTS lists now")
    actions.add_parser("show", help="its names, fingerprints and hosts, and until when it holds")
    export = actions.add_parser("export", help="write the certificates that clients trust")
    export.add_argument("file", nargs="?", type=Path, help="default: standard output")
    rotate = actions.add_parser("rotate", help="make the next one, which gives certificates in a week")
    rotate.add_argument("--now", action="store_true", help="at once, and the one before holds no more: its key was stolen")
    sign = actions.add_parser("sign", help="sign the request of a program that is no node of ours, and print its certificate")
    sign.add_argument("file", help="PKCS #10 request as PEM; - = standard input")
    sign.add_argument("hosts", nargs="+", metavar="HOST", help="name or address for which it is to hold")


@command(
    "ca",
    "The internal CA, which certifies the ports of nodes. create: make it. show: its fingerprint and hosts. export: the "
    "certificates that clients trust. rotate: make the next one. sign: certify a program that is no node of ours.",
    _add_actions,
)
def ca(options: Options) -> str:
    match options["action"]:
        case "create":
            return "\n".join(create_authority(actor=ACTOR))
        case "rotate":
            return "\n".join(rotate_authority(is_at_once=options["now"], actor=ACTOR))
        case "sign":
            return sign_request(csr=_read(options["file"]), hosts=options["hosts"], actor=ACTOR).rstrip()
        case "export":
            return _export(options["file"])
        case _:
            return "\n".join(describe_authorities()) or f"There is no internal CA; {COMMAND} ca create makes one."


def _export(file: Path | None) -> str:
    certificates = read_authorities()
    if not certificates:
        raise CommandError(f"There is no internal CA; {COMMAND} ca create makes one.")
    if file is None:
        return certificates.rstrip()
    try:
        file.write_text(certificates, encoding="ascii")
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}") from None
    return f"Wrote {file}"


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="ascii")
    except (OSError, UnicodeError) as error:
        raise CommandError(f"{file} cannot be read: {error}") from None

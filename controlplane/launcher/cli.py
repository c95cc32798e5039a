"""The command line of ``./muster``: parse, bring the environment up to what the command needs, hand over."""

from __future__ import annotations

import argparse
import ast
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from controlplane.env import SettingError
from controlplane.launcher import environment
from controlplane.launcher.console import LauncherError, complain, say
from controlplane.launcher.installation import Credentials, default_data, node_data, run_credentials

_DESCRIPTION = """\
Muster puts the GPUs you own behind one OpenAI-compatible endpoint.

First time? Run ./muster up, wait for "ready", and paste the curl line it prints.
Everything it installs goes into .venv, everything it writes into .muster, both beside this script.
"""
_EPILOG = """\
./muster COMMAND --help explains each command. docs/README.md says where to read on.
"""


def main(argv: Sequence[str]) -> int:
    """Run one command. Returns the exit status; trouble is one line on standard error and status 1."""
    arguments = list(argv)
    try:
        options, rest = _parse(arguments)
        if _explain_uninstalled(arguments, rest):
            return 0
        return int(options.run(options, rest, arguments))
    except (LauncherError, SettingError) as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = build_parser()
    before, argv = take_data(argv) if argv[:1] and argv[0].partition("=")[0] == "--data" else (None, argv)
    if before is not None:
        argv = [*argv[:1], "--data", str(before), *argv[1:]]
    # Commands that hand everything on must also hand on --help and options that look like ours.
    if argv and argv[0] in _PASSING_ON and not (argv[0] in _OWN_HELP and argv[1:2] in (["-h"], ["--help"])):
        command = argv[0]
        options, rest = parser.parse_args([command]), argv[1:]
        if command in {"manage", "audit"}:
            data, rest = take_data(rest)
            options.data = data or default_data()
            if command == "manage" and rest in ([], ["help"]):
                parser.parse_args([command, "--help"])
            if command == "manage" and rest[:1] == ["help"]:
                rest = [*rest[1:], "--help"]
        elif command == "test":
            for name in _OF_TEST:
                setattr(options, name, f"--{name}" in rest)
            rest = [word for word in rest if word.removeprefix("--") not in _OF_TEST or not word.startswith("--")]
        return options, rest
    return parser.parse_args(argv), []


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every command."""
    parser = argparse.ArgumentParser(
        prog="./muster", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_up(commands)
    down = _add(commands, "down", "stop a running installation and wait until it has stopped", _run_down)
    _add_data(down)
    credentials = _add(commands, "credentials", "show the login and the keys that the first start made", _run_credentials)
    credentials.add_argument(
        "name", nargs="?", choices=Credentials.__slots__, metavar="NAME", help="print only this one, bare: %(choices)s"
    )
    _add_data(credentials)
    manage = _add(commands, "manage", "run a Django management command on a running installation", _run_manage)
    manage.usage = "./muster manage [--data DIR] COMMAND [argument ...]     e.g. ./muster manage allow_model NAME"
    manage.formatter_class = argparse.RawDescriptionHelpFormatter
    manage.epilog = _describe_commands()
    _add_data(manage)
    audit = _add(commands, "audit", "check, export or prove the audit log of a running installation", _run_audit)
    audit.usage = "./muster audit [--data DIR] (verify [FILE] | export FILE | prove OPID [--out FILE] | checkpoint)"
    _add_data(audit)
    demo = _add(commands, "demo", "set up something to try on a running installation", _run_demo)
    demo.add_argument("what", choices=["governance"], help="three people, a second tiny model, and what to do next")
    demo.add_argument("--json", action="store_true", dest="as_json", help="print it for a program")
    _add_data(demo)
    node = _add(commands, "node", "serve models on this machine, for a gateway or alone (--standalone)", _run_node)
    node.usage = "./muster node [--all-engines] (--gateway URL --token TOKEN | --standalone) [option ...]"
    trust = _add(commands, "trust", "tell a box on this machine which approval policy it shall trust", _run_trust)
    trust.usage = "./muster trust WORDS [--data DIR]     DIR: of the installation, or the box's own (default: .muster)"
    _add(commands, "sign", "make an operation token with a key file, for a box that trusts it", _run_sign)
    keys = _add(commands, "keys", "make or show the key file of an approver", _run_approver)
    keys.usage = "./muster keys (new --name USERNAME | show) [option ...]"
    approve = _add(commands, "approve", "read what an operation is, in words, and sign it with a key file", _run_approver)
    approve.usage = "./muster approve --url URL --token-file FILE --key FILE [option ...] OPERATION"
    test = _add(commands, "test", "run the tests of the gate (installs what they need, a Chromium included)", _run_test)
    test.usage = (
        "./muster test [--fast | --all | --vllm | --clients] [pytest argument ...]\n       ./muster test --mutants [NAME ...]"
    )
    test.add_argument("--fast", action="store_true", help="only the unit tests: no process, no database")
    test.add_argument(
        "--all", action="store_true", help="also the rings: real processes, kills, engines, pages; ends with a flake report"
    )
    test.add_argument("--vllm", action="store_true", help="only the tests on a real vLLM (installs its CPU build, 2.5 GB)")
    test.add_argument(
        "--clients", action="store_true", help="only the tests with the official Node SDKs (installs them, 0.1 GB)"
    )
    test.add_argument(
        "--mutants",
        action="store_true",
        help="only show that the tests notice defects: those of tests/mutants.toml, of an area of it, or of rows of "
        "tests/defences.toml (T11, defences = all of them), in a copy",
    )
    _add(commands, "check", "format, lint, types, import contracts, migrations", _run_check)
    _add(commands, "bench", "measure what the gateway costs", _run_bench).usage = "./muster bench [argument ...]"
    _add(
        commands, "conformance", "check a server against what OpenAI's and Anthropic's clients require of it", _run_conformance
    ).usage = "./muster conformance --base-url URL --api-key KEY --model NAME [option ...]     --help lists the options"
    _add(commands, "lock", "recompile requirements/*.txt after a change in pyproject.toml", _run_lock)
    return parser


_PASSING_ON = {"manage", "audit", "node", "trust", "sign", "keys", "approve", "test", "check", "bench", "conformance"}
# The others have a --help of their own behind the hand-over.
_OWN_HELP = {"manage", "audit", "test", "check"}
_OF_TEST = ("mutants", "fast", "all", "vllm", "clients")
_NEEDS = {
    **dict.fromkeys(("manage", "audit"), ("server", "docs/operate.md")),
    "node": ("runner", "docs/nodes.md"),
    "trust": ("runner", "docs/nodes.md"),
    "sign": ("runner", "docs/runner-api.md"),
    **dict.fromkeys(("keys", "approve"), ("runner", "docs/approvals.md")),
    "bench": ("dev", "benchmarks/README.md"),
    "conformance": ("dev", "docs/clients.md"),
}
"""Commands whose --help is another program's: the set of packages that it needs, and the page that explains its options."""
_COMMANDS = environment.ROOT / "controlplane" / "management" / "commands"
_Runner = Callable[[argparse.Namespace, list[str], list[str]], int]


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, run: _Runner
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.set_defaults(run=run)
    return command


def _add_data(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data",
        type=Path,
        default=default_data(),
        metavar="DIR",
        help="directory of the installation (default: .muster beside this script)",
    )


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = _add(commands, "up", "start Muster on this machine and keep it running until Ctrl-C", _run_up)
    up.epilog = (
        "DATABASE_URL (postgresql://…) and REDIS_URL (redis://…) replace the PostgreSQL and Valkey that it otherwise runs "
        "itself. As root, PostgreSQL alone runs as another user, a number of its own; if that may not enter DIR, its files go "
        "elsewhere and you are told where."
    )
    _add_data(up)
    up.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, this machine only; 0.0.0.0: every address)",
    )
    up.add_argument(
        "--port", type=_port, default=8000, help="port of the control plane (default: %(default)s; 0 = any free one)"
    )
    up.add_argument(
        "--gateway-port", type=_port, default=8080, metavar="PORT", help="port of the gateway (default: %(default)s; 0 = any)"
    )
    up.add_argument(
        "--ready-file", type=Path, metavar="FILE", help="write URLs, credentials and process ids here as JSON once ready"
    )
    up.add_argument(
        "--no-node", dest="with_node", action="store_false", help="do not run the local node with the small built-in model"
    )
    up.add_argument("--gateways", type=int, default=1, choices=range(1, 9), metavar="N", help=argparse.SUPPRESS)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; use a whole number from 1 to 65535, or 0 for any free one")
    return int(text)


def take_data(words: list[str]) -> tuple[Path | None, list[str]]:
    """Take the first ``--data DIR`` or ``--data=DIR`` out of the words of a command, wherever it stands before a ``--``."""
    for at, word in enumerate(words):
        if word == "--":
            break
        if word == "--data" and at + 1 < len(words):
            return Path(words[at + 1]), [*words[:at], *words[at + 2 :]]
        if word.startswith("--data="):
            return Path(word.removeprefix("--data=")), [*words[:at], *words[at + 1 :]]
    return None, words


def _describe_commands() -> str:
    """Return what ``manage --help`` lists: our commands, read from their files, since Django may not be installed yet."""
    lines = ["commands:"]
    for path in sorted(_COMMANDS.glob("[a-z]*.py")):
        texts = {
            target.id: ast.literal_eval(statement.value)
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef)
            for statement in node.body
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        lines += textwrap.wrap(f"{path.stem:<26}{texts.get('help', '')}", 110, initial_indent="  ", subsequent_indent=" " * 28)
    lines += [
        "",
        "./muster manage COMMAND --help explains each. Django's own (migrate, shell, changepassword...) work too.",
        "",
    ]
    return "\n".join(lines)


def _explain_uninstalled(argv: list[str], rest: list[str]) -> bool:
    """Print a short help where the full one needs packages that are not installed: no help may install anything."""
    command = argv[0] if argv else ""
    if command not in _NEEDS or not {"-h", "--help"} & set(rest) or environment.is_installed(_NEEDS[command][0]):
        return False
    name, page = _NEEDS[command]
    say(f"usage: ./muster {command} [argument ...]")
    say(f"{page} explains its options. This help installs nothing, and the program that lists them needs the {name} set of")
    say(f"packages: once ./muster {command} has been used, its --help has them all.")
    return True


def _run_up(options: argparse.Namespace, _rest: list[str], argv: list[str]) -> int:
    environment.enter("server", argv)
    from controlplane.launcher.up import UpOptions, run_up

    return run_up(
        UpOptions(
            data=options.data,
            host=options.host,
            port=options.port,
            gateway_port=options.gateway_port,
            gateways=options.gateways,
            ready_file=options.ready_file,
            with_node=options.with_node,
        )
    )


def _run_down(options: argparse.Namespace, _rest: list[str], _argv: list[str]) -> int:
    from controlplane.launcher.installation import run_down

    return run_down(options.data)


def _run_credentials(options: argparse.Namespace, _rest: list[str], _argv: list[str]) -> int:
    return run_credentials(options.data, options.name)


def _run_manage(options: argparse.Namespace, rest: list[str], argv: list[str]) -> int:
    environment.enter("server", argv)
    from controlplane.launcher.installation import run_manage

    return run_manage(options.data, rest)


def _run_audit(options: argparse.Namespace, rest: list[str], argv: list[str]) -> int:
    return _run_manage(options, ["audit", *rest], argv)


def _run_node(_options: argparse.Namespace, rest: list[str], argv: list[str]) -> int:
    """Start the runner; ``--all-engines`` also installs CTranslate2 and faster-whisper."""
    environment.enter("engines" if "--all-engines" in rest else "runner", argv)
    _become_module("runner", [word for word in rest if word != "--all-engines"])


def _run_trust(_options: argparse.Namespace, rest: list[str], argv: list[str]) -> int:
    environment.enter("runner", argv)
    _become_module("runner.operations.trust", name_node(rest))


def name_node(words: list[str]) -> list[str]:
    """Return the words of ``trust`` with the folder of a box: the one given, MUSTER_DATA, or that of the local node."""
    given, others = take_data(words)
    if given is None and os.environ.get("MUSTER_DATA"):
        return others
    return [*others, "--data", str(node_data(given or default_data()))]


def _run_demo(options: argparse.Namespace, _rest: list[str], argv: list[str]) -> int:
    environment.enter("server", argv)
    from controlplane.launcher.demo import run_demo

    return run_demo(options.data, as_json=options.as_json)


def _run_sign(_options: argparse.Namespace, rest: list[str], argv: list[str]) -> int:
    environment.enter("runner", argv)
    _become_module("runner.operations.sign", rest)


def _run_approver(_options: argparse.Namespace, rest: list[str], argv: list[str]) -> int:
    environment.enter("runner", argv)
    _become_module("controlplane.approver_cli", [argv[0], *rest])


def _become_module(module: str, arguments: list[str]) -> NoReturn:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(environment.ROOT), os.environ.get("PYTHONPATH", "")]))
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _run_test(options: argparse.Namespace, rest: list[str], argv: list[str]) -> int:
    environment.enter("dev", argv)
    from tools.develop import run_mutants, run_tests

    if options.mutants:
        return run_mutants(rest)
    return run_tests(rest, ring=next((name for name in _OF_TEST if getattr(options, name)), ""))


def _run_check(_options: argparse.Namespace, _rest: list[str], argv: list[str]) -> int:
    environment.enter("dev", argv)
    from tools.develop import run_check

    return run_check()


def _run_bench(_options: argparse.Namespace, rest: list[str], argv: list[str]) -> int:
    environment.enter("dev", argv)
    os.chdir(environment.ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *rest])


def _run_conformance(_options: argparse.Namespace, rest: list[str], argv: list[str]) -> int:
    environment.enter("dev", argv)
    _become_module("conformance", rest)


def _run_lock(_options: argparse.Namespace, _rest: list[str], argv: list[str]) -> int:
    environment.enter("dev", argv)
    from tools.develop import run_lock

    return run_lock()

"""The command line of ``./muster``: parse, bring the environment up to what the command needs, hand over."""

from __future__ import annotations

import argparse
import ast
import os
import sys
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from controlplane.env import ALIASES, SettingError, read_address
from controlplane.launcher import environment
from controlplane.launcher.console import LauncherError, complain, say
from controlplane.launcher.installation import (
    Credentials,
    default_data,
    node_data,
    run_config,
    run_credentials,
    run_down,
    run_manage,
)
from wire import COMMAND, IS_CHECKOUT

_WHERE = (
    "Everything it installs goes into .venv, everything it writes into .muster, both beside this script."
    if IS_CHECKOUT
    else "Everything it writes goes into {data}."
)
_DESCRIPTION = f"""\
Muster puts the GPUs you own behind one OpenAI-compatible endpoint.

First time? Run {COMMAND} up, wait for "ready", and paste the curl line it prints.
{_WHERE}
"""
_EPILOG = "muster COMMAND --help explains each command. docs/README.md says where to read on."
# Switches of ``config``, which stand anywhere among the options of a node.
_SHOWN = ("--json", "--check")
_FOR_DEVELOPERS = {"test", "check", "messages", "lock", "bench", "package"}
"""Commands of a checkout alone: what they need is not in a package."""
# Switches of ``test``, which stand anywhere among the words for pytest.
_RINGS = ("mutants", "fast", "all", "vllm", "clients")


@dataclass(frozen=True, slots=True)
class Program:
    """A command that hands its words to another program, ``--help`` included.

    ``needs``: the set of packages that it runs with. ``page``: of the documentation, for a help before these are installed.
    """

    text: str
    usage: str
    needs: str
    module: str
    page: str


_PROGRAMS = {
    "manage": Program(
        "run a Django management command on a running installation",
        "[--data DIR] COMMAND [argument ...]     e.g. muster manage allow_model NAME", "server", "", "docs/operate.md"
    ),
    **{
        name: Program(text, usage, "server", "controlplane.operate", "docs/operate.md")
        for name, text, usage in (
            ("status", "show what runs, how each part stands, nodes, and what needs attention", "[--json]"),
            ("logs", "show the logs of the parts", "[-f] [-n N] [PART]"),
            ("doctor", "look at everything that an installation stands on, and say what to do", "[--json]"),
            ("chat", "talk to a model through the gateway", "[--url URL] [--key-file FILE] [MODEL]"),
            ("version", "show the release of this program, and of what runs", ""),
            ("upgrade", "say what an upgrade to this release would do", "--check"),
            ("backup", "write database, keys and settings into one file, while everything runs", "FILE [option ...]"),
            ("restore", "bring a backup back into an empty database", "FILE [option ...]"),
        )
    },
    "audit": Program(
        "check, export or prove the audit log of a running installation",
        "[--data DIR] (verify [FILE] | export FILE | prove OPID [--out FILE] | checkpoint)", "server", "", "docs/operate.md"
    ),
    "ca": Program(
        "make, show or replace the internal CA that certifies the ports of nodes",
        "[--data DIR] (create | show | export [FILE] | rotate [--now] | sign FILE HOST ...)", "server", "", "docs/fleet.md"
    ),
    "node": Program(
        "serve models on this machine, for a gateway or alone (--standalone)",
        "[--all-engines] (--gateway URL --token TOKEN | --standalone) [option ...]", "runner", "runner", "docs/nodes.md"
    ),
    "trust": Program(
        "tell a node on this machine which approval policy it shall trust",
        "WORDS [--data DIR]     DIR: of the installation, or the node's own (default: .muster)",
        "runner", "runner.operations.trust", "docs/nodes.md"
    ),
    "sign": Program(
        "make an operation token with a key file, for a node that trusts it",
        "[option ...]", "runner", "runner.operations.sign", "docs/runner-api.md"
    ),
    "keys": Program(
        "make or show the key file of an approver",
        "(new --name USERNAME | show) [option ...]", "runner", "controlplane.approver_cli", "docs/approvals.md"
    ),
    "approve": Program(
        "read what an operation is, in words, and sign it with a key file",
        "--url URL --token-file FILE --key FILE [option ...] OPERATION",
        "runner", "controlplane.approver_cli", "docs/approvals.md"
    ),
    "service": Program(
        "have systemd or launchd keep Muster running on this machine",
        "(install | print | status | uninstall) (up | node | server) [--instance NAME] [option ...]",
        "runner", "controlplane.launcher.services", "docs/operate.md"
    ),
    "bench": Program("measure what the gateway costs", "[argument ...]", "dev", "benchmarks", "benchmarks/README.md"),
    "package": Program(
        "build everything that is installed elsewhere, and check it as far as this machine can",
        "[--list] [--only NAME ...] [--out DIR]", "dev", "tools.package", "docs/install.md"
    ),
    "conformance": Program(
        "check a server against what OpenAI's and Anthropic's clients require of it",
        "--base-url URL --api-key KEY --model NAME [option ...]     --help lists the options",
        "runner", "conformance", "docs/clients.md"
    ),
}  # fmt: skip


_MANAGED = ("manage", "audit", "ca")
"""Commands that run in the environment of an installation."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, that of this process by default, as the console script ``muster`` does.

    Returns the exit status; trouble is one line on standard error and status 1.
    """
    try:
        words = translate_words(_move_data(list(sys.argv[1:] if argv is None else argv)))
        if not IS_CHECKOUT and _FOR_DEVELOPERS & {*words[:1]}:
            raise LauncherError(f"muster {words[0]} is for whoever changes Muster: it works in a clone of the repository")
        if words[:1] and words[0] in _PROGRAMS:
            _run_program(words[0], words[1:])
            return 0
        options, rest = parse(words)
        return int(options.run(options, rest, words))
    except (LauncherError, SettingError) as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


# What ModelRelay's worker takes for what nothing sets, as variables of its own: ours win, and so does its file.
_WORKER_DEFAULTS = {"PROXY_URL": "http://127.0.0.1:8080", "BACKEND_URL": "http://127.0.0.1:8000", "MAX_CONCURRENCY": "1"}
_WORKER_FILE = {
    "proxy_url": "PROXY_URL",
    "provider": "PROVIDER_NAME",
    "worker_secret": "WORKER_SECRET",
    "worker_name": "WORKER_NAME",
    "models": "MODELS",
    "max_concurrency": "MAX_CONCURRENCY",
    "backend_url": "BACKEND_URL",
    "log_level": "LOG_LEVEL",
}


def translate_words(words: list[str]) -> list[str]:
    """Return words of ours for those of ModelRelay's programs, whose options go into the environment. Raises LauncherError."""
    if words[:1] == ["modelrelay-server"]:
        given, rest = _server_parser().parse_known_args(words[1:])
        chosen = {alias: getattr(given, alias.ours) for alias in ALIASES if alias.flag}
        os.environ.update({alias.ours: alias.read(text) for alias, text in chosen.items() if text is not None})
        if given.DATABASE_URL is not None:
            os.environ["DATABASE_URL"] = given.DATABASE_URL
        return ["up", *rest]
    if words[:1] == ["modelrelay-worker"]:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--config", type=Path)
        given, rest = parser.parse_known_args(words[1:])
        for name, text in {**_WORKER_DEFAULTS, **_read_worker_file(given.config)}.items():
            os.environ.setdefault(name, text)
        return ["node", *rest]
    return words


def _server_parser() -> argparse.ArgumentParser:
    text = "Start Muster with the options of modelrelay-server. Those of muster up work too."
    parser = argparse.ArgumentParser(prog="muster modelrelay-server", description=text, allow_abbrev=False)
    for alias in ALIASES:
        if alias.flag:
            text = f"as {alias.ours}, or {alias.theirs}"
            parser.add_argument(alias.flag, dest=alias.ours, nargs="?", const="true", metavar="VALUE", help=text)
    parser.add_argument("--database-url", dest="DATABASE_URL", metavar="URL", help="as DATABASE_URL")
    return parser


def _read_worker_file(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LauncherError(f"--config: cannot read {path}: {error}") from None
    if unknown := sorted(values.keys() - _WORKER_FILE.keys()):
        raise LauncherError(f"--config: {path} has {unknown[0]!r}; it may have {', '.join(_WORKER_FILE)}")
    texts = {name: ",".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in values.items()}
    return {_WORKER_FILE[name]: text for name, text in texts.items()}


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a command, and the words that it hands on."""
    if words[:1] == ["config"] and [word for word in words if word not in _SHOWN][1:2] == ["node"]:
        own = [word for word in words if word in _SHOWN]  # what else is there are options of the node
        rest = [word for word in words if word not in _SHOWN][2:]
        return build_parser().parse_args(["config", *own, "node"]), rest
    if words[:1] == ["test"] and words[1:2] not in (["-h"], ["--help"]):
        options = build_parser().parse_args(["test"])
        for name in _RINGS:
            setattr(options, name, f"--{name}" in words)
        return options, [word for word in words[1:] if word not in {f"--{name}" for name in _RINGS}]
    return build_parser().parse_args(words), []


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="muster",
        description=_DESCRIPTION.format(data=default_data()),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, text: str, run: _Runner, usage: str = "") -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(run=run)
        command.usage = f"muster {name} {usage}" if usage else None
        return command

    _add_up(add("up", "start Muster on this machine and keep it running until Ctrl-C", _run_up))
    down = add("down", "stop a running installation and wait until it has stopped", lambda options, *_: run_down(options.data))
    text = "show the login and the keys that the first start made"
    credentials = add("credentials", text, lambda options, *_: run_credentials(options.data, options.name))
    credentials.add_argument(
        "name", nargs="?", choices=Credentials.__slots__, metavar="NAME", help="print only this one, bare: %(choices)s"
    )
    _add_config(config := add("config", "show every setting: what holds, where it was set, and what it may be", _run_config))
    _add_demo(demo := add("demo", "set up something to try, or a whole fleet that nobody has", _run_demo))
    for name, program in _PROGRAMS.items():
        if not IS_CHECKOUT and name in _FOR_DEVELOPERS:
            continue
        made = add(name, program.text, lambda *_: 0, program.usage)  # never run: its words are handed on
        if name == "manage":
            made.formatter_class, made.epilog = argparse.RawDescriptionHelpFormatter, _describe_commands()
    add("modelrelay-server", "start Muster with the options of ModelRelay's server", lambda *_: 0, "[option ...]")
    add("modelrelay-worker", "run a node with the options of ModelRelay's worker", lambda *_: 0, "[option ...]")
    for command in (down, credentials, config, demo, *(commands.choices[name] for name in _MANAGED)):
        _add_data(command)
    if IS_CHECKOUT:
        _add_developers(add)
    return parser


def _add_developers(add: Callable[[str, str, _Runner, str], argparse.ArgumentParser]) -> None:
    usage = "[--fast | --all | --vllm | --clients] [pytest argument ...]\n       muster test --mutants [NAME ...]"
    test = add("test", "run the tests of the gate (installs what they need, a Chromium included)", _run_test, usage)
    mutants = (
        "only show that the tests notice defects: those of tests/mutants.toml, of an area of it, or of rows of "
        "tests/defences.toml (T11, defences = all of them), in a copy"
    )
    for name, text in (
        ("fast", "only the unit tests: no process, no database"),
        ("all", "also the rings: real processes, kills, engines, pages; ends with a flake report"),
        ("vllm", "only the tests on a real vLLM (installs its CPU build, 2.5 GB)"),
        ("clients", "only the tests with the official Node SDKs (installs them, 0.1 GB)"),
        ("mutants", mutants),
    ):
        test.add_argument(f"--{name}", action="store_true", help=text)
    add("check", "format, lint, types, import contracts, migrations", _run_tool, "")
    add("messages", "collect what pages say for translation, and compile the translations", _run_tool, "")
    lock = add("lock", "recompile requirements/*.txt after a change in pyproject.toml", _run_tool, "")
    text = "only renew the snapshot of known advisories, from OSV's archive for PyPI or the one that is named"
    lock.add_argument("--advisories", nargs="?", const="", metavar="FILE|URL", help=text)
    text = "only write the list of licences, from what is installed here and reports of pip about the rest"
    lock.add_argument("--licences", nargs="*", metavar="REPORT", help=text)


_Runner = Callable[[argparse.Namespace, list[str], list[str]], int]


def _add_data(command: argparse.ArgumentParser) -> None:
    text = f"directory of the installation (default: {'.muster beside this script' if IS_CHECKOUT else default_data()})"
    command.add_argument("--data", type=Path, default=default_data(), metavar="DIR", help=text)


def _add_up(up: argparse.ArgumentParser) -> None:
    up.epilog = (
        "DATABASE_URL (postgresql://…) and REDIS_URL (redis://…) replace the PostgreSQL and Valkey that it otherwise runs "
        "itself. As root, PostgreSQL alone runs as another user, a number of its own; if that may not enter DIR, its files go "
        "elsewhere and you are told where."
    )
    _add_data(up)
    up.add_argument(
        "--host",
        help="address to listen on (default: that of MUSTER_LISTEN, or 127.0.0.1, this machine only; 0.0.0.0: every address)",
    )
    up.add_argument(
        "--port", type=_port, default=8000, help="port of the control plane (default: %(default)s; 0 = any free one)"
    )
    up.add_argument(
        "--gateway-port",
        type=_port,
        metavar="PORT",
        help="port of the gateway (default: that of MUSTER_LISTEN, or 8080; 0 = any)",
    )
    up.add_argument(
        "--ready-file", type=Path, metavar="FILE", help="write URLs, credentials and process ids here as JSON once ready"
    )
    up.add_argument(
        "--no-node", dest="with_node", action="store_false", help="do not run the local node with the small built-in model"
    )
    text = "speak TLS on both ports with this certificate and chain (PEM); a renewed one is taken over within a minute"
    up.add_argument("--tls-cert", type=Path, metavar="FILE", help=text)
    up.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, where that lies in a file of its own")
    up.add_argument("--gateways", type=int, default=1, choices=range(1, 9), metavar="N", help=argparse.SUPPRESS)


def _add_config(config: argparse.ArgumentParser) -> None:
    config.epilog = "Of a node: muster config node, followed by the options that the node gets."
    text = "server (control plane, gateway and worker; the default) or node"
    config.add_argument("part", nargs="?", choices=["server", "node"], default="server", help=text)
    config.add_argument("--json", action="store_true", dest="as_json", help="print it for a program")
    config.add_argument(
        "--check", action="store_true", dest="is_check", help="print only what is wrong; exit 1 when anything is"
    )


def _add_demo(demo: argparse.ArgumentParser) -> None:
    text = (
        "governance: three people, a second tiny model, and what to do next, on a running installation. fleet: 12 nodes, 5 "
        "tenants and a week of traffic, played until Ctrl-C; it starts the installation when none runs on DIR"
    )
    demo.add_argument("what", choices=["governance", "fleet"], help=text)
    demo.add_argument("--json", action="store_true", dest="as_json", help="of governance: print it for a program")
    demo.add_argument("--port", type=_port, default=8000, help="of fleet: as in up (default: %(default)s)")
    text = "of fleet: as in up (default: %(default)s)"
    demo.add_argument("--gateway-port", type=_port, default=8080, metavar="PORT", help=text)
    text = "of fleet: asked per minute (default: %(default)g)"
    demo.add_argument("--requests", type=float, default=28.0, metavar="N", help=text)
    demo.add_argument(
        "--scale", nargs="+", default=[], metavar="NAME=N",
        help="of fleet: nodes=1000 records=10000000 for measuring, instead of 12 and some 100,000",
    )  # fmt: skip
    demo.add_argument("--write-only", action="store_true", help="of fleet: end when everything is written")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; use a whole number from 1 to 65535, or 0 for any free one")
    return int(text)


def _move_data(words: list[str]) -> list[str]:
    """Return the words with a ``--data DIR`` before the command put behind it, where every command reads it."""
    if words[:1] and words[0].partition("=")[0] == "--data":
        data, rest = take_data(words)
        if data is not None:
            return [*rest[:1], "--data", str(data), *rest[1:]] if rest else []
    return words


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
    """Return what ``manage --help`` lists: our commands, read from their source, since Django may not be installed yet."""
    found: dict[str, str] = {}
    for path in (environment.ROOT / "controlplane" / "commands").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "command":
                name, text = (ast.literal_eval(word) for word in node.args[:2])
                found[name] = text
    lines = ["commands:"]
    for name, text in sorted(found.items()):
        lines += textwrap.wrap(f"{name:<26}{text}", 110, initial_indent="  ", subsequent_indent=" " * 28)
    closing = "muster manage COMMAND --help explains each. Django's own (migrate, shell, changepassword...) work too."
    return "\n".join([*lines, "", closing, ""])


def split_words(name: str, words: list[str]) -> tuple[Path | None, list[str]]:
    """Return the installation that the words of a program name, where we look it up, and the words that the program gets."""
    if name not in _MANAGED:
        return None, words
    data, words = take_data(words)
    if name == "manage" and (not words or words[0] == "help"):
        words = [*words[1:], "--help"]
    return data, words


def _run_program(name: str, words: list[str]) -> None:
    program, (data, words) = _PROGRAMS[name], split_words(name, words)
    if name in _MANAGED and words in (["-h"], ["--help"]):
        build_parser().parse_args([name, "--help"])
    if IS_CHECKOUT and {"-h", "--help"} & set(words) and not environment.is_installed(program.needs):
        # No help may install anything.
        say(f"usage: muster {name} [argument ...]")
        say(f"{program.page} explains its options. This help installs nothing, and the program that lists them needs the")
        say(f"{program.needs} set of packages: once muster {name} has been used, its --help has them all.")
        return
    # ``--all-engines`` is for us: CTranslate2 and faster-whisper as well.
    own = [word for word in words if name != "node" or word != "--all-engines"]
    needs = program.needs if own == words else "engines"
    if name == "service" and "node" not in words:
        needs = "server"
    environment.enter(needs, [name, *(["--data", str(data)] if data else []), *words])
    match name:
        case "manage" | "audit" | "ca":
            run_manage(data or default_data(), own if name == "manage" else [name, *own])
        case "trust":
            own = name_node(own)
        case "keys" | "approve":
            own = [name, *own]
        case _ if program.module == "controlplane.operate":
            own = [name, *own]
        case "bench" | "package":
            os.chdir(environment.ROOT)
    environment.run_module(program.module, own)


def name_node(words: list[str]) -> list[str]:
    """Return the words of ``trust`` with the folder of a node: the one given, MUSTER_DATA, or that of the local node."""
    given, others = take_data(words)
    if given is None and os.environ.get("MUSTER_DATA"):
        return others
    return [*others, "--data", str(node_data(given or default_data()))]


def _run_up(options: argparse.Namespace, _rest: list[str], argv: list[str]) -> int:
    environment.enter("server", argv)
    from controlplane.launcher.up import UpOptions, run_up

    host, port = read_address("MUSTER_LISTEN", "127.0.0.1:8080")
    options.host = options.host or host
    options.gateway_port = port if options.gateway_port is None else options.gateway_port
    names = ("data", "host", "port", "gateway_port", "gateways", "ready_file", "with_node", "tls_cert", "tls_key")
    return run_up(UpOptions(**{name: getattr(options, name) for name in names}))


def _run_config(options: argparse.Namespace, rest: list[str], argv: list[str]) -> int:
    if options.part == "node":
        environment.enter("runner", argv)
        switches = [*(["--json"] if options.as_json else []), *(["--check"] if options.is_check else [])]
        environment.run_module("runner", ["config", *switches, *rest])
    environment.enter("server", argv)
    return run_config(options.data, as_json=options.as_json, is_check=options.is_check)


def _run_demo(options: argparse.Namespace, _rest: list[str], argv: list[str]) -> int:
    environment.enter("server", argv)
    from controlplane.launcher.demo import run_demo, run_fleet

    if options.what == "governance":
        run_demo(options.data, as_json=options.as_json)
    words = [f"--requests={options.requests}", *(["--write-only"] if options.write_only else [])]
    for text in options.scale:
        name, _, count = text.partition("=")
        if name not in {"nodes", "records"} or not count.isdecimal():
            raise LauncherError(f"--scale takes nodes=N and records=N, not {text!r}")
        words.append(f"--{name}={count}")
    ports = ["--port", str(options.port), "--gateway-port", str(options.gateway_port)]
    return run_fleet(options.data, ports=ports, words=words)


def _run_test(options: argparse.Namespace, rest: list[str], argv: list[str]) -> int:
    environment.enter("dev", argv)
    from tools.develop import run_mutants, run_tests

    if options.mutants:
        return run_mutants(rest)
    return run_tests(rest, ring=next((name for name in _RINGS if getattr(options, name)), ""))


def _run_tool(options: argparse.Namespace, _rest: list[str], argv: list[str]) -> int:
    environment.enter("dev", argv)
    from tools.develop import run_check, run_lock
    from tools.messages import run_messages

    match argv[0]:
        case "check":
            return run_check()
        case "lock":
            return run_lock(advisories=options.advisories, licences=options.licences)
        case _:
            return run_messages()

"""``muster service``: have systemd or launchd keep Muster running, from the start of the machine on.

Three things can be kept: ``up`` (all of it on one machine, as ``muster up``), ``node`` (a node for a gateway elsewhere) and
``server`` (control plane, gateway and worker beside a PostgreSQL and a Valkey of one's own). Root installs for the machine, in
the name of the user ``muster``; anybody else for themselves.
"""

from __future__ import annotations

import argparse
import base64
import os
import plistlib
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from controlplane.launcher.console import LauncherError, complain, say
from controlplane.launcher.environment import ROOT
from controlplane.launcher.files import replace_file
from controlplane.launcher.installation import default_data
from wire import COMMAND, IS_CHECKOUT

MARK = "# Written by `muster service install`, which writes it again. Without this line it is yours, and stays."
_LABEL = "dev.muster"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_SECRETS = ("token", "worker_secret", "api_key", "backend_key")
"""Options of a node that are written where only root and the service read them, and never on a command line."""

Run = Callable[[Sequence[str]], int]
"""Runs a program and returns its exit status."""


@dataclass(frozen=True, slots=True)
class Scope:
    """For whom a service is installed: the machine, or one person. ``user``: as whom it runs; empty = as that person."""

    units: Path
    settings: Path
    data: Path
    user: str
    control: tuple[str, ...]
    """systemctl, with the word that says which manager."""

    @property
    def target(self) -> str:
        return "multi-user.target" if self.user else "default.target"


def find_scope() -> Scope:
    if os.geteuid() == 0:
        return Scope(Path("/etc/systemd/system"), Path("/etc/muster"), Path("/var/lib/muster"), "muster", ("systemctl",))
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "muster"
    return Scope(config / "systemd" / "user", config / "muster", data, "", ("systemctl", "--user"))


def find_program() -> tuple[str, ...]:
    """Return the words that start the launcher, by paths that hold outside of any shell."""
    if IS_CHECKOUT:
        return (sys.executable, str(ROOT / "muster"))
    return (str(Path(sys.executable).with_name("muster")),)


_HARDENED = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
LockPersonality=yes
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
UMask=0077
"""
_NO_DEVICES = "PrivateDevices=yes\n"
# GPUs of NVIDIA, of everybody through DRM, and of AMD for computing.
_GPUS = """\
DevicePolicy=closed
DeviceAllow=char-nvidia-frontend rw
DeviceAllow=char-nvidia rw
DeviceAllow=char-nvidia-uvm rw
DeviceAllow=char-drm rw
DeviceAllow=/dev/kfd rw
"""


def _write_unit(
    description: str,
    command: Sequence[str],
    scope: Scope,
    *,
    environment: str = "",
    after: Sequence[str] = (),
    requires: str = "",
    part_of: str = "",
    is_once: bool = False,
    has_gpus: bool = False,
    stop_s: int = 60,
    writes: Sequence[str] = (),
) -> str:
    """Return a unit of systemd. ``writes``: folders beside its own that it may write to; ``environment``: its settings."""
    start = " ".join(_quote(word) for word in command)
    unit = [MARK, "[Unit]", f"Description={description}"]
    if scope.user:
        unit += ["Wants=network-online.target", f"After={' '.join(('network-online.target', *after))}"]
    elif after:
        unit.append(f"After={' '.join(after)}")
    unit += [f"Requires={requires}"] if requires else []
    unit += [f"PartOf={part_of}"] if part_of else []
    unit += ["", "[Service]", "Type=oneshot" if is_once else "Type=exec", f"ExecStart={start}"]
    unit += [f"EnvironmentFile={environment}"] if environment else []
    unit += ["RemainAfterExit=yes"] if is_once else ["Restart=always", "RestartSec=5"]
    # What it started ends by itself and in order; what is left when the time is over is killed.
    unit += ["KillMode=mixed", f"TimeoutStopSec={stop_s}", "LimitNOFILE=65536"]
    if scope.user:
        unit += [f"User={scope.user}", f"Group={scope.user}", "StateDirectory=muster", "StateDirectoryMode=0700"]
        unit += [f"ReadWritePaths={' '.join(_quote(path) for path in writes)}"] if writes else []
        unit.append((_HARDENED + (_GPUS if has_gpus else _NO_DEVICES)).rstrip())
    else:
        # A manager of one person may not do more.
        unit += ["NoNewPrivileges=yes", "LockPersonality=yes", "UMask=0077"]
    wanted = part_of or scope.target
    unit += [] if is_once else ["", "[Install]", f"WantedBy={wanted}"]
    return "\n".join(unit) + "\n"


def _quote(word: str) -> str:
    """Return a word as systemd reads it."""
    text = word.replace("%", "%%")
    # A name of a variable stands alone, for systemd to split.
    if re.fullmatch(r"\$[A-Z_]+|[\w@%+=:,./-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$") + '"'


def write_units(what: str, words: Sequence[str], scope: Scope) -> dict[str, str]:
    """Return the unit files of what is kept running, by name."""
    program = find_program()
    if what == "up":
        given = _find_data(words)
        data = given or scope.data
        rest = words if given else ["--data", str(data), *words]
        text = _write_unit(
            "Muster, all of it", [*program, "up", *rest], scope, has_gpus=True, stop_s=120,
            writes=[str(data)] if data != scope.data else [],
        )  # fmt: skip
        return {"muster-up.service": text}
    if what == "node":
        command = [*program, "node", "$MUSTER_NODE_OPTIONS"]
        environment = f"{scope.settings}/node-%i.env"
        text = _write_unit("Muster node %i", command, scope, environment=environment, has_gpus=True, stop_s=150)
        return {"muster-node@.service": text}
    python = sys.executable
    environment = f"{scope.settings}/server.env"
    served = {
        "control": ("Muster control plane", "controlplane.serve_control", 30),
        "gateway": ("Muster gateway", "controlplane.serve_gateway", 90),
        "worker": ("Muster worker and beat", "controlplane.serve_worker", 60),
    }
    own = f"{MARK}\n[Unit]\nDescription=Muster: control plane, gateway and worker\n"
    units = {"muster.target": f"{own}\n[Install]\nWantedBy={scope.target}\n"}
    migrate = [python, "-m", "django", "migrate", "--noinput", "--settings", "controlplane.settings"]
    databases = ("postgresql.service", "valkey.service", "redis.service")
    units["muster-migrate.service"] = _write_unit(
        "Muster's tables", _from_root(migrate), scope, environment=environment, after=databases, is_once=True
    )
    for part, (description, module, stop_s) in served.items():
        units[f"muster-{part}.service"] = _write_unit(
            description, _from_root([python, "-m", module]), scope, environment=environment, stop_s=stop_s,
            after=("muster-migrate.service",), requires="muster-migrate.service", part_of="muster.target",
        )  # fmt: skip
    return units


def _from_root(command: list[str]) -> list[str]:
    """Let Python find a checkout's modules, wherever systemd starts it."""
    return ["/usr/bin/env", f"PYTHONPATH={ROOT}", *command] if IS_CHECKOUT else command


def _find_data(words: Sequence[str]) -> Path | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data", type=Path)
    found, _ = parser.parse_known_args(list(words))
    return found.data.resolve() if found.data else None


def split_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take the secrets out of a node's options: they go into variables, which no list of processes shows."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in _SECRETS:
        parser.add_argument(f"--{name.replace('_', '-')}")
    found, rest = parser.parse_known_args(list(words))
    said = {name: value for name, value in vars(found).items() if value is not None}
    said = {"token" if name == "worker_secret" else name: value for name, value in said.items()}
    return rest, {f"MUSTER_{name.upper()}": value for name, value in said.items()}


def write_node_settings(words: Sequence[str], name: str, data: Path) -> str:
    """Return the file of settings of a node. Raises LauncherError for what cannot stand in it."""
    rest, hidden = split_secrets(words)
    if broken := [word for word in rest if re.search(r"\s", word)]:
        raise LauncherError(
            f"an option of a service holds no blank: {broken[0]!r}. Give that one by its variable (docs/nodes.md)"
        )
    rest = _complete(rest, name, data)
    lines = [MARK, "# Variables of `muster node`, and its options.", f'MUSTER_NODE_OPTIONS="{" ".join(rest)}"']
    lines += [f'{variable}="{_escape(value)}"' for variable, value in hidden.items()]
    return "\n".join(lines) + "\n"


def _complete(words: list[str], name: str, data: Path) -> list[str]:
    """Return a node's options with a name and a folder of its own, which it is known by after a restart."""
    said = {word.split("=")[0] for word in words}
    named = [] if said & {"--name", "--worker-name"} else ["--name", name]
    return [*words, *named, *([] if "--data" in said else ["--data", str(data / f"node-{name}")])]


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")


def write_server_settings() -> str:
    """Return a first file of settings for the servers: secrets made, addresses to fill in."""
    seed = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
    return f"""\
# Settings of the servers (docs/settings.md). Keep a copy: without the two keys a backup of the database is not whole.
DATABASE_URL=postgresql:///muster
REDIS_URL=redis://127.0.0.1:6379/0
MUSTER_SECRET_KEY={secrets.token_hex(32)}
MUSTER_LOG_KEY={seed}
MUSTER_PUBLIC_URL=http://localhost:8000
"""


def write_plist(what: str, words: Sequence[str], *, instance: str, logs: Path, data: Path) -> tuple[str, bytes]:
    """Return name and text of a property list for launchd."""
    name = f"{_LABEL}.{what}" if what == "up" else f"{_LABEL}.{what}.{instance}"
    rest, hidden = split_secrets(words) if what == "node" else (list(words), {})
    if what == "node":
        rest = _complete(rest, instance, data)
    body = {
        "Label": name,
        "ProgramArguments": [*find_program(), what, *rest],
        "EnvironmentVariables": {"PATH": "/usr/local/bin:/opt/homebrew/bin:/usr/bin:/bin:/usr/sbin:/sbin", **hidden},
        "RunAtLoad": True,
        # Not after an orderly stop; and at most every ten seconds.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 120,
        "Umask": 0o077,
        "StandardOutPath": str(logs / f"{name}.log"),
        "StandardErrorPath": str(logs / f"{name}.log"),
        "SoftResourceLimits": {"NumberOfFiles": 65536},
    }
    return name, plistlib.dumps(body)


# The command


def run_service(words: Sequence[str], run: Run | None = None, scope: Scope | None = None) -> int:
    """Run ``muster service ACTION WHAT …``. ``scope``: of systemd, for whom (default: who runs it). Raises LauncherError."""
    options, rest = _parse(words)
    call = run or _call
    if sys.platform == "darwin" and scope is None:
        return _Launchd(call).act(options, rest)
    if not sys.platform.startswith("linux") and scope is None:
        raise LauncherError("services are for systemd and launchd; docs/nodes.md says how Windows keeps a node running")
    return _Systemd(scope or find_scope(), call).act(options, rest)


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="muster service", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="muster service (install | print | status | uninstall) (up | node | server) [--instance NAME] [option ...]",
        epilog="Options after up or node are those of `muster up` and `muster node`. Secrets among them go to a file that the "
        "service alone reads. print shows what install would write.",
    )  # fmt: skip
    parser.add_argument("action", choices=["install", "print", "status", "uninstall"])
    parser.add_argument("what", choices=["up", "node", "server"])
    parser.add_argument("--instance", default="local", metavar="NAME", help="of the node, where several run (default: local)")
    options, rest = parser.parse_known_args(list(words))
    if not _NAME.fullmatch(options.instance):
        raise LauncherError(f"--instance {options.instance} is no name: letters, digits, _ . - and at most 63 of them")
    if rest and options.action in {"status", "uninstall"}:
        raise LauncherError(f"muster service {options.action} takes no {rest[0]}")
    if rest and options.what == "server":
        raise LauncherError(f"the server takes settings, not {rest[0]}: write it into server.env (docs/settings.md)")
    return options, rest


def _call(command: Sequence[str]) -> int:
    try:
        return subprocess.run(list(command), check=False).returncode
    except OSError as error:
        raise LauncherError(f"cannot run {command[0]}: {error.strerror}. Is this machine kept by {command[0]}?") from None


@dataclass(frozen=True, slots=True)
class _Systemd:
    scope: Scope
    call: Run

    def act(self, options: argparse.Namespace, words: list[str]) -> int:
        units = write_units(options.what, words, self.scope)
        name = {"up": "muster-up.service", "node": f"muster-node@{options.instance}.service", "server": "muster.target"}[
            options.what
        ]
        settings = {"node": f"node-{options.instance}.env", "server": "server.env"}.get(options.what)
        match options.action:
            case "print":
                for unit, text in units.items():
                    say(f"# {self.scope.units / unit}\n{text}")
                return 0
            case "install":
                return self._install(options, words, units, name, settings)
            case "status":
                return self.call([*self.scope.control, "status", "--no-pager", name, *self._parts(options.what)])
        return self._uninstall(options.what, units, name, settings)

    def _parts(self, what: str) -> list[str]:
        return [f"muster-{part}.service" for part in ("control", "gateway", "worker")] if what == "server" else []

    def _install(
        self, options: argparse.Namespace, words: list[str], units: Mapping[str, str], name: str, settings: str | None
    ) -> int:
        scope = self.scope
        if scope.user:
            refuse_unreadable(Path(find_program()[-1]), scope.user)
            self._make_user()
        _make_folder(scope.settings, 0o750)
        if settings is not None:
            path = scope.settings / settings
            text = (
                write_node_settings(words, options.instance, scope.data) if options.what == "node" else write_server_settings()
            )
            # Settings that somebody filled in stay, and options that are given anew win.
            if not path.exists() or (words and options.what == "node"):
                _write_file(path, text, 0o600)
                say(f"Wrote {path}")
        _make_folder(scope.units, 0o755)
        for unit, text in units.items():
            path = scope.units / unit
            if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
                say(f"{path} was changed by hand and stays as it is")
                continue
            _write_file(path, text, 0o644)
            say(f"Wrote {path}")
        self._require(["daemon-reload"])
        if options.what == "server":
            enabled = [name, *self._parts("server")]
            self._require(["enable", *enabled])
            say(f"Fill in {scope.settings / 'server.env'}, then: {' '.join(scope.control)} start {name}")
            return 0
        self._require(["enable", "--now", name])
        if not scope.user:
            say("It stops when you sign out, unless you keep your services running: loginctl enable-linger")
        what = options.what if options.what == "up" else f"node --instance {options.instance}"
        say(f"{name} runs now and from each start on. See it: {COMMAND} service status {what}")
        return 0

    def _require(self, words: Sequence[str]) -> None:
        if self.call([*self.scope.control, *words]):
            raise LauncherError(f"{' '.join((*self.scope.control, *words))} failed: what it printed says why")

    def _make_user(self) -> None:
        import pwd

        with suppress(KeyError):
            pwd.getpwnam(self.scope.user)
            return
        home = str(self.scope.data)
        shell = "/usr/sbin/nologin"
        if self.call(["useradd", "--system", "--user-group", "--home-dir", home, "--shell", shell, self.scope.user]):
            raise LauncherError(f"the user {self.scope.user} could not be made: what useradd printed says why")

    def _uninstall(self, what: str, units: Mapping[str, str], name: str, settings: str | None) -> int:
        scope = self.scope
        self.call([*scope.control, "disable", "--now", name, *self._parts(what)])
        if what == "node" and settings is not None:
            # It holds the node's credential.
            (scope.settings / settings).unlink(missing_ok=True)
            say(f"Removed {scope.settings / settings}")
        is_shared = what == "node" and any(scope.settings.glob("node-*.env"))
        for unit in () if is_shared else units:
            path = scope.units / unit
            if path.exists():
                path.unlink()
                say(f"Removed {path}")
        self._require(["daemon-reload"])
        kept = [str(scope.settings / "server.env")] if what == "server" else [str(scope.data)]
        say(f"What stays: {', '.join(kept)}")
        return 0


@dataclass(frozen=True, slots=True)
class _Launchd:
    call: Run

    def act(self, options: argparse.Namespace, words: list[str]) -> int:
        if options.what == "server":
            raise LauncherError("on macOS keep all of it running: muster service install up")
        is_root = os.geteuid() == 0
        folder = Path("/Library/LaunchDaemons") if is_root else Path.home() / "Library" / "LaunchAgents"
        logs = Path("/Library/Logs") if is_root else Path.home() / "Library" / "Logs"
        data = Path("/Library/Application Support/muster") if is_root else default_data()
        domain = "system" if is_root else f"gui/{os.getuid()}"
        name, text = write_plist(options.what, words, instance=options.instance, logs=logs, data=data)
        path = folder / f"{name}.plist"
        match options.action:
            case "print":
                say(text.decode())
                return 0
            case "status":
                return self.call(["launchctl", "print", f"{domain}/{name}"])
            case "uninstall":
                self.call(["launchctl", "bootout", f"{domain}/{name}"])
                path.unlink(missing_ok=True)
                say(f"Removed {path}. Data stays.")
                return 0
        _make_folder(folder, 0o755)
        if path.exists():
            self.call(["launchctl", "bootout", f"{domain}/{name}"])
        # It may hold a credential.
        _write_file(path, text.decode(), 0o600)
        if self.call(["launchctl", "bootstrap", domain, str(path)]):
            raise LauncherError("launchctl bootstrap failed: what it printed says why")
        say(f"{name} runs now and from each start on; its log is {logs / f'{name}.log'}")
        return 0


def refuse_unreadable(program: Path, user: str) -> None:
    """Raise LauncherError when ``user`` cannot reach our program: a checkout below somebody's home, say."""
    for folder in reversed(program.parents):
        try:
            is_open = bool(folder.stat().st_mode & 0o001)
        except OSError:
            is_open = False
        if not is_open:
            raise LauncherError(
                f"the user {user} cannot enter {folder}, where Muster is. Install it where everybody may read: for example "
                f"python3 -m venv /opt/muster && /opt/muster/bin/pip install 'muster[server]'"
            )


def _make_folder(path: Path, mode: int) -> None:
    try:
        if not path.exists():
            path.mkdir(parents=True, mode=mode)
    except OSError as error:
        raise LauncherError(f"cannot make {path}: {error.strerror}") from None


def _write_file(path: Path, text: str, mode: int) -> None:
    try:
        replace_file(path, text.encode(), mode=mode)
    except OSError as error:
        raise LauncherError(f"cannot write {path}: {error.strerror}") from None


def main() -> int:
    try:
        return run_service(sys.argv[1:])
    except LauncherError as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

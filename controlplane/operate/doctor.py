"""``muster doctor``: one look at everything that an installation stands on. A check that fails keeps no other back."""

from __future__ import annotations

import os
import queue
import shutil
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import psycopg
import redis
from cryptography import x509

from controlplane.env import SettingError, list_problems
from controlplane.launcher.console import LauncherError, say
from controlplane.launcher.files import read_json
from controlplane.launcher.installation import installation_path
from controlplane.launcher.ports import describe_holder
from controlplane.launcher.postgres import explain_old_server
from controlplane.operate.backup import connect, find_unknown_migrations, read_migrations
from controlplane.operate.installation import SECRETS, Installation, Kind, enter
from controlplane.operate.status import ask
from controlplane.tls import CertificateError, Pair
from core.limits import limits
from core.valkey import open_client
from wire import COMMAND, RELEASE, clock
from wire.limits import MIB


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check saw. ``advice``: what to do, of everything that is not ok."""

    level: Level
    what: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at. ``trouble``: why settings or database cannot be read, which other checks say in one place."""

    installation: Installation
    trouble: str = ""

    @property
    def database_url(self) -> str:
        return self.installation.variables.get("DATABASE_URL", "")

    @property
    def is_running(self) -> bool:
        return self.installation.kind in {Kind.UP, Kind.SERVICES}


Check = Callable[[Subject], Iterable[Finding]]


def ok(what: str) -> Finding:
    return Finding(Level.OK, what)


def warn(what: str, advice: str) -> Finding:
    return Finding(Level.WARNING, what, advice)


def fail(what: str, advice: str) -> Finding:
    return Finding(Level.FAILED, what, advice)


def run_doctor(installation: Installation, *, as_json: bool) -> int:
    """Make every check and print what it found. Returns 1 when one failed, also by taking too long."""
    import json

    found = examine(installation)
    if as_json:
        say(json.dumps([{"check": name, **asdict(finding)} for name, finding in found], indent=1))
    else:
        for name, finding in found:
            advice = f" {finding.advice}." if finding.advice else ""
            say(f"{finding.level:<9}{name:<14}{finding.what}.{advice}")
        counts = {level: sum(finding.level is level for _, finding in found) for level in Level}
        say(f"{counts[Level.OK]} ok, {counts[Level.WARNING]} warnings, {counts[Level.FAILED]} failed")
    return int(any(finding.level is Level.FAILED for _, finding in found))


def examine(installation: Installation, checks: Mapping[str, Check] | None = None) -> list[tuple[str, Finding]]:
    """Make all checks side by side, each for no longer than ``doctor_s``."""
    checks = CHECKS if checks is None else checks
    trouble = ""
    try:
        enter(installation)
    except (SettingError, LauncherError) as error:
        trouble = str(error)
    subject, answers = Subject(installation, trouble), queue.SimpleQueue[tuple[str, list[Finding]]]()

    def make(name: str, check: Check) -> None:
        try:
            answers.put((name, list(check(subject))))
        # Whatever one check meets, the others say what they see.
        except Exception as error:  # noqa: BLE001 - see above
            answers.put((name, [fail(f"the check itself failed: {type(error).__name__}: {error}", "Report it")]))

    for name, check in checks.items():
        threading.Thread(target=make, args=[name, check], daemon=True).start()
    until, made = clock.monotonic() + limits().console.doctor_s, dict[str, list[Finding]]()
    while len(made) < len(checks) and (left_s := until - clock.monotonic()) > 0:
        with suppress(queue.Empty):
            name, findings = answers.get(timeout=left_s)
            made[name] = findings
    late = fail(f"it took longer than {limits().console.doctor_s:.0f} s", "Something that it asks hangs")
    return [(name, finding) for name in checks for finding in made.get(name, [late])]


# The checks


def check_program(subject: Subject) -> Iterator[Finding]:
    kinds = {
        Kind.UP: f"up runs on {subject.installation.data}",
        Kind.SERVICES: "the services of this environment",
        Kind.STOPPED: f"an installation in {subject.installation.data} that does not run",
        Kind.NONE: f"no installation in {subject.installation.data} yet",
    }
    python = ".".join(map(str, sys.version_info[:3]))
    yield ok(f"Muster {RELEASE}, Python {python}; {kinds[subject.installation.kind]}")


def check_settings(subject: Subject) -> Iterator[Finding]:
    if subject.trouble:
        yield fail(subject.trouble.removesuffix("."), f"{COMMAND} config shows every setting and where it was set")
        return
    for problem in list_problems():
        yield fail(problem.removesuffix("."), f"{COMMAND} config shows every setting and where it was set")
    if not list_problems():
        yield ok("every variable can be used")


def check_secrets(subject: Subject) -> Iterator[Finding]:
    here = subject.installation
    if here.kind is Kind.NONE:
        yield ok("the first start makes them")
        return
    for name in SECRETS:
        if here.variables.get(name):
            continue
        if name == "MUSTER_SECRET_KEY":
            yield fail("MUSTER_SECRET_KEY is not set", "Set it to what it was: sessions and sealed rows need it")
        elif name == "MUSTER_LOG_KEY":
            yield warn("MUSTER_LOG_KEY is not set", "Without it the audit log signs no checkpoints")
    for path in _list_secret_files(here):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            yield fail(f"others may read {path} (mode {mode:o})", f"chmod 600 {path}, and replace the secret if others did")
    yield ok("keys are there" if here.variables.get("MUSTER_SECRET_KEY") else "nothing else is open")


def _list_secret_files(here: Installation) -> Iterator[Path]:
    named = [path for name, path in os.environ.items() if name.startswith(("MUSTER_", "DATABASE_")) and name.endswith("_FILE")]
    own = [*SECRETS.values(), "credentials.json", "node/identity.key"] if here.is_in_folder else []
    for path in (*map(Path, named), *(here.data / name for name in own)):
        # A secret that an orchestrator mounts is root's, and its folder is closed.
        if path.is_file() and not str(path).startswith("/run/secrets"):
            yield path


def check_disk(subject: Subject) -> Iterator[Finding]:
    folders = {"data": subject.installation.data} if subject.installation.is_in_folder else {}
    for name, folder in {**folders, "temporary files": Path("/tmp")}.items():  # noqa: S108  # where programs put them
        there = next(path for path in (folder, *folder.parents) if path.exists())
        usage = shutil.disk_usage(there)
        told = f"{name}: {usage.free / 1024 / MIB:,.1f} GiB free in {there}"
        is_low = usage.free < limits().console.doctor_free_bytes
        yield warn(told, "Free some space: a full disk stops PostgreSQL") if is_low else ok(told)
        if not os.access(there, os.W_OK):
            yield fail(f"{there} cannot be written", "Choose another directory with --data DIR, or another user")


def check_ports(subject: Subject) -> Iterator[Finding]:
    if subject.installation.kind is Kind.SERVICES:
        yield ok("the services manager gives them")
        return
    told = read_json(installation_path(subject.installation.data)) if subject.installation.kind is Kind.UP else {}
    for name, port in (("control_url", 8000), ("gateway_url", 8080)):
        used = urlsplit(str(told.get(name, ""))).port or port
        holder = describe_holder(used)
        if told:
            yield ok(f"{used} is ours") if holder else fail(f"nobody listens on {used}", f"{COMMAND} logs says why")
        elif holder:
            option = "--port" if name == "control_url" else "--gateway-port"
            yield warn(f"{used} is in use by {holder}", f"Stop that program, or start with {option} N")
        else:
            yield ok(f"{used} is free")


def check_clock(subject: Subject) -> Iterator[Finding]:
    if subject.database_url:
        with suppress(LauncherError, psycopg.Error), connect(subject.database_url) as database:
            row = database.execute("SELECT clock_timestamp()").fetchone()
            off_s = abs((row[0] - clock.now()).total_seconds()) if row else 0.0
            if off_s > limits().console.doctor_clock_s:
                yield fail(f"the clock of the database differs by {off_s:.1f} s", "Set both by NTP: approvals go by it")
    control = shutil.which("timedatectl")
    told = ""
    if control:
        answer = subprocess.run([control, "show", "-p", "NTPSynchronized"], capture_output=True, text=True, check=False)
        told = answer.stdout.strip()
    if told.endswith("=no"):
        yield warn("this machine does not set its clock by NTP", "timedatectl set-ntp true")
    else:
        yield ok(f"{clock.now():%Y-%m-%d %H:%M:%S} UTC" + (", set by NTP" if told.endswith("=yes") else ""))


def check_database(subject: Subject) -> Iterator[Finding]:
    if not subject.database_url:
        yield ok("up starts its own")
        return
    began_s = clock.monotonic()
    try:
        with connect(subject.database_url) as database:
            answered_ms = (clock.monotonic() - began_s) * 1000
            major = database.info.server_version // 10_000
            if why := explain_old_server(major):
                yield fail(why, "Dump it, and restore into the newer one")
            row = database.execute(
                "SELECT current_setting('transaction_read_only'), current_setting('max_connections')::int, "
                "(SELECT count(*) FROM pg_stat_activity), current_setting('server_encoding'), current_setting('fsync'), "
                "pg_database_size(current_database())"
            ).fetchone()
            assert row is not None
            read_only, most, used, encoding, fsync, size = row
            if read_only == "on":
                yield fail("it takes no changes", "It is a standby, or its disk is full: see to the server")
            if encoding != "UTF8":
                yield fail(f"its encoding is {encoding}", "Make the database anew with ENCODING 'UTF8'")
            if fsync != "on":
                yield warn("fsync is off", "A crash of the machine may lose or break everything: switch it on")
            if used > 0.8 * most:
                yield warn(f"{used} of {most} connections are used", "Raise max_connections, or put PgBouncer in front")
            told = f"PostgreSQL {major} answers in {answered_ms:.0f} ms, {size / MIB:,.0f} MiB, {used} of {most} connections"
            yield ok(told)
            yield from _judge_migrations(read_migrations(database))
    except LauncherError as error:
        yield fail(str(error), "Start that server, or see to DATABASE_URL, its network and its pg_hba.conf")


def _judge_migrations(applied: list[str]) -> Iterator[Finding]:
    from controlplane.operate.upgrade import list_pending

    unknown = find_unknown_migrations(applied)
    if unknown:
        yield fail(f"the database is of a newer release ({unknown[0]})", f"Run that release: this program is {RELEASE}")
    pending = list_pending()
    if not applied:
        yield warn("the database is empty", f"{COMMAND} manage migrate")
    elif pending:
        yield warn(f"{len(pending)} migrations wait", f"{COMMAND} upgrade --check says what they do")
    elif not unknown:
        yield ok("the schema is that of this release")


def check_valkey(subject: Subject) -> Iterator[Finding]:
    if not subject.is_running:
        yield ok("up starts its own")
        return
    from django.conf import settings

    longest_s = limits().console.operate_answer_s
    try:
        with open_client(settings.REDIS_URL, socket_timeout=longest_s, socket_connect_timeout=longest_s) as client:
            info = client.info()
            policy = str(info.get("maxmemory_policy", ""))
            name, version = ("Valkey", info["valkey_version"]) if "valkey_version" in info else ("Redis", info["redis_version"])
    except redis.RedisError as error:
        yield fail(f"it does not answer: {error}", "Start it, or see to REDIS_URL. Until then changes take seconds")
        return
    if policy != "noeviction":
        yield warn(f"its maxmemory-policy is {policy}", "Set noeviction: it would throw away tasks when it is full")
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if limit and used > 0.8 * limit:
        yield warn(f"{used / MIB:.0f} of {limit / MIB:.0f} MiB are used", "Raise maxmemory")
    yield ok(f"{name} {version} answers, {used / MIB:.0f} MiB, {policy}")


def check_gpus(subject: Subject) -> Iterator[Finding]:
    del subject
    found = sorted(Path("/dev").glob("nvidia[0-9]*"))
    program = shutil.which("nvidia-smi")
    if program is None:
        yield (
            fail(f"{len(found)} GPUs, and no driver program", "Install NVIDIA's driver")
            if found
            else ok("no NVIDIA GPU here; models run on the CPU")
        )
        return
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=limits().console.operate_answer_s)
    if answer.returncode:
        said = (answer.stderr or answer.stdout).strip().splitlines()
        yield fail(f"nvidia-smi says: {said[-1] if said else 'nothing'}", "Load the driver again, or restart the machine")
        return
    for line in answer.stdout.strip().splitlines():
        yield ok(line.strip())


def check_models(subject: Subject) -> Iterator[Finding]:
    named = os.environ.get("MODEL_BASE_PATH")
    if named is None and not subject.installation.is_in_folder:
        yield ok("nodes have them; MODEL_BASE_PATH is not set here")
        return
    folder = Path(named or subject.installation.data / "models")
    if not folder.exists():
        yield (
            fail(f"{folder} does not exist", "Make it, or correct MODEL_BASE_PATH") if named else ok("the first start makes it")
        )
    elif not os.access(folder, os.R_OK | os.X_OK):
        yield fail(f"{folder} cannot be read", "Give its user the right to")
    else:
        count, free = sum(1 for _ in folder.iterdir()), shutil.disk_usage(folder).free
        told = f"{count} entries in {folder}, {free / 1024 / MIB:,.1f} GiB free"
        is_low = free < limits().console.doctor_free_bytes
        yield warn(told, "A model that is fetched needs more") if is_low else ok(told)


def check_certificate(subject: Subject) -> Iterator[Finding]:
    if subject.trouble:
        yield warn("not looked at", "Correct the settings first")
        return
    from django.conf import settings

    host = urlsplit(settings.PUBLIC_URL).hostname or ""
    if settings.TLS_CERT:
        try:
            yield from _judge_certificate(Pair(Path(settings.TLS_CERT), Path(settings.TLS_KEY)).check(), host)
        except CertificateError as error:
            yield fail(str(error).removesuffix("."), "")
    elif settings.PUBLIC_URL.startswith("https://"):
        try:
            shown = ssl.get_server_certificate(
                (host, urlsplit(settings.PUBLIC_URL).port or 443), timeout=limits().console.operate_answer_s
            )
            yield from _judge_certificate(x509.load_pem_x509_certificate(shown.encode()), host)
        except (OSError, ValueError) as error:
            yield fail(f"the proxy of {settings.PUBLIC_URL} shows none: {error}", "See docs/lan-and-https.md")
    else:
        yield ok(f"{settings.PUBLIC_URL} needs none")
    if subject.is_running:
        from django.db import DatabaseError

        from nodes.services.certificates import find_authority_end

        with suppress(DatabaseError):  # another check says that the database is away
            ends_at = find_authority_end()
            if ends_at is not None and ends_at - clock.now() < timedelta(days=limits().console.system_certificate_days):
                yield warn(f"the CA of nodes expires on {ends_at:%Y-%m-%d}", f"{COMMAND} ca rotate")


def _judge_certificate(leaf: x509.Certificate, host: str) -> Iterator[Finding]:
    ends_at, now = leaf.not_valid_after_utc, clock.now()
    names: list[str] = []
    with suppress(x509.ExtensionNotFound):
        alternative = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = [*alternative.get_values_for_type(x509.DNSName), *map(str, alternative.get_values_for_type(x509.IPAddress))]
    is_named = host in names or any(name.startswith("*.") and host.partition(".")[2] == name[2:] for name in names)
    if not is_named:
        yield fail(
            f"the certificate is for {', '.join(names[:5]) or 'nobody'}, not for {host}", "Get one for MUSTER_PUBLIC_URL"
        )
    if ends_at < now:
        yield fail(f"the certificate expired on {ends_at:%Y-%m-%d}", "Renew it")
    elif ends_at - now < timedelta(days=limits().console.doctor_certificate_days):
        yield warn(f"the certificate expires on {ends_at:%Y-%m-%d}", "See why nothing has renewed it yet")
    elif is_named:
        yield ok(f"the certificate for {host} is valid until {ends_at:%Y-%m-%d}")


def check_servers(subject: Subject) -> Iterator[Finding]:
    if not subject.is_running or subject.trouble:
        yield ok("nothing runs") if not subject.trouble else warn("not asked", "Correct the settings first")
        return
    from django.conf import settings

    told = read_json(installation_path(subject.installation.data)) if subject.installation.kind is Kind.UP else {}
    gateway = str(told.get("gateway_url", settings.GATEWAY_PUBLIC_URL)).rstrip("/")
    for name, url in (("control plane", f"{settings.PUBLIC_URL.rstrip('/')}/healthz"), ("gateway", f"{gateway}/health")):
        answer = ask(url)
        if isinstance(answer, str):
            yield fail(f"{name}: {url} does not answer: {answer}", "See whether it runs, and what stands in between")
        elif answer.status_code != 200:
            yield fail(f"{name}: {url} answers {answer.status_code}", f"{COMMAND} logs says why")
        else:
            yield ok(f"{name}: {url} answers")


def check_nodes(subject: Subject) -> Iterator[Finding]:
    if not subject.is_running or subject.trouble:
        yield ok("not asked: nothing runs")
        return
    from django.db import DatabaseError

    from controlplane.operate.upgrade import judge_versions
    from nodes.services.availability import read_fleet
    from wire.contract import NodeStatus

    try:
        nodes = read_fleet().nodes
        versions = judge_versions()
    except DatabaseError:
        yield warn("not asked: the database does not answer", "See database")
        return
    away = [node.name for node in nodes if node.status is NodeStatus.OFFLINE]
    if away:
        named = ", ".join(away[:3]) + (" and more" if len(away) > 3 else "")
        yield warn(f"{len(away)} of {len(nodes)} are offline: {named}", "Start them; a log says why its node does not connect")
    for node in nodes:
        if node.probe_error and node.status is not NodeStatus.OFFLINE:
            yield fail(f"the gateway does not reach {node.name}: {node.probe_error}", "See to the network in between")
    yield from (warn(text, advice) for text, advice in versions)
    yield (
        ok(f"{len(nodes) - len(away)} of {len(nodes)} are online")
        if nodes
        else warn("no node has connected", f"{COMMAND} node --help")
    )


def check_backup(subject: Subject) -> Iterator[Finding]:
    if not subject.is_running or subject.trouble:
        yield ok("not asked: nothing runs")
        return
    from django.db import DatabaseError

    from governance.audit import BACKUP_CREATED, find_last_action_at

    try:
        made_at = find_last_action_at(BACKUP_CREATED)
    except DatabaseError:
        yield warn("not asked: the database does not answer", "See database")
        return
    if made_at is None:
        yield warn("there is none yet", f"{COMMAND} backup FILE")
    elif clock.now() - made_at > timedelta(seconds=limits().console.backup_age_s):
        yield warn(f"the last one is of {made_at:%Y-%m-%d}", f"{COMMAND} backup FILE")
    else:
        yield ok(f"the last one is of {made_at:%Y-%m-%d %H:%M} UTC")


def check_memory(subject: Subject) -> Iterator[Finding]:
    del subject
    memory = psutil.virtual_memory()
    told = f"{memory.available / 1024 / MIB:,.1f} of {memory.total / 1024 / MIB:,.1f} GiB are free"
    is_low = memory.available < limits().console.doctor_free_bytes // 2
    yield warn(told, "Processes may be killed: see what uses it") if is_low else ok(told)


CHECKS: dict[str, Check] = {
    "program": check_program, "settings": check_settings, "secrets": check_secrets, "disk": check_disk, "memory": check_memory,
    "ports": check_ports, "clock": check_clock, "database": check_database, "valkey": check_valkey, "GPU": check_gpus,
    "models": check_models, "certificate": check_certificate, "servers": check_servers, "nodes": check_nodes,
    "backup": check_backup,
}  # fmt: skip

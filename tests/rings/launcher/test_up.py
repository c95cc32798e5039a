"""``./muster`` as a person runs it: help before anything is installed, one line for what stops it, ``up`` to an orderly end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any  # the ready file is JSON

import httpx
import psycopg
import pytest

from controlplane.env import LOG_LEVELS
from controlplane.launcher.environment import ROOT
from controlplane.launcher.processes import find_by_directory, identify
from tests.fakes.control_process import free_port
from tests.fakes.tls import Authority, make_key, write_key
from tests.fakes.waiting import wait_until
from wire.contract import OPEN_REQUEST_STATES

pytestmark = pytest.mark.timeout(400)
READY_S = 120.0
BACK_S = 60.0  # the promise is 10 s on an idle machine; tests share theirs with other tests
NONE: Mapping[str, str] = MappingProxyType({})
Ended = subprocess.CompletedProcess[str]


def run(*words: str, root: Path = ROOT, variables: Mapping[str, str] = NONE) -> Ended:
    """Run Python with these words in our repository, or another, and with more variables."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=180
    )


# before anything is installed

# -I -S: no site-packages, so this fails when the launcher needs anything that is not in the standard library.
BARE = ("-I", "-S", "muster")


@pytest.fixture(scope="module")
def bare_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which nothing has been installed, as far as the launcher reaches."""
    root = tmp_path_factory.mktemp("checkout")
    packages = ("controlplane", "core", "wire")
    modules = (
        "controlplane/env.py",
        "core/limits.py",
        "wire/clock.py",
        "wire/limits.py",
        "wire/variables.py",
        "core/issuer.py",
    )
    for name in ("muster", *(f"{package}/__init__.py" for package in packages), *modules):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for folder in ("controlplane/launcher", "controlplane/commands", "requirements"):
        shutil.copytree(ROOT / folder, root / folder)
    return root


@pytest.mark.parametrize("command", ["conformance", "bench", "node", "sign", "keys", "manage allow_model", "audit verify"])
def test_no_help_installs_anything(command: str, bare_checkout: Path) -> None:
    before = set(bare_checkout.iterdir())
    answer = run(*BARE, *command.split(), "--help", root=bare_checkout)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith(f"usage: muster {command.split(maxsplit=1)[0]} ")
    page = re.search(r"\b(docs|benchmarks)/[\w-]+\.md", answer.stdout)
    assert page is not None
    assert (ROOT / page[0]).is_file()
    assert set(bare_checkout.iterdir()) == before


# what stops a program


@pytest.mark.parametrize(
    "program", ["-m controlplane.serve_control", "-m controlplane.serve_gateway", "-m controlplane.serve_worker"]
)
def test_a_setting_that_cannot_be_used_stops_every_program_with_one_line(program: str) -> None:
    for name, value, words in (
        ("MUSTER_LOG_LEVEL", "verbose", f"must be one of {', '.join(LOG_LEVELS)}, not 'verbose'"),
        ("MUSTER_TRUSTED_PROXIES", "proxy.example", ""),
    ):
        ended = run(*program.split(), variables={name: value})
        assert (ended.returncode, ended.stdout) == (1, "")
        assert re.fullmatch(rf"muster: {name}\b.*{re.escape(words)}.*\n", ended.stderr)


@pytest.mark.parametrize(("proxies", "found"), [("127.0.0.1", ""), ("", "controlplane.W001")])
def test_a_production_environment_has_no_warning_and_one_without_its_proxy_has(proxies: str, found: str) -> None:
    settings = {
        "MUSTER_SECRET_KEY": "0123456789abcdef" * 4, "MUSTER_DEBUG": "off", "MUSTER_BEHIND_TLS": "true",
        "MUSTER_ALLOWED_HOSTS": "muster.example.com", "MUSTER_CSRF_TRUSTED_ORIGINS": "https://muster.example.com",
        "MUSTER_PUBLIC_URL": "https://muster.example.com", "MUSTER_TRUSTED_PROXIES": proxies,
    }  # fmt: skip
    ended = run("manage.py", "check", "--deploy", "--fail-level", "WARNING", variables=settings)
    assert (ended.returncode, found in ended.stderr) == (1 if found else 0, True), ended.stderr


@pytest.mark.parametrize("program", ["controlplane.serve_control", "controlplane.serve_gateway", "up"])
def test_a_certificate_that_cannot_be_used_stops_a_server_with_one_line(program: str, tmp_path: Path) -> None:
    pair = Authority().write_pair(tmp_path, host="localhost")
    pair.key.write_text(write_key(make_key()))
    words = ["muster", "up", "--data", str(tmp_path / "data")] if program == "up" else ["-m", program, "--port", "0"]
    ended = run(*words, "--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    said = r"muster.*: the key in \S+/key.pem does not belong to the first certificate in \S+/cert.pem\. .*"
    assert re.fullmatch(said, ended.stderr.splitlines()[-1])
    assert not (tmp_path / "data").exists()


def test_a_busy_port_stops_a_server_with_one_line_and_who_signs_on_a_desk_needs_nothing_of_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run("-m", "controlplane.serve_control", "--port", str(taken.getsockname()[1]))
    assert (ended.returncode, "already in use" in ended.stderr.splitlines()[-1]) == (1, True)
    assert "Traceback" not in ended.stderr
    program = (
        "import sys; from controlplane.approver_cli import main; code = main(sys.argv[1:]); "
        "assert not {'django', 'celery', 'psycopg'} & set(sys.modules); sys.exit(code)"
    )
    ended = run("-c", program, "keys", "show", "--dir", str(tmp_path))
    assert (ended.returncode, ended.stderr, "There is no key file" in ended.stdout) == (0, "", True)


# up

KEYS = {
    *("control_url", "public_url", "gateway_url", "admin", "admin_token", "api_key", "model"),
    *("worker_secret", "node_token", "database_url", "redis_url", "pids"),
}
PARTS = {"postgres", "valkey", "control", "gateway", "worker"}


@dataclass
class Installation:
    """A directory and the ``up`` that may run on it."""

    directory: Path
    process: subprocess.Popen[bytes] | None = None
    seen_pids: set[int] = field(default_factory=set)

    @property
    def ready_file(self) -> Path:
        return self.directory.parent / "ready.json"

    def start(self, *more: str) -> dict[str, Any]:
        """Run ``up`` and return the ready file. ``more``: words of it, "--no-node" if there are none."""
        # Ports of ours: seconds pass before somebody listens, and one that was free by chance may be somebody else's then.
        ports = ["--port", str(free_port()), "--gateway-port", str(free_port())]
        command = muster("up", "--data", str(self.directory), "--ready-file", str(self.ready_file), *ports)
        command += more or ("--no-node",)
        # As quiet as possible: no part may be judged by what it logs.
        environment = {**surroundings(), "MUSTER_LOG_LEVEL": "critical"}
        with (self.directory.parent / "up.log").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self.process = process
        self.wait(lambda: self.ready_file.exists() or process.poll() is not None, READY_S)
        assert process.poll() is None, self.said() + self.logs()
        return self.read()

    def wait(self, condition: Callable[[], bool], within_s: float = BACK_S) -> None:
        """Wait for something; what ``up`` printed explains a failure."""
        try:
            wait_until(condition, within_s=within_s, pause_s=0.05)
        except AssertionError as late:
            raise AssertionError(self.said()) from late

    def logs(self) -> str:
        """Return the last words of every part."""
        paths = sorted((self.directory / "logs").glob("*.log"))
        return "".join(f"\n--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)

    def read(self) -> dict[str, Any]:
        """Return the ready file and remember the processes it names."""
        ready: dict[str, Any] = json.loads(self.ready_file.read_text())
        self.seen_pids |= set(ready["pids"].values())
        return ready

    def said(self) -> str:
        """Return what ``up`` printed."""
        return (self.directory.parent / "up.log").read_text()

    def run(self, command: str, *arguments: str) -> Ended:
        """Run another command on the directory to its end."""
        words = muster(command, "--data", str(self.directory), *arguments)
        return subprocess.run(words, capture_output=True, text=True, env=surroundings(), timeout=120, check=False)

    def is_empty(self) -> bool:
        """Return whether no process that we ever saw is alive, and none works in the database's directory."""
        return not any(map(identify, self.seen_pids)) and not find_by_directory(self.directory / "postgres" / "data")

    def paste_key(self) -> str:
        """Return what the printed line puts into the variable, pasted in another folder."""
        line = [line for line in self.said().splitlines() if "export MUSTER_API_KEY=" in line][-1]
        pasted = ["sh", "-ec", f'{line}\nprintf %s "$MUSTER_API_KEY"']
        return subprocess.run(pasted, cwd="/", capture_output=True, text=True, check=True).stdout


def muster(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "muster"), *arguments]


def surroundings() -> dict[str, str]:
    dropped = {"DATABASE_URL", "REDIS_URL", "MUSTER_SECRET_KEY"}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def both_answer(ready: dict[str, Any]) -> bool:
    try:
        for url in (ready["control_url"] + "/healthz", ready["gateway_url"] + "/health"):
            urllib.request.urlopen(url, timeout=30).close()
    except OSError:
        return False
    return True


@contextmanager
def lend_installation() -> Iterator[Installation]:
    with tempfile.TemporaryDirectory(prefix="muster-up-", dir="/tmp") as name:
        Path(name).chmod(0o711)
        made = Installation(Path(name) / "data")
        yield made
        made.run("down")
        if made.process is not None:
            made.process.wait(timeout=60)


@pytest.fixture(scope="module")
def installation() -> Iterator[Installation]:
    with lend_installation() as made:
        yield made


def test_the_ready_file_is_private_and_names_everything(installation: Installation) -> None:
    ready = installation.start()
    assert (set(ready), set(ready["pids"])) == (KEYS, PARTS)
    assert installation.ready_file.stat().st_mode & 0o777 == 0o600
    assert (installation.directory / "log_key").stat().st_mode & 0o777 == 0o600
    installation.wait(lambda: both_answer(ready))
    said = installation.said()
    assert f"login admin / {ready['admin']['password']}\n" in said
    assert (said.count(ready["api_key"]), installation.paste_key()) == (1, ready["api_key"])
    # Nobody serves a model here, so nobody is told to ask one.
    assert f'{ready["gateway_url"]}/v1/models -H "Authorization: Bearer $MUSTER_API_KEY"' in said
    assert "chat/completions" not in said
    # Browsers bind a passkey to a name: what people are told to open is no address.
    assert ready["public_url"] == ready["control_url"].replace("127.0.0.1", "localhost")
    assert f"{ready['public_url']}/admin/" in said


def test_what_up_cannot_do_is_one_line_before_anything_starts(installation: Installation) -> None:
    assert installation.process is not None
    port = installation.read()["control_url"].rpartition(":")[2]
    again = installation.run("up", "--port", "0", "--gateway-port", "0")
    assert f"in use by another muster up (process {installation.process.pid})" in again.stderr
    with tempfile.TemporaryDirectory(prefix="muster-up-", dir="/tmp") as name:
        other = Installation(Path(name) / "other")
        busy = other.run("up", "--port", port, "--gateway-port", "0")
        assert busy.stderr.startswith(f"muster: port {port} on 127.0.0.1 is in use by process ")
        assert list(Path(name).iterdir()) == []
        (Path(name) / "thesis.tex").touch()
        foreign = Installation(Path(name)).run("up", "--port", "0", "--gateway-port", "0")
        assert foreign.stderr.startswith(f"muster: {name} is not empty and holds no installation of Muster (thesis.tex).")
        assert [entry.name for entry in Path(name).iterdir()] == ["thesis.tex"]
    for answer in (again, busy, foreign):
        assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (1, "", 1)


def test_manage_reaches_the_running_installation(installation: Installation) -> None:
    answer = installation.run("manage", "shell", "-v", "0", "-c", "from core.models import User; print(User.objects.get())")
    assert answer.stdout == "admin\n", answer.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs the death signal, which only Linux has")
def test_a_killed_supervisor_takes_its_children_along_and_the_next_up_carries_on(installation: Installation) -> None:
    before = installation.read()
    with psycopg.connect(before["database_url"], autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS n")
    assert installation.process is not None
    installation.process.kill()
    installation.process.wait()
    installation.wait(installation.is_empty)
    installation.ready_file.unlink()
    told = len(installation.said())
    after = installation.start()
    said = installation.said()[told:]
    # Said once, by the first start: under systemd this is the journal.
    assert not [secret for secret in (after["admin"]["password"], after["api_key"], after["admin_token"]) if secret in said]
    assert "/admin/   login admin\n" in said
    assert f"{installation.directory}/credentials.json, shown by: " in said
    assert installation.paste_key() == after["api_key"]
    for name in ("admin", "admin_token", "api_key", "worker_secret", "node_token"):
        assert after[name] == before[name]
    with psycopg.connect(after["database_url"]) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (42,)


def test_down_stops_everything_and_takes_the_ready_file_back(installation: Installation) -> None:
    installation.read()
    answer = installation.run("down")
    assert answer.returncode == 0, answer.stderr
    assert installation.process is not None
    assert installation.process.wait(timeout=60) == 0
    assert (installation.is_empty(), installation.ready_file.exists()) == (True, False)
    assert installation.run("down").stdout.startswith("Not running:")


def test_up_speaks_tls_to_a_node_that_knows_its_ca_and_shows_a_renewed_certificate_to_who_comes_next() -> None:
    with lend_installation() as installation:
        authority, folder = Authority(), installation.directory.parent
        pair, trust = authority.write_pair(folder, host="localhost"), authority.make_trust()
        (folder / "ca.pem").write_text(authority.certificate)
        ready = installation.start("--no-node", "--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))
        said = installation.said()
        address = re.search(r"Gateway +(https://localhost:\d+)/v1\n", said)
        assert address is not None, said
        assert re.match(r"https://localhost:\d+\Z", ready["public_url"])
        with httpx.Client(verify=trust, headers={"authorization": f"Bearer {ready['api_key']}"}, timeout=60) as client:
            page = client.get(f"{ready['public_url']}/sign-in/", headers={"accept": "text/html"})
            assert page.headers["set-cookie"].startswith("__Host-csrftoken=")
            assert "strict-transport-security" not in page.headers, "other ports of this host may be plain"
            token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
            assert token is not None
            form = {"name": "admin", "password": ready["admin"]["password"], "csrfmiddlewaretoken": token[1]}
            signed_in = client.post(f"{ready['public_url']}/sign-in/", data=form, headers={"origin": ready["public_url"]})
            assert (signed_in.status_code, "secure" in signed_in.headers["set-cookie"].lower()) == (302, True)

            token_file = folder / "token"
            token_file.write_text(ready["worker_secret"])
            node = [*muster("node"), "--gateway", address[1], "--token-file", str(token_file), "--name", "private"]
            untrusting = subprocess.Popen(node, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert untrusting.stdout is not None
            with untrusting, untrusting.stdout as output:
                assert any("name its CA with --gateway-ca FILE" in line for line in output)
                untrusting.terminate()
            with (
                (folder / "node.log").open("w") as log,
                subprocess.Popen([*node, "--gateway-ca", str(folder / "ca.pem")], stdout=log, stderr=log) as trusting,
            ):
                question = {"model": ready["model"], "messages": [{"role": "user", "content": "hello"}]}
                chat = f"{address[1]}/v1/chat/completions"
                try:
                    installation.wait(lambda: client.post(chat, json={**question, "max_tokens": 3}).status_code == 200)
                    endless = {**question, "max_tokens": 2000, "ignore_eos": True, "stream": True}
                    with client.stream("POST", chat, json=endless) as stream:
                        pieces = stream.iter_raw()
                        next(pieces)
                        port = int(address[1].rpartition(":")[2])
                        before = ssl.get_server_certificate(("127.0.0.1", port))
                        authority.write_pair(folder, host="localhost")
                        for name in ("gateway", "control"):
                            os.kill(ready["pids"][name], signal.SIGHUP)
                        installation.wait(lambda: ssl.get_server_certificate(("127.0.0.1", port)) != before)
                        next(pieces)
                finally:
                    trusting.terminate()
            assert client.get(f"{ready['public_url']}/healthz").status_code == 200
        assert installation.run("down").returncode == 0
        assert installation.is_empty()


def test_sigterm_while_starting_leaves_nothing(installation: Installation) -> None:
    command = muster("up", "--data", str(installation.directory), "--port", "0", "--gateway-port", "0")
    process = subprocess.Popen(command, env=surroundings(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout as output:
        for line in output:
            if "Preparing the database" in line:
                break
        process.terminate()
        assert process.wait(timeout=60) == 0
    assert installation.is_empty()


def test_of_two_gateways_one_is_killed_in_mid_stream_and_the_other_serves_on_by_the_same_node() -> None:
    with lend_installation() as installation:
        ready = installation.start("--gateways", "2")
        first, second = [f"http://127.0.0.1:{int(ready['gateway_url'].rpartition(':')[2]) + more}" for more in (0, 1)]
        client = httpx.Client(headers={"authorization": f"Bearer {ready['api_key']}"}, timeout=60)
        question = {"model": ready["model"], "messages": [{"role": "user", "content": "hello"}]}

        def find_used(url: str) -> str:
            """How many slots of the node are in use as a gateway counts them, "" while the node has not dialled it."""
            found = re.search(r"^muster_node_slots_used.* ([0-9.]+)$", client.get(f"{url}/metrics").text, re.MULTILINE)
            return "" if found is None else found[1]

        def is_served(url: str) -> bool:
            try:
                return client.post(f"{url}/v1/chat/completions", json={**question, "max_tokens": 3}).status_code == 200
            except httpx.TransportError:
                return False

        installation.wait(lambda: find_used(first) == find_used(second) == "0.0")
        endless = {**question, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        told, is_killed = b"", False

        def follow() -> None:
            nonlocal told, is_killed
            with client.stream("POST", f"{second}/v1/chat/completions", json=endless) as stream:
                for piece in stream.iter_raw():
                    told += piece
                    if not is_killed and b"chat.completion.chunk" in told:
                        os.kill(ready["pids"]["gateway-2"], signal.SIGKILL)
                        is_killed = True

        with pytest.raises(httpx.TransportError):
            follow()
        assert (is_killed, b"[DONE]" in told) == (True, False)
        assert is_served(first), "the node is on both"
        installation.wait(lambda: find_used(first) == "0.0" and is_served(second))
        with psycopg.connect(ready["database_url"], autocommit=True) as connection:
            states = (
                "SELECT count(*) FILTER (WHERE state = %s), count(*) FILTER (WHERE state = ANY(%s)) FROM gateway_requestrecord"
            )
            values = ("interrupted", [state.value for state in OPEN_REQUEST_STATES])
            installation.wait(lambda: connection.execute(states, values).fetchone() == (1, 0))
        assert (find_used(first), find_used(second)) == ("0.0", "0.0"), "nothing is left open"
        client.close()
        installation.read()
        assert installation.run("down").returncode == 0
        assert installation.is_empty()

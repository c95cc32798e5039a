"""An installation and the commands on it: places, private files, locks, credentials, what parts are told, what is installed."""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from controlplane.launcher import environment, files, installation, parts
from controlplane.launcher.cli import _move_data, build_parser, name_node, parse, split_words, take_data, translate_words
from controlplane.launcher.console import LauncherError
from controlplane.launcher.demo import MODEL, make_second_model, run_demo
from controlplane.launcher.environment import ROOT, SETS, lock_file
from controlplane.launcher.files import (
    FileLock,
    LockHeld,
    read_holder,
    read_json,
    read_or_create_secret,
    replace_file,
    write_json,
)
from controlplane.launcher.installation import (
    Credentials,
    default_data,
    describe_command,
    read_credentials,
    require_credentials,
    run_credentials,
    run_down,
    run_manage,
)
from controlplane.launcher.parts import answers_ok, describe_unreachable, lists_model, names_process
from controlplane.launcher.ports import claim_port, list_addresses, list_names
from controlplane.launcher.supervisor import Backoff, open_log, read_last_line, read_tail, rotate
from core.limits import limits
from runner.config import read_config
from tests.fakes.limits import set_limits
from tests.fakes.models.make import read_gguf
from tools import client_tests, vllm_tests

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells who holds a port, and lets it be held for a child"
)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


# places


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody may enter."""
    with tempfile.TemporaryDirectory(prefix="muster-test-", dir="/tmp") as name:
        Path(name).chmod(0o711)
        yield Path(name)


def test_a_folder_is_made_with_its_places_and_one_that_was_there_keeps_its_mode(folder: Path) -> None:
    data = installation.prepare_data(folder / "a" / "b")
    assert {entry.name for entry in data.iterdir()} == {"logs", "models", "node", "run"}
    assert (mode(data / "logs"), mode(data) & 0o066) == (0o700, 0)
    place, note = installation.choose_place(data)
    assert (note, place.postgres, place.sockets) == ("", data / "postgres", data / "sockets")
    (folder / "mine").mkdir(mode=0o700)
    assert mode(installation.prepare_data(folder / "mine")) == 0o700
    (folder / "file").touch()
    with pytest.raises(LauncherError, match=r"cannot write to .*--data DIR"):
        installation.prepare_data(folder / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as another user")
def test_under_root_a_closed_directory_gets_an_open_place_and_keeps_it(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    data = installation.prepare_data(closed / "d")
    place, note = installation.choose_place(data)
    assert str(data) in note
    assert installation.is_open_to_others(place.postgres.parent)
    assert (mode(closed), installation.choose_place(data)[0]) == (0o700, place)


def test_a_long_path_gets_short_sockets_and_those_of_somebody_else_are_refused(folder: Path) -> None:
    data = installation.prepare_data(folder / ("x" * 90))
    place, _ = installation.choose_place(data)
    assert len(str(place.sockets)) < 80
    assert installation.choose_place(data)[0].sockets == place.sockets
    place.make_socket_directory()
    place.sockets.rmdir()
    place.sockets.symlink_to(folder)
    with pytest.raises(LauncherError, match="belongs to somebody else"):
        place.make_socket_directory()
    place.sockets.unlink()


@pytest.mark.parametrize(
    ("names", "is_empty"),
    [([], True), (["lost+found"], False), (["up.lock", "logs", "postgres"], False), (["credentials.json", "notes.txt"], False)],
)
def test_an_empty_folder_and_one_of_an_installation_are_taken(folder: Path, names: list[str], is_empty: bool) -> None:
    for name in names:
        (folder / name).touch()
    assert installation.check_data(folder) is is_empty
    assert installation.check_data(folder / "not" / "there")


def test_what_a_start_that_failed_had_made_is_removed_and_what_it_had_written_stays(folder: Path) -> None:
    wanted = folder / "a" / "b"
    made = installation.find_missing(wanted)
    data = installation.prepare_data(wanted)
    installation.lock_path(data).touch()
    installation.remove_unused(data, made)
    assert list(folder.iterdir()) == []
    data = installation.prepare_data(wanted)
    (data / "logs" / "postgres.log").write_text("no space left")
    installation.remove_unused(data, [data])
    assert (data / "logs" / "postgres.log").exists()


# files, logs, locks


def test_a_secret_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("\n")
    first = read_or_create_secret(path)
    assert (len(first) >= 43, mode(path), read_or_create_secret(path)) == (True, 0o600, first)


def test_a_file_that_was_open_to_others_is_closed_when_replaced_and_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("old")
    path.chmod(0o644)
    write_json(path, {"new": 1})
    assert (read_json(path), mode(path)) == ({"new": 1}, 0o600)
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "directory", b"text")
    assert {entry.name for entry in tmp_path.iterdir()} == {"ready.json", "directory"}
    for content in ("", "[1]", "{broken"):
        path.write_text(content)
        assert read_json(path) == read_json(tmp_path / "missing") == {}


def test_a_log_is_kept_once_when_it_has_grown_and_read_from_where_it_was_and_to_its_last_words(tmp_path: Path) -> None:
    path = tmp_path / "part.log"
    assert read_last_line(path) == "nothing in its log"
    with open_log(path) as log:
        log.write(b"x" * (limits().launcher.log_bytes + 1))
        log.flush()
        rotate(path)
        log.write(b"after\n")
    assert (path.read_bytes(), mode(path)) == (b"after\n", 0o600)
    assert path.with_name("part.log.1").stat().st_size == limits().launcher.log_bytes + 1
    path.write_text("after\nlast words\n\n  \n")
    assert read_last_line(path) == "last words"
    assert read_tail(path, since=len("after\n")) == "last words\n\n  \n"
    path.write_text(
        '{"time":"2026-11-29T00:10:02Z","level":"error","logger":"muster.gateway","event":"gateway.start_failed","port":8080,'
        '"exception":"Traceback (most recent call last):\\n  File …\\nOSError: the address is in use"}\n'
    )
    assert read_last_line(path) == "gateway.start_failed port=8080 OSError: the address is in use"
    path.write_text("[1, 2]\n")
    assert read_last_line(path) == "[1, 2]"
    path.write_text("after\nlast words\n\n  \n")
    path.write_text("cut\n")
    assert read_tail(path, since=len("after\n")) == "cut\n"


_HOLD = """
import signal, sys
from pathlib import Path
from controlplane.launcher.files import FileLock
FileLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
signal.alarm(60); signal.pause()
"""


def test_a_second_holder_is_refused_and_told_who_holds_it_and_one_killed_with_9_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert read_holder(path) is None
    with FileLock(path):
        assert read_holder(path) == os.getpid()
        with pytest.raises(LockHeld) as refused:
            FileLock(path).acquire()
        assert refused.value.holder == str(os.getpid())
    assert read_holder(path) is None
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout is not None
    with holder, holder.stdout as output:
        assert output.readline() == b"held\n"
        assert read_holder(path) == holder.pid
        holder.kill()
        holder.wait()
        assert read_holder(path) is None
        with FileLock(path):
            pass


class Clock:
    """Stands in for the clock: time passes while somebody sleeps, and only then."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_waiting_for_a_lock_ends_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited_for = Clock(), list[str]()
    monkeypatch.setattr(files, "clock", clock)
    with FileLock(tmp_path / "lock"), pytest.raises(LockHeld):
        FileLock(tmp_path / "lock").acquire(within_s=5.0, on_wait=waited_for.append)
    assert waited_for == [str(os.getpid())]
    assert 5.0 <= clock.now < 6.0


# credentials

WHOLE = {
    "admin": {"username": "admin", "password": "p"}, "admin_token": "msa_x", "api_key": "mst_x", "model": "muster-tiny",
    "worker_secret": "msw_a", "node_token": "msw_b", "local_node_token": "msw_c",
}  # fmt: skip


def write_credentials(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**WHOLE, **changes}))
    return path


def test_credentials_are_shown_together_or_one_bare_from_any_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "it's here"
    data.mkdir()
    with pytest.raises(LauncherError, match=r"credentials\.json is missing.*\./muster up"):
        run_credentials(data, None)
    found = require_credentials(write_credentials(data / "credentials.json"))
    assert (found.username, found.password, found.local_node_token) == ("admin", "p", "msw_c")
    assert run_credentials(data, None) == 0
    shown = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert {"username admin", "password p", "api_key mst_x"} <= shown
    pasted = ["sh", "-c", f"{describe_command(data)} api_key"]
    assert subprocess.run(pasted, cwd="/", capture_output=True, text=True, check=True).stdout == "mst_x\n"
    changed = write_credentials(data / "credentials.json", admin={"username": "admin", "password": ""})
    assert require_credentials(changed).password == "", "a password that the operator changed is no fault"


@pytest.mark.parametrize("changes", [{"api_key": ""}, {"api_key": None}, {"admin": "admin"}, {"admin": {"username": "admin"}}])
def test_a_credential_that_is_missing_is_one_line(tmp_path: Path, changes: dict[str, object]) -> None:
    path = write_credentials(tmp_path / "c.json", **changes)
    assert read_credentials(path) is None
    with pytest.raises(LauncherError, match="incomplete: delete it"):
        require_credentials(path)


# what each part is told

CREDENTIALS = Credentials(
    username="admin", password="", admin_token="", api_key="mst_x", model="muster-tiny", worker_secret="msw_a",
    node_token="msw_b", local_node_token="msw_c",
)  # fmt: skip
NEAR = {"localhost", "127.0.0.1", "[::1]"}
OUTSIDE = NEAR | {"192.168.1.4", "[fd00::4]", "gpu1", "gpu1.local"}
NAMED = ["http://gpu1:8000", "http://gpu1.local:8000"]


def make_installation(tmp_path: Path, host: str = "127.0.0.1") -> parts.Installation:
    return parts.Installation(
        place=installation.Place(data=tmp_path, postgres=tmp_path / "postgres", sockets=tmp_path / "sockets"),
        addresses=parts.Addresses(host=host, control_port=8000, gateway_ports=(8080,)),
        database_url="postgresql:///x", redis_url="redis://x", secret_key="s", cluster_secret="c", log_key="l", run_id="r",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("host", "public", "hosts", "urls"),
    [
        ("127.0.0.1", "http://localhost:8000", NEAR, []),
        ("::1", "http://localhost:8000", NEAR, []),
        ("0.0.0.0", "http://localhost:8000", OUTSIDE, ["http://192.168.1.4:8000", *NAMED]),
        ("::", "http://localhost:8000", OUTSIDE, ["http://[fd00::4]:8000", *NAMED]),
        ("192.168.1.4", "http://192.168.1.4:8000", OUTSIDE, ["http://192.168.1.4:8000"]),
    ],
)
def test_people_are_told_a_name_on_loopback_and_it_answers_to_every_name_of_its_machine_where_it_listens_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, public: str, hosts: set[str], urls: list[str]
) -> None:
    for name in ("MUSTER_PUBLIC_URL", "MUSTER_ALLOWED_HOSTS"):
        monkeypatch.delenv(name, raising=False)
    plain = make_installation(tmp_path, host)
    made = replace(plain, addresses=replace(plain.addresses, own=("192.168.1.4", "fd00::4"), names=("gpu1", "gpu1.local")))
    assert set(made.own_variables()["MUSTER_ALLOWED_HOSTS"].split(",")) == hosts
    assert (made.own_variables()["MUSTER_PUBLIC_URL"], made.addresses.outside_urls(8000)) == (public, urls)
    monkeypatch.setenv("MUSTER_ALLOWED_HOSTS", "gpu.example.com")
    monkeypatch.setenv("MUSTER_PUBLIC_URL", "https://muster.example.com:8443")
    told = made.own_variables()
    assert set(told["MUSTER_ALLOWED_HOSTS"].split(",")) - {host} == NEAR - {host} | {"gpu.example.com", "muster.example.com"}
    assert told["MUSTER_CSRF_TRUSTED_ORIGINS"] == told["MUSTER_PUBLIC_URL"] == "https://muster.example.com:8443"


def test_the_local_node_keeps_its_identity_and_gets_no_secret_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = parts.node_spec(make_installation(tmp_path), CREDENTIALS).command()
    options = dict(zip(plain.argv[1:], plain.argv[2:], strict=False))
    assert (options["--data"], options["--model-path"]) == (str(tmp_path / "node"), str(parts.TINY_MODEL))
    assert (options["--model-name"], plain.env["MODEL_BASE_PATH"]) == ("muster-tiny", str(tmp_path / "models"))
    assert plain.env["MUSTER_TOKEN"] == "msw_c"
    secrets = ("DATABASE_URL", "REDIS_URL", "MUSTER_SECRET_KEY", "MUSTER_CLUSTER_SECRET", "MUSTER_LOG_KEY")
    of_another = ("MUSTER_BACKEND_URL", "MUSTER_PROVIDER", "MUSTER_TOKEN", "MUSTER_NAME", "OP_TOKEN_LEVEL")
    for name in (*secrets, *of_another):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(f"{name}_FILE", "/x")
    environment = parts.node_spec(make_installation(tmp_path), CREDENTIALS).command().env
    assert environment == plain.env, "a shell that was set up for another node changes nothing for the local one"
    assert not {f"{name}{suffix}" for name in secrets for suffix in ("", "_FILE")} & set(environment)


def test_what_needs_the_settings_that_are_loaded_is_a_fork_and_the_node_never_is(tmp_path: Path) -> None:
    def list_programs(made: parts.Installation) -> dict[str, str]:
        specs = [
            parts.control_spec(made),
            parts.worker_spec(made),
            *parts.gateway_specs(made),
            parts.node_spec(made, CREDENTIALS),
        ]
        return {spec.name: (spec.command().program or ("",))[0] for spec in specs}

    plain = make_installation(tmp_path)
    assert not any(list_programs(plain).values()), "nothing is loaded yet"
    loaded = replace(plain, is_preloaded=True)
    forks = {"control": "controlplane.serve_control", "worker": "controlplane.serve_worker", "node": ""}
    assert list_programs(loaded) == {**forks, "gateway": "controlplane.serve_gateway"}
    several = replace(loaded, addresses=replace(loaded.addresses, gateway_ports=(8080, 8081)))
    assert list_programs(several) == {**forks, "gateway": "", "gateway-2": ""}, "each has an address of its own"


class _Recorded(Mapping[str, str]):
    """An environment that remembers which variables were looked for."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@pytest.mark.parametrize("arguments", [[], ["--backend", "http://127.0.0.1:1"]])
def test_no_variable_that_a_runner_reads_reaches_the_local_node_from_the_shell(arguments: list[str]) -> None:
    read = _Recorded({"MUSTER_GATEWAY": "http://127.0.0.1:1", "MUSTER_TOKEN": "msw_x", "MUSTER_API_PORT": "0"})
    read_config(arguments, read)
    open_ended = {"TENANT_WEIGHT_a", "TENANT_RATE_LIMIT_a", "DEFAULT_RATE_LIMIT", "ENABLE_MULTI_TENANT"}
    of_the_machine = {"CUDA_VISIBLE_DEVICES", "HF_HOME"}
    assert {"MUSTER_TOKEN", "MUSTER_PROVIDER", "MUSTER_NAME", "OP_TOKEN_LEVEL"} <= read.names
    shell = dict.fromkeys(read.names | open_ended, "x")
    assert set(parts.node_environment(shell)) == of_the_machine & read.names | set(parts.FOR_THE_NODE) & read.names
    machine = {
        "PATH": "/bin", "LC_ALL": "C", "https_proxy": "http://p", "CUDA_VISIBLE_DEVICES": "1", "HF_TOKEN": "t", "VLLM_X": "y",
    }  # fmt: skip
    assert parts.node_environment(machine) == machine


# when a part is ready


def test_the_worker_is_ready_when_it_says_so_itself_and_not_by_its_log(tmp_path: Path) -> None:
    spec = parts.worker_spec(make_installation(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker.log").write_text("worker ready.\n")
    assert not spec.is_ready(12)
    said = Path(dict(itertools.pairwise(spec.command().argv))["--ready-file"])
    for text, is_ready in (("", False), ("1\n", False), ("12\n", True)):
        said.write_text(text)
        assert spec.is_ready(12) is names_process(said, 12) is is_ready
    assert spec.before_start is not None
    spec.before_start()
    assert not spec.is_ready(12)


class _Gateway(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.path == "/health" or self.headers.get("Authorization") == "Bearer key"
        body = json.dumps({"data": [{"id": "muster-tiny"}]}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture
def gateway_port() -> Iterator[int]:
    """A server that answers, however long this machine stands still before it does."""
    set_limits(launcher={"ready_answer_s": 30.0})
    with ThreadingHTTPServer(("127.0.0.1", 0), _Gateway) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_part_is_ready_when_it_answers_200_and_a_model_when_the_holder_of_the_key_sees_it(gateway_port: int) -> None:
    url = f"http://127.0.0.1:{gateway_port}"
    assert answers_ok(url, "/health")
    assert not answers_ok(url, "/v1/models")
    for key, model, is_listed in (("key", "muster-tiny", True), ("key", "another", False), ("wrong", "muster-tiny", False)):
        assert lists_model(url, api_key=key, model=model) is is_listed
    assert describe_unreachable(f"postgresql://u:p@127.0.0.1:{gateway_port}/db", default_port=5432) == ""
    assert describe_unreachable("redis://127.0.0.1/0", default_port=gateway_port) == ""


# ports, addresses and pauses


@linux_only
def test_a_claimed_port_is_held_for_a_server_that_asks_for_it_by_its_number() -> None:
    with ExitStack() as held:
        port = claim_port("127.0.0.1", 0, option="--port", held=held)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as server:
            assert server.getsockname()[1] == port
    with ExitStack() as again:
        assert claim_port("127.0.0.1", port, option="--port", held=again) == port


def test_the_addresses_and_names_of_this_machine_are_those_it_can_listen_on_and_none_of_loopback() -> None:
    addresses = [ipaddress.ip_address(text) for text in list_addresses()]
    assert not any(address.is_loopback or address.is_link_local for address in addresses)
    assert [address.version for address in addresses] == sorted(address.version for address in addresses)
    for address in addresses:
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((str(address), 0))
    names = list_names([])
    assert (names[0], names) == (socket.gethostname().lower(), list(dict.fromkeys(names)))


def test_a_first_death_costs_no_pause_the_next_ones_double_up_to_the_longest_and_a_healthy_run_starts_over() -> None:
    backoff = Backoff()
    assert [backoff.next_pause_s(1.0) for _ in range(8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert (backoff.next_pause_s(10.0), backoff.next_pause_s(9.9)) == (0.0, 0.5)
    assert Backoff(failures=100_000).next_pause_s(0.0) == 15.0


# the second model of the demo


def test_the_second_model_is_the_shipped_one_to_half_precision_and_left_alone_once_it_is_there(tmp_path: Path) -> None:
    written = make_second_model(tmp_path)
    shipped, second = read_gguf(parts.TINY_MODEL), read_gguf(written)
    assert second.tensors.keys() == shipped.tensors.keys()
    for name, tensor in shipped.tensors.items():
        np.testing.assert_allclose(second.tensors[name], tensor, rtol=1e-3, atol=1e-6)
    assert {key for key, value in shipped.metadata.items() if value != second.metadata[key]} == {"general.file_type"}
    before = written.stat()
    assert before.st_size > 1.5 * parts.TINY_MODEL.stat().st_size
    assert make_second_model(tmp_path) == written
    assert (written.stat().st_ino, written.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [path.name for path in tmp_path.iterdir()] == [f"{MODEL}.gguf"]


# the command line


def test_words_reach_the_command_they_are_for_and_options_of_other_programs_are_handed_on() -> None:
    for name, words in (
        ("node", ["--gateway", "http://x", "--help"]),
        ("conformance", ["--base-url", "http://x", "--help"]),
        ("bench", ["--data", "x"]),
    ):
        assert split_words(name, words) == (None, words)
    assert [split_words("manage", words)[1] for words in ([], ["help"], ["help", "invite"])] == [
        ["--help"], ["--help"], ["invite", "--help"]
    ]  # fmt: skip
    for words, rest in (
        (["test", "-k", "name", "--fast", "tests/unit"], ["-k", "name", "tests/unit"]),
        (["test", "--vllm", "-x"], ["-x"]),
        (["test", "--mutants", "T11", "F28"], ["T11", "F28"]),
        (["config", "--check", "node", "--name", "node"], ["--name", "node"]),
    ):
        options, left = parse(words)
        assert left == rest
        for switch in ("fast", "vllm", "clients", "mutants"):
            assert getattr(options, switch, False) is (f"--{switch}" in words)
    options, _ = parse(["up"])  # the address is that of a setting
    assert (options.host, options.port, options.gateway_port, options.with_node) == (None, 8000, None, True)
    assert options.data == default_data()
    assert _move_data(["--data", "/d"]) == []
    for words in (["demo", "governance", "--json", "--data", "/d"], ["--data", "/d", "demo", "governance", "--json"]):
        options, _ = parse(_move_data(words))
        assert (options.what, options.as_json, options.data) == ("governance", True, Path("/d"))


def test_options_of_modelrelays_programs_become_settings_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = {"MUSTER_QUEUE_TIMEOUT_S": "1", "BACKEND_URL": "http://b"}
    monkeypatch.setattr("os.environ", environment)
    words = ["--listen", "0.0.0.0:80", "--max-queue-len=0", "--queue-timeout", "9", "--require-api-keys", "--data", "/d"]
    assert translate_words(["modelrelay-server", *words, "--database-url", "postgresql://db"]) == ["up", "--data", "/d"]
    assert environment == {
        "MUSTER_LISTEN": "0.0.0.0:80", "MUSTER_MAX_QUEUE_LEN": "1000000", "MUSTER_QUEUE_TIMEOUT_S": "9", "BACKEND_URL": "http://b",
        "MUSTER_REQUIRE_API_KEYS": "true", "DATABASE_URL": "postgresql://db",
    }  # fmt: skip
    file = tmp_path / "worker.toml"
    file.write_text('models = ["a", "b"]\nbackend_url = "http://c"\nmax_concurrency = 3\n')
    assert translate_words(["modelrelay-worker", "--config", str(file), "--worker-name", "w"]) == ["node", "--worker-name", "w"]
    told = [environment[name] for name in ("MODELS", "BACKEND_URL", "MAX_CONCURRENCY", "PROXY_URL")]
    assert told == ["a,b", "http://b", "3", "http://127.0.0.1:8080"]
    file.write_text("nonsense = 1\n")
    for path in (file, tmp_path):
        with pytest.raises(LauncherError, match="--config: "):
            translate_words(["modelrelay-worker", "--config", str(path)])
    assert translate_words(["up", "--listen", "x"]) == ["up", "--listen", "x"]


@pytest.mark.parametrize(
    ("words", "data", "rest"),
    [
        (["--data", "/d", "allow_model", "--data", "x"], Path("/d"), ["allow_model", "--data", "x"]),
        (["--data=/d", "shell"], Path("/d"), ["shell"]),
        (["allow_model", "x", "--data", "/d"], Path("/d"), ["allow_model", "x"]),
        (["allow_model", "--data=/d", "x"], Path("/d"), ["allow_model", "x"]),
        (["shell", "--", "--data", "x"], None, ["shell", "--", "--data", "x"]),
        (["shell", "--data"], None, ["shell", "--data"]),
    ],
)
def test_the_installation_is_named_anywhere_among_the_words(words: list[str], data: Path | None, rest: list[str]) -> None:
    assert take_data(words) == (data, rest)
    if data is not None and "--data" not in rest:
        assert split_words("manage", words) == (data, rest)
        (name, *moved) = _move_data(["--data", str(data), "audit", "verify"])
        assert (name, split_words("audit", moved)) == ("audit", (data, ["verify"]))


@pytest.mark.parametrize("command", [name for action in build_parser()._actions for name in action.choices or ()])
def test_every_help_names_the_command_as_people_type_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([command, "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: muster {command}")
    assert not re.search(r"usage: (?!muster )|--(settings|pythonpath|traceback|no-color|verbosity)", shown)


def test_trust_means_the_box_it_is_told_of_or_the_local_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSTER_DATA", raising=False)
    installation, box = tmp_path / "installation", tmp_path / "box"
    (installation / "node").mkdir(parents=True)
    (installation / "up.lock").touch()
    (box / "node").mkdir(parents=True)
    words = ["babab-dabab"]
    assert name_node([*words, "--data", str(installation)]) == [*words, "--data", str(installation / "node")]
    assert name_node([f"--data={box}", *words, "--forget"]) == [*words, "--forget", "--data", str(box)]
    assert name_node(words)[:2] == [*words, "--data"]
    assert Path(name_node(words)[2]) in {default_data(), default_data() / "node"}
    monkeypatch.setenv("MUSTER_DATA", str(box))
    assert name_node(words) == words


def test_where_nothing_runs_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DATABASE_URL")
    words = f"no Muster runs on {tmp_path}: start it with ./muster up"
    with pytest.raises(LauncherError, match=words):
        run_demo(tmp_path, as_json=False)
    with pytest.raises(LauncherError, match=words):
        run_manage(tmp_path, ["check"])
    assert run_down(tmp_path) == 0
    assert capsys.readouterr().out == f"Not running: {tmp_path}\n"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(os, "execve", lambda _program, argv, _environment: sys.exit(argv[-1]))
    with pytest.raises(SystemExit, match="--help"):
        run_manage(tmp_path, ["allow_model", "--help"])


# the installer


def test_what_pip_is_configured_to_use_reaches_uv() -> None:
    lines = [
        ":env:.find-links='/from/variable'", "global.find-links='/from/global'", "install.index-url='https://install/simple'",
        "global.index-url='https://global/simple'", "global.cert='/etc/ca.pem'", "", "list.format='columns'", "nonsense",
        "global.proxy=not quoted",
    ]  # fmt: skip
    settings = {"find-links": "/from/variable", "index-url": "https://install/simple", "cert": "/etc/ca.pem"}
    assert environment.parse_pip_settings(lines) == settings
    more = {"extra-index-url": "https://b/simple\nfile:///c", "no-index": "true", "trusted-host": "a"}
    assert environment.uv_options({**settings, **more}) == [
        "--index-strategy", "unsafe-best-match", "--default-index", "https://install/simple", "--extra-index-url",
        "https://b/simple", "--extra-index-url", "file:///c", "--find-links", "/from/variable", "--allow-insecure-host", "a",
        "--no-index",
    ]  # fmt: skip
    assert environment.uv_environment({"cert": "/ca.pem", "default-timeout": "180"}) == {
        "SSL_CERT_FILE": "/ca.pem",
        "UV_HTTP_TIMEOUT": "180",
    }
    assert environment.uv_environment({}) == {}


def test_each_lock_file_holds_everything_of_the_smaller_ones() -> None:
    def pins(name: str) -> set[str]:
        return {line.split(" ")[0] for line in lock_file(name).read_text().splitlines() if "==" in line and line[0].isalnum()}

    for bigger, held in SETS.items():
        for smaller in held:
            assert pins(smaller) <= pins(bigger), f"{bigger}.txt lacks pins of {smaller}.txt: run requirements/lock.sh"
    lines = [
        "a==1 \\", "    --hash=sha256:00", "b==2 ; sys_platform == 'win32' \\", "# via a", "c==3 ; sys_platform != 'win32'",
    ]  # fmt: skip
    assert environment.count_pins("\n".join(lines)) == 2, "pins of other systems are not counted"


@pytest.mark.parametrize("has_uv", [True, False])
def test_whatever_installs_takes_nothing_without_a_hash_that_was_locked(tmp_path: Path, *, has_uv: bool) -> None:
    """Both ways in turn: uv is said to fail where it is there, so that pip has to do it."""
    calls, python = tmp_path / "calls", tmp_path / "python"
    answers = "exit 0" if has_uv else "exit 1"
    python.write_text(f"""#!/bin/sh
echo "$@" >> {calls}
case "$*" in
    "-m uv --version") {answers} ;;
    "-m uv pip install"*) exit 1 ;;
esac
""")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    lock, uv_lock = tmp_path / "lock.txt", tmp_path / "uv.txt"
    lock.write_text("one==1 --hash=sha256:00\n")
    uv_lock.write_text("uv==1 --hash=sha256:00\n")
    environment.install(python, lock, uv_lock)
    installs = [call for call in calls.read_text().splitlines() if " install " in call]
    assert [call.split()[1] for call in installs] == (["uv", "pip"] if has_uv else ["pip", "uv", "pip"])
    assert all("--require-hashes" in call.split() for call in installs)


# what the optional tests run on

LOCK_TEXT = '{"packages": {"": {}, "node_modules/openai": {}}}'


@pytest.fixture
def node_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose packages are installed, by their stamp, and a Node.js and an npm that say what ``programs`` tell them."""
    node = tmp_path / client_tests.TESTS / "node"
    (node / "node_modules").mkdir(parents=True)
    (node / "package-lock.json").write_text(LOCK_TEXT)
    write_json(client_tests._stamp(node), {"checksum": client_tests._checksum(node)})
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    put_program(tmp_path, "node", "echo v20.20.2")
    put_program(tmp_path, "npm", 'echo "$@" > called')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put_program(node_folder: Path, name: str, script: str) -> None:
    program = node_folder / "bin" / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_packages_of_a_changed_lock_file_are_installed_once_without_install_scripts(node_folder: Path) -> None:
    assert client_tests.client_environment(node_folder) == {"MUSTER_TEST_CLIENTS": "1"}
    assert not (node_folder / "called").exists()
    (node_folder / client_tests.TESTS / "node" / "package-lock.json").write_text(LOCK_TEXT + "\n")
    put_program(node_folder, "npm", "echo E401 >&2; exit 1")
    for _ in range(2):
        with pytest.raises(LauncherError, match=r"cannot install package-lock\.json: E401\. Check the network"):
            client_tests.client_environment(node_folder)
    put_program(node_folder, "npm", 'echo "$@" > called')
    client_tests.client_environment(node_folder)
    said = (node_folder / "called").read_text()
    assert said.startswith(f"ci --prefix {node_folder / client_tests.TESTS / 'node'} ")
    assert "--ignore-scripts" in said
    (node_folder / "called").unlink()
    client_tests.client_environment(node_folder)
    assert not (node_folder / "called").exists()


def test_every_package_is_pinned_and_locked_with_its_hash() -> None:
    wanted = json.loads((ROOT / client_tests.TESTS / "node" / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert [name for name, version in wanted.items() if not re.fullmatch(r"\d+\.\d+\.\d+", version)] == []
    locked = json.loads((ROOT / client_tests.TESTS / "node" / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert [name for name, entry in locked.items() if name and not entry["integrity"].startswith("sha512-")] == []
    assert [name for name, entry in locked.items() if entry.get("hasInstallScript")] == []
    pins = (ROOT / vllm_tests.REQUIREMENTS).read_text(encoding="utf-8").splitlines()
    assert {bool(re.fullmatch(r"[a-z-]+==[\d.]+", pin)) for pin in pins if pin and not pin.startswith(("#", "--"))} == {True}

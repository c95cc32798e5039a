"""The parts of an installation: what each is told, when it is ready, where it listens, how long it pauses."""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from controlplane.launcher.backoff import Backoff
from controlplane.launcher.credentials import Credentials
from controlplane.launcher.demo import MODEL, make_second_model
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.parts import (
    FOR_THE_NODE,
    TINY_MODEL,
    Addresses,
    Installation,
    node_environment,
    node_spec,
    worker_spec,
)
from controlplane.launcher.places import Place
from controlplane.launcher.ports import claim_port, describe_holder, list_addresses, list_names
from controlplane.launcher.readiness import answers_ok, describe_unreachable, fetch, lists_model, names_process
from controlplane.launcher.tiny_model import write_f16_model
from runner.config import read_config
from tests.fakes.limits import set_limits
from tests.fakes.models.gguf_file import read_gguf
from tests.unit.closed_port import closed_port

CREDENTIALS = Credentials(
    username="admin", password="", admin_token="", api_key="mst_x", model="muster-tiny", worker_secret="msw_a",
    node_token="msw_b", local_node_token="msw_c",
)  # fmt: skip


def make_installation(tmp_path: Path, host: str = "127.0.0.1") -> Installation:
    return Installation(
        place=Place(data=tmp_path, postgres=tmp_path / "postgres", sockets=tmp_path / "sockets"),
        addresses=Addresses(host=host, control_port=8000, gateway_ports=(8080,)),
        database_url="postgresql:///x", redis_url="redis://x", secret_key="s", cluster_secret="c", log_key="l", run_id="r",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("host", "public"),
    [
        ("127.0.0.1", "http://localhost:8000"), ("::1", "http://localhost:8000"), ("0.0.0.0", "http://localhost:8000"),
        ("192.168.1.4", "http://192.168.1.4:8000"),
    ],
)  # fmt: skip
def test_people_are_told_a_name_wherever_the_control_plane_is_on_loopback(tmp_path: Path, host: str, public: str) -> None:
    assert make_installation(tmp_path, host).addresses.public_url == public


def test_an_address_of_the_operator_comes_before_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSTER_PUBLIC_URL", raising=False)
    assert make_installation(tmp_path).own_variables()["MUSTER_PUBLIC_URL"] == "http://localhost:8000"
    monkeypatch.setenv("MUSTER_PUBLIC_URL", "https://muster.example.com")
    assert make_installation(tmp_path).own_variables()["MUSTER_PUBLIC_URL"] == "https://muster.example.com"


def test_the_local_node_keeps_its_identity_and_names_its_model(tmp_path: Path) -> None:
    command = node_spec(make_installation(tmp_path), CREDENTIALS).command()
    options = dict(zip(command.argv[1:], command.argv[2:], strict=False))
    assert options["--data"] == str(tmp_path / "node")
    assert options["--model-path"] == str(TINY_MODEL)
    assert options["--model-name"] == "muster-tiny"
    assert command.env["MODEL_BASE_PATH"] == str(tmp_path / "models")


def test_the_local_node_gets_no_secret_of_the_control_plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("DATABASE_URL", "REDIS_URL", "MUSTER_SECRET_KEY", "MUSTER_CLUSTER_SECRET", "MUSTER_LOG_KEY")
    for name in secrets:
        monkeypatch.setenv(name, "x")
        monkeypatch.setenv(f"{name}_FILE", "/x")
    environment = node_spec(make_installation(tmp_path), CREDENTIALS).command().env
    assert not {f"{name}{suffix}" for name in secrets for suffix in ("", "_FILE")} & set(environment)
    assert environment["MUSTER_TOKEN"] == "msw_c"


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
    assert set(node_environment(shell)) == of_the_machine & read.names | set(FOR_THE_NODE) & read.names


def test_the_local_node_gets_what_belongs_to_the_machine() -> None:
    shell = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "https_proxy": "http://p",
        "CUDA_VISIBLE_DEVICES": "1",
        "HF_TOKEN": "t",
        "VLLM_X": "y",
    }
    assert node_environment(shell) == shell


def test_a_shell_that_was_set_up_for_another_node_changes_nothing_for_the_local_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = node_spec(make_installation(tmp_path), CREDENTIALS).command().env
    for name in ("MUSTER_BACKEND_URL", "MUSTER_PROVIDER", "MUSTER_TOKEN", "MUSTER_TOKEN_FILE", "MUSTER_NAME", "OP_TOKEN_LEVEL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert node_spec(make_installation(tmp_path), CREDENTIALS).command().env == plain


def test_the_worker_is_ready_when_it_says_so_itself_and_not_by_its_log(tmp_path: Path) -> None:
    spec = worker_spec(make_installation(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker.log").write_text("worker ready.\n")
    assert not spec.is_ready(12)
    options = dict(itertools.pairwise(spec.command().argv))
    Path(options["--ready-file"]).write_text("12\n")
    assert spec.is_ready(12)
    assert spec.before_start is not None
    spec.before_start()
    assert not spec.is_ready(12)


def _hosts(installation: Installation) -> set[str]:
    return set(installation.own_variables()["MUSTER_ALLOWED_HOSTS"].split(","))


NEAR = {"localhost", "127.0.0.1", "[::1]"}


def _name_machine(installation: Installation) -> Installation:
    named = replace(installation.addresses, own=("192.168.1.4", "fd00::4"), names=("gpu1", "gpu1.local"))
    return replace(installation, addresses=named)


@pytest.mark.parametrize(
    ("host", "hosts", "urls"),
    [
        ("127.0.0.1", NEAR, []),
        ("0.0.0.0", NEAR | {"192.168.1.4", "[fd00::4]", "gpu1", "gpu1.local"}, ["http://192.168.1.4:8000"]),
        ("::", NEAR | {"192.168.1.4", "[fd00::4]", "gpu1", "gpu1.local"}, ["http://[fd00::4]:8000"]),
        ("fd00::4", NEAR | {"192.168.1.4", "[fd00::4]", "gpu1", "gpu1.local"}, ["http://[fd00::4]:8000"]),
    ],
)
def test_an_installation_that_listens_for_others_answers_to_every_name_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, hosts: set[str], urls: list[str]
) -> None:
    for name in ("MUSTER_PUBLIC_URL", "MUSTER_ALLOWED_HOSTS"):
        monkeypatch.delenv(name, raising=False)
    made = _name_machine(make_installation(tmp_path, host))
    assert _hosts(made) == hosts
    assert made.addresses.outside_urls(8000) == urls


def test_a_list_of_the_operator_takes_the_place_of_the_names_and_the_public_url_is_always_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _name_machine(make_installation(tmp_path, "0.0.0.0"))
    monkeypatch.setenv("MUSTER_ALLOWED_HOSTS", "gpu.example.com")
    monkeypatch.setenv("MUSTER_PUBLIC_URL", "https://muster.example.com:8443")
    assert _hosts(made) == NEAR | {"gpu.example.com", "muster.example.com"}
    assert made.own_variables()["MUSTER_CSRF_TRUSTED_ORIGINS"] == "https://muster.example.com:8443"


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


def test_a_part_is_ready_when_it_answers_200(gateway_port: int) -> None:
    assert answers_ok("127.0.0.1", gateway_port, "/health")
    assert not answers_ok("127.0.0.1", gateway_port, "/v1/models")
    with closed_port() as port:
        assert not answers_ok("127.0.0.1", port, "/health")


def test_a_model_counts_when_the_holder_of_the_key_sees_it(gateway_port: int) -> None:
    assert lists_model("127.0.0.1", gateway_port, api_key="key", model="muster-tiny")
    assert not lists_model("127.0.0.1", gateway_port, api_key="key", model="another")
    assert not lists_model("127.0.0.1", gateway_port, api_key="wrong", model="muster-tiny")


def test_nobody_there_is_no_answer() -> None:
    with closed_port() as port:
        assert fetch("127.0.0.1", port, "/") is None


def test_a_server_that_answers_is_reachable(gateway_port: int) -> None:
    assert describe_unreachable(f"postgresql://u:p@127.0.0.1:{gateway_port}/db", default_port=5432) == ""
    assert describe_unreachable("redis://127.0.0.1/0", default_port=gateway_port) == ""


@pytest.mark.parametrize("url", ["postgresql:///muster?host=/nowhere", "unix:///nowhere/valkey.sock?db=0"])
def test_a_missing_socket_is_said(url: str) -> None:
    assert "nothing answers at /nowhere" in describe_unreachable(url, default_port=5432)


def test_a_closed_port_is_said() -> None:
    with closed_port() as port:
        said = describe_unreachable(f"redis://127.0.0.1:{port}", default_port=1)
    assert f"nothing answers at 127.0.0.1 port {port}" in said


def test_a_part_is_ready_when_it_wrote_its_own_id(tmp_path: Path) -> None:
    path = tmp_path / "worker.ready"
    assert not names_process(path, 12)
    path.write_text("")
    assert not names_process(path, 12)
    path.write_text("12\n")
    assert names_process(path, 12)
    assert not names_process(path, 1)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_busy_port_is_named_with_the_option_to_change(busy_port: int) -> None:
    with pytest.raises(LauncherError, match=rf"port {busy_port} on 127.0.0.1 is in use.*--gateway-port"), ExitStack() as held:
        claim_port("127.0.0.1", busy_port, option="--gateway-port", held=held)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who holds a port")
def test_the_holder_of_a_port_is_named(busy_port: int) -> None:
    assert describe_holder(busy_port).startswith(f"process {os.getpid()} (")


def test_zero_means_any_free_port() -> None:
    with ExitStack() as held:
        assert claim_port("127.0.0.1", 0, option="--port", held=held) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a child listen on a port that is held for it")
def test_a_claimed_port_is_held_for_a_server_that_asks_for_it_by_its_number() -> None:
    with ExitStack() as held:
        port = claim_port("127.0.0.1", 0, option="--port", held=held)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as server:
            assert server.getsockname()[1] == port
    with ExitStack() as again:
        assert claim_port("127.0.0.1", port, option="--port", held=again) == port


def test_an_address_that_is_not_ours_is_said_so() -> None:
    with pytest.raises(LauncherError, match=r"--host 203\.0\.113\.1 is not an address of this machine"):
        claim_port("203.0.113.1", 0, option="--port", held=ExitStack())


def test_nobody_holds_a_free_port() -> None:
    with closed_port() as port:
        assert describe_holder(port) == ""


def test_the_addresses_of_this_machine_are_those_it_can_listen_on_and_none_of_loopback() -> None:
    addresses = [ipaddress.ip_address(text) for text in list_addresses()]
    assert not any(address.is_loopback or address.is_link_local for address in addresses)
    assert [address.version for address in addresses] == sorted(address.version for address in addresses)
    for address in addresses:
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((str(address), 0))


def test_the_names_of_this_machine_begin_with_its_host_name() -> None:
    names = list_names([])
    assert names[0] == socket.gethostname().lower()
    assert names == list(dict.fromkeys(names))


def test_a_first_death_costs_no_pause_and_the_next_ones_double_up_to_the_longest() -> None:
    backoff = Backoff()
    assert [backoff.next_pause_s(1.0) for _ in range(8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]


def test_a_healthy_run_starts_over() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.next_pause_s(1.0)
    assert backoff.next_pause_s(10.0) == 0.0
    assert backoff.next_pause_s(9.9) == 0.5


def test_thousands_of_failures_do_not_overflow() -> None:
    backoff = Backoff(failures=100_000)
    assert backoff.next_pause_s(0.0) == 15.0


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second model."""
    return make_second_model(tmp_path_factory.mktemp("models"))


def test_the_weights_are_those_of_the_shipped_model_to_half_precision(written: Path) -> None:
    shipped, second = read_gguf(TINY_MODEL), read_gguf(written)
    assert second.tensors.keys() == shipped.tensors.keys()
    for name, tensor in shipped.tensors.items():
        np.testing.assert_allclose(second.tensors[name], tensor, rtol=1e-3, atol=1e-6)


def test_only_the_encoding_differs_in_what_the_file_says_of_itself(written: Path) -> None:
    shipped, second = read_gguf(TINY_MODEL).metadata, read_gguf(written).metadata
    assert {key for key in shipped if shipped[key] != second[key]} == {"general.file_type"}
    assert written.stat().st_size > 1.5 * TINY_MODEL.stat().st_size


def test_a_model_that_is_there_is_left_alone(written: Path) -> None:
    before = written.stat()
    assert make_second_model(written.parent) == written
    assert (written.stat().st_ino, written.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [path.name for path in written.parent.iterdir()] == [f"{MODEL}.gguf"]


def test_what_is_no_such_model_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source.gguf"
    source.write_bytes(b"GGML" + bytes(40))
    with pytest.raises(ValueError, match="not a GGUF file of version 3"):
        write_f16_model(source, tmp_path / "target.gguf")
    assert list(tmp_path.iterdir()) == [source]


def test_without_an_installation_it_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="Is an installation there"):
        make_second_model(tmp_path / "nowhere")

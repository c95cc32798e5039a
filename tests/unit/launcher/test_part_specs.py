"""What the parts of an installation are told: each as much as it needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.launcher.credentials import Credentials
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
from runner.config import read_config

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

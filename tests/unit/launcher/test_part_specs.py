"""What the parts of an installation are told: each as much as it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.launcher.credentials import Credentials
from controlplane.launcher.parts import TINY_MODEL, Addresses, Installation, node_spec
from controlplane.launcher.places import Place

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

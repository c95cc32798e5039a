"""A replica over two nodes on a whole installation: approved once, delivered to both, served by the head, ended by a death."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.govcheck.fleet import ROOT, Fleet, open_fleet
from controlplane.launcher.installation import read_variables
from tests.fakes.control_process import free_port
from tests.fakes.engines.cases import build_driver, write_contract_python
from tests.fakes.model_files import write_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "big"
NAMES = ("left", "right")
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8,
}  # fmt: skip


def manage(fleet: Fleet, *words: str) -> str:
    environment = {**os.environ, **read_variables(fleet.data)}
    done = subprocess.run(
        [sys.executable, "manage.py", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@dataclass
class Node:
    """A node beside the installation's own."""

    name: str
    folder: Path
    env: dict[str, str]
    options: list[str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "runner", "--name", self.name, "--data", str(self.folder / "data"), *self.options]
            self.process = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=log, stderr=log)

    def kill(self) -> list[psutil.Process]:
        """Kill it and return what it had started."""
        assert self.process is not None
        below = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        return below

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def engines(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def run_nodes(fleet: Fleet, place: Path) -> Iterator[dict[str, Node]]:
    write_folder(place / "models" / MODEL, CONFIG)
    (place / "driver").mkdir()
    driver, python = build_driver(place / "driver", "WITH_V3"), write_contract_python(place)
    words = str(fleet.call("GET", "/api/v1/policy")["words"])
    nodes = {}
    with ExitStack() as stack:
        for name in NAMES:
            folder = place / name
            folder.mkdir()
            kept = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
            env = {
                **kept, "MUSTER_TOKEN": fleet.ready["node_token"], "MODEL_BASE_PATH": str(place / "models"),
                "MUSTER_JOIN_S": "20", "MUSTER_VLLM_PYTHON": python, "LD_LIBRARY_PATH": str(driver),
                "MUSTER_RECONNECT_MAX_S": "0.5",
            }  # fmt: skip
            options = ["--gateway", fleet.ready["gateway_url"], "--cluster-address", f"127.0.0.1:{free_port()}"]
            nodes[name] = node = Node(name, folder, env, options)
            node.start()
            stack.callback(node.stop)
            key = folder / "data" / "identity.key"
            fleet.wait(key.exists, within_s=60, what="it has a key")
            fleet.muster("trust", words, "--data", str(folder / "data"))
        await_pinned(fleet)
        yield nodes


def await_pinned(fleet: Fleet) -> None:
    known = "SELECT count(*) FROM nodes_node n JOIN nodes_nodepresence p ON p.node_id = n.id WHERE n.name = ANY(%s)"
    ready = f"{known} AND n.policy_version > 0 AND n.cluster_address <> '' AND p.connected"
    fleet.wait(lambda: fleet.query(ready, list(NAMES))[0][0] == len(NAMES) or None, within_s=60, what="both follow the policy")


def propose(fleet: Fleet) -> dict[str, Any]:
    members = [{"node": name, "gpus": [0, 1]} for name in NAMES]
    body = {
        "operation": "model-load", "targets": list(NAMES), "params": {"modelId": MODEL, "members": members},
        "reason": "a check",
    }  # fmt: skip
    fleet.tokens.append(fleet.tokens.pop(0))
    reply = fleet.client.post("/api/v1/operations", json=body, headers={"authorization": f"Bearer {fleet.tokens[0]}"})
    assert reply.status_code < 300, reply.text
    return dict(reply.json())


def await_replica(fleet: Fleet, state: str, reason: str = "") -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = fleet.call_patiently("GET", "/api/v1/replicas").get("replicas", [])
        return next((one for one in found if one["state"] == state and reason in one["reason"]), None)

    return fleet.wait(look, within_s=60, what=f"the replica is {state}")


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, dict[str, Node]]]:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc) to build a driver library")
    with open_fleet() as fleet:
        fleet.enrol()
        manage(fleet, "allow_model", MODEL)
        with run_nodes(fleet, tmp_path_factory.mktemp("nodes")) as nodes:
            yield fleet, nodes


def test_an_approved_replica_serves_until_a_node_of_it_dies(installation: tuple[Fleet, dict[str, Node]]) -> None:
    fleet, nodes = installation
    asked = propose(fleet)
    fleet.approve(asked)
    runs = fleet.await_runs(asked["op_id"])
    assert [(run["state"], run["attempt"]) for run in runs] == [("succeeded", 1)] * 2, runs
    serving = await_replica(fleet, "serving")
    assert [(member["role"], member["gpus"]) for member in serving["members"]] == [("head", [0, 1]), ("member", [0, 1])]
    fleet.wait(lambda: fleet.chat(MODEL).status_code == 200 or None, within_s=60, what="the model answers")
    left_behind = [*nodes["right"].kill(), *nodes["left"].engines()]
    await_replica(fleet, "ended", "the connection to right")
    fleet.wait(lambda: fleet.chat(MODEL).status_code != 200 or None, within_s=60, what="nothing is sent there any more")
    fleet.wait(lambda: not any(map(psutil.Process.is_running, left_behind)) or None, within_s=60, what="nothing is left")
    nodes["right"].start()
    await_pinned(fleet)


def test_a_control_plane_that_is_killed_in_between_loads_it_on_all_nodes_or_on_none(
    installation: tuple[Fleet, dict[str, Node]],
) -> None:
    fleet, nodes = installation
    asked = propose(fleet)
    fleet.approve(asked)
    for part in ("worker", "gateway", "web"):
        if (process := fleet.part(part)) is not None:
            process.kill()
    states = {run["state"] for run in fleet.await_runs(asked["op_id"], within_s=180)}
    if states == {"succeeded"}:
        await_replica(fleet, "serving")
        fleet.wait(lambda: fleet.chat(MODEL).status_code == 200 or None, within_s=60, what="the model answers")
    else:
        assert "succeeded" not in states
        fleet.wait(lambda: not any(node.engines() for node in nodes.values()) or None, within_s=60, what="all is free")

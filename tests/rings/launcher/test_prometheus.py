"""Dashboards and rules against a real Prometheus that asks a running installation with a token, as the shipped files say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.govcheck.fleet import Fleet, open_fleet
from controlplane.launcher.parts import TINY_MODEL
from tests.fakes.control_process import free_port
from tools.dashboards import DASHBOARDS, list_expressions
from wire import clock

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "prometheus"
NODE_KEY = "the-key-of-the-port-of-a-node"
SILENT = (
    "muster_gpu_", "vllm:", "tgi_",  # no GPU and no such engine here
    "muster_model_queue_depth", "muster_node_ejections_total", "muster_worker_auth_failures_total", "muster_redispatches_total",
    "muster_continued_streams_total", "muster_budget_refusals_total", "muster_audit_checkpoint_age",
    "muster_request_errors_total", 'status=~"5.."',
)  # fmt: skip
"""In expressions that have no value while nothing of the kind happens, or is there."""

pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="there is no prometheus on this machine (Debian: prometheus)"
    ),
    pytest.mark.timeout(300),
]


@contextmanager
def run(*words: str | Path, log: Path) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen([str(word) for word in words], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def until(look: Callable[[], object], what: str, within_s: float = 60.0) -> None:
    give_up_at = clock.monotonic() + within_s
    while not look():
        assert clock.monotonic() < give_up_at, f"not within {within_s:.0f} s: {what}"
        clock.sleep(0.2)


class Prometheus:
    """A running one and what it has read."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url)

    def ask(self, path: str, **params: str) -> Any:  # Any: JSON
        answer = self._client.get(f"/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", (params, answer.get("error"))
        return answer["data"]

    def is_up(self) -> bool:
        with suppress(httpx.TransportError, ValueError):  # it says in plain text that it starts
            targets = self.ask("targets")["activeTargets"]
            return len(targets) == 3 and all(target["health"] == "up" for target in targets)
        return False

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has asked gateway, control plane and a node, with a request that was served, refused, and not known."""
    place = tmp_path_factory.mktemp("prometheus")
    with ExitStack() as stack:
        fleet = stack.enter_context(open_fleet())
        port, node_port = free_port(), free_port()
        node = ["-m", "runner", "--standalone", "--engine", "llamacpp", "--model-path", str(TINY_MODEL)]
        node += ["--model-name", "muster-tiny", "--api-port", str(node_port), "--api-key", NODE_KEY]
        node += ["--data", str(place / "node")]
        stack.enter_context(run(sys.executable, *node, log=place / "node.log"))
        for path in (
            fleet.ready["gateway_url"],
            fleet.ready["control_url"],
        ):  # a proxy passes it on
            assert httpx.get(f"{path}/metrics", headers={"via": "1.1 proxy"}).status_code == 403
        config = yaml.safe_load((FOLDER / "scrape" / "prometheus.yaml").read_text(encoding="utf-8"))
        config["rule_files"] = [f"{FOLDER}/*.yaml"]
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        targets = [fleet.ready["gateway_url"], fleet.ready["control_url"], f"http://127.0.0.1:{node_port}"]
        secrets = [fleet.ready["admin_token"], fleet.ready["admin_token"], NODE_KEY]
        for index, job in enumerate(config["scrape_configs"]):
            job["static_configs"] = [{"targets": [targets[index].partition("//")[2]]}]
            job["authorization"] = {"credentials": secrets[index]}
        (place / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        words = [f"--config.file={place}/prometheus.yaml", f"--storage.tsdb.path={place}/data"]
        words += [f"--web.listen-address=127.0.0.1:{port}"]
        stack.enter_context(run("prometheus", *words, log=place / "prometheus.log"))
        made = Prometheus(f"http://127.0.0.1:{port}")
        stack.callback(made.close)
        until(made.is_up, "Prometheus has asked all three")
        for _ in range(3):  # a rate needs two looks at a series
            ask_something(fleet, f"http://127.0.0.1:{node_port}")
        rate = 'sum(rate(muster_tokens_total{kind="completion"}[1m])) > 0'
        until(lambda: made.ask("query", query=rate)["result"], "it has seen requests twice")
        until(lambda: made.ask("query", query="muster:request_seconds:p95_5m > 0")["result"], "its rules have been evaluated")
        memory = "muster_runner_model_memory_bytes"
        until(lambda: made.ask("query", query=memory)["result"], "the node has measured its model")
        yield made


def ask_something(fleet: Fleet, node: str) -> None:
    body = {"model": "muster-tiny", "stream": True, "max_tokens": 20, "messages": [{"role": "user", "content": "Hello"}]}
    for url, key, model, status in (
        (fleet.ready["gateway_url"], fleet.ready["api_key"], "muster-tiny", 200),
        (fleet.ready["gateway_url"], fleet.ready["api_key"], "unheard-of", 404),
        (fleet.ready["gateway_url"], "nonsense", "muster-tiny", 401),
        (node, NODE_KEY, "muster-tiny", 200),
    ):
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{url}/v1/chat/completions", headers=headers, json={**body, "model": model}, timeout=60)
        assert answer.status_code == status, answer.text
    clock.sleep(1.2)


def test_every_expression_of_the_dashboards_has_a_value_unless_nothing_of_the_kind_is_there(prometheus: Prometheus) -> None:
    silent = []
    for dashboard in DASHBOARDS:
        for text in list_expressions(dashboard):
            expr = text.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$model", ".*")
            if not prometheus.ask("query", query=expr)["result"]:
                silent.append(expr)
    assert not [expr for expr in silent if not any(word in expr for word in SILENT)]


def test_every_rule_is_evaluated_without_an_error_and_a_well_installation_raises_no_alarm(prometheus: Prometheus) -> None:
    def read() -> list[dict[str, Any]]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in read()), "every rule has been evaluated")
    assert len(read()) > 30
    assert not [(rule["name"], rule.get("lastError")) for rule in read() if rule["health"] != "ok"]
    firing = [alert["labels"]["alertname"] for alert in prometheus.ask("alerts")["alerts"] if alert["state"] == "firing"]
    assert not firing

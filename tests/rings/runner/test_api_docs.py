"""docs/runner-api.md is true: its commands run on a real box in their order; codes, metrics and paths are those of the code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import runner.api.app  # noqa: F401  # makes the refusals of the API known
from runner.errors import RequestRefused
from tests.fakes.runners.api_process import run_api_box
from tests.fakes.runners.process import ROOT

pytestmark = pytest.mark.timeout(180)

TEXT = (ROOT / "docs" / "runner-api.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```sh box\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def refusal_codes() -> set[str]:
    """Return the code of every refusal that a client may see."""
    found, classes = set(), [RequestRefused]
    while classes:
        one = classes.pop()
        found.add(one.code)
        classes += one.__subclasses__()
    return found


def test_the_commands_of_the_page_work_in_their_order(tmp_path: Path) -> None:
    with run_api_box(tmp_path, models=("tiny",)) as box:
        surroundings = {**os.environ, "BOX": box.url, "KEY_FILE": str(tmp_path / "model-api.key"), "PYTHONPATH": str(ROOT)}
        sign = f"{sys.executable} -m runner.operations.sign"
        for block in COMMANDS:
            script = block.replace("./muster sign", sign)
            if "/v1/models/load/$TASK_ID" in script:  # and wait, for what follows needs the model
                box.wait_for(
                    lambda: box.client.get(f"/v1/models/load/{surroundings['TASK_ID']}").json(),
                    lambda task: task["status"] == "completed",
                )
            if "/v1/chat/completions" in script:
                box.ensure_loaded("tiny")
            if "/v1/admin/models/tiny/load" in script:
                box.ensure_unloaded("tiny")
            ran = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=surroundings, capture_output=True, text=True,
                check=False, timeout=30,
            )  # fmt: skip
            assert ran.returncode == 0, f"{script}\n{ran.stderr}"
            assert '"error"' not in ran.stdout.replace('"error":null', ""), f"{script}\n{ran.stdout}"
            assert '"detail":{' not in ran.stdout, f"{script}\n{ran.stdout}"
            if '"taskId"' in ran.stdout:
                surroundings["TASK_ID"] = json.loads(ran.stdout)["taskId"]


def test_every_code_and_metric_is_on_the_page_and_no_other(tmp_path: Path) -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")]
    documented = {
        code for row in rows if re.match(r"\| [45]\d\d \|", row) for code in re.findall(r"`([a-z_]+)`", row.split("|")[2])
    }
    assert documented == refusal_codes()
    named = {name for row in rows for name in re.findall(r"`((?:vllm|muster_runner)_\w+)`", row.split("|")[1])}
    with run_api_box(tmp_path, models=("tiny",)) as box:
        box.ensure_loaded("tiny")
        shown = {
            family.name + ("_total" if family.type == "counter" else "")
            for family in text_string_to_metric_families(box.client.get("/metrics").text)
        }
        paths = [path.replace("{task_id}", "{taskId}") for path in box.client.get("/openapi.json").json()["paths"]]
    assert named == {name for name in shown if ":" not in name}
    engines = {name.partition(":")[0] for name in shown if ":" in name}
    assert engines == {"llamacpp"}
    assert all(f"`{engine}:…`" in TEXT for engine in engines)
    assert [path for path in paths if path not in TEXT and path != "/v1/models/{name}"] == []

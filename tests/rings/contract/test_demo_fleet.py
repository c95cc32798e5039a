"""``./muster demo fleet`` as a person starts it: an installation of its own, eleven nodes on real sockets, and a clean end."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

from controlplane.demo.scene import FILE
from controlplane.launcher.installation import installation_path
from tests.fakes.lab import CHAT
from tests.fakes.waiting import wait_until
from tools.demo_browser import open_demo


@pytest.mark.slow
def test_the_demo_plays_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in os.environ if name.startswith(("MUSTER_", "DJANGO_")) or name in {"DATABASE_URL", "REDIS_URL"}
    ]:
        monkeypatch.delenv(name)
    data = tmp_path / "data"
    before = {process.pid for process in psutil.process_iter()}
    with open_demo(data, requests=0) as demo:
        kept = json.loads((data / FILE).read_text(encoding="utf-8"))
        key = kept["api_keys"]["support-bot"][0]
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        asked = {"model": "default", "messages": [{"role": "user", "content": "Is anybody there?"}]}
        answers: list[dict[str, Any]] = []

        def is_answered() -> bool:  # a gateway hears of models and keys a moment after they are there
            with suppress(HTTPError), urlopen(Request(f"{demo.gateway_url}{CHAT}", json.dumps(asked).encode(), headers)) as one:
                answers.append(json.load(one))
            return bool(answers)

        wait_until(is_answered, what="an answer of a node of the demo", within_s=60)
        (said,) = answers
        assert "You asked: Is anybody there? This is qwen3-32b on borealis" in said["choices"][0]["message"]["content"]
        assert said["usage"]["completion_tokens"] > 10
        with urlopen(Request(f"{demo.gateway_url}/v1/models", headers=headers)) as answer:
            models = {one["id"] for one in json.load(answer)["data"]}
        assert {"gpt-oss-120b", "llama-3.3-70b", "bge-m3"} <= models
    assert not installation_path(data).exists()
    ours = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    assert not [process for process in ours if str(data) in " ".join(process.info["cmdline"] or [])]

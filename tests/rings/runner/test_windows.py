"""A node as on Windows: without what is Unix' alone it fronts a server, keeps its folder to itself, and stops in order.

Windows itself is not here. The program runs under a Python from which everything is taken that Windows' has not.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.engines.scripted_server import run_engine, stream_words
from tests.fakes.runners.process import ROOT, run_box
from tests.fakes.scripted_gateway import run_gateway
from tests.fakes.waiting import DEADLINE_S

pytestmark = pytest.mark.timeout(60)

WINDOWS = {"PYTHONPATH": os.pathsep.join((str(ROOT / "tests" / "fakes" / "windows"), str(ROOT)))}


def start(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner", *options]
    surroundings = {**os.environ, **WINDOWS}
    return subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False, timeout=DEADLINE_S)


async def test_it_serves_a_backend_through_a_gateway_and_stops_on_a_signal(tmp_path: Path) -> None:
    async with run_engine() as engine:
        engine.handler = lambda request, _body: stream_words(request, 3, 0.0)
        options = ("--backend", engine.url, "--data", str(tmp_path / "data"))
        async with run_gateway() as gateway, run_box(tmp_path, gateway.url, *options, env=WINDOWS) as node:
            box = await gateway.accept()
            question = {"model": box.register.models[0], "messages": [{"role": "user", "content": "Hello"}], "stream": True}
            answer = await (await box.open(question)).finish()
            assert (answer.status, answer.body.endswith(b"data: [DONE]\n\n")) == (200, True)
            second = await asyncio.to_thread(start, "--gateway", gateway.url, "--token", "x", *options)
            assert (second.returncode, "is in use by another runner" in second.stderr) == (2, True)
            node.process.terminate()
            assert await node.exit_status() == 0


def test_what_starts_an_engine_of_its_own_is_refused_in_words(tmp_path: Path) -> None:
    ended = start("--standalone", "--data", str(tmp_path))
    assert (ended.returncode, "on Windows give --backend URL" in ended.stderr) == (2, True), ended.stderr

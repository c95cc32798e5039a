"""Where the tiny models lie: each is made once per machine, in a folder under the system's temporary one.

A folder is written under another name and then renamed, so that two test processes may make the same one at the same time.
``python -m tests.fakes.models.make`` makes them all and prints where they are.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

from tests.fakes.models import llama_shapes, speech, whisper_shape

_SOURCES = sorted(Path(__file__).parent.glob("*.py"))


def hf_model_dir() -> Path:
    """The chat model as a Hugging Face folder: bf16 safetensors, config.json, tokenizer.json, tokenizer_config.json."""
    return _made("muster-tiny-hf", llama_shapes.write_hf_model)


def ct2_model_dir(quantization: str = "int8") -> Path:
    """The chat model as a CTranslate2 folder; ``quantization`` is int8 or float32."""
    return _made(f"muster-tiny-ct2-{quantization}", lambda to: llama_shapes.write_ct2_model(to, quantization=quantization))


def lora_dir() -> Path:
    """A rank-8 PEFT adapter for the Hugging Face model; its weights are random and small."""
    return _made("muster-tiny-lora", llama_shapes.write_lora)


def whisper_dir(*, multilingual: bool = True) -> Path:
    """A Whisper model for CTranslate2 that says the same words whatever it hears; without languages it is English only."""
    name = "tiny-whisper-ct2" if multilingual else "tiny-whisper-en-ct2"
    return _made(name, lambda to: whisper_shape.write_whisper(to, multilingual=multilingual))


def speech_wav() -> Path:
    """A few seconds of 16 kHz mono: bursts of tones like a voice, with pauses between."""
    return _made("speech", lambda to: speech.write_speech(to / "speech.wav")) / "speech.wav"


@cache
def _home() -> Path:
    """The folder of this state of the sources; another state makes its own."""
    digest = hashlib.sha256(version("ctranslate2").encode())
    for path in [*_SOURCES, llama_shapes.GGUF]:
        digest.update(path.read_bytes())
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"muster-models-{user}-{digest.hexdigest()[:16]}"


def _made(name: str, write: Callable[[Path], None]) -> Path:
    _home().mkdir(mode=0o700, exist_ok=True)  # each time: temporary folders are cleared now and then
    target = _home() / name
    if target.is_dir():
        return target
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=_home()))
    try:
        write(draft)
        draft.chmod(0o755)
        try:
            draft.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


if __name__ == "__main__":
    for made in (hf_model_dir(), ct2_model_dir(), lora_dir(), whisper_dir(), whisper_dir(multilingual=False), speech_wav()):
        print(made)

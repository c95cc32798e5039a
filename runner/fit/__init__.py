"""Whether a model fits: the shape that the headers of its files state, never its weights, and the memory that takes."""

from __future__ import annotations

from pathlib import Path

from runner.errors import CorruptModel
from runner.fit.ct2 import read_ct2
from runner.fit.gguf import read_gguf
from runner.fit.memory import ModelShape
from runner.fit.safetensors import read_folder


def read_shape(path: Path) -> ModelShape:
    """Read what a model needs from the headers of its files: a .gguf (any part of a split one) or a model folder.

    Blocks for some milliseconds (a second for very large vocabularies): call it from a thread. Raises CorruptModel, which
    names the file and what is wrong with it, also when the file cannot be opened.
    """
    try:
        if not path.is_dir():
            return read_gguf(path)
        if (path / "model.bin").is_file():
            return read_ct2(path / "model.bin")
        if (path / "config.json").is_file():
            return read_folder(path)
    except OSError as error:
        raise CorruptModel(f"{path.name} cannot be read ({error.strerror or type(error).__name__}).") from None
    raise CorruptModel.of(path, "it holds neither a config.json nor a model.bin")

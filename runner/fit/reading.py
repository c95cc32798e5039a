"""One way in for every format: which it is, and the shape that its files state."""

from __future__ import annotations

from pathlib import Path

from runner.errors import CorruptModel
from runner.fit.ct2 import read_ct2, shape_ct2
from runner.fit.cursor import corrupt
from runner.fit.gguf import read_gguf
from runner.fit.gguf_shape import shape_gguf
from runner.fit.hf_config import shape_folder
from runner.fit.shape import ModelShape


def read_shape(path: Path) -> ModelShape:
    """Read what a model needs from the headers of its files: a .gguf (any part of a split one) or a model folder.

    Blocks for some milliseconds (a second for very large vocabularies): call it from a thread. Raises CorruptModel, which
    names the file and what is wrong with it, also when the file cannot be opened.
    """
    try:
        return _read(path)
    except OSError as error:
        raise CorruptModel(f"{path.name} cannot be read ({error.strerror or type(error).__name__}).") from None


def _read(path: Path) -> ModelShape:
    if not path.is_dir():
        return shape_gguf(read_gguf(path))
    if (path / "model.bin").is_file():
        return shape_ct2(read_ct2(path / "model.bin"))
    if (path / "config.json").is_file():
        return shape_folder(path)
    raise corrupt(path, "it holds neither a config.json nor a model.bin")

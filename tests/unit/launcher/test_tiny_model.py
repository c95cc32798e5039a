"""The second tiny model: the same weights in another encoding, in a file that is whole or not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from controlplane.launcher.demo import MODEL, make_second_model
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.parts import TINY_MODEL
from controlplane.launcher.tiny_model import write_f16_model
from tests.fakes.models.gguf_file import read_gguf


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second model."""
    return make_second_model(tmp_path_factory.mktemp("models"))


def test_the_weights_are_those_of_the_shipped_model_to_half_precision(written: Path) -> None:
    shipped, second = read_gguf(TINY_MODEL), read_gguf(written)
    assert second.tensors.keys() == shipped.tensors.keys()
    for name, tensor in shipped.tensors.items():
        np.testing.assert_allclose(second.tensors[name], tensor, rtol=1e-3, atol=1e-6)


def test_only_the_encoding_differs_in_what_the_file_says_of_itself(written: Path) -> None:
    shipped, second = read_gguf(TINY_MODEL).metadata, read_gguf(written).metadata
    assert {key for key in shipped if shipped[key] != second[key]} == {"general.file_type"}
    assert written.stat().st_size > 1.5 * TINY_MODEL.stat().st_size


def test_a_model_that_is_there_is_left_alone(written: Path) -> None:
    before = written.stat()
    assert make_second_model(written.parent) == written
    assert (written.stat().st_ino, written.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [path.name for path in written.parent.iterdir()] == [f"{MODEL}.gguf"]


def test_what_is_no_such_model_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source.gguf"
    source.write_bytes(b"GGML" + bytes(40))
    with pytest.raises(ValueError, match="not a GGUF file of version 3"):
        write_f16_model(source, tmp_path / "target.gguf")
    assert list(tmp_path.iterdir()) == [source]


def test_without_an_installation_it_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="Is an installation there"):
        make_second_model(tmp_path / "nowhere")

"""Which files of a repository are fetched: one set of weights, and the configuration and tokenizer beside them. Pure.

Never code (``*.py``) and never pickles: what is fetched is data only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from runner.errors import DownloadFailed
from runner.library.files import PICKLE_REASON, first_part, gguf_groups, is_pickle
from runner.library.ids import SEGMENT
from runner.limits import limits

_SIDE_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja")
_NOT_NEEDED = ("adapter_", "consolidated", "README", "LICENSE")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a commit. ``digest`` is hexadecimal: SHA-256 of the content when ``is_lfs``, else its git blob id (SHA-1)."""

    name: str
    size_bytes: int
    digest: str
    is_lfs: bool


def choose_files(repo_id: str, files: Sequence[RemoteFile], wanted: str) -> tuple[RemoteFile, ...]:
    """Return what to fetch. ``wanted``: path inside the repository of one GGUF, or of one .safetensors file, which then comes
    alone; "" = the model that it holds.

    Raises DownloadFailed when there are no usable weights, or several models and none is chosen.
    """
    usable = [file for file in files if _is_plain(file.name)]
    groups = gguf_groups(file.name for file in usable)
    if wanted.endswith(".safetensors"):
        if alone := tuple(file for file in usable if file.name == wanted):
            return alone
        raise DownloadFailed(f"{repo_id} has no {wanted}.")
    if wanted:
        first = first_part(wanted if wanted.endswith(".gguf") else f"{wanted}.gguf")
        if first not in groups:
            raise DownloadFailed(f"{repo_id} has no {first}; it has {_list(groups) or 'no GGUF files'}.")
        return _with_sides(usable, groups[first])
    tensors = [file.name for file in usable if "/" not in file.name and _is_safetensors(file.name)]
    if tensors:
        return _with_sides(usable, tensors)
    if len(groups) > 1:
        raise DownloadFailed(f"{repo_id} holds several models; ask for one of them: {_list(groups, f'{repo_id}/')}.")
    if groups:
        return _with_sides(usable, next(iter(groups.values())))
    if any(file.name == "model.bin" for file in usable):  # CTranslate2; told from a pickle by its first bytes once it is here
        return _with_sides(usable, ["model.bin"])
    if any(is_pickle(file.name) for file in usable):
        raise DownloadFailed(f"{repo_id} cannot be used: {PICKLE_REASON}.")
    raise DownloadFailed(f"{repo_id} has no weights that can be used (safetensors, GGUF or CTranslate2).")


def _is_plain(name: str) -> bool:
    """Return whether it is a relative path of harmless names, which cannot lead out of the folder it is written to."""
    path = PurePosixPath(name)
    return len(name) <= 200 and ".." not in name and all(SEGMENT.fullmatch(part) for part in path.parts) and str(path) == name


def _is_safetensors(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith(_NOT_NEEDED)


def _with_sides(usable: Sequence[RemoteFile], weights: Sequence[str]) -> tuple[RemoteFile, ...]:
    folders = {"", str(PurePosixPath(weights[0]).parent).removeprefix(".")}
    sides = [
        file
        for file in usable
        if file.name.endswith(_SIDE_SUFFIXES)
        and str(PurePosixPath(file.name).parent).removeprefix(".") in folders
        and not PurePosixPath(file.name).name.startswith(_NOT_NEEDED)
        and file.size_bytes <= limits().models.side_bytes
    ]
    chosen = [*sides, *(file for file in usable if file.name in set(weights))]
    if len(chosen) > limits().models.files:
        raise DownloadFailed(f"The model has {len(chosen)} files, and {limits().models.files} are the most that is fetched.")
    return tuple(chosen)


def _list(groups: dict[str, tuple[str, ...]], prefix: str = "") -> str:
    return ", ".join(prefix + name.removesuffix(".gguf") for name in list(groups)[:30])

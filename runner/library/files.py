"""What lies in one folder: which model it makes, and whether all of it may be read.

Only safetensors, GGUF and the model.bin of CTranslate2 are weights. Files that can run code when they are opened (pickles)
are refused, and so is what leads out of the folder that models are kept in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from runner.definitions.fields import Backend
from runner.limits import limits

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PICKLE_REASON = "it has only pickle weights (.bin, .pt, .ckpt), which run code when opened; convert them to safetensors or GGUF"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
BACKENDS: dict[str, Backend] = {
    "gguf": "gguf",
    "safetensors": "vllm",
    "exl3": "exllamav3",
    "ctranslate2": "ct2",
    "whisper": "whisper",
}
"""Format of the files -> the backend that loads them."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model among the files. ``path``: a .gguf (the first part of a split one) or a folder; ``size_bytes`` of its weights.

    ``problem`` says why it cannot be used; then ``backend`` is a guess from the names.
    """

    model_id: str
    path: Path
    backend: Backend
    size_bytes: int
    quantization: str | None = None
    problem: str | None = None


class FolderKind(StrEnum):
    """What a folder is, by the names in it."""

    SAFETENSORS = "safetensors"
    CTRANSLATE2 = "ctranslate2"
    PICKLES = "pickles"
    OTHER = "other"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Listing:
    """The entries of a folder by name, sorted; links to folders, which are never followed, are left out.

    ``others``: what is neither a folder nor a regular file inside the bounds. ``is_complete``: it was not too long.
    """

    files: tuple[str, ...]
    folders: tuple[str, ...]
    others: tuple[str, ...]
    has_links: bool
    is_complete: bool = True


def list_folder(folder: Path, bounds: Path) -> Listing:
    """List a folder. Links are files only when they end at a regular file below ``bounds``, a resolved path. Raises OSError."""
    files: list[str] = []
    folders: list[str] = []
    others: list[str] = []
    links = 0
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count >= limits().models.folder_entries:
                return Listing(
                    tuple(sorted(files)), tuple(sorted(folders)), tuple(sorted(others)), links > 0, is_complete=False
                )
            links += entry.is_symlink()
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif _is_readable(entry, bounds):
                files.append(entry.name)
            elif not os.path.isdir(entry.path):  # noqa: PTH112 (says no where DirEntry raises: links in a circle)
                others.append(entry.name)
    return Listing(tuple(sorted(files)), tuple(sorted(folders)), tuple(sorted(others)), links > 0)


def _is_readable(entry: os.DirEntry[str], bounds: Path) -> bool:
    if not entry.is_symlink():
        return entry.is_file()
    target = resolve_inside(Path(entry.path), bounds)
    return target is not None and target.is_file()


def resolve_inside(path: Path, bounds: Path) -> Path | None:
    """Return where a path leads, all links followed, when that exists and lies below ``bounds``, a resolved path."""
    try:
        resolved = path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
        return None
    return resolved if resolved.is_relative_to(bounds) else None


def kind_of(listing: Listing) -> FolderKind:
    """Say what a folder is. OTHER: a part of something that is no model here (a diffusion pipeline, an adapter)."""
    names = set(listing.files) | set(listing.others)
    if "model_index.json" in names or "adapter_config.json" in names:
        return FolderKind.OTHER
    has_config = "config.json" in names
    if has_config and any(name.endswith(".safetensors") for name in names):
        return FolderKind.SAFETENSORS
    if "model.bin" in names and (has_config or any(name.startswith("vocabulary.") for name in names)):
        return FolderKind.CTRANSLATE2
    if any(name.endswith(".gguf") for name in names):
        return FolderKind.PLAIN
    if has_config and any(is_pickle(name) for name in names):
        return FolderKind.PICKLES
    return FolderKind.PLAIN


def is_pickle(name: str) -> bool:
    """Return whether a file name is that of weights that are pickled Python objects."""
    return name.endswith(PICKLE_SUFFIXES) and name != "model.bin"


def unusable_entry(listing: Listing) -> str | None:
    """Return what is wrong with a model folder before any file of it is opened."""
    if not listing.is_complete:
        return f"it has more than {limits().models.folder_entries} entries"
    for name in listing.others:
        if not name.startswith("."):
            return f"{name[:80]} is no regular file, or a link that leads out of the model folder"
    return None


def gguf_groups(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the GGUF files by the name of their first part; vision projectors belong to a model and are none themselves."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if not name.endswith(".gguf") or "mmproj" in name.lower():
            continue
        groups.setdefault(first_part(name), []).append(name)
    return {first: tuple(sorted(parts)) for first, parts in sorted(groups.items())}


def first_part(name: str) -> str:
    """Return the name of the first part of a split GGUF, any other name as it is."""
    match = _PART.fullmatch(name)
    return f"{match['stem']}-00001-of-{match['count']}.gguf" if match else name


def weight_names(listing: Listing, kind: FolderKind) -> tuple[str, ...]:
    """Return the files of a model folder whose size is that of the model."""
    if kind is FolderKind.CTRANSLATE2:
        return ("model.bin",)
    if kind is FolderKind.SAFETENSORS:
        return tuple(name for name in listing.files if name.endswith(".safetensors"))
    return tuple(name for name in listing.files if is_pickle(name))

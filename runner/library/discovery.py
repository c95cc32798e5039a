"""Looking through a tree of folders for models: bounded, and cheap when nothing has changed since the last time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from runner.definitions.fields import Backend
from runner.errors import CorruptModel
from runner.library.files import (
    BACKENDS,
    PICKLE_REASON,
    FolderKind,
    FoundModel,
    Listing,
    gguf_groups,
    kind_of,
    list_folder,
    unusable_entry,
    weight_names,
)
from runner.library.ids import is_model_id
from runner.limits import limits
from wire import clock

_GUESSES: dict[FolderKind, Backend] = {FolderKind.CTRANSLATE2: "ct2"}
Fingerprint = tuple[tuple[str, int, int], ...]


class Shape(Protocol):
    """What the headers of a model say, as far as it matters here."""

    @property
    def format(self) -> str:
        """A key of BACKENDS."""

    @property
    def quantization(self) -> str | None:
        """How the weights are stored."""


ReadShape = Callable[[Path], Shape]
"""Reads headers; raises CorruptModel."""


@dataclass(slots=True)
class _Budget:
    """What is left of the bounds of one walk."""

    folders: int = field(default_factory=lambda: limits().models.folders)
    found: int = field(default_factory=lambda: limits().models.found)


@dataclass(slots=True)
class Scanner:
    """Finds models below folders and remembers what it read, by time stamps. Blocking; one thread at a time."""

    read_shape: ReadShape
    _listings: dict[Path, tuple[int, Listing]] = field(default_factory=dict)
    _read: dict[Path, tuple[Fingerprint, FoundModel]] = field(default_factory=dict)

    def scan(self, root: Path, *, bounds: Path, prefix: str = "", skip: frozenset[Path] = frozenset()) -> list[FoundModel]:
        """Return the models below ``root``, an existing folder, sorted by id. Links to folders are not followed.

        Ids are ``prefix`` and the path below ``root``; ``bounds``: nothing outside it is opened; ``skip``: not looked at.
        """
        return sorted(self._walk(root, prefix, bounds, skip, 0, _Budget()), key=lambda entry: entry.model_id)

    def _walk(
        self, folder: Path, model_id: str, bounds: Path, skip: frozenset[Path], depth: int, budget: _Budget
    ) -> Iterator[FoundModel]:
        budget.folders -= 1
        if budget.folders < 0 or budget.found <= 0 or folder in skip:
            return
        try:
            listing = self._list(folder, bounds)
        except OSError:
            return  # gone since, or not ours to read
        kind = kind_of(listing)
        if kind is FolderKind.OTHER:
            return
        if kind is not FolderKind.PLAIN and model_id:
            budget.found -= 1
            yield self._inspect_folder(folder, model_id, listing, kind)
            return
        for first, parts in gguf_groups((*listing.files, *listing.others)).items():
            budget.found -= 1
            yield self._inspect_gguf(folder, _join(model_id, first.removesuffix(".gguf")), first, parts, listing)
        if depth < limits().models.folder_depth:
            for name in listing.folders:
                if not name.startswith((".", "models--")):
                    yield from self._walk(folder / name, _join(model_id, name), bounds, skip, depth + 1, budget)

    def _list(self, folder: Path, bounds: Path) -> Listing:
        changed_ns = folder.stat().st_mtime_ns
        known = self._listings.get(folder)
        if known is not None and known[0] == changed_ns:
            return known[1]
        listing = list_folder(folder, bounds)
        self._listings.pop(folder, None)
        # Where a link leads can change without a trace in the folder, so folders with links are looked at anew each time.
        if (
            not listing.has_links
            and clock.unix_s() - changed_ns / 1e9 > limits().models.settled_s
            and len(self._listings) < limits().models.folders
        ):
            self._listings[folder] = (changed_ns, listing)
        return listing

    def _inspect_folder(self, folder: Path, model_id: str, listing: Listing, kind: FolderKind) -> FoundModel:
        names = weight_names(listing, kind)
        problem = PICKLE_REASON if kind is FolderKind.PICKLES else unusable_entry(listing)
        entry = FoundModel(model_id, folder, _GUESSES.get(kind, "vllm"), 0, problem=problem)
        extra = ("config.json", "model.safetensors.index.json")
        return self._inspect(entry, folder, names, (*names, *(name for name in extra if name in listing.files)))

    def _inspect_gguf(self, folder: Path, model_id: str, first: str, parts: tuple[str, ...], listing: Listing) -> FoundModel:
        bad = next((name for name in parts if name in listing.others), None)
        problem = f"{bad[:80]} is no regular file, or a link that leads out of the model folder" if bad else None
        return self._inspect(FoundModel(model_id, folder / first, "gguf", 0, problem=problem), folder, parts, parts)

    def _inspect(self, entry: FoundModel, folder: Path, weights: tuple[str, ...], read: tuple[str, ...]) -> FoundModel:
        """Return the entry with what its headers say, read again only when one of its files has changed."""
        problem = entry.problem
        if problem is None and not is_model_id(entry.model_id):
            problem = "its name has characters that a model id may not have; rename it"
        fingerprint = _fingerprint(folder, read)
        size_bytes = sum(size for name, size, _ in fingerprint if name in weights)
        if problem is not None:
            return FoundModel(entry.model_id, entry.path, entry.backend, size_bytes, problem=problem)
        known = self._read.get(entry.path)
        if known is not None and known[0] == fingerprint and known[1].model_id == entry.model_id:
            return known[1]
        try:
            shape = self.read_shape(entry.path)
        except CorruptModel as error:
            found = FoundModel(entry.model_id, entry.path, entry.backend, size_bytes, problem=str(error))
        else:
            backend = BACKENDS.get(shape.format, entry.backend)
            found = FoundModel(entry.model_id, entry.path, backend, size_bytes, shape.quantization)
        if len(self._read) >= limits().models.found:  # of models long gone, most likely
            self._read.clear()
        self._read[entry.path] = (fingerprint, found)
        return found


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def _fingerprint(folder: Path, names: tuple[str, ...]) -> Fingerprint:
    """Return name, size and time of change of the files that are there."""
    found: list[tuple[str, int, int]] = []
    for name in names:
        try:
            status = (folder / name).stat()
        except OSError:
            continue
        found.append((name, status.st_size, status.st_mtime_ns))
    return tuple(found)

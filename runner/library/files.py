"""Model files of this machine: what an id may look like, which model the files of a folder make, and looking for models.

Only safetensors, GGUF and the model.bin of CTranslate2 are weights. Files that can run code when they are opened (pickles)
are refused, and so is what leads out of the folder that models are kept in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from runner.definitions.fields import Backend
from runner.errors import CorruptModel, InvalidRequest
from runner.fit.memory import ModelShape
from runner.limits import limits

SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=:-]*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_REPO_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*", re.ASCII)
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
_PART_OF_ID = re.compile(r"-\d{5}-of-\d{5}$")
_QUANTIZATION = re.compile(
    r"[-_.](?:i?q\d+(?:_[a-z0-9]{1,3}){0,3}|bf16|fp?16|fp?32|fp8(?:[-_]dynamic)?|(?:mx|nv)fp4|tq\d_\d|awq|gptq|exl[23]|gguf|ct2"
    r"|(?:int)?[2-8][-_]?bit|int[48](?:_[a-z0-9]+)?|w\da\d+|\d(?:\.\d+)?bpw|ud|imat|imatrix|quantized)$",
    re.IGNORECASE | re.ASCII,
)

WHISPER_SIZES = {
    "tiny": "Systran/faster-whisper-tiny",
    "base": "Systran/faster-whisper-base",
    "small": "Systran/faster-whisper-small",
    "medium": "Systran/faster-whisper-medium",
    "large": "Systran/faster-whisper-large-v3",
    "large-v3": "Systran/faster-whisper-large-v3",
}
"""Whisper models by their size, as the model-runner specification names them, and where faster-whisper has them from."""
PICKLE_REASON = "it has only pickle weights (.bin, .pt, .ckpt), which run code when opened; convert them to safetensors or GGUF"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def is_model_id(text: str) -> bool:
    """Return whether it is ``name``, ``org/name`` or a longer path of plain segments, which can be joined to a folder."""
    if not 1 <= len(text) <= limits().models.id_chars or ".." in text:
        return False
    return all(SEGMENT.fullmatch(segment) for segment in text.split("/"))


def check_model_id(text: str) -> tuple[str, ...]:
    """Return the segments of a model id. Raises InvalidRequest."""
    if not is_model_id(text):
        raise InvalidRequest(
            "A model id is org/name, or a path below the model folder: letters, digits and _ . + @ = : - in parts "
            f"separated by single slashes, no '..', at most {limits().models.id_chars} characters.",
            param="modelId",
        )
    return tuple(text.split("/"))


def split_repo_id(segments: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the repository of a model id and the path inside it ("" = all of it), None when it cannot be one."""
    if len(segments) < 2 or not all(_REPO_SEGMENT.fullmatch(segment) and "--" not in segment for segment in segments[:2]):
        return None
    return "/".join(segments[:2]), "/".join(segments[2:])


def check_revision(text: str) -> str:
    """Return a revision: a branch, a tag or a commit. Raises InvalidRequest."""
    if len(text) > limits().models.id_chars or ".." in text or not _REVISION.fullmatch(text):
        raise InvalidRequest("A revision is a branch, a tag or a commit of the repository.", param="revision")
    return text


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model among the files. ``path``: a .gguf (the first part of a split one) or a folder; ``size_bytes`` of its weights.

    ``problem`` says why it cannot be used; then ``backend`` is a guess from the names.
    """

    model_id: str
    path: Path
    backend: Backend
    size_bytes: int = 0
    quantization: str | None = None
    problem: str | None = None


def name_without_quantization(model_id: str) -> str:
    """Return the last part of an id in lower case, without what says how the weights are stored, as publishers name that."""
    name = _PART_OF_ID.sub("", model_id.rsplit("/", 1)[-1])
    # Publishers stack suffixes (-GGUF, -UD, -IQ2_XXS), so they come off one by one.
    while (shorter := _QUANTIZATION.sub("", name)) != name and shorter:
        name = shorter
    return name.lower()


def other_quantizations(model_id: str, found: Iterable[FoundModel]) -> tuple[FoundModel, ...]:
    """Return the usable models of the same name whose quantisation is known, the largest first; the model itself is not one."""
    name = name_without_quantization(model_id)
    same = [
        entry
        for entry in found
        if entry.model_id != model_id
        and entry.problem is None
        and entry.quantization is not None
        and name_without_quantization(entry.model_id) == name
    ]
    return tuple(sorted(same, key=lambda entry: (-entry.size_bytes, entry.model_id)))


class FolderKind(StrEnum):
    """What a folder is, by the names in it. OTHER: a part of something that is no model here, as of a diffusion pipeline."""

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

    files: list[str]
    folders: list[str]
    others: list[str]
    is_complete: bool

    @property
    def kind(self) -> FolderKind:
        names = {*self.files, *self.others}
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

    @property
    def problem(self) -> str | None:
        if not self.is_complete:
            return f"it has more than {limits().models.folder_entries} entries"
        hidden = (name for name in self.others if not name.startswith("."))
        return next((leading_out(name) for name in hidden), None)


def list_folder(folder: Path, bounds: Path) -> Listing:
    """List a folder. Links are files only when they end at a regular file below ``bounds``, a resolved path. Raises OSError."""
    files: list[str] = []
    folders: list[str] = []
    others: list[str] = []
    is_complete = True
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count >= limits().models.folder_entries:
                is_complete = False
                break
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif _is_readable(entry, bounds):
                files.append(entry.name)
            elif not os.path.isdir(entry.path):  # noqa: PTH112 (says no where DirEntry raises: links in a circle)
                others.append(entry.name)
    return Listing(sorted(files), sorted(folders), sorted(others), is_complete)


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


def leading_out(name: str) -> str:
    return f"{name[:80]} is no regular file, or a link that leads out of the model folder"


def is_pickle(name: str) -> bool:
    return name.endswith(_PICKLE_SUFFIXES) and name != "model.bin"


def gguf_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF files by the name of their first part; vision projectors belong to a model and are none themselves."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and "mmproj" not in name.lower():
            groups.setdefault(first_part(name), []).append(name)
    return dict(sorted(groups.items()))


def first_part(name: str) -> str:
    """Return the name of the first part of a split GGUF, any other name as it is."""
    match = _PART.fullmatch(name)
    return f"{match['stem']}-00001-of-{match['count']}.gguf" if match else name


ReadShape = Callable[[Path], ModelShape]
"""Reads headers; raises CorruptModel."""
_Fingerprint = list[tuple[str, int, int]]


@dataclass(slots=True)
class Scanner:
    """Finds models below folders, bounded, and remembers what it read, by time stamps. Blocking; one thread at a time."""

    read_shape: ReadShape
    _read: dict[Path, tuple[_Fingerprint, FoundModel]] = field(default_factory=dict)
    _folders_left: int = 0
    _found_left: int = 0

    def scan(self, root: Path, *, bounds: Path, prefix: str = "", skip: frozenset[Path] = frozenset()) -> list[FoundModel]:
        """Return the models below ``root``, an existing folder, sorted by id. Links to folders are not followed.

        Ids are ``prefix`` and the path below ``root``; ``bounds``: nothing outside it is opened; ``skip``: not looked at.
        """
        self._folders_left, self._found_left = limits().models.folders, limits().models.found
        return sorted(self._walk(root, prefix, bounds, skip, limits().models.folder_depth), key=lambda entry: entry.model_id)

    def _walk(self, folder: Path, model_id: str, bounds: Path, skip: frozenset[Path], depth: int) -> Iterator[FoundModel]:
        self._folders_left -= 1
        if self._folders_left < 0 or self._found_left <= 0 or folder in skip:
            return
        try:
            listing = list_folder(folder, bounds)
        except OSError:
            return  # gone since, or not ours to read
        kind = listing.kind
        if kind is FolderKind.OTHER:
            return
        if kind is not FolderKind.PLAIN and model_id:
            self._found_left -= 1
            yield self._inspect_folder(folder, model_id, listing, kind)
            return
        for first, parts in gguf_groups((*listing.files, *listing.others)).items():
            self._found_left -= 1
            problem = next((leading_out(name) for name in parts if name in listing.others), None)
            entry = FoundModel(_join(model_id, first.removesuffix(".gguf")), folder / first, "gguf", problem=problem)
            yield self._inspect(entry, folder, parts, parts)
        if depth > 0:
            for name in listing.folders:
                # ``models--`` is a repository in a cache of the hub, which is listed by its own name.
                if not name.startswith((".", "models--")):
                    yield from self._walk(folder / name, _join(model_id, name), bounds, skip, depth - 1)

    def _inspect_folder(self, folder: Path, model_id: str, listing: Listing, kind: FolderKind) -> FoundModel:
        backend: Backend = "vllm"
        problem = listing.problem
        if kind is FolderKind.CTRANSLATE2:
            backend, weights = "ct2", ["model.bin"]
        elif kind is FolderKind.PICKLES:
            problem, weights = PICKLE_REASON, [name for name in listing.files if is_pickle(name)]
        else:
            weights = [name for name in listing.files if name.endswith(".safetensors")]
        extra = [name for name in ("config.json", "model.safetensors.index.json") if name in listing.files]
        return self._inspect(FoundModel(model_id, folder, backend, problem=problem), folder, weights, [*weights, *extra])

    def _inspect(self, entry: FoundModel, folder: Path, weights: list[str], read: list[str]) -> FoundModel:
        fingerprint = _fingerprint(folder, read)
        entry = replace(entry, size_bytes=sum(size for name, size, _ in fingerprint if name in weights))
        if entry.problem is None and not is_model_id(entry.model_id):
            entry = replace(entry, problem="its name has characters that a model id may not have; rename it")
        if entry.problem is not None:
            return entry
        # Headers are read again only when one of the files has changed.
        known = self._read.get(entry.path)
        if known is not None and known[0] == fingerprint and known[1].model_id == entry.model_id:
            return known[1]
        try:
            shape = self.read_shape(entry.path)
        except CorruptModel as error:
            entry = replace(entry, problem=str(error))
        else:
            entry = replace(entry, backend=shape.backend, quantization=shape.quantization)
        if len(self._read) >= limits().models.found:  # of models long gone, most likely
            self._read.clear()
        self._read[entry.path] = (fingerprint, entry)
        return entry


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def _fingerprint(folder: Path, names: list[str]) -> _Fingerprint:
    found: _Fingerprint = []
    for name in names:
        try:
            status = (folder / name).stat()
        except OSError:
            continue
        found.append((name, status.st_size, status.st_mtime_ns))
    return found

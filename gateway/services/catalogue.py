"""Catalogue: well-known open models that can be fetched from a hub, and whether the nodes have room for them.

The list is a file of the package, with the day of which it is. What it says of memory is arithmetic over its own numbers: the
node reads the files themselves before it loads one.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from functools import cache
from importlib.resources import files

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from core.charts import print_value
from core.limits import limits
from nodes.operations.load import Room
from wire.memory import FIRST_GUESSES, KvLayer, count_kv_bytes

_MIB = 1024 * 1024


class ModelKind(StrEnum):
    """What a model is for."""

    CHAT = "chat"
    CODE = "code"
    VISION = "vision"
    EMBEDDING = "embedding"
    SPEECH = "speech"
    IMAGE = "image"


ENGINES = {"gguf": "llama.cpp", "vllm": "vLLM", "whisper": "faster-whisper", "comfyui": "ComfyUI"}
"""What runs the files of a backend."""
_OPEN = frozenset({"Apache-2.0", "MIT"})
"""Licences without conditions on use."""


@dataclass(frozen=True, slots=True)
class CatalogueFile:
    """One form of a model on the hub. ``hub``: the id by which a node loads it; ``revision``: the branch that is fetched.

    ``size_bytes``: of the weights.
    """

    quantization: str
    backend: str
    hub: str
    revision: str
    size_bytes: int

    @property
    def engine(self) -> str:
        return ENGINES.get(self.backend, self.backend)

    @property
    def size_mb(self) -> int:
        return -(-self.size_bytes // _MIB)

    @property
    def needs_gpu(self) -> bool:
        return self.backend in {"vllm", "comfyui"}

    @property
    def can_be_loaded(self) -> bool:
        """Whether a node loads it by its id alone; a ComfyUI model needs a definition in the node's settings."""
        return self.backend != "comfyui"


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model of the catalogue. ``context_tokens`` None = it takes no text of a length; ``cache``: what it keeps of tokens."""

    name: str
    family: str
    kind: ModelKind
    licence: str
    parameters: int
    context_tokens: int | None
    cache: tuple[KvLayer, ...]
    files: tuple[CatalogueFile, ...]

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def size(self) -> str:
        """How many parameters it has, as models are called by it: 8.2B, 137M."""
        scale, letter = (1_000_000_000, "B") if self.parameters >= 1_000_000_000 else (1_000_000, "M")
        return f"{self.parameters / scale:.3g}{letter}"

    @property
    def is_open(self) -> bool:
        return self.licence in _OPEN

    def limit_context(self, wanted: int) -> int:
        """Return a context that the model can have."""
        return min(wanted, self.context_tokens or wanted)

    def estimate(self, file: CatalogueFile, *, context_tokens: int, has_gpu: bool) -> Need:
        """Return what a load takes for one request at a time of so many tokens."""
        kv = count_kv_bytes(self.cache, context_tokens=context_tokens, slots=1)
        return Need(file.size_bytes, kv, FIRST_GUESSES.get(file.backend, (0, 0))[has_gpu])


@dataclass(frozen=True, slots=True)
class Need:
    """What a load takes, in bytes: weights, KV cache, and the engine's own share."""

    weights_bytes: int
    kv_bytes: int
    engine_bytes: int

    @property
    def total_mb(self) -> int:
        return -(-(self.weights_bytes + self.kv_bytes + self.engine_bytes) // _MIB)

    @property
    def weights_mb(self) -> int:
        return self.weights_bytes // _MIB

    @property
    def kv_mb(self) -> int:
        return self.kv_bytes // _MIB

    @property
    def engine_mb(self) -> int:
        return self.engine_bytes // _MIB


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The list, and the day of which it is."""

    listed_on: date
    models: tuple[CatalogueModel, ...]

    def find(self, hub: str) -> tuple[CatalogueModel, CatalogueFile] | None:
        """Return the model that a hub id is of, and which of its files; None = it is not listed."""
        return next(((model, file) for model in self.models for file in model.files if file.hub == hub), None)


@cache
def read_catalogue() -> Catalogue:
    """Return the list that the product brings."""
    said = tomllib.loads(files("gateway").joinpath("catalogue.toml").read_text(encoding="utf-8"))
    models = tuple(
        CatalogueModel(
            name=one["name"],
            family=one["family"],
            kind=ModelKind(one["kind"]),
            licence=one["licence"],
            parameters=one["parameters"],
            context_tokens=one.get("context_tokens"),
            cache=tuple(
                KvLayer(layer["heads"], layer["key_dim"], layer["value_dim"], layer.get("window"), layer.get("fixed_tokens"))
                for layer in one.get("cache", ())
                for _number in range(layer["layers"])
            ),
            files=tuple(
                CatalogueFile(file["quantization"], file["backend"], file["hub"], file["revision"], file["bytes"])
                for file in one["files"]
            ),
        )
        for one in said["models"]
    )
    return Catalogue(said["listed_on"], models)


class Fit(StrEnum):
    """Whether a node has room for a model, the best first."""

    FITS = "fits"
    SPLIT = "split"
    """Over its GPUs together, and on none of them alone."""
    FULL = "full"
    """It would, if something else were unloaded."""
    NEVER = "never"
    UNKNOWN = "unknown"


FIT_WORDS = {
    Fit.FITS: gettext_lazy("fits"),
    Fit.SPLIT: gettext_lazy("fits over its GPUs"),
    Fit.FULL: gettext_lazy("no room now"),
    Fit.NEVER: gettext_lazy("too small"),
    Fit.UNKNOWN: gettext_lazy("not known"),
}


@dataclass(frozen=True, slots=True)
class RoomFit:
    """Whether a node has room for a model. ``reason``: a sentence; ``frees``: models that would have to go for it."""

    room: Room
    fit: Fit
    reason: str
    frees: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        return str(FIT_WORDS[self.fit])

    @property
    def is_possible(self) -> bool:
        """Whether the node takes loads and has the room."""
        return not self.room.refusal and self.fit in {Fit.FITS, Fit.SPLIT}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The memory that a model takes, in MiB: on a node with GPUs, and on one without; None = it needs a GPU."""

    with_gpu_mb: int
    on_host_mb: int | None

    def of(self, room: Room) -> int | None:
        return self.with_gpu_mb if room.has_gpu else self.on_host_mb


def want_file(model: CatalogueModel, file: CatalogueFile, *, context_tokens: int) -> Wanted:
    """Return what a file of the catalogue takes."""
    with_gpu, on_host = (model.estimate(file, context_tokens=context_tokens, has_gpu=has_gpu) for has_gpu in (True, False))
    return Wanted(with_gpu.total_mb, None if file.needs_gpu else on_host.total_mb)


def judge_room(room: Room, wanted: Wanted) -> RoomFit:
    """Return whether a node has room for a model. Pure."""
    needed = wanted.of(room)
    if needed is None:
        return RoomFit(room, Fit.NEVER, _("Needs a GPU; %(node)s has none.") % {"node": room.node})
    if room.total_mb is None or room.free_mb is None:
        return RoomFit(room, Fit.UNKNOWN, _("%(node)s does not say how much memory it has.") % {"node": room.node})
    words = {
        "node": room.node,
        "needed": print_value(needed, "MiB"),
        "free": print_value(room.free_mb, "MiB"),
        "total": print_value(room.total_mb, "MiB"),
    }
    if needed > room.total_mb:
        return RoomFit(room, Fit.NEVER, _("Needs %(needed)s; %(node)s has %(total)s in all.") % words)
    if needed > room.free_mb:
        frees = _find_fewest(room.loaded, needed - room.free_mb)
        return RoomFit(room, Fit.FULL, _("Needs %(needed)s; %(node)s has %(free)s free.") % words, frees)
    if room.gpus > 1 and room.one_gpu_mb is not None and needed > room.one_gpu_mb:
        words["one"] = print_value(room.one_gpu_mb, "MiB")
        return RoomFit(room, Fit.SPLIT, _("Needs %(needed)s; no GPU of %(node)s has more than %(one)s free.") % words)
    return RoomFit(room, Fit.FITS, _("Needs %(needed)s of %(free)s free.") % words)


def judge_rooms(rooms: Iterable[Room], wanted: Wanted) -> list[RoomFit]:
    """Return the fit of every node, those that could load it first, then by what is free there."""
    found = [judge_room(room, wanted) for room in rooms]
    order = list(Fit)
    return sorted(found, key=lambda one: (bool(one.room.refusal), order.index(one.fit), -(one.room.free_mb or 0)))


def _find_fewest(loaded: Sequence[tuple[str, int]], missing_mb: int) -> tuple[str, ...]:
    chosen: list[str] = []
    for model, mb in sorted(loaded, key=lambda pair: -pair[1]):
        if missing_mb <= 0:
            break
        chosen.append(model)
        missing_mb -= mb
    return tuple(chosen) if missing_mb <= 0 else ()


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of the catalogue with the room for it: on how many nodes that are heard it fits, and on the best of them.

    ``needed_mb``: with a GPU, of a context of ``context_tokens``.
    """

    file: CatalogueFile
    needed_mb: int
    context_tokens: int
    fits_on: int
    best: RoomFit | None

    @property
    def others(self) -> int:
        """On how many nodes it fits beside the best."""
        return max(0, self.fits_on - 1)


@dataclass(frozen=True, slots=True)
class ListedEntry:
    """A model of the catalogue as the page lists it."""

    model: CatalogueModel
    files: tuple[ListedFile, ...]

    @property
    def fits(self) -> bool:
        return any(listed.fits_on for listed in self.files)


def list_entries(
    rooms: Sequence[Room], *, text: str = "", kind: str = "", licence: str = "", fits_only: bool = False
) -> list[ListedEntry]:  # fmt: skip
    """Return the models of the catalogue that are asked for, each with the room that nodes have for its files.

    ``text``: words that all stand in name, family or hub ids; ``licence``: ``open`` = without conditions on use, or a name.
    """
    words, found, space = text.lower().split(), [], _Space.of(rooms)
    for model in read_catalogue().models:
        said = " ".join((model.name, model.family, model.licence, *(file.hub for file in model.files))).lower()
        is_licensed = not licence or (model.is_open if licence == "open" else model.licence == licence)
        if (kind and model.kind != kind) or not is_licensed or not all(word in said for word in words):
            continue
        entry = ListedEntry(model, tuple(_list_file(model, file, space) for file in model.files))
        if entry.fits or not fits_only:
            found.append(entry)
    return found


@dataclass(frozen=True, slots=True)
class _Space:
    """The room of a fleet, looked at once for all files. ``first``: the emptiest node of each kind, the one to take first."""

    with_gpu_mb: Sequence[int]
    on_host_mb: Sequence[int]
    first: Sequence[Room]

    @classmethod
    def of(cls, rooms: Sequence[Room]) -> _Space:
        there = [room for room in rooms if not room.is_away and room.free_mb is not None]
        kinds: dict[tuple[bool, bool], Room] = {}
        for room in sorted(there, key=lambda room: room.free_mb or 0):
            kinds[bool(room.refusal), not room.has_gpu] = room
        free = [sorted(room.free_mb or 0 for room in there if room.has_gpu is has_gpu) for has_gpu in (True, False)]
        return cls(free[0], free[1], [kinds[kind] for kind in sorted(kinds)])

    def count(self, wanted: Wanted) -> int:
        """Return on how many nodes there is room."""
        found = len(self.with_gpu_mb) - bisect_left(self.with_gpu_mb, wanted.with_gpu_mb)
        if wanted.on_host_mb is not None:
            found += len(self.on_host_mb) - bisect_left(self.on_host_mb, wanted.on_host_mb)
        return found

    def find(self, wanted: Wanted) -> Room | None:
        return next((room for room in self.first if _has_room(room, wanted)), None)


def _list_file(model: CatalogueModel, file: CatalogueFile, space: _Space) -> ListedFile:
    context = model.limit_context(limits().gateway.catalogue_context_tokens)
    wanted = want_file(model, file, context_tokens=context)
    best = space.find(wanted)
    judged = judge_room(best, wanted) if best is not None else None
    return ListedFile(file, wanted.with_gpu_mb, context, space.count(wanted), judged)


def _has_room(room: Room, wanted: Wanted) -> bool:
    needed = wanted.of(room)
    return needed is not None and room.free_mb is not None and room.free_mb >= needed

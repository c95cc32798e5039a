"""Model ids to files: below the owner's model folder first, then among what was fetched from a hub."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import threading
from dataclasses import replace
from pathlib import Path

from runner.definitions.plan import Progress, Report
from runner.errors import DownloadFailed, InvalidRequest
from runner.library.cache import RepoCache, cached_repos
from runner.library.files import (
    PICKLE_REASON,
    FolderKind,
    FoundModel,
    ReadShape,
    Scanner,
    check_model_id,
    check_revision,
    first_part,
    gguf_groups,
    is_model_id,
    leading_out,
    list_folder,
    resolve_inside,
    split_repo_id,
)
from runner.library.hub import Hub, run_to_its_end
from wire.bridge import HubModel


class Library:
    """The model files of this machine.

    ``base_path``: the owner's folder (MODEL_BASE_PATH); ``hf_home``: HF_HOME, whose ``hub`` folder is the cache of
    huggingface_hub; ``hub``: where missing ones are fetched from, None = nowhere. ``read_shape`` reads the headers of a model.
    All methods but ``fetch`` block on the disk: call them from a thread.
    """

    def __init__(self, base_path: Path | None, hf_home: Path | None, hub: Hub | None, *, read_shape: ReadShape) -> None:
        self._base = base_path.resolve() if base_path is not None else None
        self._cache = (hf_home / "hub").resolve() if hf_home is not None else None
        self._home = hf_home.resolve() if hf_home is not None else None
        self._hub = hub
        self._scanner = Scanner(read_shape)
        self._lock = threading.Lock()  # the scanner remembers what it read, and is asked from several threads

    def find(self, model_id: str, *, revision: str | None = None) -> Path | None:
        """Return where a model lies: a .gguf (the first part of a split one) or a folder; None when there is nothing.

        ``revision`` chooses among what was fetched from a hub. Raises InvalidRequest for an id that cannot be one and for a
        model that may not be loaded (pickles, links that lead out).
        """
        segments = check_model_id(model_id)
        if revision is not None:
            check_revision(revision)
        if self._base is not None and (found := _find_below(self._base, segments, bounds=self._base)) is not None:
            return found
        repo = split_repo_id(segments)
        if self._cache is None or repo is None:
            return None
        cache = RepoCache(self._cache, repo[0])
        commit = cache.commit_of(revision)
        if commit is None or (snapshot := resolve_inside(cache.snapshot(commit), self._cache)) is None:
            return None
        inner = tuple(repo[1].split("/")) if repo[1] else ()
        return _find_below(snapshot, inner, bounds=self._cache, keep_links=True)

    def discover(self) -> list[FoundModel]:
        """Return every model found, damaged ones with their problem. An id that lies in both places is that of the owner's
        folder, as for ``find``.
        """
        with self._lock:
            found: dict[str, FoundModel] = {}
            for cached in self._discover_cached():
                found[cached.model_id] = cached
            if self._base is not None and self._base.is_dir():
                skip = frozenset(path for path in (self._home, self._cache) if path is not None and path != self._base)
                for entry in self._scanner.scan(self._base, bounds=self._base, skip=skip):
                    found[entry.model_id] = entry
            return sorted(found.values(), key=lambda entry: entry.model_id)

    def can_fetch(self, model_id: str) -> bool:
        """Return whether a model that is not here may be asked for at the hub: its id is that of a repository, or of a file in
        one, and the owner allows it. Whether the hub has it, only the hub can say.
        """
        if self._hub is None or not is_model_id(model_id):
            return False
        repo = split_repo_id(tuple(model_id.split("/")))
        return repo is not None and self._hub.allows(repo[0])

    @property
    def has_hub(self) -> bool:
        return self._hub is not None

    async def search(self, text: str) -> list[HubModel]:
        """Return the repositories of the hub that a text names and that may be fetched. Raises DownloadFailed."""
        if self._hub is None:
            raise DownloadFailed("Downloads are switched off on this node.")
        return await self._hub.search(text)

    async def fetch(self, model_id: str, *, revision: str | None, report: Report) -> Path:
        """Fetch a repository (``org/name``) or one GGUF of it (``org/name/file``), and return where it lies.

        Raises DownloadFailed, with the reason and what would help, and InvalidRequest.
        """
        repo = split_repo_id(check_model_id(model_id))
        if self._hub is None:
            raise DownloadFailed(f"{model_id} is not among the files of this node, and downloads are switched off.")
        if repo is None:
            raise DownloadFailed(f"{model_id} is not among the files of this node, and it is no id of a repository (org/name).")
        return await self._hub.fetch(
            repo[0], wanted=repo[1], revision=None if revision is None else check_revision(revision), report=report
        )

    async def place(self, model_id: str, folder: Path, *, revision: str | None, report: Report) -> Path:
        """Have one file of a repository (``org/name/file``) in a folder that another program reads, and return it there.

        One of that name that is there already is taken as it is. Raises DownloadFailed and InvalidRequest.
        """
        repo = split_repo_id(check_model_id(model_id))
        if repo is None or not repo[1]:
            raise InvalidRequest(
                f"{model_id} names no file of a repository: say org/name/file.safetensors.", param="model_path"
            )
        target = folder / repo[1].rpartition("/")[2]
        if not await asyncio.to_thread(target.is_file):
            source = await self.fetch(model_id, revision=revision, report=report)
            report(Progress(f"putting {target.name} into {folder}"))
            await run_to_its_end(_link_or_copy, source, target)
        return target

    def _discover_cached(self) -> list[FoundModel]:
        found: list[FoundModel] = []
        if self._cache is None:
            return found
        for cache in cached_repos(self._cache):
            commit = cache.commit_of(None)
            snapshot = resolve_inside(cache.snapshot(commit), self._cache) if commit is not None else None
            if snapshot is None:
                continue
            models = self._scanner.scan(snapshot, bounds=self._cache, prefix=cache.repo_id)
            if len(models) == 1:  # the only one of its repository goes by its name
                models = [replace(models[0], model_id=cache.repo_id)]
            found += models
        return found


def _link_or_copy(source: Path, target: Path) -> None:
    real, partial = source.resolve(), target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        try:
            os.link(real, partial)  # costs no room where both are on one disk
        except OSError:
            shutil.copyfile(real, partial)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DownloadFailed(f"{target} cannot be written: {error.strerror or type(error).__name__}.") from None


def _find_below(root: Path, segments: tuple[str, ...], *, bounds: Path, keep_links: bool = False) -> Path | None:
    path = root.joinpath(*segments)
    for candidate in (path.with_name(path.name + ".gguf"), path) if segments else (path,):
        target = resolve_inside(candidate, bounds)
        if target is None:
            continue
        if target.is_file() and candidate.name.endswith(".gguf"):
            # What a link of the cache leads to is named by its digest; its own name says which part of a model it is.
            place = candidate if keep_links else target
            return _check_gguf(place.with_name(first_part(place.name)), bounds)
        if target.is_dir():
            return _find_in_folder(candidate if keep_links else target, bounds, "/".join(segments))
    return None


def _check_gguf(first: Path, bounds: Path) -> Path | None:
    try:
        listing = list_folder(first.parent, bounds)
    except OSError:
        return None
    if first.name not in listing.files:
        return None
    for name in gguf_groups((*listing.files, *listing.others)).get(first.name, ()):
        if name in listing.others:
            raise _refusal(first.name, leading_out(name))
    return first


def _find_in_folder(folder: Path, bounds: Path, model_id: str) -> Path | None:
    try:
        listing = list_folder(folder, bounds)
    except OSError:
        return None
    kind = listing.kind
    if kind is FolderKind.PICKLES:
        raise _refusal(model_id, PICKLE_REASON)
    if kind in {FolderKind.SAFETENSORS, FolderKind.CTRANSLATE2}:
        if (problem := listing.problem) is not None:
            raise _refusal(model_id, problem)
        return folder
    groups = gguf_groups(listing.files)
    if len(groups) > 1:
        names = ", ".join(name.removesuffix(".gguf") for name in list(groups)[:20])
        raise InvalidRequest(f"{model_id} holds several models; add one of these after a slash: {names}.", param="modelId")
    return _check_gguf(folder / next(iter(groups)), bounds) if groups else None


def _refusal(model_id: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"The model {model_id} is refused: {problem}.", param="modelId")

"""Fetching a model from a Hugging Face hub into the cache that huggingface_hub uses, so that other programs find it too.

What the hub has (commit, files, digests) is asked through huggingface_hub. The bytes are fetched here: since version 2.4
that library throws away what a broken download had, and a transfer of it cannot be cancelled. Xet is not used.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import aiohttp

from runner.definitions.plan import Progress, Report
from runner.errors import DownloadFailed
from runner.library.choice import RemoteFile, choose_files
from runner.library.hf_cache import RepoCache
from runner.library.hub_listing import Commit, ask_commit, file_url
from runner.library.transfer import Transfer, read_digest, run_to_its_end
from runner.limits import limits
from wire import clock

PUBLIC_HUB = "https://huggingface.co"
MB = 1_000_000


def allow_listed(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a check of repository ids against patterns such as ``org/*`` (case counts); none at all allows every id."""
    return lambda repo_id: not patterns or any(fnmatchcase(repo_id, pattern) for pattern in patterns)


def disk_free(folder: Path) -> int:
    """Return the bytes that may still be written where a folder is, or would be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


class _Meter:
    """Adds up the bytes of a fetch and reports them, five times a second at most."""

    def __init__(self, total_bytes: int, report: Report) -> None:
        self._total = total_bytes
        self._report = report
        self._done = 0
        self._reported_at = 0.0

    def count(self, size: int) -> None:
        self._done += size
        now = clock.monotonic()
        if now - self._reported_at >= limits().models.progress_gap_s or self._done >= self._total:
            self._reported_at = now
            share = min(1.0, self._done / self._total) if self._total else 1.0
            self._report(Progress(f"downloading ({self._done / MB:.1f} of {self._total / MB:.1f} MB)", share))


@dataclass(slots=True)
class _Shared:
    """One fetch, and the reports of those who wait for it."""

    task: asyncio.Task[Path]
    reports: list[Report]


class Hub:
    """A hub, and the cache folder (``HF_HOME/hub``) that models are fetched into. One event loop.

    ``token`` is sent to ``endpoint`` alone. ``is_allowed`` says which repository ids may be fetched. ``free_bytes`` tells how
    much room a folder has.
    """

    def __init__(
        self,
        cache: Path,
        *,
        endpoint: str = PUBLIC_HUB,
        token: str | None = None,
        is_allowed: Callable[[str], bool] = allow_listed(()),  # noqa: B008 (a pure function)
        free_bytes: Callable[[Path], int] = disk_free,
    ) -> None:
        self._cache = cache
        self._endpoint = endpoint.rstrip("/")
        self._token = token
        self._is_allowed = is_allowed
        self._free_bytes = free_bytes
        self._running: dict[tuple[str, str, str | None], _Shared] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def allows(self, repo_id: str) -> bool:
        """Return whether the owner lets this repository be fetched."""
        return self._is_allowed(repo_id)

    async def fetch(self, repo_id: str, *, wanted: str = "", revision: str | None = None, report: Report) -> Path:
        """Return where the files lie: the folder of the commit, or the file ``wanted``. Two calls for the same share one.

        Raises DownloadFailed; what had come by then is kept, and the next call goes on from there. Cancelling the last call
        that waits stops the transfer.
        """
        if not self._is_allowed(repo_id):
            raise DownloadFailed(f"{repo_id} is not among the repositories that may be fetched (MUSTER_HUB_ALLOW).")
        key = (repo_id, wanted, revision)
        shared = self._running.get(key)
        if shared is None:
            shared = self._start(key)
        shared.reports.append(report)
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.reports.remove(report)
            if not shared.reports and not shared.task.done():
                self._running.pop(key, None)
                shared.task.cancel()
                await asyncio.wait({shared.task})

    def _start(self, key: tuple[str, str, str | None]) -> _Shared:
        reports: list[Report] = []

        def tell(progress: Progress) -> None:
            for report in tuple(reports):
                report(progress)

        task = asyncio.create_task(self._fetch(*key, tell), name=f"fetch {key[0]}")
        shared = self._running[key] = _Shared(task, reports)
        task.add_done_callback(lambda _: self._forget(key, shared))
        return shared

    def _forget(self, key: tuple[str, str, str | None], shared: _Shared) -> None:
        if not shared.task.cancelled():
            shared.task.exception()  # looked at, though nobody may be waiting any more
        if self._running.get(key) is shared:
            del self._running[key]

    async def _fetch(self, repo_id: str, wanted: str, revision: str | None, report: Report) -> Path:
        lock = self._locks.setdefault(repo_id, asyncio.Lock())  # other files of a repository may have the same blobs
        async with lock:
            report(Progress("asking the hub", 0.0))
            commit = await asyncio.to_thread(
                ask_commit,
                repo_id,
                revision,
                endpoint=self._endpoint,
                token=self._token,
                timeout_s=limits().models.hub_connect_s,
            )
            chosen = choose_files(repo_id, commit.files, wanted)
            cache = RepoCache(self._cache, repo_id)
            try:
                await self._bring(cache, commit, chosen, report)
                await run_to_its_end(_publish, cache, commit.sha, chosen, revision or "main")
            except OSError as error:
                raise DownloadFailed(
                    f"{repo_id} cannot be written below {self._cache}: {error.strerror or type(error).__name__}."
                ) from None
            snapshot = cache.snapshot(commit.sha)
            return snapshot / _first_weight(chosen) if wanted else snapshot

    async def _bring(self, cache: RepoCache, commit: Commit, chosen: tuple[RemoteFile, ...], report: Report) -> None:
        """Have every chosen file as a blob whose digest has been checked. Raises DownloadFailed, OSError."""
        unique = list({file.digest: file for file in chosen}.values())
        meter = _Meter(sum(file.size_bytes for file in unique), report)
        missing = [file for file in unique if not await self._has(cache, file, meter)]
        async with aiohttp.ClientSession(read_bufsize=limits().models.hub_chunk_bytes, auto_decompress=False) as http:
            transfers = [
                (file, Transfer(http, file_url(self._endpoint, cache.repo_id, commit.sha, file.name), file,
                                cache.blob(file.digest), token=self._token))
                for file in missing
            ]  # fmt: skip
            self._check_room(cache, transfers)
            for file, transfer in transfers:
                await transfer.run(meter.count)
                if file.name.endswith("model.bin"):
                    await run_to_its_end(_refuse_pickle, cache.blob(file.digest), file.name)

    async def _has(self, cache: RepoCache, file: RemoteFile, meter: _Meter) -> bool:
        """Return whether the blob is there and whole; one that is not is removed."""
        blob = cache.blob(file.digest)
        if not blob.is_file():
            return False
        digest, size = await read_digest(file, blob)
        if size != file.size_bytes or digest.text() != file.digest:
            blob.unlink()
            return False
        meter.count(size)
        return True

    def _check_room(self, cache: RepoCache, transfers: Sequence[tuple[RemoteFile, Transfer]]) -> None:
        needed = 0
        for file, transfer in transfers:
            partial = transfer.partial_path
            needed += file.size_bytes - (min(partial.stat().st_size, file.size_bytes) if partial.is_file() else 0)
        free = self._free_bytes(cache.folder)
        reserve_bytes = limits().models.reserve_bytes
        if needed and needed + reserve_bytes > free:
            raise DownloadFailed(
                f"{cache.repo_id} needs {(needed + reserve_bytes) / MB:.0f} MB on the disk of {self._cache} "
                f"({reserve_bytes // MB} MB are left free) and {free / MB:.0f} MB are free. Make room there, or set HF_HOME to "
                "a larger disk."
            )


def _publish(cache: RepoCache, commit: str, chosen: Sequence[RemoteFile], revision: str) -> None:
    """Make the checked blobs appear as the files of the commit, configuration first: weights without it are of no use."""
    for file in chosen:
        cache.place(commit, file.name, file.digest)
    cache.write_ref(revision, commit)


def _first_weight(chosen: Sequence[RemoteFile]) -> str:
    return min(file.name for file in chosen if file.name.endswith((".gguf", ".safetensors")))


def _refuse_pickle(path: Path, name: str) -> None:
    """Remove a file that is no model of CTranslate2, whose first number is a small version. Raises DownloadFailed."""
    with path.open("rb") as file:
        version = int.from_bytes(file.read(4), "little")
    if not 1 <= version <= 100:
        path.unlink()
        raise DownloadFailed(f"{name} is no model of CTranslate2 but weights of PyTorch, which are not loaded; it was removed.")

"""Hub: fetching a model from a Hugging Face hub into the cache that huggingface_hub uses, so that other programs find it too.

What the hub has (commit, files, digests) is asked through huggingface_hub. The bytes are fetched here: that library throws away
what a broken download had, and does not check digests, see docs/adr/0007-dependencies.md. Xet is not used.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import BinaryIO, ParamSpec, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from runner.definitions.plan import Progress, Report
from runner.errors import DownloadFailed
from runner.library.cache import RepoCache
from runner.library.files import COMMIT, PICKLE_REASON, SEGMENT, first_part, gguf_groups, is_pickle
from runner.limits import limits
from runner.system import lock_file
from wire import clock
from wire.bridge import HubModel
from wire.unreadable import UNREADABLE

P = ParamSpec("P")
T = TypeVar("T")
Count = Callable[[int], None]
"""Is told how many bytes have come (negative: how many were for nothing)."""

PUBLIC_HUB = "https://huggingface.co"
MB = 1_000_000
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SIDE_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja")
_NOT_NEEDED = ("adapter_", "consolidated", "README", "LICENSE")
_RETRIED = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
_TRANSIENT = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, ConnectionError)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a commit. ``digest`` is hexadecimal: SHA-256 of the content when ``is_lfs``, else its git blob id (SHA-1)."""

    name: str
    size_bytes: int
    digest: str
    is_lfs: bool


@dataclass(slots=True)
class _Shared:
    """One fetch, and the reports of those who wait for it."""

    task: asyncio.Task[Path]
    reports: list[Report]


class _File(msgspec.Struct):
    rfilename: str


class _Listed(msgspec.Struct):
    """A repository as the hub's list of models has it."""

    id: str
    downloads: int = 0
    pipeline_tag: str | None = None
    gated: bool | str = False
    siblings: list[_File] = []

    def describe(self) -> HubModel:
        """Return it for a page; of a file in parts the first names all of them."""
        names = [file.rfilename for file in self.siblings if file.rfilename.endswith(".gguf")]
        first = sorted({first_part(name) for name in names}) if names else []
        return HubModel(
            name=self.id, downloads=self.downloads, task=self.pipeline_tag or "", is_gated=bool(self.gated), files=first
        )  # fmt: skip


def disk_free(folder: Path) -> int:
    """Return the bytes that may still be written where a folder is, or would be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


class Hub:
    """A hub, and the cache folder (``HF_HOME/hub``) that models are fetched into. One event loop.

    ``token`` is sent to ``endpoint`` alone. ``allow``: patterns such as ``org/*`` (case counts) of the repositories that may
    be fetched, none = all. ``free_bytes`` tells how much room a folder has.
    """

    def __init__(
        self,
        cache: Path,
        *,
        endpoint: str = PUBLIC_HUB,
        token: str | None = None,
        allow: Sequence[str] = (),
        free_bytes: Callable[[Path], int] = disk_free,
    ) -> None:
        self._cache = cache
        self._endpoint = endpoint.rstrip("/")
        self._token = token
        self._allow = allow
        self._free_bytes = free_bytes
        self._running: dict[tuple[str, str, str | None], _Shared] = {}
        self._search = asyncio.Lock()
        self._locks: dict[str, asyncio.Lock] = {}

    def allows(self, repo_id: str) -> bool:
        return not self._allow or any(fnmatchcase(repo_id, pattern) for pattern in self._allow)

    async def fetch(self, repo_id: str, *, wanted: str = "", revision: str | None = None, report: Report) -> Path:
        """Return where the files lie: the folder of the commit, or the file ``wanted``. Two calls for the same share one.

        Raises DownloadFailed; what had come by then is kept, and the next call goes on from there. Cancelling the last call
        that waits stops the transfer.
        """
        if not self.allows(repo_id):
            raise DownloadFailed(f"{repo_id} is not among the repositories that may be fetched (MUSTER_HUB_ALLOW).")
        key = (repo_id, wanted, revision)
        shared = self._running.get(key) or self._start(key)
        shared.reports.append(report)
        try:
            return await asyncio.shield(shared.task)  # others may wait for it: who leaves does not cancel it for them
        finally:
            shared.reports.remove(report)
            if not shared.reports and not shared.task.done():
                self._running.pop(key, None)
                shared.task.cancel()
                await asyncio.wait({shared.task})

    async def search(self, text: str) -> list[HubModel]:
        """Return the repositories that a text names and that may be fetched, those that are fetched most first.

        One search at a time. Raises DownloadFailed, with the reason and what would help.
        """
        if self._search.locked():
            raise DownloadFailed("The node is still searching for something else; try again in a moment.")
        async with self._search:
            try:
                async with asyncio.timeout(limits().models.hub_search_s):
                    said = await self._ask_models(text)
                found = msgspec.json.decode(said, type=list[_Listed])
            except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE) as error:
                raise DownloadFailed(
                    f"The hub at {self._endpoint} cannot be searched ({type(error).__name__}). Check the network of the node, "
                    "HF_ENDPOINT and HF_TOKEN."
                ) from None
        return [one.describe() for one in found if self.allows(one.id)][: limits().models.hub_found]

    async def _ask_models(self, text: str) -> bytes:
        asked = [("search", text), ("sort", "downloads"), ("direction", "-1"), ("limit", str(limits().models.hub_found))]
        asked += [("expand[]", name) for name in ("downloads", "pipeline_tag", "gated", "siblings")]
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            # A redirect would take the token elsewhere.
            http.get(f"{self._endpoint}/api/models", params=asked, allow_redirects=False) as answer,
        ):
            if answer.status != HTTPStatus.OK:
                raise DownloadFailed(f"The hub at {self._endpoint} answers {answer.status} to a search; try again later.")
            said = bytearray()
            async for part in answer.content.iter_any():
                said += part
                if len(said) > limits().models.hub_search_bytes:
                    raise DownloadFailed("The hub answers with more than can be read; search for something narrower.")
            return bytes(said)

    def _start(self, key: tuple[str, str, str | None]) -> _Shared:
        reports: list[Report] = []

        def tell(progress: Progress) -> None:
            for report in tuple(reports):
                report(progress)

        def forget(task: asyncio.Task[Path]) -> None:
            if not task.cancelled():
                task.exception()  # looked at, though nobody may be waiting any more
            if self._running.get(key) is shared:
                del self._running[key]

        task = asyncio.create_task(self._fetch(*key, tell), name=f"fetch {key[0]}")
        shared = self._running[key] = _Shared(task, reports)
        task.add_done_callback(forget)
        return shared

    async def _fetch(self, repo_id: str, wanted: str, revision: str | None, report: Report) -> Path:
        lock = self._locks.setdefault(repo_id, asyncio.Lock())  # other files of a repository may have the same blobs
        async with lock:
            report(Progress("asking the hub", 0.0))
            commit, files = await asyncio.to_thread(_ask_commit, repo_id, revision, endpoint=self._endpoint, token=self._token)
            chosen = _choose_files(repo_id, files, wanted)
            cache = RepoCache(self._cache, repo_id)
            try:
                await self._bring(cache, commit, chosen, report)
                await run_to_its_end(_publish, cache, commit, chosen, revision or "main")
            except OSError as error:
                raise DownloadFailed(
                    f"{repo_id} cannot be written below {self._cache}: {error.strerror or type(error).__name__}."
                ) from None
            snapshot = cache.snapshot(commit)
            if not wanted:
                return snapshot
            return snapshot / min(file.name for file in chosen if file.name.endswith((".gguf", ".safetensors")))

    async def _bring(self, cache: RepoCache, commit: str, chosen: list[RemoteFile], report: Report) -> None:
        from huggingface_hub import hf_hub_url

        # The same content under two names is one blob.
        unique = {file.digest: file for file in chosen}.values()
        count = _meter(sum(file.size_bytes for file in unique), report)
        async with aiohttp.ClientSession(read_bufsize=limits().models.hub_chunk_bytes, auto_decompress=False) as http:
            transfers = [
                _Transfer(http, hf_hub_url(cache.repo_id, file.name, revision=commit, endpoint=self._endpoint), file,
                          cache.blob(file.digest), token=self._token, count=count)
                for file in unique
            ]  # fmt: skip
            missing = [transfer for transfer in transfers if not await transfer.is_done()]
            self._check_room(cache, sum(transfer.missing_bytes() for transfer in missing))
            for transfer in missing:
                await transfer.run()

    def _check_room(self, cache: RepoCache, needed: int) -> None:
        free, reserve_bytes = self._free_bytes(cache.folder), limits().models.reserve_bytes
        if needed and needed + reserve_bytes > free:
            raise DownloadFailed(
                f"{cache.repo_id} needs {(needed + reserve_bytes) / MB:.0f} MB on the disk of {self._cache} "
                f"({reserve_bytes // MB} MB are left free) and {free / MB:.0f} MB are free. Make room there, or set HF_HOME to "
                "a larger disk."
            )


def _meter(total_bytes: int, report: Report) -> Count:
    done, reported_at = 0, 0.0

    def count(size: int) -> None:
        nonlocal done, reported_at
        done += size
        now = clock.monotonic()
        if now - reported_at >= limits().models.progress_gap_s or done >= total_bytes:
            reported_at = now
            share = min(1.0, done / total_bytes) if total_bytes else 1.0
            report(Progress(f"downloading ({done / MB:.1f} of {total_bytes / MB:.1f} MB)", share))

    return count


def _publish(cache: RepoCache, commit: str, chosen: Sequence[RemoteFile], revision: str) -> None:
    # Configuration comes first: weights without it are of no use.
    for file in chosen:
        cache.place(commit, file.name, file.digest)
    cache.write_ref(revision, commit)


# What a repository holds, and what of it is fetched.


def _ask_commit(repo_id: str, revision: str | None, *, endpoint: str, token: str | None) -> tuple[str, list[RemoteFile]]:
    """Return the commit that a revision is now, and its files. Blocking. Raises DownloadFailed with what would help."""
    # Imported when it is needed: it takes half a second and 30 MB that a node with its own files never has to spend.
    import httpx2
    from huggingface_hub import HfApi, errors

    # False keeps the library from sending a token that it finds somewhere on the disk.
    api = HfApi(endpoint=endpoint, token=token or False, library_name="muster")
    try:
        info = api.model_info(repo_id, revision=revision, files_metadata=True, timeout=limits().models.hub_connect_s)
    except errors.GatedRepoError:
        raise DownloadFailed(
            f"{repo_id} asks for its terms to be accepted: do so at {endpoint}/{repo_id}, then set HF_TOKEN to a token of the "
            "account that did."
        ) from None
    except errors.RevisionNotFoundError:
        raise DownloadFailed(f"{repo_id} has no revision {revision}.") from None
    except errors.RepositoryNotFoundError:
        raise DownloadFailed(
            f"The hub has no repository {repo_id}, or it is private: then set HF_TOKEN to a token that may read it."
        ) from None
    except errors.HfHubHTTPError as error:
        raise DownloadFailed(
            f"The hub answers {error.response.status_code} when asked for {repo_id}; try again later."
        ) from None
    except (errors.OfflineModeIsEnabled, httpx2.HTTPError, errors.HFValidationError, OSError, ValueError) as error:
        raise DownloadFailed(
            f"The hub at {endpoint} cannot be asked for {repo_id} ({type(error).__name__}). Check the network, HF_ENDPOINT and "
            "HF_HUB_OFFLINE."
        ) from None
    siblings = info.siblings or []
    if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha) or len(siblings) > limits().models.listed_files:
        raise DownloadFailed(f"The answer of the hub at {endpoint} about {repo_id} cannot be understood.")
    files = [_read_file(entry.rfilename, entry.size, entry.blob_id, entry.lfs) for entry in siblings]
    return info.sha, [file for file in files if file is not None]


def _read_file(name: object, size: object, blob_id: object, lfs: object) -> RemoteFile | None:
    digest, pattern = blob_id, COMMIT
    if isinstance(lfs, dict):
        size, digest, pattern = lfs.get("size"), lfs.get("sha256"), _SHA256
    # A file without a size and a digest cannot be checked.
    if not isinstance(name, str) or not isinstance(size, int) or size < 0:
        return None
    if not isinstance(digest, str) or not pattern.fullmatch(digest):
        return None
    return RemoteFile(name, size, digest, is_lfs=pattern is _SHA256)


def _choose_files(repo_id: str, files: list[RemoteFile], wanted: str) -> list[RemoteFile]:
    """Return what to fetch: one set of weights, and the configuration and tokenizer beside them, never code and never pickles.

    ``wanted``: path inside the repository of one GGUF, or of one .safetensors file, which then comes alone; "" = the model that
    it holds. Raises DownloadFailed when there are no usable weights, or several models and none is chosen.
    """
    usable = [file for file in files if _is_plain(file.name)]
    groups = gguf_groups(file.name for file in usable)
    if wanted.endswith(".safetensors"):
        if alone := [file for file in usable if file.name == wanted]:
            return alone
        raise DownloadFailed(f"{repo_id} has no {wanted}.")
    if wanted:
        first = first_part(wanted if wanted.endswith(".gguf") else f"{wanted}.gguf")
        if first not in groups:
            raise DownloadFailed(f"{repo_id} has no {first}; it has {_list(groups) or 'no GGUF files'}.")
        return _with_sides(usable, groups[first])
    if tensors := [file.name for file in usable if "/" not in file.name and _is_safetensors(file.name)]:
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
    path = PurePosixPath(name)
    # What the hub says must not lead out of the folder that it is written to.
    return len(name) <= 200 and ".." not in name and all(SEGMENT.fullmatch(part) for part in path.parts) and str(path) == name


def _is_safetensors(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith(_NOT_NEEDED)


def _with_sides(usable: list[RemoteFile], weights: list[str]) -> list[RemoteFile]:
    folders, names = {PurePosixPath("."), PurePosixPath(weights[0]).parent}, set(weights)
    chosen = [
        file
        for file in usable
        if file.name.endswith(_SIDE_SUFFIXES)
        and (path := PurePosixPath(file.name)).parent in folders
        and not path.name.startswith(_NOT_NEEDED)
        and file.size_bytes <= limits().models.side_bytes
    ]
    chosen += [file for file in usable if file.name in names]
    if len(chosen) > limits().models.files:
        raise DownloadFailed(f"The model has {len(chosen)} files, and {limits().models.files} are the most that is fetched.")
    return chosen


def _list(groups: Iterable[str], prefix: str = "") -> str:
    return ", ".join(prefix + name.removesuffix(".gguf") for name in list(groups)[:30])


# One file: resumed after a break, checked by size and digest, stopped at once when it is cancelled.


async def run_to_its_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread; when the caller is cancelled, wait for it, so that no file is closed under its hands."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


class _Broken(Exception):
    """One attempt is over; the next may succeed."""


class _Transfer:
    """Brings one file to ``target``; bytes that came are kept beside it (``.part``) until they are complete.

    ``token`` goes to the host of ``url`` only, never to where that redirects.
    """

    def __init__(
        self, http: aiohttp.ClientSession, url: str, file: RemoteFile, target: Path, *, token: str | None, count: Count
    ) -> None:
        self._http = http
        self._url = url
        self._file = file
        self._target = target
        self._partial = target.with_name(f"{target.name}.part")
        self._count = count
        self._limits = limits().models
        self._headers = {"Accept-Encoding": "identity"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._begin()

    def _begin(self) -> None:
        self._size = 0
        self._hash = hashlib.sha256() if self._file.is_lfs else hashlib.sha1(usedforsecurity=False)
        if not self._file.is_lfs:  # the id of a git blob
            self._hash.update(f"blob {self._file.size_bytes}\0".encode())

    def _take(self, data: bytes) -> None:
        self._hash.update(data)
        self._size += len(data)

    def _is_right(self) -> bool:
        return self._size == self._file.size_bytes and self._hash.hexdigest() == self._file.digest

    async def is_done(self) -> bool:
        if not self._target.is_file():
            return False
        await self._take_file(self._target)
        if not self._is_right():
            self._target.unlink()
            self._begin()
            return False
        self._count(self._size)
        return True

    def missing_bytes(self) -> int:
        here = self._partial.stat().st_size if self._partial.is_file() else 0
        return max(0, self._file.size_bytes - here)

    async def run(self) -> None:
        self._partial.parent.mkdir(parents=True, exist_ok=True)
        with self._partial.open("ab") as sink:
            try:
                lock_file(sink.fileno())
            except BlockingIOError:
                raise DownloadFailed(f"{self._file.name} is being fetched by another program on this machine.") from None
            await self._take_file(self._partial)
            self._count(self._size)
            if self._size > self._file.size_bytes:
                self._start_over(sink)
            await self._fill(sink)
            if not self._is_right():
                self._count(-self._size)
                self._partial.unlink(missing_ok=True)
                raise DownloadFailed(
                    f"{self._file.name} did not arrive as the hub describes it (its digest differs), so it was removed. Try "
                    "again; should it happen again, the hub or a proxy on the way changes files."
                )
            if self._file.name.endswith("model.bin"):
                await run_to_its_end(self._refuse_pickle)
            await run_to_its_end(os.fsync, sink.fileno())  # else a power cut could leave a whole name for half a file
            self._partial.replace(self._target)

    async def _take_file(self, path: Path) -> None:
        stop = threading.Event()

        def read() -> None:
            with path.open("rb") as file:
                while not stop.is_set() and (data := file.read(self._limits.hub_chunk_bytes)):
                    self._take(data)

        task = asyncio.ensure_future(asyncio.to_thread(read))
        try:
            await asyncio.shield(task)
        finally:
            stop.set()  # a large file is read for minutes: who is cancelled does not wait for its end
            await asyncio.wait({task})

    def _refuse_pickle(self) -> None:
        with self._partial.open("rb") as file:
            # A model of CTranslate2 begins with its version, a small number.
            version = int.from_bytes(file.read(4), "little")
        if not 1 <= version <= 100:
            self._partial.unlink()
            raise DownloadFailed(
                f"{self._file.name} is no model of CTranslate2 but weights of PyTorch, which are not loaded; it was removed."
            )

    async def _fill(self, sink: BinaryIO) -> None:
        breaks = 0
        while (before := self._size) < self._file.size_bytes:
            try:
                await self._receive(sink)
                reason = "it ended early"
            except (_Broken, *_TRANSIENT) as error:
                reason = str(error) or type(error).__name__
            if self._size == self._file.size_bytes:
                break
            breaks = 1 if self._size > before else breaks + 1
            if breaks >= self._limits.hub_tries:
                raise DownloadFailed(
                    f"The transfer of {self._file.name} broke {breaks} times in a row ({reason[:200]}). What has come is kept: "
                    "try again to go on from there."
                )
            await asyncio.sleep(self._limits.hub_pause_first_s * 2 ** min(breaks - 1, 5))

    def _start_over(self, sink: BinaryIO) -> None:
        self._count(-self._size)
        sink.truncate(0)
        self._begin()

    async def _receive(self, sink: BinaryIO) -> None:
        last = min(self._size + self._limits.hub_window_bytes, self._file.size_bytes) - 1
        headers = self._headers | {"Range": f"bytes={self._size}-{last}"}
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._limits.hub_connect_s, sock_read=self._limits.hub_silence_s
        )
        async with self._http.get(self._url, headers=headers, timeout=timeout, proxy=_proxy_for(self._url)) as response:
            self._check_status(response.status)
            if response.status == HTTPStatus.OK and self._size:  # the whole file, whatever we asked for
                self._start_over(sink)
            async for data in response.content.iter_any():
                if self._size + len(data) > self._file.size_bytes:
                    raise DownloadFailed(f"{self._file.name} is longer than the hub says ({self._file.size_bytes} bytes).")
                await run_to_its_end(self._store, sink, data)
                self._count(len(data))

    def _store(self, sink: BinaryIO, data: bytes) -> None:
        sink.write(data)
        sink.flush()
        self._take(data)

    def _check_status(self, status: int) -> None:
        if status in {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT}:
            return
        if status in _RETRIED or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _Broken(f"the hub answers {status}")
        advice = "the file may have been taken away; try another revision"
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            advice = "it needs a token that may read it (HF_TOKEN)"
        raise DownloadFailed(f"The hub answers {status} for {self._file.name}; {advice}.")


def _proxy_for(url: str) -> str | None:
    # As the hub's own library would use it.
    parts = urlsplit(url)
    if not parts.hostname or urllib.request.proxy_bypass(parts.hostname):
        return None
    return urllib.request.getproxies().get(parts.scheme)

"""Fetching one file: resumed after a break, checked by size and digest, stopped at once when it is cancelled."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import threading
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar
from urllib.parse import urlsplit

import aiohttp

from runner.errors import DownloadFailed
from runner.library.choice import RemoteFile
from runner.limits import limits

P = ParamSpec("P")
T = TypeVar("T")
Count = Callable[[int], None]
"""Is told how many bytes have come (negative: how many were for nothing)."""

_RETRIED = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
_TRANSIENT = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, ConnectionError)


class _Broken(Exception):
    """One attempt is over; the next may succeed."""


async def run_to_its_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread; when the caller is cancelled, wait for it, so that no file is closed under its hands."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


class Digest:
    """The digest of a file as a hub states it: SHA-256 for large files, else the id of a git blob."""

    def __init__(self, file: RemoteFile) -> None:
        self._hash = hashlib.sha256() if file.is_lfs else hashlib.sha1(usedforsecurity=False)
        if not file.is_lfs:
            self._hash.update(f"blob {file.size_bytes}\0".encode())

    def add(self, data: bytes) -> None:
        """Take in the next bytes."""
        self._hash.update(data)

    def add_file(self, path: Path, stop: threading.Event) -> int:
        """Take in a file from its beginning and return its size; ends early, with what it has, once ``stop`` is set."""
        size = 0
        with path.open("rb") as file:
            while not stop.is_set() and (data := file.read(limits().models.hub_chunk_bytes)):
                self._hash.update(data)
                size += len(data)
        return size

    def text(self) -> str:
        """Return it in hexadecimal."""
        return self._hash.hexdigest()


async def read_digest(file: RemoteFile, path: Path) -> tuple[Digest, int]:
    """Return the digest of what is in ``path`` and its size. Raises OSError."""
    digest, stop = Digest(file), threading.Event()
    task = asyncio.ensure_future(asyncio.to_thread(digest.add_file, path, stop))
    try:
        return digest, await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({task})
        raise


class Transfer:
    """Brings one file to ``target``; bytes that came are kept beside it (``.part``) until they are complete.

    ``token`` goes to the host of ``url`` only, never to where that redirects.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, file: RemoteFile, target: Path, *, token: str | None) -> None:
        self._http = http
        self._url = url
        self._file = file
        self._target = target
        self._limits = limits().models
        self._digest = Digest(file)
        self._done = 0
        self._headers = {"Accept-Encoding": "identity"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    @property
    def partial_path(self) -> Path:
        """Where the bytes are kept that have come so far."""
        return self._target.with_name(f"{self._target.name}.part")

    async def run(self, count: Count) -> None:
        """Fetch what is missing, check it and put it in place. Raises DownloadFailed, OSError."""
        self.partial_path.parent.mkdir(parents=True, exist_ok=True)
        with self.partial_path.open("ab") as sink:
            try:
                fcntl.flock(sink, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DownloadFailed(f"{self._file.name} is being fetched by another program on this machine.") from None
            await self._fill(sink, count)
            await run_to_its_end(os.fsync, sink.fileno())  # else a power cut could leave a whole name for half a file
            self.partial_path.replace(self._target)

    async def _fill(self, sink: BinaryIO, count: Count) -> None:
        self._digest, self._done = await read_digest(self._file, self.partial_path)
        count(self._done)
        if self._done > self._file.size_bytes:
            self._start_over(sink, count)
        breaks = 0
        while self._done < self._file.size_bytes:
            before = self._done
            try:
                await self._receive(sink, count)
                reason = "it ended early"
            except (_Broken, *_TRANSIENT) as error:
                reason = str(error) or type(error).__name__
            if self._done == self._file.size_bytes:
                break
            breaks = 1 if self._done > before else breaks + 1
            if breaks >= self._limits.hub_tries:
                raise DownloadFailed(
                    f"The transfer of {self._file.name} broke {breaks} times in a row ({reason[:200]}). What has come is kept: "
                    "try again to go on from there."
                )
            await asyncio.sleep(self._limits.hub_pause_first_s * 2 ** min(breaks - 1, 5))
        self._check_digest(count)

    def _check_digest(self, count: Count) -> None:
        if self._digest.text() == self._file.digest:
            return
        count(-self._done)
        self.partial_path.unlink(missing_ok=True)
        raise DownloadFailed(
            f"{self._file.name} did not arrive as the hub describes it (its digest differs), so it was removed. Try again; "
            "should it happen again, the hub or a proxy on the way changes files."
        )

    def _start_over(self, sink: BinaryIO, count: Count) -> None:
        count(-self._done)
        sink.truncate(0)
        self._digest, self._done = Digest(self._file), 0

    async def _receive(self, sink: BinaryIO, count: Count) -> None:
        """Fetch up to one window. Raises _Broken when it is to be tried again."""
        last = min(self._done + self._limits.hub_window_bytes, self._file.size_bytes) - 1
        headers = self._headers | {"Range": f"bytes={self._done}-{last}"}
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._limits.hub_connect_s, sock_read=self._limits.hub_silence_s
        )
        async with self._http.get(self._url, headers=headers, timeout=timeout, proxy=_proxy_for(self._url)) as response:
            self._check_status(response)
            if response.status == HTTPStatus.OK and self._done:  # the whole file, whatever we asked for
                self._start_over(sink, count)
            async for data in response.content.iter_any():
                if self._done + len(data) > self._file.size_bytes:
                    raise DownloadFailed(f"{self._file.name} is longer than the hub says ({self._file.size_bytes} bytes).")
                await run_to_its_end(_store, sink, self._digest, data)
                self._done += len(data)
                count(len(data))

    def _check_status(self, response: aiohttp.ClientResponse) -> None:
        status = response.status
        if status in {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT}:
            return
        if status in _RETRIED or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _Broken(f"the hub answers {status}")
        raise DownloadFailed(f"The hub answers {status} for {self._file.name}; {_advice(status)}.")


def _store(sink: BinaryIO, digest: Digest, data: bytes) -> None:
    sink.write(data)
    sink.flush()
    digest.add(data)


def _advice(status: int) -> str:
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return "it needs a token that may read it (HF_TOKEN)"
    return "the file may have been taken away; try another revision"


def _proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for a URL, as the hub's own library would use it."""
    parts = urlsplit(url)
    if not parts.hostname or urllib.request.proxy_bypass(parts.hostname):
        return None
    return urllib.request.getproxies().get(parts.scheme)

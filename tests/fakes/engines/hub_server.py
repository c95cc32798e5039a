"""A Hugging Face hub on loopback: the requests that fetching a model really makes, and the ways they go wrong."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from tests.fakes.engines.scripted_server import listening

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Seen:
    """One request as it came."""

    path: str
    query: str
    range: str | None
    authorization: str | None


@dataclass
class HubServer:
    """``files`` by repository and name. Files in ``lfs`` are delivered by a second port, as by the CDN of the real hub.

    Faults: ``break_after`` bytes, once per entry of the list; ``wrong_bytes`` for names in it; ``gated`` and ``private``
    repositories; ``hold`` set to an event stops bodies half-way until it is set; ``ignore_range``; ``statuses`` are answered
    before a file is delivered.
    """

    files: dict[str, dict[str, bytes]]
    lfs: set[str] = field(default_factory=set)
    token: str | None = None
    gated: set[str] = field(default_factory=set)
    break_after: list[int] = field(default_factory=list)
    wrong_bytes: set[str] = field(default_factory=set)
    statuses: list[int] = field(default_factory=list)
    ignore_range: bool = False
    hold: asyncio.Event | None = None
    seen: list[Seen] = field(default_factory=list)
    open_bodies: int = 0
    url: str = ""
    cdn: str = ""
    commit: str = COMMIT

    def downloads(self) -> list[Seen]:
        return [
            seen for seen in self.seen if seen.path.startswith("/cdn/") or ("/resolve/" in seen.path and not self._is_lfs(seen))
        ]

    def _is_lfs(self, seen: Seen) -> bool:
        return seen.path.partition("/resolve/")[2].partition("/")[2] in self.lfs

    async def info(self, request: web.Request) -> web.StreamResponse:
        """``/api/models/{repo}[/revision/{revision}]?blobs=True``."""
        repo = f"{request.match_info['org']}/{request.match_info['name']}"
        revision = request.match_info.get("revision", "main")
        if (refusal := self._refuse(request, repo)) is not None:
            return refusal
        if revision not in {"main", "v1.0", self.commit}:
            return web.json_response({"error": "Invalid rev id"}, status=404, headers={"X-Error-Code": "RevisionNotFound"})
        siblings = [self._sibling(name, content) for name, content in self.files[repo].items()]
        return web.json_response({"id": repo, "modelId": repo, "sha": self.commit, "private": False, "siblings": siblings})

    async def search(self, request: web.Request) -> web.StreamResponse:
        """``/api/models?search=…``: what its name holds, with the members that were asked for."""
        self._note(request)
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        if self.hold is not None:
            await self.hold.wait()
        found = [repo for repo in self.files if request.query["search"] in repo][: int(request.query["limit"])]
        return web.json_response(
            [
                {
                    "_id": "0" * 24, "id": repo, "downloads": 7, "pipeline_tag": "text-generation",
                    "gated": "manual" if repo in self.gated else False,
                    "siblings": [{"rfilename": name} for name in self.files[repo]],
                }
                for repo in found
            ]
        )  # fmt: skip

    def _sibling(self, name: str, content: bytes) -> dict[str, object]:
        blob_id = hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()
        entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob_id}
        if name in self.lfs:
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return entry

    async def resolve(self, request: web.Request) -> web.StreamResponse:
        """``/{repo}/resolve/{commit}/{path}``: the content, or for large files the way to it."""
        repo = f"{request.match_info['org']}/{request.match_info['name']}"
        name = request.match_info["path"]
        if (refusal := self._refuse(request, repo)) is not None:
            return refusal
        if request.match_info["revision"] != self.commit or name not in self.files[repo]:
            return web.json_response({"error": "Entry not found"}, status=404, headers={"X-Error-Code": "EntryNotFound"})
        if name in self.lfs:
            digest = hashlib.sha256(self.files[repo][name]).hexdigest()
            headers = {"X-Repo-Commit": self.commit, "X-Linked-Etag": f'"{digest}"'}
            return web.Response(status=302, headers={**headers, "Location": f"{self.cdn}/cdn/{repo}/{name}"})
        return await self._deliver(request, name, self.files[repo][name])

    async def from_cdn(self, request: web.Request) -> web.StreamResponse:
        """The content of a large file; no credential belongs here."""
        self._note(request)
        repo = f"{request.match_info['org']}/{request.match_info['name']}"
        name = request.match_info["path"]
        return await self._deliver(request, name, self.files[repo][name])

    def _note(self, request: web.Request) -> None:
        headers = request.headers
        self.seen.append(Seen(request.path, request.query_string, headers.get("Range"), headers.get("Authorization")))

    def _refuse(self, request: web.Request, repo: str) -> web.Response | None:
        self._note(request)
        has_token = self.token is not None and request.headers.get("Authorization") == f"Bearer {self.token}"
        if repo in self.gated and not has_token:
            return web.json_response({"error": "Access is restricted"}, status=401, headers={"X-Error-Code": "GatedRepo"})
        if repo not in self.files or (self.token is not None and not has_token):
            return web.json_response({"error": "Repository not found"}, status=401, headers={"X-Error-Code": "RepoNotFound"})
        return None

    async def _deliver(self, request: web.Request, name: str, content: bytes) -> web.StreamResponse:
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        if name in self.wrong_bytes:
            content = bytes(len(content) - 1) + b"!"
        asked = request.headers.get("Range")
        first, last = 0, len(content) - 1
        if asked and not self.ignore_range:
            low, _, high = asked.removeprefix("bytes=").partition("-")
            first, last = int(low), min(int(high or last), last)
        body = content[first : last + 1]
        response = web.StreamResponse(status=206 if asked and not self.ignore_range else 200)
        if response.status == 206:
            response.headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        response.headers["ETag"] = '"any"'
        response.content_length = len(body)
        await response.prepare(request)
        self.open_bodies += 1
        try:
            await self._send(request, response, body)
        finally:
            self.open_bodies -= 1
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, body: bytes) -> None:
        if self.break_after:
            await response.write(body[: self.break_after.pop(0)])
            assert request.transport is not None
            request.transport.abort()
            return
        if self.hold is not None:
            await response.write(body[: len(body) // 2])
            await self.hold.wait()
            await response.write(body[len(body) // 2 :])
        else:
            await response.write(body)
        await response.write_eof()


@asynccontextmanager
async def serve_hub(server: HubServer) -> AsyncIterator[HubServer]:
    """Serve it on two ports of loopback, the hub's own and the CDN's."""
    app = web.Application()
    app.router.add_get("/api/models", server.search)
    app.router.add_get("/api/models/{org}/{name}", server.info)
    app.router.add_get("/api/models/{org}/{name}/revision/{revision}", server.info)
    app.router.add_get("/{org}/{name}/resolve/{revision}/{path:.+}", server.resolve)
    app.router.add_get("/cdn/{org}/{name}/{path:.+}", server.from_cdn)
    async with listening(app, ports=2) as (server.url, server.cdn):
        yield server

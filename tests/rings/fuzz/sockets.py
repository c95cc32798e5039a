"""Clients that write bytes of their own making to a gateway, and see what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass

from tests.rings.contract.stack import Gateway
from tests.rings.fuzz.bodies import CHAT

_STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d) ")
_PIECE = b"a" * 65_536


@dataclass(frozen=True, slots=True)
class Unread:
    """A request whose body nobody wants. ``status``: what it has to be answered, however much of it is under way."""

    kind: str
    status: int
    path: str = CHAT
    method: str = "POST"


UNREAD = (
    Unread("a large body without a key", 401),
    Unread("a large body to Anthropic's surface without a key", 401, path="/v1/messages"),
    Unread("a large body to no path", 404, path="/v1/nothing"),
    Unread("a large body to a path that is read", 405, path="/v1/models"),
    Unread("a large body by another method", 405, method="PUT"),
)


def read_status(answer: bytes) -> int:
    """Return the status of an answer; 0 = there is none."""
    found = _STATUS.match(answer)
    return int(found.group(1)) if found else 0


async def converse(gateway: Gateway, data: bytes, *, leaves: bool, within_s: float) -> bytes:
    """Send bytes and return the head of what is answered, or what came before the connection was closed.

    ``leaves``: close our half behind the bytes. Raises AssertionError when neither comes in time.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    found = bytearray()
    try:
        async with asyncio.timeout(within_s):
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                if leaves:
                    writer.write_eof()
                while b"\r\n\r\n" not in found and (piece := await reader.read(65_536)):
                    found += piece
    except TimeoutError:
        raise AssertionError(f"neither an answer nor an end within {within_s:g} s to {data[:600]!r}") from None
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return bytes(found)


async def pour(
    gateway: Gateway, request: Unread, headers: dict[str, str], size_bytes: int, *, declared: bool, within_s: float
) -> tuple[int, int]:
    """Send a body as fast as it is taken until an answer comes; return its status and how much was taken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    length = f"content-length: {size_bytes}" if declared else "transfer-encoding: chunked"
    named = [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([f"{request.method} {request.path} HTTP/1.1", "host: gateway", length, *named, "", ""]).encode())
    framed = _PIECE if declared else b"%x\r\n%b\r\n" % (len(_PIECE), _PIECE)
    answering = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    taken = 0
    try:
        async with asyncio.timeout(within_s):
            while taken < size_bytes and not answering.done():
                writer.write(framed)
                await writer.drain()
                await asyncio.sleep(0)
                taken += len(_PIECE)
            status = read_status(await answering)
    except (ConnectionError, asyncio.IncompleteReadError):
        status = 0
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return status, taken

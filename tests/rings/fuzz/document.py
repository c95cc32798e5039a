"""Good and bad data for every operation of the client API's document, made from the document itself."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any  # the document and its cases are JSON

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from requests import RequestException
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks

from tests.fakes.request_bodies import CHAT
from tests.fakes.stack import Gateway
from wire.contract import ErrorCode

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


CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
REFUSED_FIELDS = frozenset({"store", "previous_response_id", "source_lang_code", "target_lang_code"})
"""What is right in the document and refused where answers are not kept, or where no box speaks llm-pool's form."""
OF_THE_MODEL = frozenset({ErrorCode.MAX_TOKENS_TOO_LARGE.value})
"""Refusals of what is right in the document, by limits that each model has of its own."""
_WITHIN_S = 30


_FRAMING = frozenset({"connection", "content-length", "expect", "host", "te", "trailer", "transfer-encoding", "upgrade"})
"""Headers that say where a request ends, not what it asks: a broken one is answered before there is an operation.

tests/fakes/broken_http.py sends those.
"""


class Attack:
    """Everything that is sent to one gateway for one model. ``statuses``: how often each came.

    ``first``: the seed of what is drawn; the same number means the same data for as long as the document is the same.
    """

    def __init__(self, document: dict[str, Any], url: str, model: str, key: str, *, examples: int, first: int = 7) -> None:
        self._document = document
        self._url = url
        self._model = model
        self._key = key
        self._examples = examples
        self._first = first
        self.statuses: Counter[int] = Counter()
        self.findings: list[str] = []
        """Of each operation and kind of data, the first answer that is wrong."""

    def run(self, paths: Collection[str] = ()) -> None:
        """Send it, blocking; ``paths`` empty = all there are."""
        for found in schemathesis.openapi.from_dict(self._document).get_all_operations():
            assert isinstance(found, Ok), found
            operation = found.ok()
            if paths and operation.path not in paths:
                continue
            self._send(operation.as_strategy(GenerationMode.POSITIVE), is_good=True)
            if operation.body or operation.query:
                self._send(operation.as_strategy(GenerationMode.NEGATIVE), is_good=False)

    def _send(self, cases: st.SearchStrategy[Any], *, is_good: bool) -> None:
        @_fixed(self._examples, self._first)
        @given(cases)
        def send(case: schemathesis.Case[Any]) -> None:
            if is_good and isinstance(case.body, dict):
                case.body = {**case.body, "model": self._model}
            for name in _FRAMING & {name.lower() for name in case.headers or {}}:
                del case.headers[name]
            response = case.call(base_url=self._url, headers={"Authorization": f"Bearer {self._key}"}, timeout=_WITHIN_S)
            self.statuses[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)
            if is_good and case.operation.body and response.status_code >= 400:
                error = response.json()["error"]
                is_due = error["param"] in REFUSED_FIELDS or error["code"] in OF_THE_MODEL
                assert is_due, f"{case.path}: {response.text} to {case.body!r}"

        try:
            send()
        except (AssertionError, FailureGroup, RequestException) as fault:  # the other operations have their turn
            self.findings.append(_describe(fault))


def _describe(fault: BaseException) -> str:
    inner = [_describe(one) for one in fault.exceptions] if isinstance(fault, BaseExceptionGroup) else []
    return f"{fault!s:.3000}\n" + "\n".join(inner)


def _fixed(examples: int, first: int) -> Callable[[Any], Any]:  # Any: decorators of Hypothesis
    """The same examples for the same seed, without shrinking: the first failure says enough."""
    fixed = settings(
        max_examples=examples, derandomize=False, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return lambda test: seed(first)(fixed(test))

"""Access log of one gateway process: a line for each inference request, made behind the answer and written in a thread.

A line has the form of every other one of the log (``wire.logs``) and does not go through ``logging``, which takes ten times as
long. What has to wait longer than the bound allows is dropped and counted; a request never waits for its line.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any, BinaryIO

import msgspec

from core.limits import GatewayLimits
from gateway.errors import GatewayError
from gateway.metrics import ACCESS_LINES_DROPPED
from gateway.values import Caller, InferenceRequest, Record, RequestOutcome
from wire.ids import format_id
from wire.logs import cut_secrets

NAME = "muster.access"
REQUEUED, ESTIMATED = "RQ", "TE"
"""Flags beside those of errors: another node had failed before, and tokens that the gateway estimated."""


class AccessMode(StrEnum):
    """Which requests get a line."""

    ON = "on"
    ERRORS = "errors"
    """Those that were refused or failed, or that their client left."""
    OFF = "off"


class AccessLine(msgspec.Struct, omit_defaults=True):
    """What is said of a request; what is not known, or nothing, is left out. Durations are in ms, from acceptance."""

    time: datetime
    level: str
    logger: str
    event: str
    request: str
    outcome: RequestOutcome
    status: int | None = None
    flags: str = ""
    code: str = ""
    dialect: str = ""
    path: str = ""
    stream: bool = False
    model: str = ""
    alias: str = ""
    node: str = ""
    tenant: str = ""
    key: str = ""
    client: str = ""
    duration_ms: int | None = None
    queue_ms: int | None = None
    ttft_ms: int | None = None
    attempts: int = 0
    tokens_in: int | None = None
    tokens_cached: int | None = None
    tokens_out: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    error: str = ""
    trace: str = ""


_ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
_encode = msgspec.json.Encoder().encode


@lru_cache(maxsize=64)
def name_dialect(path: str) -> str:
    """Return the dialect of a path, or what stands behind ``/v1/`` where it is none of the four."""
    return _ENDPOINTS.get(path) or path.removeprefix("/v1/")


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that has no record, as far as it was read. ``address``: of its client."""

    record_id: uuid.UUID
    path: str
    address: str = ""
    caller: Caller | None = None
    request: InferenceRequest | None = None
    trace: str = ""


def make_line(record: Record, error: GatewayError | None, outcome: RequestOutcome, bytes_in: int, trace: str) -> AccessLine:
    """Return the line of a request that was accepted and has ended."""
    flags = error.flag if error is not None else ""
    if record.lost_attempts:
        flags += f",{REQUEUED}" if flags else REQUEUED
    if record.tokens_estimated:
        flags += f",{ESTIMATED}" if flags else ESTIMATED
    return AccessLine(
        record.finished_at or record.created_at,
        "info",
        NAME,
        "request",
        format_id("req", record.id),
        outcome,
        record.status_code,
        flags,
        record.error_code or "",
        name_dialect(record.endpoint),
        record.endpoint,
        record.is_streaming,
        record.model,
        record.asked_model,
        record.node_name,
        record.tenant,
        record.key_name,
        "",
        record.latency_ms,
        record.queue_ms,
        record.ttfb_ms,
        record.attempts,
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        bytes_in,
        record.bytes_out,
        cut_secrets(record.engine_error) if record.engine_error else "",
        trace,
    )


def make_refusal_line(at: datetime, error: GatewayError, outcome: RequestOutcome, refused: Refused) -> AccessLine:
    """Return the line of one that was not accepted."""
    caller, request = refused.caller, refused.request
    return AccessLine(
        time=at,
        level="info",
        logger=NAME,
        event="request",
        request=format_id("req", refused.record_id),
        outcome=outcome,
        status=error.status,
        flags=error.flag,
        code=error.code,
        dialect=name_dialect(refused.path),
        path=refused.path,
        stream=request is not None and request.is_streaming,
        model=cut_secrets(request.model) if request is not None else "",  # nobody knows what the caller wrote there
        tenant=caller.tenant if caller is not None else "",
        key=caller.key_name if caller is not None else "",
        client=refused.address,
        bytes_in=len(request.body) if request is not None else 0,
        trace=refused.trace,
    )


class AccessLog:
    """Takes lines on the event loop and writes them, many at a time. ``write_line``: returns a line as bytes."""

    def __init__(
        self, mode: AccessMode, limits: GatewayLimits, *, stream: BinaryIO, write_line: Callable[[AccessLine], bytes]
    ) -> None:
        self._is_for_errors = mode is AccessMode.ERRORS
        self._every = limits.access_log_every
        self._limits = limits
        self._stream = stream
        self._write_line = write_line
        self._served = 0
        self._waiting: list[tuple[Callable[..., AccessLine], tuple[Any, ...]]] = []  # whatever ``make`` takes
        self._timer: asyncio.TimerHandle | None = None
        self._batches: queue.Queue[bytes | None] = queue.Queue(limits.access_log_batches)
        self._thread: threading.Thread | None = None

    def skips(self, outcome: RequestOutcome) -> bool:
        """Whether a request gets no line: of those that were served every n-th has one."""
        if outcome is not RequestOutcome.SERVED:
            return False
        if self._is_for_errors:
            return True
        self._served += 1
        return self._served % self._every != 0

    def add(self, make: Callable[..., AccessLine], *arguments: object) -> None:
        """Have a line made of ``arguments`` and written, behind what answers have to do now."""
        if len(self._waiting) >= self._limits.access_log_waiting:
            ACCESS_LINES_DROPPED.inc()
            return
        self._waiting.append((make, arguments))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.access_log_s, self.flush)

    def flush(self) -> None:
        """Hand over what waits to the thread that writes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
            self._thread.start()
        batch = b"".join([self._write_line(make(*arguments)) for make, arguments in waiting])
        try:
            self._batches.put_nowait(batch)
        except queue.Full:  # whoever reads standard error has stopped to
            ACCESS_LINES_DROPPED.inc(len(waiting))

    def stop(self) -> None:
        """Write what waits, as far as somebody takes it."""
        self.flush()
        if self._thread is not None:
            try:
                self._batches.put(None, timeout=self._limits.access_log_stop_s)
            except queue.Full:
                return
            self._thread.join(self._limits.access_log_stop_s)
            self._thread = None

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self._stream.write(batch)
                self._stream.flush()
            except (OSError, ValueError):  # it is closed, or its disk is full: the next line may find it open
                ACCESS_LINES_DROPPED.inc(batch.count(b"\n"))


def write_json(line: AccessLine) -> bytes:
    """Return a line as JSON."""
    return _encode(line) + b"\n"


def write_text(line: AccessLine) -> bytes:
    """Return a line as text for a terminal."""
    said = msgspec.to_builtins(line)
    head = f"{said.pop('time')} [{said.pop('level')}] {said.pop('event')} [{said.pop('logger')}]"
    return f"{' '.join([head, *(f'{name}={_quote(value)}' for name, value in said.items())])}\n".encode()


def _quote(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else ascii(text)


def open_access_log(mode: AccessMode, limits: GatewayLimits, *, is_json: bool) -> AccessLog | None:
    """Return the access log of this process, on standard error; None where nobody wants one."""
    if mode is AccessMode.OFF or not logging.getLogger(NAME).isEnabledFor(logging.INFO):
        return None
    return AccessLog(mode, limits, stream=sys.stderr.buffer, write_line=write_json if is_json else write_text)

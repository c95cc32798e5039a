"""``GET …/events``: an operation followed as server-sent events (WHATWG HTML section 9.2), from rows; hints make it quicker."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, cast
from weakref import WeakSet

from channels.db import database_sync_to_async
from channels.layers import get_channel_layer
from django.db import Error as DatabaseFailure
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.views.decorators.csrf import csrf_exempt
from redis.exceptions import RedisError
from rest_framework.exceptions import APIException, MethodNotAllowed, NotAuthenticated
from rest_framework.request import Request
from rest_framework.views import APIView

from core.hints import HINT_GROUP
from core.limits import limits
from core.roles import SEE_OPERATIONS, Holder, may
from governance.errors import GovernanceError, NotPermitted
from governance.operations.approvals import find_operation
from governance.operations.queries import OperationSummary, summarise
from governance.rest.requests import read_op_id
from governance.states import FINAL_APPROVALS, FINAL_RUNS, ApprovalState, RunState
from wire import clock
from wire.contract import ErrorCode

_HEARTBEAT = b": still here\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

logger = logging.getLogger("muster.governance")
# Their own: looks that wait for the database must not hold up what else the loop's default threads do.
_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="stream")
# Knows who may call and how errors look, as for every view of the REST framework.
_rules = APIView()


class TooManyStreams(GovernanceError, code=ErrorCode.TOO_MANY_OPEN, status=HTTPStatus.SERVICE_UNAVAILABLE, retryable=True):
    """The process follows as many operations as it can."""

    retry_after_s = 5


class StatusStream:
    """The events of one operation for one client. It counts as open until it ends, is closed or is dropped."""

    def __init__(self, request: HttpRequest, op_id: uuid.UUID) -> None:
        self._request = request
        self._op_id = op_id
        self._limits = limits().governance
        self._hinted = asyncio.Event()
        _open.add(self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        listener = asyncio.create_task(self._listen())
        try:
            async for chunk in self._follow():
                yield chunk
        except DatabaseFailure as error:
            # The client comes back by itself and finds the state of then.
            logger.warning("stream_cut op=%s error=%s", self._op_id, type(error).__name__)
        finally:
            self.close()
            listener.cancel()
            await asyncio.wait({listener}, timeout=limits().governance.stream_layer_s)

    def close(self) -> None:
        # Django calls it as well when the response ends before its first byte.
        _open.discard(self)

    async def _follow(self) -> AsyncIterator[bytes]:
        seen: dict[str, object] | None = None
        quiet_since = clock.monotonic()
        while True:
            self._hinted.clear()
            status = await _in_database(partial(read_status, self._op_id))
            if status != seen:
                yield f"event: status\ndata: {json.dumps(status, ensure_ascii=False)}\n\n".encode()
                seen, quiet_since = status, clock.monotonic()
            if status["is_final"]:
                return
            await asyncio.sleep(self._limits.stream_pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.stream_poll_s - self._limits.stream_pause_s):
                    await self._hinted.wait()
            if clock.monotonic() - quiet_since >= self._limits.stream_heartbeat_s:
                if not await _in_database(partial(_is_still_admitted, self._request)):
                    return
                yield _HEARTBEAT
                quiet_since = clock.monotonic()

    async def _listen(self) -> None:
        """Wake the stream on every hint about this operation. Without the channel layer polling alone does it."""
        layer = get_channel_layer()
        if layer is None:
            return
        channel = None
        try:
            async with asyncio.timeout(limits().governance.stream_layer_s):
                channel = await layer.new_channel()
                await layer.group_add(HINT_GROUP, channel)
            while True:
                message = await layer.receive(channel)
                if message.get("topic") == "operations" and message.get("ident") in {"", str(self._op_id)}:
                    self._hinted.set()
        except (OSError, RedisError, TimeoutError) as error:
            logger.warning("stream_without_hints op=%s error=%s", self._op_id, type(error).__name__)
        finally:
            if channel is not None:
                with suppress(OSError, RedisError, TimeoutError):
                    async with asyncio.timeout(limits().governance.stream_layer_s):
                        await layer.group_discard(HINT_GROUP, channel)


# The streams of this process. Weak, so that one whose client left before its first byte does not count for ever.
_open: WeakSet[StatusStream] = WeakSet()


@csrf_exempt
async def stream_events(request: HttpRequest, op_id: str) -> HttpResponse | StreamingHttpResponse:
    """Answer the stream, or the refusal that the REST framework would give (401, 404, 405, 503 without the database).

    503 also when too many are open.
    """
    try:
        admitted = await _in_database(partial(_admit, request, op_id))
    except (InterfaceError, OperationalError) as error:
        return _render(error)
    if isinstance(admitted, HttpResponse):
        return admitted
    if len(_open) >= limits().governance.stream_max:
        most, wait_s = limits().governance.stream_max, TooManyStreams.retry_after_s
        return _render(TooManyStreams(f"{most} streams are open, which is all this process keeps; try again in {wait_s} s."))
    return StreamingHttpResponse(StatusStream(request, admitted), content_type="text/event-stream", headers=_HEADERS)


def read_status(op_id: uuid.UUID) -> dict[str, object]:
    """Return how an operation stands, as one event says it. Raises NotFound."""
    operation = find_operation(op_id)
    summary, runs = summarise(operation), list(operation.runs.all())
    return {
        "op_id": summary.printed_id,
        "state": summary.state,
        "run_state": summary.run_state,
        "approvals": summary.approvals,
        "required": summary.required,
        "percent": summary.percent,
        "eta_s": max((run.eta_s for run in runs if run.eta_s is not None and not run.ended_at), default=None),
        "runs": [
            {
                "run_id": str(run.pk), "target": run.target, "use": run.use, "state": run.state, "stage": run.stage,
                "percent": run.percent, "code": run.code, "message": run.message,
            }
            for run in runs
        ],
        "is_final": _is_final(summary, [RunState(run.state) for run in runs]),
    }  # fmt: skip


def _is_final(summary: OperationSummary, runs: list[RunState]) -> bool:
    # A standing approval may be used again until it expires.
    if not FINAL_RUNS.issuperset(runs):
        return False
    state = ApprovalState(summary.state)
    return state in FINAL_APPROVALS or (state is ApprovalState.APPROVED and bool(runs) and not summary.is_standing)


def _admit(request: HttpRequest, op_id: str) -> uuid.UUID | HttpResponse:
    try:
        if request.method != "GET":
            raise MethodNotAllowed(str(request.method))
        _authenticate(request)
        return find_operation(read_op_id(op_id)).pk
    except (APIException, GovernanceError) as error:
        return _render(error)


def _authenticate(request: HttpRequest) -> None:
    """Check the credential exactly as the views of the REST framework do. Raises what they raise."""
    holder = Request(request, authenticators=_rules.get_authenticators()).user
    if holder is None:
        raise NotAuthenticated
    if not may(cast("Holder", holder), SEE_OPERATIONS):
        raise NotPermitted(f"This admin token may not do this: its role needs the permission {SEE_OPERATIONS}.")


def _is_still_admitted(request: HttpRequest) -> bool:
    # A token that is revoked ends its streams within a heartbeat.
    try:
        _authenticate(request)
    except (APIException, GovernanceError):
        return False
    return True


def _render(error: Exception) -> HttpResponse:
    answer = _rules.get_exception_handler()(error, {})
    assert answer is not None  # it knows all errors that come here
    response = JsonResponse(answer.data, status=answer.status_code)
    for name in ("WWW-Authenticate", "Retry-After"):
        if name in answer:
            response[name] = answer[name]
    if isinstance(error, MethodNotAllowed):
        response["Allow"] = "GET"
    return response


async def _in_database(look: Any) -> Any:  # Any: Channels ships no types
    """Return what ``look`` returns. Raises OperationalError when that takes ``stream_look_s``, and what ``look`` raises."""
    try:
        async with asyncio.timeout(limits().governance.stream_look_s):
            return await database_sync_to_async(look, thread_sensitive=False, executor=_threads)()
    except TimeoutError:
        raise OperationalError("the database did not answer in time") from None

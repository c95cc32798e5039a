"""Operations that come over a gateway's socket: carried out like those of the HTTP port, followed, and told to whoever asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from runner.definitions.settings import SettingsChange
from runner.errors import InvalidRequest, OpTokenRefused, RequestRefused, RunnerError, Unavailable
from runner.ledger import LedgerError, Run
from runner.limits import limits
from runner.operations.gate import REFUSED, OperationRunning
from runner.operations.operation import FlushBody, LoadBody, Operations, ReloadBody, Reply, UnloadBody
from wire import clock
from wire.bridge import OpCommand, OpQuery, OpStatus
from wire.optoken import Operation, OpTokenError, read_token

log = logging.getLogger(__name__)

TOKEN_FIELD = "verifiedOpToken"  # noqa: S105  # the name of a field
RECEIPT_FIELD = "receipt"

Answer = Callable[[OpStatus], None]
"""Takes a status to whoever asked; must not block."""
_Key = tuple[str, int]
Body = TypeVar("Body")


@dataclass(slots=True)
class _Tracked:
    """An operation of this process and who wants to hear of it."""

    status: OpStatus
    answers: set[Answer] = field(default_factory=set)
    work: asyncio.Task[None] | None = None
    has_begun: bool = False

    @property
    def is_over(self) -> bool:
        return self.work is None or self.work.done()


class Commands:
    """``seek`` looks for a model that is not known yet; ``reload_settings`` takes over what the settings files say now."""

    def __init__(
        self,
        operations: Operations,
        seek: Callable[[str], Awaitable[None]],
        reload_settings: Callable[[], Awaitable[SettingsChange]],
    ) -> None:
        self._operations = operations
        self._seek = seek
        self._reload_settings = reload_settings
        self._tracked: dict[_Key, _Tracked] = {}
        self._queries: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Follow nothing any more; what is being carried out is ended by those who carry it out."""
        tasks = [*self._queries, *(each.work for each in self._tracked.values() if each.work is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def take(self, command: OpCommand, answer: Answer) -> None:
        """Carry out a command, once however often it comes, and tell ``answer`` how it goes on."""
        key = (command.op_id, command.use)
        known = self._tracked.get(key)
        if known is not None:
            known.answers.add(answer)
            answer(known.status)
            return
        if not self._make_room():
            words = f"{limits().operations.tracked} operations are under way on this box; send it again when one has ended."
            answer(_refused(command, Unavailable.code, words))
            return
        tracked = self._tracked[key] = _Tracked(_running(command), {answer})
        tracked.work = asyncio.create_task(self._carry_out(command, tracked))
        tracked.work.add_done_callback(lambda done: self._after(key, done))

    def query(self, query: OpQuery, answer: Answer) -> None:
        """Tell ``answer`` where an operation stands. Nothing is said while the ledger cannot be read: ask again."""
        known = self._tracked.get((query.op_id, query.use))
        if known is not None:
            known.answers.add(answer)
            answer(known.status)
        elif len(self._queries) < limits().operations.tracked:
            self._queries.add(task := asyncio.create_task(self._look_up(query, answer)))
            task.add_done_callback(self._queries.discard)

    def _make_room(self) -> bool:
        """Return whether one more can be tracked; the oldest that has ended makes way."""
        if len(self._tracked) < limits().operations.tracked:
            return True
        ended = next((key for key, each in self._tracked.items() if each.is_over), None)
        if ended is None:
            return False
        del self._tracked[ended]
        return True

    def _after(self, key: _Key, work: asyncio.Task[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None:
            self._tracked.pop(key, None)  # whoever asks now is told what the ledger has
            log.critical("operation of a gateway failed unexpectedly op=%r", key[0][:40], exc_info=error)

    async def _look_up(self, query: OpQuery, answer: Answer) -> None:
        try:
            row = await self._operations.find(query.op_id, query.use)
        except LedgerError as error:
            log.error("where an operation stands cannot be told op=%r error=%s", query.op_id[:40], error)  # noqa: TRY400
            return
        answer(OpStatus(op_id=query.op_id, use=query.use, state="unknown") if row is None else _as_status(row))

    async def _carry_out(self, command: OpCommand, tracked: _Tracked) -> None:
        try:
            status = await self._perform(command, tracked)
        except OperationRunning:
            status = _running(command)
        except RequestRefused as error:
            status = await self._settle(command, tracked, code=error.code, message=error.message)
        except RunnerError as error:
            status = await self._settle(command, tracked, code="engine_failed", message=str(error))
        if status.state in {"refused", "running"}:
            # Not kept: another token may let a refused one in, and one that another door began is not followed from here.
            self._tracked.pop((command.op_id, command.use), None)
        self._tell(tracked, status)

    async def _perform(self, command: OpCommand, tracked: _Tracked) -> OpStatus:
        """Return how the operation ended, or stands. Raises RunnerError."""
        try:
            known = await self._operations.find(command.op_id, command.use)
        except LedgerError:
            raise Unavailable("The ledger of this box cannot be read, so no operation is carried out.") from None
        if known is not None:
            return _as_status(known)
        _check_token(command)
        reply = await self._start(command, tracked)
        task_id = reply.body.get("taskId")
        if not (isinstance(task_id, str) and reply.status == 202):
            return await self._read_ended(command) or _succeeded(command, reply.body)
        await self._follow(command, task_id, tracked)
        ended = await self._read_ended(command)
        if ended is not None:
            return ended
        shown = await self._operations.wait(task_id)
        if shown.get("status") == "completed":
            return _succeeded(command, shown)
        return _failed(command, str(shown.get("code", "model_load_failed")), str(shown.get("error", "")), shown)

    async def _start(self, command: OpCommand, tracked: _Tracked) -> Reply:
        operations, params = self._operations, command.body
        fields = {**params, TOKEN_FIELD: command.token}

        def tell() -> None:
            tracked.has_begun = True
            self._tell(tracked, _running(command, stage="begun"))

        match command.operation:
            case Operation.MODEL_LOAD:
                load = _decode(fields, LoadBody)
                await self._seek(load.modelId)
                return await operations.load(load, params, on_begin=tell)
            case Operation.MODEL_UNLOAD:
                return await operations.unload(_decode(fields, UnloadBody), params, on_begin=tell)
            case Operation.CACHE_FLUSH:
                return await operations.flush(_decode(fields, FlushBody), params, on_begin=tell)
            case Operation.SETTINGS_RELOAD:
                return await operations.reload_settings(_decode(fields, ReloadBody), self._reload_settings, on_begin=tell)
            case _:
                raise InvalidRequest(f"This box does not know the operation {command.operation[:40]!r}.", param="operation")

    async def _follow(self, command: OpCommand, task_id: str, tracked: _Tracked) -> None:
        """Tell how a load goes on until it has ended."""
        told_at, told_stage = float("-inf"), None
        while (view := self._operations.view(task_id)) is not None:
            left_s = told_at + limits().operations.status_gap_s - clock.monotonic()
            if view.stage != told_stage or left_s <= 0:
                told_at, told_stage, left_s = clock.monotonic(), view.stage, limits().operations.status_gap_s
                status = _running(command, stage=view.stage)
                status.fraction = None if view.fraction is None else round(view.fraction, 3)
                status.eta_s = None if view.eta_s is None else round(view.eta_s, 1)
                self._tell(tracked, status)
            await self._operations.wait_news(task_id, within_s=left_s)

    async def _read_ended(self, command: OpCommand) -> OpStatus | None:
        """Return the end of an operation as it was recorded, None when it was not."""
        try:
            row = await self._operations.find(command.op_id, command.use)
        except LedgerError:
            return None
        return None if row is None or row.outcome is None else _as_status(row)

    async def _settle(self, command: OpCommand, tracked: _Tracked, *, code: str, message: str) -> OpStatus:
        """Return the end of an operation that raised: refused when it was not even begun, else as it was recorded."""
        try:
            row = await self._operations.find(command.op_id, command.use)
        except LedgerError:
            row = None
        if row is not None and row.outcome is not None:
            return _as_status(row)
        if row is None and not tracked.has_begun:
            return _refused(command, code, message)
        return _failed(command, code, message, {})

    def _tell(self, tracked: _Tracked, status: OpStatus) -> None:
        tracked.status = status
        for answer in list(tracked.answers):
            answer(status)


def _check_token(command: OpCommand) -> None:
    """Refuse a command whose token is for another operation: what is told about one must be what was done.

    Nothing is believed here; the gate verifies the token. Raises OpTokenRefused and InvalidRequest.
    """
    if TOKEN_FIELD in command.body:
        raise InvalidRequest(f"The token of an operation does not belong into its body ({TOKEN_FIELD}).", param=TOKEN_FIELD)
    try:
        claims = read_token(command.token).claims
    except OpTokenError as error:
        log.warning("operation refused operation=%r reason=%s", command.operation[:40], error)
        raise OpTokenRefused(REFUSED) from None
    if "opId" in claims and (claims["opId"], claims.get("use", 1)) != (command.op_id, command.use):
        log.warning("operation refused, its token is for another one op=%r use=%d", command.op_id[:40], command.use)
        raise OpTokenRefused(REFUSED)


def _decode(fields: Mapping[str, object], kind: type[Body]) -> Body:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"The body of the operation cannot be used: {error}.") from None


def _running(command: OpCommand, *, stage: str = "") -> OpStatus:
    return OpStatus(op_id=command.op_id, use=command.use, state="running", stage=stage)


def _refused(command: OpCommand, code: str, message: str) -> OpStatus:
    return OpStatus(op_id=command.op_id, use=command.use, state="refused", code=code, message=message)


def _succeeded(command: OpCommand, body: Mapping[str, object]) -> OpStatus:
    result, receipt = _split(body)
    return OpStatus(op_id=command.op_id, use=command.use, state="succeeded", result=result, receipt=receipt)


def _failed(command: OpCommand, code: str, message: str, body: Mapping[str, object]) -> OpStatus:
    result, receipt = _split(body)
    return OpStatus(
        op_id=command.op_id, use=command.use, state="failed", code=code, message=message, result=result, receipt=receipt
    )


def _split(body: Mapping[str, object]) -> tuple[dict[str, object], str]:
    """Return a result without its receipt, which signs the rest, and the receipt."""
    receipt = body.get(RECEIPT_FIELD)
    return {name: value for name, value in body.items() if name != RECEIPT_FIELD}, receipt if isinstance(receipt, str) else ""


def _as_status(row: Run) -> OpStatus:
    """Return where an operation stands by the ledger."""
    status = OpStatus(op_id=row.approval_id, use=row.use, state="running", receipt=row.receipt)
    if row.outcome is None:
        return status
    body = row.outcome.get("body")
    status.result = body if isinstance(body, dict) else {}
    status.state = str(row.outcome.get("state", "succeeded"))
    if status.state == "interrupted":
        status.code, status.message = "operation_interrupted", "The box ended while this was carried out; see the result."
    elif status.state == "failed":
        error = status.result.get("error")
        if isinstance(error, dict):  # the error object of the API
            status.code, status.message = str(error.get("code", "")), str(error.get("message", ""))
        else:  # a load task
            status.code, status.message = str(status.result.get("code", "model_load_failed")), str(error or "")
    return status

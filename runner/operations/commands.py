"""Operations that come over a gateway's socket: carried out like those of the HTTP port, followed, and told to whoever asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from runner.definitions.settings import SettingsChange
from runner.errors import InvalidRequest, OpTokenRefused, RequestRefused, RunnerError, Unavailable
from runner.ledger.database import LedgerError
from runner.ledger.ledger import Run
from runner.limits import limits
from runner.operations.gate import REFUSED, OperationRunning
from runner.operations.operation import FlushBody, LoadBody, Operations, ReloadBody, Reply, UnloadBody
from wire import clock
from wire.bridge import OpCommand, OpQuery, OpStatus
from wire.optoken.op_token import OpTokenError, SignedToken, read_token
from wire.optoken.verifier import Operation

log = logging.getLogger(__name__)

TOKEN_FIELD = "verifiedOpToken"  # noqa: S105  # the name of a field
RECEIPT_FIELD = "receipt"

Answer = Callable[[OpStatus], None]
"""Takes a status to whoever asked; must not block."""
_Key = tuple[str, int]
Body = TypeVar("Body", LoadBody, UnloadBody, FlushBody, ReloadBody)


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
            words = f"{limits().operations.tracked} operations are under way on this node; send it again when one has ended."
            answer(_status(command, "refused", code=Unavailable.code, message=words))
            return
        tracked = self._tracked[key] = _Tracked(_status(command, "running"), {answer})
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
        if len(self._tracked) < limits().operations.tracked:
            return True
        # The oldest that has ended makes way: whoever asks for it is told what the ledger has.
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
            status = _status(command, "running")
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
            raise Unavailable("The ledger of this node cannot be read, so no operation is carried out.") from None
        if known is not None:
            return _as_status(known)
        reply = await self._start(command, _read_token(command), tracked)
        task_id = reply.body.get("taskId")
        is_load = isinstance(task_id, str) and reply.status == 202
        if is_load:
            await self._follow(command, str(task_id), tracked)
        ended = await self._read(command)
        if ended is not None and ended.outcome is not None:
            return _as_status(ended)
        # The ledger failed, so this process alone knows how it went.
        shown = await self._operations.wait(str(task_id)) if is_load else reply.body
        if is_load and shown.get("status") != "completed":
            return _status(
                command, "failed", code=str(shown.get("code", "model_load_failed")), message=str(shown.get("error", "")),
                **_split(shown),
            )  # fmt: skip
        return _status(command, "succeeded", **_split(shown))

    async def _start(self, command: OpCommand, token: SignedToken, tracked: _Tracked) -> Reply:
        operations, params = self._operations, command.body

        def tell() -> None:
            tracked.has_begun = True
            self._tell(tracked, _status(command, "running", stage="begun"))

        match command.operation:
            case Operation.MODEL_LOAD:
                load = _decode(params, LoadBody, token)
                await self._seek(load.modelId)
                return await operations.load(load, params, on_begin=tell)
            case Operation.MODEL_UNLOAD:
                return await operations.unload(_decode(params, UnloadBody, token), params, on_begin=tell)
            case Operation.CACHE_FLUSH:
                return await operations.flush(_decode(params, FlushBody, token), params, on_begin=tell)
            case Operation.SETTINGS_RELOAD:
                body = _decode(params, ReloadBody, token)
                return await operations.reload_settings(body, self._reload_settings, on_begin=tell)
            case _:
                raise InvalidRequest(f"This node does not know the operation {command.operation[:40]!r}.", param="operation")

    async def _follow(self, command: OpCommand, task_id: str, tracked: _Tracked) -> None:
        told_at, told_stage = float("-inf"), None
        while (view := self._operations.view(task_id)) is not None:
            load, eta_s = view
            left_s = told_at + limits().operations.status_gap_s - clock.monotonic()
            if load.stage != told_stage or left_s <= 0:
                told_at, told_stage, left_s = clock.monotonic(), load.stage, limits().operations.status_gap_s
                status = _status(command, "running", stage=load.stage)
                status.fraction = None if load.fraction is None else round(load.fraction, 3)
                status.eta_s = None if eta_s is None else round(eta_s, 1)
                self._tell(tracked, status)
            await self._operations.wait_news(task_id, within_s=left_s)

    async def _read(self, command: OpCommand) -> Run | None:
        try:
            return await self._operations.find(command.op_id, command.use)
        except LedgerError:
            return None

    async def _settle(self, command: OpCommand, tracked: _Tracked, *, code: str, message: str) -> OpStatus:
        """Return the end of an operation that raised: refused when it was not even begun, else as it was recorded."""
        run = await self._read(command)
        if run is not None and run.outcome is not None:
            return _as_status(run)
        has_begun = run is not None or tracked.has_begun
        return _status(command, "failed" if has_begun else "refused", code=code, message=message)

    def _tell(self, tracked: _Tracked, status: OpStatus) -> None:
        tracked.status = status
        for answer in list(tracked.answers):
            answer(status)


def _read_token(command: OpCommand) -> SignedToken:
    """Return the token of a command; the gate verifies it. Raises OpTokenRefused and InvalidRequest."""
    if TOKEN_FIELD in command.body:
        raise InvalidRequest(f"The token of an operation does not belong into its body ({TOKEN_FIELD}).", param=TOKEN_FIELD)
    try:
        token = read_token(command.token)
    except OpTokenError as error:
        log.warning("operation refused operation=%r reason=%s", command.operation[:40], error)
        raise OpTokenRefused(REFUSED) from None
    claims = token.claims
    # What is told about an operation must be what was done: the token must be for this very one.
    if "opId" in claims and (claims["opId"], claims.get("use", 1)) != (command.op_id, command.use):
        log.warning("operation refused, its token is for another one op=%r use=%d", command.op_id[:40], command.use)
        raise OpTokenRefused(REFUSED)
    return token


def _decode(params: Mapping[str, object], kind: type[Body], token: SignedToken) -> Body:
    try:
        body = msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"The body of the operation cannot be used: {error}.") from None
    body.verifiedOpToken = token
    return body


def _status(command: OpCommand, state: str, **fields: Any) -> OpStatus:
    return OpStatus(op_id=command.op_id, use=command.use, state=state, **fields)


def _split(body: Mapping[str, object]) -> dict[str, object]:
    # The receipt signs the rest.
    result = {name: value for name, value in body.items() if name != RECEIPT_FIELD}
    return {"result": result, "receipt": str(body.get(RECEIPT_FIELD) or "")}


def _as_status(run: Run) -> OpStatus:
    status = OpStatus(op_id=run.approval_id, use=run.use, state=run.state.value, receipt=run.receipt)
    if run.outcome is None:
        return status
    body = run.outcome.get("body")
    status.result = body if isinstance(body, dict) else {}
    if status.state == "interrupted":
        status.code, status.message = "operation_interrupted", "The node ended while this was carried out; see the result."
    elif status.state == "failed":
        error = status.result.get("error")
        if isinstance(error, dict):  # the error object of the API
            status.code, status.message = str(error.get("code", "")), str(error.get("message", ""))
        else:  # a load task
            status.code, status.message = str(status.result.get("code", "model_load_failed")), str(error or "")
    return status

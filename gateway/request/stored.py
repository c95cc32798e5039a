"""Answers of /v1/responses that are kept, or that go on from one: what the tenant allows, and the two trips to the database.

The first trip reads the conversation before the request is accepted. The second comes when the answer is whole: its last
event leaves only once the row is durable, so that a client which knows the answer's id can always ask for it again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from django.db import DatabaseError, InterfaceError

from core.db.threads import run_in_database
from core.limits import limits
from gateway.dialects.body import count_prompt_chars
from gateway.dialects.chat import AnswerTranslator, Translation
from gateway.dialects.responses_answer import make_response_id
from gateway.dialects.responses_request import COMPACT_PATH, list_input_items, translate_compact, translate_responses
from gateway.errors import BadRequest, GatewayError, RecordsUnavailable, ResponseNotFound
from gateway.services.responses import keep_response, load_history
from gateway.values import Caller, InferenceRequest
from wire import clock

logger = logging.getLogger("muster.gateway")

T = TypeVar("T")

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FALSE = msgspec.Raw(b"false")


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """What a request of /v1/responses has to do with the database. ``translate`` says it with its history.

    ``history_chars``: what the conversation so far adds to the prompt, counted as input is.
    """

    is_stored: bool
    previous_id: str
    history_chars: int
    translate: Callable[[InferenceRequest], Translation]


async def plan_storage(caller: Caller, request: InferenceRequest, request_id: str) -> StoragePlan | None:
    """Return what is to be read and kept, None for an answer that stands alone.

    Raises BadRequest for an answer that the tenant does not let us keep, ResponseNotFound for a previous one that is not there,
    RecordsUnavailable when the database does not answer.
    """
    if not caller.stores_responses:
        if request.store:
            raise BadRequest(
                "Answers are not kept for this tenant: send store false, or ask an operator to allow it.", param="store"
            )
        if request.previous_response_id:
            raise ResponseNotFound(
                "Answers are not kept for this tenant, so there is none to go on from: send the whole conversation as input, "
                "or ask an operator to allow it.",
                param="previous_response_id",
            )
        return None
    is_compact = request.endpoint == COMPACT_PATH
    is_stored, previous_id = request.store is not False and not is_compact, request.previous_response_id
    if not is_stored and not previous_id:
        return None
    history, history_chars = await _ask_database(lambda: _read_history(caller.tenant, previous_id)) if previous_id else ([], 0)
    # Ids of requests stand in records, which more people see than may read what was kept. The client alone is told this one.
    response_id = f"resp_{secrets.token_hex(20)}" if is_stored else make_response_id(request_id)

    def translate(renamed: InferenceRequest) -> Translation:
        say = translate_compact if is_compact else translate_responses
        return say(
            renamed, history=history, previous_response_id=previous_id or None, is_stored=is_stored, response_id=response_id
        )

    return StoragePlan(is_stored, previous_id, history_chars, translate)


async def keep_answer(caller: Caller, request: InferenceRequest, storage: StoragePlan, translator: AnswerTranslator) -> bool:
    """Write the answer down; return whether that was done. The client gets its answer either way."""
    body = translator.kept
    if body is None:
        return False
    give_up_at = clock.monotonic() + limits().gateway.store_s - limits().gateway.store_margin_s
    try:
        await _ask_database(
            lambda: keep_response(
                tenant=caller.tenant,
                key_id=caller.key_id,
                kept_days=caller.responses_kept_days,
                model=request.model,
                previous_id=storage.previous_id,
                input_items=list_input_items(request.body),
                body=body,
                give_up_at=give_up_at,
            )
        )
    except GatewayError as error:
        logger.warning("response.not_kept code=%s", error.code)
        return False
    return True


def mark_unkept(last: bytes) -> bytes:
    """Return closing events, or a whole body, whose response object says that it was not stored."""
    if not last.endswith(b"\n\n"):
        return _put(last, "store", _FALSE)
    start = last.rfind(b"\ndata:") + len(b"\ndata:")  # at the beginning of a line: texts may speak of data too
    data = last[start:]
    response = _put(_fields_decoder.decode(data)["response"], "store", _FALSE)
    return last[:start] + b" " + _put(data, "response", msgspec.Raw(response)) + b"\n\n"


def _put(fields: bytes | msgspec.Raw, name: str, value: msgspec.Raw) -> bytes:
    return msgspec.json.encode({**_fields_decoder.decode(fields), name: value})


def _read_history(tenant: str, response_id: str) -> tuple[list[bytes], int]:
    """Return the items of a conversation and how many characters of text they have; in a thread, for they may be many."""
    items = load_history(tenant=tenant, response_id=response_id)
    return items, count_prompt_chars(msgspec.Raw(), *map(msgspec.Raw, items))


async def _ask_database(ask: Callable[[], T]) -> T:
    try:
        async with asyncio.timeout(limits().gateway.store_s):
            return await run_in_database(ask)
    except (TimeoutError, DatabaseError, InterfaceError, OSError):
        raise RecordsUnavailable("Kept answers cannot be reached now; please retry", retry_after_s=2) from None

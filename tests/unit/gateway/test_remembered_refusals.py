"""What a gateway remembers of callers that it refused: no more than of the last minute."""

from __future__ import annotations

import uuid

from gateway.admission import RateLimiter
from gateway.bookkeeping import Bookkeeper, unread_request
from gateway.errors import BadRequest
from gateway.records import RecordWriter
from gateway.values import Caller


def test_callers_that_are_refused_nothing_any_more_are_forgotten() -> None:
    now = 1000.0
    records = RecordWriter(accept_s=1.0, max_pending=1000)
    limiter = RateLimiter(lambda: now)
    books = Bookkeeper(uuid.uuid4(), records, limiter)

    def refuse(key_id: uuid.UUID) -> None:
        caller = Caller(key_id=key_id, key_name="k", tenant="t", requests_per_minute=1, allowed_models=frozenset())
        books.record_refusal(BadRequest("no"), caller, unread_request("/v1/models"), uuid.uuid4())

    for _ in range(100):
        refuse(uuid.uuid4())
    now += 30
    stays = uuid.uuid4()
    refuse(stays)
    assert records.pending == 101
    now += 31
    books.forget_idle()
    assert set(limiter._windows) == {stays}

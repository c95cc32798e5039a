"""Group commit of request records against a real PostgreSQL, which also goes away and comes back."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from django.db import connections, transaction

from core.limits import limits
from gateway import metrics
from gateway.errors import RecordsUnavailable
from gateway.request import records as record_sql
from gateway.request.records import RecordWriter
from gateway.services.requests import close_orphaned_requests
from gateway.values import Record
from tests.fakes.limits import set_limits
from tests.fakes.pipeline import ACCEPT_S, Rows, count, is_waited_for, make_record, read, written
from tests.fakes.waiting import DEADLINE_S, eventually
from wire.contract import RequestState


@pytest.fixture
async def writer(rows: Rows) -> AsyncIterator[RecordWriter]:
    """A writer that runs on the private database."""
    writer = RecordWriter(accept_s=ACCEPT_S, max_pending=10_000)
    writer.start()
    yield writer
    await writer.stop()


OURS = "FROM pg_stat_activity WHERE application_name = 'muster-records' AND datname = current_database()"


def end_connections(rows: Rows) -> None:
    """Have the server end the connections of the writers."""
    rows.execute(f"SELECT pg_terminate_backend(pid) {OURS}")


def usage_of(rows: Rows, record: Record) -> list[tuple[object, ...]]:
    found = "SELECT state, tokens, cost_micros, is_estimated FROM gateway_usageevent WHERE event_id = %s"
    return rows.execute(found, [record.id]).fetchall()


async def test_every_column_is_written_back(writer: RecordWriter, rows: Rows) -> None:
    record = make_record()
    await writer.accept(record)
    node = uuid.uuid4()
    changes: dict[str, object] = {
        "error_code": "NODE_STALE", "status_code": 503, "node_id": node, "node_name": "rig é \U0001f600", "attempts": 3,
        "prompt_tokens": 2, "completion_tokens": limits().gateway.record_integer, "cached_tokens": 1, "tokens_estimated": True,
        "bytes_out": 2**40, "queue_ms": 4, "ttfb_ms": 5, "latency_ms": 6, "finished_at": datetime.now(UTC),
        "state": RequestState.FAILED,
    }  # fmt: skip
    for name, value in changes.items():
        setattr(record, name, value)
    writer.touch(record)
    await written(writer)
    assert read(rows, record, *changes) == tuple(changes.values())
    of_event = "SELECT node_id, status_code, queue_ms, ttft_ms, latency_ms FROM gateway_usageevent WHERE event_id = %s"
    assert rows.execute(of_event, [record.id]).fetchall() == [(node, 503, 4, 5 if record.is_streaming else None, 6)]


async def test_a_gateway_that_stood_still_and_was_taken_over_changes_nothing_any_more(writer: RecordWriter, rows: Rows) -> None:
    stood_still, alive = make_record(gateway_id=uuid.uuid4()), make_record(gateway_id=uuid.uuid4())
    for record, silent_s in ((stood_still, 30), (alive, -600)):
        rows.execute(
            "INSERT INTO gateway_gatewayprocess (id, host, pid, internal_url, started_at, heartbeat_at)"
            " VALUES (%s, 'h', 1, '', now(), now() - make_interval(secs => %s))",
            [record.gateway_id, silent_s],
        )
        record.reserved_tokens, record.reserved_micros = 500, 7
        await writer.accept(record)

    def take_over() -> int:
        try:
            return close_orphaned_requests(dead_after_s=0.5, confirm_s=0.0)
        finally:
            connections.close_all()

    closed = await asyncio.to_thread(take_over)
    for record in (stood_still, alive):
        record.state = RequestState.RUNNING
        writer.touch(record)
        await written(writer)
        record.completion_tokens, record.state = 9, RequestState.COMPLETED
        await writer.finish(record)
    await written(writer)
    assert closed == 1
    assert read(rows, stood_still, "state", "completion_tokens") == ("interrupted", None)
    assert usage_of(rows, stood_still) == [("interrupted", 500, 7, True)], "nobody knows more: what it might have used"
    assert usage_of(rows, alive) == [("completed", 9, 0, False)]
    assert read(rows, alive, "state", "completion_tokens") == ("completed", 9)


async def test_what_a_request_used_is_written_with_its_end_and_once(writer: RecordWriter, rows: Rows) -> None:
    rows.execute(
        "INSERT INTO gateway_model (name, allowed, owned_by, input_price, cached_price, output_price, created_at, updated_at) "
        "VALUES ('m', true, 'x', 0.5, 0.1, 2, now(), now())"
    )
    record, open_one = make_record(), make_record()
    await writer.accept(record)
    await writer.accept(open_one)
    record.prompt_tokens, record.cached_tokens, record.completion_tokens = 1001, 501, 10
    record.state = RequestState.COMPLETED
    await writer.finish(record)
    writer.touch(record)
    await written(writer)

    assert usage_of(rows, record) == [("completed", 1011, 250 + 51 + 20, False)], "a part of a millionth counts as one"
    assert usage_of(rows, open_one) == []


@pytest.mark.parametrize(("price", "cost"), [("input_price", 500), ("cached_price", 501), ("output_price", 10)])
async def test_each_price_is_charged_also_where_it_is_the_only_one(
    writer: RecordWriter, rows: Rows, price: str, cost: int
) -> None:
    prices = {"input_price": 0, "cached_price": 0, "output_price": 0, price: 1}
    rows.execute(
        "INSERT INTO gateway_model (name, allowed, owned_by, input_price, cached_price, output_price, created_at, updated_at) "
        "VALUES ('m', true, 'x', %s, %s, %s, now(), now())",
        list(prices.values()),
    )
    record = make_record()
    record.prompt_tokens, record.cached_tokens, record.completion_tokens = 1001, 501, 10
    record.state = RequestState.COMPLETED
    await writer.accept(record)
    await written(writer)
    assert [used[2] for used in usage_of(rows, record)] == [cost]


async def test_a_request_that_two_end_at_the_same_moment_leaves_one_event(writer: RecordWriter, rows: Rows) -> None:
    record = make_record(gateway_id=uuid.uuid4())  # of a gateway that nobody knows
    record.created_at -= timedelta(seconds=60)
    await writer.accept(record)
    is_closed, may_commit = threading.Event(), threading.Event()

    def take_over() -> None:
        try:
            with transaction.atomic():
                close_orphaned_requests(dead_after_s=0.5, confirm_s=0.0)
                is_closed.set()
                assert may_commit.wait(DEADLINE_S)
        finally:
            connections.close_all()

    closing = asyncio.create_task(asyncio.to_thread(take_over))
    await eventually(is_closed.is_set)
    record.state = RequestState.COMPLETED
    await writer.finish(record)
    await eventually(lambda: rows.execute(f"SELECT 1 {OURS} AND wait_event_type = 'Lock'").fetchone(), "it waits for the row")
    may_commit.set()
    await closing
    await written(writer)
    assert [state for state, *_ in usage_of(rows, record)] == ["interrupted"]


async def test_an_estimate_charges_no_more_than_was_reserved(writer: RecordWriter, rows: Rows) -> None:
    record = make_record()
    record.prompt_tokens, record.completion_tokens, record.tokens_estimated = 50, 500, True
    record.reserved_tokens, record.reserved_micros, record.state = 100, 0, RequestState.CANCELLED
    await writer.accept(record)
    await written(writer)
    assert usage_of(rows, record) == [("cancelled", 100, 0, True)]


async def test_to_change_a_row_reads_no_other(rows: Rows) -> None:
    """Whatever PostgreSQL believes of how many rows there are: it looks into the index, and has no plan to read the table."""
    record = msgspec.json.encode([make_record()]).decode()
    statement = record_sql.STATEMENTS[record_sql.WRITE].replace("$1", "%s")
    answer: Any = rows.execute(f"EXPLAIN (FORMAT JSON) {statement}", [record]).fetchone()
    # The outer one adds what finished requests used: it reads the rows that this one wrote, and the short list of models.
    (plan,) = (one for one in answer[0][0]["Plan"]["Plans"] if one.get("Subplan Name") == "CTE written")
    assert plan["Conflict Arbiter Indexes"] == ["gateway_requestrecord_pkey"]
    assert [node["Node Type"] for node in plan["Plans"]] == ["Function Scan"]


@pytest.mark.parametrize("final", [s for s in RequestState if s.value not in {"queued", "assigned", "running"}])
@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_final_state_is_never_overwritten_but_by_the_refusal_of_what_was_completed_on_its_way_in(
    writer: RecordWriter, rows: Rows, final: RequestState, *, is_refused: bool
) -> None:
    """The client of a refusal was told that the request could not be written down: nobody has the answer of the row."""
    record = make_record()
    await writer.accept(record)
    rows.execute("UPDATE gateway_requestrecord SET state = %s WHERE id = %s", [final.value, record.id])
    record.attempts = 9
    if is_refused:
        record.error_code, record.state = RecordsUnavailable.code, RequestState.REJECTED
    else:
        record.state = RequestState.COMPLETED if final is not RequestState.COMPLETED else RequestState.FAILED
    writer.touch(record)
    await written(writer)
    is_closed = is_refused and final is RequestState.COMPLETED
    expected = (RequestState.REJECTED.value, 9) if is_closed else (final.value, 0)
    assert read(rows, record, "state", "attempts") == expected


POISON: list[dict[str, object]] = [
    {"model": "a\x00b"}, {"max_tokens": 2**31}, {"max_tokens": 10**40}, {"prompt_tokens": -1}, {"status_code": 99_999},
    {"bytes_out": 2**63}, {"node_name": "\ud800"}, {"tenant": "t" * 500},
]  # fmt: skip


@pytest.mark.parametrize("poison", POISON, ids=lambda poison: next(iter(poison)))
async def test_one_record_that_cannot_be_stored_harms_no_other(
    writer: RecordWriter, rows: Rows, poison: dict[str, object]
) -> None:
    good, bad = [make_record() for _ in range(3)], make_record(**poison)
    waiting = [writer.accept(good[0]), writer.accept(bad), writer.accept(good[1]), writer.accept(good[2])]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [result is None for result in results] == [True, False, True, True]
    assert isinstance(results[1], RecordsUnavailable)
    assert writer.is_healthy
    for record in good:
        record.state = RequestState.COMPLETED
        writer.touch(record)
    writer.add_final(make_record(state=RequestState.REJECTED, **poison))
    await written(writer)
    assert {read(rows, record) for record in good} == {("completed",)}
    assert read(rows, bad) is None


async def test_a_change_that_cannot_be_stored_does_not_hold_up_the_next(writer: RecordWriter, rows: Rows) -> None:
    good, bad = make_record(), make_record()
    await asyncio.gather(writer.accept(good), writer.accept(bad))
    bad.prompt_tokens, good.state, bad.state = 10**12, RequestState.COMPLETED, RequestState.COMPLETED
    writer.touch(bad)
    writer.touch(good)
    await written(writer)
    assert read(rows, good) == ("completed",)
    assert writer.is_healthy


async def test_more_than_the_bound_is_refused_at_once(rows: Rows) -> None:
    writer = RecordWriter(accept_s=0.2, max_pending=3)
    writer.start()
    with rows.transaction():
        rows.execute("LOCK TABLE gateway_requestrecord IN ACCESS EXCLUSIVE MODE")
        waiting = [writer.accept(make_record()) for _ in range(4)]
        assert [future.done() for future in waiting] == [False, False, False, True]
        assert isinstance(waiting[3].exception(), RecordsUnavailable)
        for future in waiting[:3]:
            with pytest.raises(RecordsUnavailable):
                await future
    await writer.stop()


async def test_more_than_a_socket_takes_at_once_becomes_durable_in_few_commits(writer: RecordWriter, rows: Rows) -> None:
    before = metrics.COUNTERS.flushes["ok"]
    records = [make_record(model="m" * 200) for _ in range(3000)]
    await asyncio.gather(*(writer.accept(record) for record in records))
    assert count(rows, RequestState.QUEUED) == 3000
    assert metrics.COUNTERS.flushes["ok"] - before <= 3


async def test_a_database_that_hangs_bounds_the_wait_and_closes_what_got_in_late(rows: Rows) -> None:
    writer = RecordWriter(accept_s=ACCEPT_S, max_pending=100)
    writer.start()
    try:
        await writer.accept(make_record())
        record = make_record()
        writer._accept_s = 0.1
        writer._check_outstanding()  # ends the long watch over the first, behind which the second would be looked at late
        with rows.transaction():
            rows.execute("LOCK TABLE gateway_requestrecord IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(RecordsUnavailable):
                await writer.accept(record)
            assert writer.is_healthy, "the writer itself has not given up yet"
        writer._accept_s = ACCEPT_S
        await written(writer)
        await eventually(lambda: read(rows, record) == ("rejected",))
    finally:
        await writer.stop()


async def test_what_is_given_up_before_it_is_sent_has_a_row_like_what_was_sent(rows: Rows) -> None:
    writer = RecordWriter(accept_s=1.0, max_pending=1000)
    writer.start()
    try:
        sent, unsent = make_record(), [make_record() for _ in range(120)]
        with rows.transaction():
            rows.execute("LOCK TABLE gateway_requestrecord IN ACCESS EXCLUSIVE MODE")
            first = writer.accept(sent)
            await eventually(lambda: is_waited_for(rows))
            waiting = [first, *(writer.accept(record) for record in unsent)]
            assert {type(end) for end in await asyncio.gather(*waiting, return_exceptions=True)} == {RecordsUnavailable}
        await eventually(lambda: count(rows, RequestState.REJECTED) == 121)
        final = {read(rows, record, "state", "error_code", "status_code") for record in (sent, *unsent)}
        assert final == {("rejected", "NO_AVAILABLE_NODE", 503)}
        portions = "SELECT count(DISTINCT xmin::text) FROM gateway_requestrecord WHERE id = ANY(%s)"
        (number,) = rows.execute(portions, [[record.id for record in unsent]]).fetchone() or (0,)
        # Each is soon through, so that nobody has to wait for all.
        assert int(str(number)) >= 120 / limits().gateway.records_refused_batch
    finally:
        await writer.stop()


async def test_refusals_beyond_the_bound_are_counted_instead_of_written(rows: Rows) -> None:
    writer = RecordWriter(accept_s=1.0, max_pending=3)
    writer.start()
    dropped = metrics.RECORDS_DROPPED._value.get()
    try:
        with rows.transaction():
            rows.execute("LOCK TABLE gateway_requestrecord IN ACCESS EXCLUSIVE MODE")
            first = writer.accept(make_record())
            await eventually(lambda: is_waited_for(rows))
            waiting = [first, *(writer.accept(make_record()) for _ in range(10))]
            assert {type(end) for end in await asyncio.gather(*waiting, return_exceptions=True)} == {RecordsUnavailable}
        await eventually(lambda: count(rows, RequestState.REJECTED) + metrics.RECORDS_DROPPED._value.get() - dropped == 11)
        assert 1 <= count(rows, RequestState.REJECTED) <= 1 + 3
    finally:
        await writer.stop()


async def test_a_connection_that_died_while_nobody_used_it_costs_no_request(writer: RecordWriter, rows: Rows) -> None:
    await writer.accept(make_record())
    end_connections(rows)
    await eventually(lambda: rows.execute(f"SELECT 1 {OURS}").fetchone() is None)
    record = make_record()
    await writer.accept(record)
    assert read(rows, record) == ("queued",)
    assert writer.is_healthy


async def test_a_row_that_had_got_in_before_its_connection_died_is_not_written_twice(writer: RecordWriter, rows: Rows) -> None:
    """The commit may be durable although its acknowledgement was lost: the second attempt finds the row."""
    record = make_record()
    await writer.accept(record)
    again = make_record(id=record.id, created_at=record.created_at, attempts=1)
    await writer.accept(again)
    assert read(rows, record, "attempts", "count(*) OVER ()") == (1, 1)


async def test_a_refused_request_that_gets_in_after_the_database_is_back_is_closed(rows: Rows) -> None:
    """A frozen server carries out what it had received when it thaws, perhaps after the writer has closed what it found."""
    set_limits(gateway={"records_late_s": 0.5})
    writer = RecordWriter(accept_s=ACCEPT_S, max_pending=100)
    writer.start()
    try:
        while (record := await let_in_late(writer, rows)) is None:
            pass
        await eventually(lambda: read(rows, record) == ("rejected",))
    finally:
        await writer.stop()


async def let_in_late(writer: RecordWriter, rows: Rows) -> Record | None:
    """Have a request refused, and its row come in once the writer is well again. None: not before the last look at it."""
    await written(writer)
    record = make_record()
    with rows.transaction():
        rows.execute("LOCK TABLE gateway_requestrecord IN ACCESS EXCLUSIVE MODE")
        refused = writer.accept(record)
        while not refused.done():  # the writer tries once more when a connection dies under a statement
            await eventually(lambda: refused.done() or is_waited_for(rows))
            rows.execute("SELECT pg_stat_clear_snapshot()")  # else the transaction goes on seeing the first connection alone
            end_connections(rows)
        with pytest.raises(RecordsUnavailable):
            await refused
    await eventually(lambda: writer.is_healthy and writer.pending == 0)
    if read(rows, record) is not None:
        return None
    late = msgspec.json.encode([make_record(id=record.id, created_at=record.created_at)]).decode()
    rows.execute(record_sql.STATEMENTS[record_sql.WRITE].replace("$1", "%s"), [late])
    return record if writer._doubtful else None

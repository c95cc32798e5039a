"""Request records against a database that goes away, falls behind, loses acknowledgements and refuses values."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gateway.metrics import RECORDS_DROPPED
from gateway.request.records import RecordWriter
from gateway.values import Record
from tests.fakes.examples import examples
from tests.fakes.pipeline import MemoryDatabase, make_record
from tests.fakes.virtual_loop import VirtualLoop
from tests.fakes.waiting import takes
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, RequestState

ACCEPT_S = 2.0
STEPS = st.one_of(
    st.tuples(
        st.sampled_from(["accept", "accept", "accept bad", "refusal", "leave", "run", "run", "finish", "end early"]),
        st.integers(1, 4),
    ),
    st.tuples(
        st.sampled_from(["works", "slow", "dies before", "dies after", "fails", "stalls", "goes away", "comes back"]),
        st.integers(1, 3),
    ),
    st.tuples(st.just("wait"), st.sampled_from([0, 1, 2, 3, 25, 300, 2500, 9000])),
)


@dataclass
class Story:
    """What was asked of the writer, and of the database."""

    writer: RecordWriter
    database: MemoryDatabase
    asked: list[tuple[Record, asyncio.Future[None]]] = field(default_factory=list)
    refusals: list[Record] = field(default_factory=list)
    finishes: list[asyncio.Task[None]] = field(default_factory=list)

    def accept(self, model: str) -> None:
        """A request comes."""
        record = make_record(model=model)
        self.asked.append((record, self.writer.accept(record)))

    def find(self, number: int) -> Record | None:
        """Return one of the requests that were accepted and still run."""
        running = [record for record, future in self.asked if is_accepted(future) and record.state in OPEN_REQUEST_STATES]
        return running[number % len(running)] if running else None

    def end_early(self) -> None:
        """Everything ends whose row was not sent yet."""
        for record, _ in self.asked:
            if self.writer.is_entering(record) and record.state in OPEN_REQUEST_STATES:
                record.finished_at, record.state = clock.now(), RequestState.COMPLETED

    async def take(self, step: str, number: int) -> None:
        """Do what a step says."""
        record = self.find(number)
        match step:
            case "accept" | "accept bad":
                for each in range(number):
                    self.accept("bad" if step == "accept bad" and not each else "m")
            case "run" if record is not None:
                record.state = RequestState.ASSIGNED
                record.attempts += 1
                self.writer.touch(record)
            case "finish" if record is not None:
                record.finished_at, record.state = clock.now(), RequestState.COMPLETED
                self.finishes.append(asyncio.ensure_future(self.writer.finish(record)))
            case "end early":
                self.end_early()
            case "leave":
                waiting = [(record, future) for record, future in self.asked if not future.done()]
                if waiting:
                    record, future = waiting[number % len(waiting)]
                    future.cancel()
                    record.finished_at, record.state = clock.now(), RequestState.CANCELLED
                    self.writer.touch(record)
            case "refusal":
                self.refusals.append(make_record(state=RequestState.REJECTED, finished_at=clock.now()))
                self.writer.add_final(self.refusals[-1])
            case "goes away" | "comes back":
                self.database.is_away = step == "goes away"
            case "wait":
                await takes(number / 1000)
            case "works" | "slow" | "dies before" | "dies after" | "fails" | "stalls":
                self.database.fates += [step] * number


def is_accepted(future: asyncio.Future[None]) -> bool:
    """Whether a request was taken on."""
    return future.done() and not future.cancelled() and future.exception() is None


@examples(400)
@given(steps=st.lists(STEPS, min_size=5, max_size=60))
def test_whatever_the_database_does_each_request_has_one_end(steps: list[tuple[str, int]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(live_through(steps))


async def pass_time(seconds: float) -> None:
    """Let so much time of the loop pass."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    await loop.pass_time(seconds)


async def live_through(steps: list[tuple[str, int]]) -> None:
    database = MemoryDatabase()
    writer = RecordWriter(accept_s=ACCEPT_S, max_pending=6, connect=database.connect)
    writer.start()
    story, dropped = Story(writer, database), RECORDS_DROPPED._value.get()
    for step, number in steps:
        await story.take(step, number)
    database.is_away = False
    database.fates.clear()
    await pass_time(ACCEPT_S + 20)
    assert all(future.done() for _, future in story.asked)
    assert all(task.done() for task in story.finishes)
    await pass_time(10)  # what was refused while the database was away has its row by now
    assert writer.pending == 0
    lost = 0
    for record, future in story.asked:
        row = database.rows.get(str(record.id))
        if record.model == "bad":
            assert row is None
            assert not is_accepted(future)
        elif is_accepted(future):
            assert row is not None
            assert (row["state"], row["attempts"]) == (record.state, record.attempts)
        elif row is not None:
            assert row["state"] == (RequestState.CANCELLED if future.cancelled() else RequestState.REJECTED)
        elif not future.cancelled():
            lost += 1
    assert lost <= RECORDS_DROPPED._value.get() - dropped, "rows are dropped only beyond the bound, and counted"
    await writer.stop()


async def test_what_came_last_is_written_before_the_writer_stops() -> None:
    database = MemoryDatabase()
    writer = RecordWriter(accept_s=ACCEPT_S, max_pending=6, connect=database.connect)
    writer.start()
    record, refusal = make_record(), make_record(state=RequestState.REJECTED, finished_at=clock.now())
    await writer.accept(record)
    record.state = RequestState.COMPLETED
    writer.touch(record)
    writer.add_final(refusal)
    await writer.stop()
    assert {key: row["state"] for key, row in database.rows.items()} == {
        str(record.id): RequestState.COMPLETED,
        str(refusal.id): RequestState.REJECTED,
    }


async def test_a_request_that_ends_before_its_row_is_sent_is_written_once() -> None:
    database = MemoryDatabase()
    writer = RecordWriter(accept_s=ACCEPT_S, max_pending=6, connect=database.connect)
    writer.start()
    record = make_record()
    accepted = writer.accept(record)
    assert writer.is_entering(record)
    record.finished_at, record.state = clock.now(), RequestState.COMPLETED
    await accepted
    assert (database.written, writer.pending) == ([[RequestState.COMPLETED]], 0)
    await writer.stop()

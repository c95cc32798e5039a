"""The file: private, one process at a time, moved aside when damaged, never taken for another version's."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from runner.ledger import FILE_NAME, Ledger, LedgerError
from runner.ledger.database import LOCK_NAME
from runner.limits import limits
from tests.fakes.ledgers import T0, Clock, opened
from tests.fakes.limits import set_runner_limits


def ledger_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("ledger")}


def damaged_files(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if ".damaged-" in path.name]


def modes_in(directory: Path) -> dict[str, int]:
    return {path.name: mode_of(path) for path in directory.iterdir()}


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_a_ledger_is_new_once_and_keeps_its_birth(tmp_path: Path) -> None:
    async with opened(tmp_path / "data" / "box", Clock()) as ledger:
        assert (ledger.is_new, ledger.born_at) == (True, T0)
    async with opened(tmp_path / "data" / "box", Clock(T0 + 1000)) as ledger:
        assert (ledger.is_new, ledger.born_at) == (False, T0)


async def test_only_the_owner_reads_the_files(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch(mode=0o644)
    (tmp_path / FILE_NAME).chmod(0o644)
    async with opened(tmp_path) as ledger:
        await ledger.spend_nonce("n-1", expires_at=T0)
        modes = modes_in(tmp_path)
    assert modes == dict.fromkeys((FILE_NAME, FILE_NAME + "-wal", FILE_NAME + "-shm", LOCK_NAME), 0o600)
    async with opened(tmp_path / "made-here"):
        assert mode_of(tmp_path / "made-here") == 0o700


async def test_every_commit_is_on_disk_before_it_is_believed(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        settings = await ledger._run(
            lambda db: [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
        )
    assert settings == ["wal", 2]


@pytest.mark.parametrize("damage", ["no database", "cut in half", "pages overwritten", "last page overwritten", "empty"])
async def test_a_damaged_file_is_moved_aside_and_counts_as_lost(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FILE_NAME
    async with opened(tmp_path) as ledger:
        for number in range(3):
            await ledger.spend_nonce(f"n-{number}", expires_at=T0 + 300)
    content = path.read_bytes()
    spoilt = {
        "no database": b"this is no database, but long enough to be taken for one" * 100,
        "cut in half": content[: len(content) // 8192 * 4096],
        "pages overwritten": content[:4096] + b"\xff" * (len(content) - 4096),
        "last page overwritten": content[:-4096] + b"\xff" * 4096,
        "empty": b"",
    }[damage]
    path.write_bytes(spoilt)
    with caplog.at_level(logging.ERROR):
        async with opened(tmp_path, Clock(T0 + 60)) as ledger:
            assert (ledger.is_new, ledger.born_at) == (True, T0 + 60)
            assert await ledger.spend_nonce("n-1", expires_at=T0 + 300)
    kept = damaged_files(tmp_path)
    if damage == "empty":
        assert not kept
    else:
        assert [path.read_bytes() for path in kept] == [spoilt]
        assert "ledger is damaged" in caplog.text


async def test_a_file_of_another_version_is_left_alone(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(LedgerError, match="another version"):
        await Ledger.open(tmp_path)
    assert not damaged_files(tmp_path)


async def test_a_second_program_is_kept_out_until_the_first_leaves(tmp_path: Path) -> None:
    async with opened(tmp_path):
        with pytest.raises(LedgerError, match="in use by another runner"):
            await Ledger.open(tmp_path)
    async with opened(tmp_path):
        pass


async def test_a_place_that_cannot_hold_a_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="choose another data directory"):
        await Ledger.open(tmp_path / "file")
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(LedgerError, match=FILE_NAME):
        await Ledger.open(tmp_path)


async def test_a_failed_start_leaves_neither_thread_nor_lock(tmp_path: Path) -> None:
    before = ledger_threads()
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(LedgerError):
        await Ledger.open(tmp_path)
    (tmp_path / FILE_NAME).rmdir()
    async with opened(tmp_path):
        pass
    async with asyncio.timeout(30):
        while not ledger_threads() <= before:
            await asyncio.sleep(0.005)


async def test_a_closed_ledger_says_so(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path)
    await ledger.close()
    await ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        await ledger.spend_nonce("n-1", expires_at=T0)


async def test_what_was_submitted_is_done_before_the_file_closes(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path, clock=Clock())
    spending = [asyncio.create_task(ledger.spend_nonce(f"n-{number}", expires_at=T0 + 300)) for number in range(20)]
    await asyncio.sleep(0)
    await ledger.close()
    assert all(await asyncio.gather(*spending))
    async with opened(tmp_path) as ledger:
        assert not await ledger.spend_nonce("n-19", expires_at=T0 + 300)


async def test_a_failing_disk_is_our_error(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger._run(lambda db: db.execute("PRAGMA max_page_count=1"))
        with pytest.raises(LedgerError, match="full"):
            await asyncio.gather(*(ledger.spend_nonce(f"n-{number}", expires_at=T0 + 300) for number in range(200)))
        # The failed write was undone, so the connection is fit for the next one.
        await ledger._run(lambda db: db.execute("PRAGMA max_page_count=10000"))
        assert await ledger.spend_nonce("after", expires_at=T0 + 300)


async def test_a_disk_that_hangs_is_given_up(tmp_path: Path) -> None:
    release, usual_s = threading.Event(), limits().ledger.answer_s
    async with opened(tmp_path) as ledger:
        set_runner_limits(ledger={"answer_s": 0.05})
        try:
            with pytest.raises(LedgerError, match="did not answer"):
                await ledger._run(lambda _: release.wait(30))
        finally:
            release.set()
        set_runner_limits(ledger={"answer_s": usual_s})
        assert await ledger.spent("t", "2026-11") == 0


async def test_the_queue_in_front_of_the_file_is_bounded(tmp_path: Path) -> None:
    set_runner_limits(ledger={"waiting": 5})
    release = threading.Event()
    async with opened(tmp_path) as ledger:
        blocked = asyncio.create_task(ledger._run(lambda _: release.wait(30)))
        waiting = [asyncio.create_task(ledger.spent("t", "2026-11")) for _ in range(4)]
        await asyncio.sleep(0)
        try:
            with pytest.raises(LedgerError, match="too slow"):
                await ledger.spent("t", "2026-11")
        finally:
            release.set()
        assert await asyncio.gather(*waiting) == [0, 0, 0, 0]
        assert await blocked
        assert await ledger.spent("t", "2026-11") == 0

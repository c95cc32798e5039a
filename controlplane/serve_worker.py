"""``python -m controlplane.serve_worker``: the Celery worker, which carries out what is due by the clock itself.

For one machine: one process instead of the three that ``celery worker --beat`` runs. Where several workers run, start them with
``celery worker`` and exactly one ``celery beat``.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from controlplane.env import list_alias_notes, report_setting_errors

report_setting_errors()
# The control plane runs Django's checks at its start. Here they would load every URL and page just to look at them.
os.environ.setdefault("CELERY_SKIP_CHECKS", "1")

from celery import bootsteps, signals
from celery.apps.worker import Worker
from celery.beat import ScheduleEntry, Scheduler, Service
from django.conf import settings
from django.db import InterfaceError, OperationalError

from controlplane.celery import app
from core.db.threads import with_kept_connection
from wire import clock

logger = logging.getLogger(__name__)


class DueHere(Scheduler):  # type: ignore[misc]  # Celery ships no types
    """Has a thread of this process carry out what is due."""

    producer = None

    def __init__(self, *args: object, **options: object) -> None:
        self._under_way: set[str] = set()
        self._due_at: dict[str, float] = {}
        self._is_away = False
        # A message to oneself costs more than most of the work, and needs Valkey.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="due")
        super().__init__(*args, **options)

    def tick(self, *_args: object, **_options: object) -> float:
        """Carry out what is due; return in how many seconds something is again."""
        # Celery itself works with dates, which takes 9 ms a time.
        now = clock.monotonic()
        for entry in self.schedule.values():
            every_s = entry.schedule.run_every.total_seconds()
            due_at = self._due_at.setdefault(entry.name, now + every_s)
            if now >= due_at:
                self._due_at[entry.name] = now + every_s
                self.apply_async(entry)
        return max(0.0, min(self._due_at.values()) - now)

    def apply_async(self, entry: ScheduleEntry, *_args: object, **_options: object) -> None:
        """Carry out a task of the schedule, unless it is under way since it was due before."""
        if entry.task not in self._under_way:
            self._under_way.add(entry.task)
            self._threads.submit(self._carry_out, entry.task)

    def _carry_out(self, task: str) -> None:
        try:
            with_kept_connection(self.app.tasks[task].run)
            if self._is_away:
                logger.info("due_tasks_go_on")
            self._is_away = False
        except (OperationalError, InterfaceError) as error:
            if not self._is_away:
                logger.warning("due_tasks_wait reason=%s", type(error).__name__)
            self._is_away = True
        except Exception:
            logger.exception("due_task_failed task=%s", task)
        finally:
            self._under_way.discard(task)


class BeatThread(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery ships no types
    """Runs beat beside the worker."""

    requires = {"celery.worker.components:Pool"}

    def __init__(self, worker: Worker, **options: object) -> None:
        super().__init__(worker, **options)
        self._is_stopping = False
        # In memory: every interval is short, and what is due at a start may run then.
        self._service = Service(worker.app, scheduler_cls=DueHere)
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self, worker: Worker) -> None:
        del worker
        self._thread.start()

    def stop(self, worker: Worker) -> None:
        del worker
        self._is_stopping = True
        # It may sleep until its next entry is due, which nobody needs to wait for.
        self._service.stop(wait=False)

    def _run(self) -> None:
        try:
            self._service.start()
        finally:
            if not self._is_stopping:
                logger.error("beat_ended_unasked")
                # The worker ends with it: nothing would sweep any more.
                os.kill(os.getpid(), signal.SIGTERM)


class NamedWorker(Worker):  # type: ignore[misc]  # Celery ships no types
    """A worker whose process keeps its name, by which people look for it."""

    def set_process_status(self, info: str) -> None:
        """Leave the name of the process as it is."""


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m controlplane.serve_worker", description="Run Muster's background work.")
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help="write the process id here once tasks are taken")
    ready_file: Path | None = parser.parse_args(argv).ready_file
    logging.captureWarnings(True)  # Celery warns of what it finds at its start
    app.steps["worker"].add(BeatThread)
    worker = NamedWorker(
        app=app,
        hostname=f"worker@{os.uname().nodename}",
        # Tasks are short and few, so two threads do: no second copy of Django in memory.
        pool="threads",
        concurrency=2,
        loglevel=settings.LOG_LEVEL,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    if ready_file is not None:
        # Strongly held: Celery keeps only a weak reference to a receiver unless told otherwise.
        signals.worker_ready.connect(lambda **_: ready_file.write_text(f"{os.getpid()}\n", encoding="ascii"), weak=False)
    for line in list_alias_notes():
        logger.info("settings.alias %s", line)
    worker.start()
    return int(worker.exitcode or 0)


if __name__ == "__main__":
    sys.exit(main())

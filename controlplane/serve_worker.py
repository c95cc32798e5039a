"""``python -m controlplane.serve_worker``: the Celery worker with beat in a thread of it.

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
from pathlib import Path

from controlplane.env import read_log_level, report_setting_errors

report_setting_errors()
# The control plane runs Django's checks at its start. Here they would load every URL and page just to look at them.
os.environ.setdefault("CELERY_SKIP_CHECKS", "1")

from celery import bootsteps, signals
from celery.apps.worker import Worker
from celery.beat import Scheduler, Service

from controlplane.celery import app
from controlplane.reconciling import Reconciler

logger = logging.getLogger(__name__)


class BeatThread(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery ships no types
    """Runs beat beside the worker. A beat that ends on its own takes the worker along: nothing would sweep any more."""

    requires = {"celery.worker.components:Pool"}

    def __init__(self, worker: Worker, **options: object) -> None:
        super().__init__(worker, **options)
        self._is_stopping = False
        # In memory: every interval is short, and what is due at a start may run then.
        self._service = Service(worker.app, scheduler_cls=Scheduler)
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self, worker: Worker) -> None:
        """Start the thread."""
        del worker
        self._thread.start()

    def stop(self, worker: Worker) -> None:
        """Tell the thread to end. It may sleep until its next entry is due, which nobody needs to wait for."""
        del worker
        self._is_stopping = True
        self._service.stop(wait=False)

    def _run(self) -> None:
        try:
            self._service.start()
        finally:
            if not self._is_stopping:
                logger.error("beat_ended_unasked")
                os.kill(os.getpid(), signal.SIGTERM)


class ReconcilerStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery ships no types
    """Runs the reconciler beside the worker: it goes on when the worker has lost the broker."""

    requires = {"celery.worker.components:Pool"}

    def __init__(self, worker: Worker, **options: object) -> None:
        super().__init__(worker, **options)
        self._reconciler = Reconciler()

    def start(self, worker: Worker) -> None:
        """Start the thread."""
        del worker
        self._reconciler.start()

    def stop(self, worker: Worker) -> None:
        """End it after the look under way."""
        del worker
        self._reconciler.stop()


def main(argv: list[str]) -> int:
    """Run until SIGTERM. Tasks are short and few, so two threads do: no second copy of Django in memory."""
    parser = argparse.ArgumentParser(prog="python -m controlplane.serve_worker", description="Run Muster's background work.")
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help="write the process id here once tasks are taken")
    ready_file: Path | None = parser.parse_args(argv).ready_file
    app.steps["worker"].add(BeatThread)
    app.steps["worker"].add(ReconcilerStep)
    worker = app.Worker(
        hostname=f"worker@{os.uname().nodename}",
        pool="threads",
        concurrency=2,
        loglevel=read_log_level("MUSTER_LOG_LEVEL"),
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    if ready_file is not None:
        # Strongly held: Celery keeps only a weak reference to a receiver unless told otherwise.
        signals.worker_ready.connect(lambda **_: ready_file.write_text(f"{os.getpid()}\n", encoding="ascii"), weak=False)
    worker.start()
    return int(worker.exitcode or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``python -m controlplane.serve_control``: the control plane's server process (admin pages, REST API) on Daphne.

The client-facing data plane has its own process: ``controlplane.serve_gateway``.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from django.db import Error as DatabaseFailure
from django.db import connections

from controlplane.env import add_tls_options, list_alias_notes, report_setting_errors, set_tls_variables
from core.db.base import limit_process
from core.db.threads import with_kept_connection
from core.limits import limits
from wire import clock

DESCRIPTION = "Serve Muster's control plane: the operators' pages and the REST API."

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns 0 after a stop that was asked for, 1 when the address cannot be used."""
    arguments = read_arguments(argv)
    set_tls_variables(arguments)
    report_setting_errors()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    from controlplane.daphne_server import FlowControlledServer  # chooses the reactor, so it comes before Django

    # isort: split
    from daphne.access import AccessLogGenerator
    from django.conf import settings

    from controlplane.asgi import application
    from controlplane.problems import watch
    from controlplane.tls import Pair
    from governance.operations.runs import reconcile

    limit_process(limits().core.database_silence_s)
    server = FlowControlledServer(
        application,
        host=arguments.host,
        port=arguments.port,
        plain_port=arguments.plain_port,
        pair=Pair(Path(settings.TLS_CERT), Path(settings.TLS_KEY)) if settings.TLS_CERT else None,
        action_logger=AccessLogGenerator(sys.stdout) if arguments.access_log else None,
        proxies=settings.TRUSTED_PROXIES,
        websocket_max_message_size=limits().console.socket_message_bytes,
        websocket_max_frame_size=limits().console.socket_message_bytes,
        header_timeout_s=limits().gateway.header_s,
        body_timeout_s=limits().gateway.body_s,
        write_timeout_s=arguments.write_timeout,
        stop_grace_s=arguments.stop_grace,
        server_name="muster",
    )
    for line in list_alias_notes():
        logger.info("settings.alias %s", line)
    logger.info("control_starting host=%s port=%d", arguments.host, arguments.port)
    looks = [
        Reconciler(begin_with(keep_own_secrets, reconcile), pause_s=limits().console.reconcile_s),
        Reconciler(watch, pause_s=limits().console.problem_look_s, longest_s=limits().console.problem_look_max_s),
    ]
    spare_loaded_objects()
    for reconciler in looks:
        reconciler.start()
    try:
        server.run()
    finally:
        for reconciler in looks:
            reconciler.stop()
    if server.listen_failure is not None:
        sys.stderr.write(f"muster control: {server.listen_failure}\n")
        return 1
    return 0


def begin_with(first: Callable[[], object], look: Callable[[], int]) -> Callable[[], int]:
    """Return ``look`` with ``first`` done once before it, as soon as the database lets it."""
    waiting = [first]

    def run() -> int:
        while waiting:
            waiting[0]()
            waiting.pop()
        return look()

    return run


def keep_own_secrets() -> None:
    """Bring what variables say of credentials, an admin token and requests without a key into the database."""
    from django.conf import settings

    from core.errors import ContractError
    from gateway.services.keys import keep_keyless_key
    from governance.admin_tokens import keep_own_token
    from nodes.services.credentials import keep_own_credential

    actor = "system:environment"
    for keep in (keep_own_credential, keep_own_token, partial(keep_keyless_key, is_on=not settings.REQUIRE_API_KEYS)):
        try:
            keep(actor=actor)
        except ContractError as refusal:  # what one of them lacks is no reason to leave the others
            logger.warning("settings.not_taken reason=%s", refusal)


def spare_loaded_objects() -> None:
    """Have the collector pass over what is loaded, the addresses and templates of the admin among it, and look less often.

    A look at all of it takes a tenth of a second, and would come within one page in ten.
    """
    from django.urls import get_resolver

    get_resolver().url_patterns  # noqa: B018  # loads every page's module
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


class Reconciler:
    """Looks every ``pause_s`` seconds for what is due, in a thread, whatever becomes of one look.

    ``longest_s``: where a look costs much, as with a thousand nodes, the pause grows up to it.
    """

    def __init__(self, look: Callable[[], int], *, pause_s: float, longest_s: float = 0.0) -> None:
        self._look = look
        self._pause_s, self._longest_s = pause_s, longest_s
        self._stopping = threading.Event()
        self._is_away = False
        # Not a task: so a lost message or a deaf worker only costs time, and it needs neither Celery nor the broker.
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        """Begin, with the first look at once."""
        self._thread.start()

    def stop(self) -> bool:
        """End after the look under way; False when that takes longer than ``reconcile_stop_s``: its transaction rolls back."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(limits().console.reconcile_stop_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = clock.monotonic()
            try:
                with_kept_connection(self._look)
                self._note_database(is_away=False)
            except DatabaseFailure as error:
                self._note_database(is_away=True, why=type(error).__name__)
            except Exception:
                # What cannot be looked at once may be the next time.
                logger.exception("reconcile_failed")
            wanted_s = (clock.monotonic() - began) * limits().console.problem_look_pauses
            self._stopping.wait(max(self._pause_s, min(wanted_s, self._longest_s)))
        connections.close_all()

    def _note_database(self, *, is_away: bool, why: str = "") -> None:
        # Once when it goes and once when it is back, not every few seconds in between.
        if is_away and not self._is_away:
            logger.warning("reconcile_waits reason=%s", why)
        elif self._is_away and not is_away:
            logger.info("reconcile_goes_on")
        self._is_away = is_away


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m controlplane.serve_control", description=DESCRIPTION)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--access-log", action="store_true", help="print one line for each request")
    parser.add_argument("--write-timeout", type=float, default=60.0, metavar="S", help="cut a client that reads nothing for S")
    parser.add_argument(
        "--stop-grace", type=float, default=10.0, metavar="S", help="how long requests may finish after SIGTERM"
    )
    add_tls_options(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

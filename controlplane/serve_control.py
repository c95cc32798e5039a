"""``python -m controlplane.serve_control``: the control plane's server process (admin pages, REST API) on Daphne.

The client-facing data plane has its own process: ``controlplane.serve_gateway``.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from controlplane.env import report_setting_errors
from core.limits import limits

DESCRIPTION = "Serve Muster's control plane: the operators' pages and the REST API."

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns 0 after a stop that was asked for, 1 when the address cannot be used."""
    arguments = read_arguments(argv)
    report_setting_errors()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    from controlplane.daphne_server import FlowControlledServer  # chooses the reactor, so it comes before Django

    # isort: split
    from daphne.access import AccessLogGenerator
    from daphne.endpoints import build_endpoint_description_strings
    from django.conf import settings

    from controlplane.asgi import application
    from controlplane.reconciling import Reconciler
    from core.db import limit_process

    limit_process(limits().core.database_silence_s)
    server = FlowControlledServer(
        application,
        endpoints=build_endpoint_description_strings(host=arguments.host, port=arguments.port),
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
    logger.info("control_starting host=%s port=%d", arguments.host, arguments.port)
    reconciler = Reconciler()
    reconciler.start()
    try:
        server.run()
    finally:
        reconciler.stop()
    if server.listen_failure is not None:
        sys.stderr.write(f"muster control: {server.listen_failure}\n")
        return 1
    return 0


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m controlplane.serve_control", description=DESCRIPTION)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--access-log", action="store_true", help="print one line for each request")
    parser.add_argument("--write-timeout", type=float, default=60.0, metavar="S", help="cut a client that reads nothing for S")
    parser.add_argument(
        "--stop-grace", type=float, default=10.0, metavar="S", help="how long requests may finish after SIGTERM"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

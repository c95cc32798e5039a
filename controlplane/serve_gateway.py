"""``python -m controlplane.serve_gateway``: one gateway process on uvicorn."""

from __future__ import annotations

import argparse
import gc
import logging
import os

from controlplane.env import add_tls_options, list_alias_notes, report_setting_errors, set_tls_variables

logger = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(prog="serve_gateway", description="Serve Muster's client API and its worker socket.")
    parser.add_argument("--host", help="address to listen on (default: that of MUSTER_LISTEN, or 127.0.0.1)")
    parser.add_argument("--port", type=int, help="its port (default: that of MUSTER_LISTEN, or 8080)")
    parser.add_argument("--fd", type=int, help="an inherited socket, bound to that port; who holds it too keeps it listening")
    add_tls_options(parser)
    arguments = parser.parse_args()
    set_tls_variables(arguments)
    # Until GatewayApp has started and sets its own: to look for garbage among what is loaded takes a fifth of the start.
    gc.set_threshold(1_000_000)
    report_setting_errors()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    import django

    django.setup()
    from django.conf import settings

    from controlplane.gateway_server.server import serve

    for line in list_alias_notes():
        logger.info("settings.alias %s", line)
    host, port = settings.GATEWAY_LISTEN
    port = port if arguments.port is None else arguments.port
    serve(host=arguments.host or host, port=port, fd=arguments.fd, plain_port=arguments.plain_port)


if __name__ == "__main__":
    main()

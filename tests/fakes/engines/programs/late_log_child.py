"""Stands in for the child that holds llama.cpp: its log, which another thread writes there, comes after its answer."""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

from runner.engines.children.base import Parent

LOG = """\
0.00.070.000 I llama_kv_cache: KV buffer size =     4.00 MiB
0.00.091.455 I cmn  common_init_: warming up the model with an empty run
0.00.114.894 I srv          init: model loaded
"""
LATE_S = 0.5


class Nothing(BaseHTTPRequestHandler):
    """Knows no path."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_words: object) -> None:
        """Be silent."""


if __name__ == "__main__":
    parent = Parent()
    parent.read_settings()
    server = HTTPServer(("127.0.0.1", 0), Nothing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    parent.say(stage="reading weights", fraction=0.0)
    parent.say(url=f"http://127.0.0.1:{server.server_port}")
    time.sleep(LATE_S)
    sys.stderr.write(LOG)
    sys.stderr.flush()
    parent.wait_until_told()

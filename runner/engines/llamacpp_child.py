"""The process that holds llama.cpp: one model, one HTTP server on a random loopback port.

Started by ``runner.engines.llamacpp`` as ``python -m runner.engines.llamacpp_child PARENT_PID``. Reads one JSON line
of settings from standard input, answers with one JSON line on standard output (``{"url": …}`` or ``{"error": …}``),
then serves until standard input closes. The log of llama.cpp goes to standard error. Nothing of asyncio or aiohttp is imported
here: this process should weigh what the engine weighs.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from typing import Any

UNLOAD_LIMIT_S = 4
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve one model; return the exit status."""
    # A Ctrl-C in the terminal reaches the whole process group; when to stop is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(int(sys.argv[1]))
    reply = _reserve_stdout()
    settings = json.loads(sys.stdin.readline())
    try:
        server = _start_server(settings)
        url = str(server.listening_address)
        # Destroying a server that was never asked anything can deadlock inside llama.cpp: ask once.
        _check_health(url)
    except (RuntimeError, OSError, ValueError) as error:
        reply(error=str(error))
        return 1
    reply(url=url)
    sys.stdin.read()
    # Unloading takes milliseconds; should it hang, the default action of SIGALRM ends the process.
    signal.alarm(UNLOAD_LIMIT_S)
    del server
    return 0


def _die_with(parent: int) -> None:
    """Have Linux kill this process when the runner dies; elsewhere the closed standard input must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)


def _reserve_stdout() -> Any:  # Any: a closure with keyword arguments
    """Keep standard output for our one line; whatever the engine prints goes to standard error."""
    line_out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(**fields: str) -> None:
        line_out.write(json.dumps(fields) + "\n")
        line_out.flush()

    return reply


def _start_server(settings: dict[str, Any]) -> Any:  # Any: xllamacpp has no type information
    try:
        import xllamacpp
    except ImportError as error:
        raise RuntimeError(f"the engine cannot be imported ({error}): pip install 'muster[llamacpp]'") from error
    params = xllamacpp.CommonParams()
    params.model.path = settings["model_path"]
    params.model_alias = {settings["model_name"]}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [settings["key"]]
    params.n_parallel = settings["slots"]
    params.n_ctx = settings["context_tokens"] * settings["slots"]
    params.n_batch = params.n_ubatch = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.n_threads_http = settings["slots"] + 4  # a streamed answer holds one; health checks must always find one
    params.cache_ram_mib = 0  # else an erased prompt comes back from host memory
    params.slot_save_path = os.devnull + os.sep  # erasing a slot answers 501 without one; saving to this one fails
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.warmup = False
    params.ui = False
    params.verbosity = 2
    return xllamacpp.Server(params)


def _check_health(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        if b" 200 " not in connection.recv(64):
            raise RuntimeError("the engine started but does not report itself healthy")


if __name__ == "__main__":
    sys.exit(main())

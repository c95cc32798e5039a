"""The process that holds llama.cpp: one model, one HTTP server on a random loopback port.

Started by ``runner.engines.llama`` as ``python -m runner.engines.children.llamacpp PARENT_PID``. The log of llama.cpp goes
to standard error. Nothing of asyncio or aiohttp is imported here: this process should weigh what the engine weighs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

from runner.engines.children import Parent, Settings, import_engine, run_child
from runner.limits import limits


def load(settings: Settings, parent: Parent) -> Any:  # Any: xllamacpp has no type information
    """Load the model. Raises RuntimeError, ValueError or OSError with a reason for the node's owner."""
    parent.say(stage="reading weights", fraction=0.0)
    xllamacpp = import_engine("xllamacpp", "llamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = settings["model_path"]
    params.model_alias = {settings["model_id"]}
    _set_server(params, settings)
    _set_memory(params, settings, xllamacpp)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.embedding = settings["embedding"]
    params.warmup = True
    params.verbosity = 4  # it tells what the adapter reads from the log; prompts appear only from 5 on
    return xllamacpp.Server(params)  # holds the interpreter until the model is loaded: its progress is for the parent to see


def serve(server: Any, _settings: Settings, parent: Parent) -> None:  # Any: as above
    url = str(server.listening_address)
    _check_health(url)  # destroying a server that was never asked anything can deadlock inside llama.cpp
    parent.say(url=url)
    parent.wait_until_told()


def unload(_server: Any) -> None:  # Any: as above
    """Have the default action of SIGALRM end the process, should the server's end, which takes milliseconds, hang."""
    signal.alarm(limits().children.llama_unload_s)


def _set_server(params: Any, settings: Settings) -> None:  # Any: xllamacpp has no type information
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [settings["key"]]
    params.n_parallel = settings["slots"]
    params.n_threads_http = settings["slots"] + 4  # a streamed answer holds one; health checks must always find one
    params.cache_ram_mib = 0  # else an erased prompt comes back from host memory
    params.cache_idle_slots = False  # needs that memory
    params.cache_prompt = False  # what does not say in which slot it runs must not reuse what it finds there
    params.slot_prompt_similarity = 0.0  # nor look for a slot that fits its prompt
    params.slot_save_path = os.devnull + os.sep  # erasing a slot answers 501 without one; saving to this one fails
    if settings["enable_thinking"] is not None:  # of every dialect, where a request says nothing; values are JSON texts
        params.default_template_kwargs = {"enable_thinking": json.dumps(settings["enable_thinking"])}
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.ui = False


def _set_memory(params: Any, settings: Settings, xllamacpp: Any) -> None:  # Any: xllamacpp has no type information
    params.n_ctx = settings["context_tokens"] * settings["slots"]
    params.n_batch = params.n_ubatch = settings["batch_tokens"]
    if settings["embedding"] and not _names_pooling(settings["model_path"]):  # a language model used for its embeddings
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    params.fit_params = False  # what was planned is what is loaded, or the load fails
    params.n_gpu_layers = settings["gpu_layers"]
    flash = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[settings["flash_attn"]]
    params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
    params.cache_type_k = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{settings['type_k'].upper()}")
    params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{settings['type_v'].upper()}")


def _names_pooling(path: str) -> bool:
    with open(path, "rb") as file:  # noqa: PTH123  # pathlib would double what this process imports
        # The model's own fields come before the long lists of tokens.
        return b".pooling_type" in file.read(1024 * 1024)


def _check_health(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        if b" 200 " not in connection.recv(64):
            raise RuntimeError("the engine started but does not report itself healthy")


if __name__ == "__main__":
    sys.exit(run_child(load, serve, unload))

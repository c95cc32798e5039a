"""A real llama.cpp server with one model, started as its owner would: ``python … GGUF CACHE_RAM_MIB SLOT_SAVE_PATH KEY``.

Prints its address and serves until standard input closes. An empty SLOT_SAVE_PATH or KEY is none.
"""

from __future__ import annotations

import sys
import urllib.request

import xllamacpp


def main() -> None:
    path, cache_ram_mib, slot_save_path, key = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.model_alias = {"tiny"}
    params.n_ctx, params.n_parallel = 4096, 2
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_ram_mib = int(cache_ram_mib)
    params.slot_save_path = slot_save_path
    params.api_keys = [key] if key else []
    params.endpoint_metrics = True
    params.warmup = False
    params.verbosity = 0
    server = xllamacpp.Server(params)
    url = server.listening_address
    with urllib.request.urlopen(f"{url}/health") as response:
        response.read()
    print(url, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

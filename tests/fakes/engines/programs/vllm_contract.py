"""Stands in for ``python -m vllm.entrypoints.openai.api_server``: its flags, log lines, routes, metrics and ways to fail.

Run as a program. What it is to do wrong stands in ``contract.json`` in the model's folder: ``fail`` (a text it dies with
while loading), ``hang`` (it never gets ready), ``lies`` (a reset says success and clears nothing).
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.fakes.engines.scripted_server import says, set_up, stream_words, words_answer
from tests.fakes.waiting import takes, takes_blocking

VERSION = "0.32.0"
BLOCK = 16
CONTEXT = 512
TOKEN_S = 0.005
_FLAGS = (
    "--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--disable-fastapi-docs", "--enforce-eager",
    "--enable-sleep-mode", "--enable-lora", "--enable-prefix-caching", "--no-enable-prefix-caching",
    "--enable-auto-tool-choice",
)  # fmt: skip
_VALUES = (
    "--model", "--served-model-name", "--uds", "--max-num-seqs", "--scheduling-policy", "--allowed-media-domains",
    "--max-model-len", "--tensor-parallel-size", "--runner", "--convert", "--kv-cache-memory-bytes", "--max-lora-rank",
    "--max-loras", "--gpu-memory-utilization", "--quantization", "--kv-cache-dtype", "--tool-call-parser",
    "--speculative-config", "--default-chat-template-kwargs", "--pipeline-parallel-size", "--distributed-executor-backend",
)  # fmt: skip


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line; a flag that vLLM does not have ends the program as it does there."""
    assert argv[:2] == ["-m", "vllm.entrypoints.openai.api_server"], argv
    parser = argparse.ArgumentParser(prog="api_server.py", allow_abbrev=False)
    for flag in _FLAGS:
        parser.add_argument(flag, action="store_true")
    for name in _VALUES:
        parser.add_argument(name)
    parser.add_argument("--lora-modules", nargs="+", type=json.loads, default=[])
    return parser.parse_args(argv[2:])


def say(process: str, text: str, level: str = "INFO") -> None:
    print(f"({process} pid={os.getpid()}) {level} 11-21 19:16:39 [core.py:1] {text}", flush=True)


class Slots:
    """So many requests at once, the lowest priority number first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = 0
        self.waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @asynccontextmanager
    async def hold(self, priority: int) -> AsyncIterator[None]:
        if self.running >= self.size:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self.waiting, (priority, next(self._order), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                self.waiting = [entry for entry in self.waiting if entry[2] is not turn]
                heapq.heapify(self.waiting)
                raise
        else:
            self.running += 1
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self.waiting:
            turn = heapq.heappop(self.waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1


class Server:
    """The state behind the routes."""

    def __init__(self, args: argparse.Namespace, faults: dict[str, Any], worker: subprocess.Popen[bytes]) -> None:
        self.args = args
        self.faults = faults
        self.worker = worker
        self.slots = Slots(int(args.max_num_seqs))
        self.blocks: set[tuple[str, str, tuple[object, ...]]] = set()
        self.loras: set[str] = {entry["name"] for entry in args.lora_modules}
        self.is_asleep = False
        self.seen: list[dict[str, Any]] = []
        self.begun: list[int] = []
        """The priorities of requests in the order in which they got their slot."""
        self.queried = self.hit = 0

    def routes(self) -> list[web.RouteDef]:
        answer, control = self._answer, self._control
        return [
            web.get("/health", self._health), web.get("/version", says(lambda: {"version": VERSION})),
            web.get("/metrics", self._metrics), web.get("/v1/models", says(self._list_models)),
            web.post("/v1/chat/completions", answer), web.post("/v1/completions", answer), web.post("/v1/responses", answer),
            web.post("/v1/messages", answer), web.post("/v1/embeddings", answer), web.post("/tokenize", self._tokenize),
            web.post("/reset_prefix_cache", control), web.post("/sleep", control), web.post("/wake_up", control),
            web.post("/v1/load_lora_adapter", self._lora), web.post("/v1/unload_lora_adapter", self._lora),
            web.get("/seen", says(lambda: self.seen)), web.get("/begun", says(lambda: self.begun)),
        ]  # fmt: skip

    async def watch_worker(self) -> None:
        """Exit some time after the worker has died, as vLLM does."""
        while self.worker.poll() is None:
            await takes(0.02)
        say("APIServer", "EngineCore encountered an issue. See stack trace for the root cause.", "ERROR")
        await takes(0.5)
        os._exit(1)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self.worker.poll() is not None else 200)

    def _list_models(self) -> object:
        entries = [{"id": self.args.served_model_name, "max_model_len": int(self.args.max_model_len or CONTEXT)}]
        return {"data": entries + [{"id": name, "parent": entries[0]["id"]} for name in sorted(self.loras)]}

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("model") not in {None, self.args.served_model_name, *self.loras}:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if body.get("messages") == []:
            return _error(400, "list index out of range")
        count = len(_tokens(body))
        return web.json_response({"count": count, "max_model_len": CONTEXT, "tokens": list(range(count))})

    async def _control(self, request: web.Request) -> web.Response:
        if os.environ.get("VLLM_SERVER_DEV_MODE") != "1":
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.path == "/reset_prefix_cache":
            if self.slots.running:
                return web.json_response({"success": False})
            if not self.faults.get("lies"):
                self.blocks.clear()
            return web.json_response({"success": True})
        self.is_asleep = request.path == "/sleep"
        if self.is_asleep:
            self.blocks.clear()
        return web.json_response({"status": "sleeping" if self.is_asleep else "awake"})

    async def _lora(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["lora_name"]
        if not self.args.enable_lora:
            return _error(500, "LoRA is not enabled")
        if request.path == "/v1/unload_lora_adapter":
            if name not in self.loras:
                return _error(404, f"The lora adapter '{name}' cannot be found.")
            self.loras.remove(name)
            return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
        if name in self.loras:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if not Path(body["lora_path"], "adapter_config.json").is_file():  # noqa: ASYNC240
            return _error(404, f"Loading lora {name} failed: No adapter found for {body['lora_path']}")
        self.loras.add(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        # json.loads also reads UTF-16 and takes the last of two equal names, like the original.
        body = json.loads(await request.read())
        self.seen.append({"path": request.path, "headers": {k.lower(): v for k, v in request.headers.items()}, "body": body})
        if body.get("model") not in {self.args.served_model_name, *self.loras}:
            return _error(404, f"The model `{body.get('model')}` does not exist.")
        while self.is_asleep:
            await takes(0.02)
        priority = int(request.headers.get("x-vllm-priority", body.get("priority", 0)))
        async with self.slots.hold(priority):
            self.begun.append(priority)
            return await self._generate(request, body)

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        tokens = _tokens(body)
        cached = self._look_up(body, tokens)
        wanted = int(body.get("max_tokens") or body.get("max_output_tokens") or 4)
        answer = words_answer(wanted, len(tokens), model=body["model"])
        answer["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        if not body.get("stream"):
            await takes(TOKEN_S * wanted)
            return web.json_response(answer)
        tells_usage = (body.get("stream_options") or {}).get("include_usage")
        return await stream_words(request, wanted, TOKEN_S, usage=answer["usage"] if tells_usage else None, id="cmpl-1")

    def _look_up(self, body: dict[str, Any], tokens: list[object]) -> int:
        """Return how many tokens are cached, and cache the whole blocks of this prompt."""
        if self.args.no_enable_prefix_caching:
            return 0
        keys = [
            (str(body.get("cache_salt")), body["model"], tuple(tokens[: count * BLOCK]))
            for count in range(1, len(tokens) // BLOCK + 1)
        ]
        found = sum(1 for key in keys if key in self.blocks and len(key[2]) < len(tokens)) * BLOCK
        self.blocks.update(keys)
        self.queried, self.hit = self.queried + len(tokens), self.hit + found
        return found

    async def _metrics(self, _request: web.Request) -> web.Response:
        labels = f'engine="0",model_name="{self.args.served_model_name}"'
        kv_bytes = int(self.args.kv_cache_memory_bytes or 0)
        size = kv_bytes // 1024
        config = (
            f'block_size="{BLOCK}",enable_prefix_caching="{not self.args.no_enable_prefix_caching}",engine="0",'
            f'kv_cache_memory_bytes="{kv_bytes or None}",kv_cache_size_tokens="{size}"'
        )
        used = len(self.blocks) * BLOCK / size if size else 0.0
        text = (
            "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running{{{labels}}} {float(self.slots.running)}\n"
            f"vllm:num_requests_waiting{{{labels}}} {float(len(self.slots.waiting))}\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} {used}\n"
            f"vllm:prefix_cache_queries_total{{{labels}}} {float(self.queried)}\n"
            f"vllm:prefix_cache_hits_total{{{labels}}} {float(self.hit)}\n"
            f"vllm:cache_config_info{{{config}}} 1.0\n"
            "# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.\n"
            "# TYPE vllm:num_preemptions_total counter\n"
            f"vllm:num_preemptions_total{{{labels}}} 3.0\n"
            "# HELP vllm:num_preemptions_created Cumulative number of preemption from the engine.\n"
            "# TYPE vllm:num_preemptions_created gauge\n"
            f"vllm:num_preemptions_created{{{labels}}} 1.7e+09\n"
            "# HELP vllm:request_success_total Count of successfully processed requests.\n"
            "# TYPE vllm:request_success_total counter\n"
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} {float(len(self.seen))}\n'
            "# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.\n"
            "# TYPE vllm:time_to_first_token_seconds histogram\n"
            f'vllm:time_to_first_token_seconds_bucket{{{labels},le="0.001"}} 0.0\n'
            f'vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} {float(len(self.seen))}\n'
            f"vllm:time_to_first_token_seconds_count{{{labels}}} {float(len(self.seen))}\n"
            f"vllm:time_to_first_token_seconds_sum{{{labels}}} 0.5\n"
        )
        return web.Response(text=text)


def _tokens(body: dict[str, Any]) -> list[object]:
    prompt = body.get("prompt") or body.get("input")
    if isinstance(prompt, list):
        return prompt
    words = prompt or " ".join(str(message["content"]) for message in body.get("messages", []))
    return list(words.split())


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "BadRequestError", "code": status}}, status=status)


async def watch_cluster(args: argparse.Namespace) -> None:
    """Return once Ray has the GPUs that this needs; when it has them no more the program ends, as vLLM does."""
    if args.distributed_executor_backend is None:
        return
    assert args.distributed_executor_backend == "ray"
    host, _, port = os.environ["RAY_ADDRESS"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    needs = int(args.tensor_parallel_size) * int(args.pipeline_parallel_size)
    writer.write(json.dumps({"token": os.environ["RAY_AUTH_TOKEN"], "needs": needs}).encode() + b"\n")
    say("EngineCore", "Waiting for creating a placement group of specs for 10 seconds.")
    if not json.loads(await reader.readline() or b"{}").get("ready"):
        sys.exit("ValueError: The number of required GPUs exceeds the total number of available GPUs in the placement group.")

    async def follow() -> None:
        await reader.readline()
        writer.close()
        say("EngineCore", "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "ERROR")
        await takes(0.5)
        os._exit(1)

    watches.add(asyncio.create_task(follow()))


watches: set[asyncio.Task[None]] = set()


async def serve(args: argparse.Namespace, faults: dict[str, Any], worker: subprocess.Popen[bytes]) -> None:
    await watch_cluster(args)
    server = Server(args, faults, worker)
    runner = await set_up(server.routes())
    await web.UnixSite(runner, args.uds).start()
    say("APIServer", f"Starting vLLM server on unix:{args.uds}")
    await server.watch_worker()


def main() -> None:
    args = parse(sys.argv[1:])
    model = Path(args.model)
    faults = json.loads((model / "contract.json").read_text()) if (model / "contract.json").exists() else {}
    say("APIServer", "Resolved architecture: LlamaForCausalLM")
    # The worker ignores the death of its parent, like the original's.
    worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", "VLLM::EngineCore"])
    say("EngineCore", "Initializing a V1 LLM engine (v0.32.0) with config: model='m'")
    if faults.get("fail"):
        print(
            '(EngineCore pid=7) Traceback (most recent call last):\n(EngineCore pid=7)   File "x.py", line 1', file=sys.stderr
        )
        print(f"(EngineCore pid=7) {faults['fail']}", file=sys.stderr)
        print("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}", file=sys.stderr)
        worker.kill()
        sys.exit(1)
    say("Worker", "Starting to load model m...")
    for index in range(5):
        line = f"Loading safetensors checkpoint shards: {index * 25:3d}% Completed | {index}/4 [00:00<00:00,  9.9it/s]\n"
        print(f"\r{line}", file=sys.stderr, flush=True)
    say("Worker", "Loading weights took 0.01 seconds")
    say("Worker", "Model loading took 0.25 GiB memory and 0.1 seconds")
    say("EngineCore", "GPU KV cache size: 65,536 tokens, Maximum concurrency for 2,048 tokens per request: 32.00x")
    while faults.get("hang"):
        takes_blocking(1.0)
    say("EngineCore", "init engine (profile, create kv cache, warmup model) took 0.13 s")
    asyncio.run(serve(args, faults, worker))


if __name__ == "__main__":
    main()

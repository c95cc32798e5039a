"""Stands in for ``text-generation-launcher``: its flags, log lines, routes, metrics and errors.

Run as a program. What it is to do wrong stands in ``contract.json`` in the model's folder: ``fail`` (a text its shard dies
with), ``overloaded`` (every request is answered with 429).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.fakes.engines.scripted_server import says, set_up, stream_words, words_answer
from tests.fakes.waiting import takes

TOKEN_S = 0.005
_NAMES = (
    "--model-id", "--hostname", "--port", "--prometheus-port", "--master-port", "--shard-uds-path", "--max-batch-size",
    "--max-concurrent-requests", "--max-total-tokens", "--max-input-tokens", "--num-shard", "--quantize", "--lora-adapters",
)  # fmt: skip


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line; an unknown flag ends the program."""
    parser = argparse.ArgumentParser(prog="text-generation-launcher", allow_abbrev=False)
    for name in _NAMES:
        parser.add_argument(name)
    return parser.parse_args(argv)


def say(text: str, level: str = "INFO") -> None:
    colour = "31m" if level == "ERROR" else "32m"
    print(f"2026-11-21T19:16:39.123456Z \x1b[{colour}{level}\x1b[0m text_generation_launcher: {text}", flush=True)


class Server:
    """The state behind the routes."""

    def __init__(self, args: argparse.Namespace, faults: dict[str, Any]) -> None:
        self.args = args
        self.faults = faults
        self.key = os.environ.get("API_KEY", "")
        self.running = 0
        self.seen: list[dict[str, Any]] = []

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", says(dict)), web.get("/info", says(self._tell)), web.get("/metrics", self._metrics),
            web.post("/v1/chat/completions", self._answer), web.post("/v1/completions", self._answer),
            web.post("/tokenize", self._tokenize), web.post("/chat_tokenize", self._chat_tokenize),
            web.get("/seen", says(lambda: self.seen)),
        ]  # fmt: skip

    def _tell(self) -> object:
        limit = int(self.args.max_concurrent_requests or 128)
        return {
            "model_id": self.args.model_id, "model_sha": None, "max_concurrent_requests": limit, "max_input_tokens": 1023,
            "max_total_tokens": 1024, "validation_workers": 2, "router": "text-generation-router", "version": "3.3.6-dev",
        }  # fmt: skip

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=(
            "# TYPE tgi_batch_current_size gauge\n"
            f"tgi_batch_current_size {self.running}\n"
            f"tgi_batch_current_max_tokens {self.running * 100}\n"
            "tgi_batch_max_total_tokens 4096\n"
            "tgi_queue_size 0\n"
            'tgi_request_failure{err="overloaded"} 3\n'
        ))  # fmt: skip

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response(_tokens((await request.json())["inputs"].split()))

    async def _chat_tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not body["messages"]:
            message = "Input validation error: `inputs` cannot be empty"
            return web.json_response({"error": message, "error_type": "validation"}, status=422)
        return web.json_response({"tokenize_response": _tokens(_words(body)), "templated_text": " ".join(_words(body))})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        body = await request.json()
        self.seen.append(body)
        if self.faults.get("overloaded"):
            return web.json_response({"error": "Model is overloaded", "error_type": "overloaded"}, status=429)
        if body["model"] != "tgi" and body["model"] not in (self.args.lora_adapters or "").split(","):
            return web.json_response({"error": "Request failed: unknown adapter", "error_type": "generation"}, status=424)
        wanted = int(body.get("max_tokens") or 4)
        if wanted < 1:
            message = "Input validation error: `max_new_tokens` must be strictly positive"
            return web.json_response({"error": message, "error_type": "validation"}, status=422)
        self.running += 1
        try:
            return await self._generate(request, body, wanted)
        finally:
            self.running -= 1

    async def _generate(self, request: web.Request, body: dict[str, Any], wanted: int) -> web.StreamResponse:
        if not body.get("stream"):
            await takes(TOKEN_S * wanted)
            return web.json_response(words_answer(wanted, len(_words(body)), model=self.args.model_id))
        return await stream_words(request, wanted, TOKEN_S)


def _words(body: dict[str, Any]) -> list[str]:
    texts = [body["prompt"]] if "prompt" in body else [message["content"] for message in body["messages"]]
    return " ".join(texts).split()


def _tokens(words: list[str]) -> list[dict[str, object]]:
    return [{"id": number, "text": word, "start": 0, "stop": 1} for number, word in enumerate(words)]


async def serve(args: argparse.Namespace, faults: dict[str, Any], shard: subprocess.Popen[bytes]) -> None:
    runner = await set_up(Server(args, faults).routes())
    await web.TCPSite(runner, args.hostname, int(args.port)).start()
    say("Connected")
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    while shard.poll() is None and not stopping.is_set():
        await takes(0.02)
    os._exit(0 if stopping.is_set() else 1)


def main() -> None:
    args = parse(sys.argv[1:])
    described = Path(args.model_id, "contract.json")
    faults = json.loads(described.read_text()) if described.exists() else {}
    say("Starting check and download process for m")
    say("Successfully downloaded weights for m")
    say("Starting shard rank=0")
    shard = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", "tgi-shard"])
    if faults.get("fail"):
        shard.kill()
        say(f"Shard complete standard error output:\n\n{faults['fail']} rank=0", "ERROR")
        say("Shutting down shards")
        print("Error: ShardCannotStart", file=sys.stderr, flush=True)
        sys.exit(1)
    say("Shard ready in 5.2s rank=0")
    say("Starting Webserver")
    say("Warming up model")
    asyncio.run(serve(args, faults, shard))


if __name__ == "__main__":
    main()

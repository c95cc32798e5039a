"""``python -m conformance.engine``: run the scripted engine until it is told to stop, and print where it listens."""

from __future__ import annotations

import argparse
import asyncio
import signal

from conformance.engine.server import MESSAGES, RESPONSES, serve_engine


def main() -> None:
    """Read the options and serve."""
    parser = argparse.ArgumentParser(prog="python -m conformance.engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 = any free one (default)")
    parser.add_argument("--model", action="append", metavar="NAME", help="a model to list; may be repeated (default: scripted)")
    parser.add_argument("--native-messages", action="store_true", help="answer /v1/messages as well")
    parser.add_argument("--native-responses", action="store_true", help="answer /v1/responses as well")
    parser.add_argument("--strict-tools", action="store_true", help="refuse there the tools that vLLM refuses")
    options = parser.parse_args()
    native = [path for path, wanted in ((MESSAGES, options.native_messages), (RESPONSES, options.native_responses)) if wanted]
    asyncio.run(_serve(options, native))


async def _serve(options: argparse.Namespace, native: list[str]) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    models, is_strict = options.model or ["scripted"], options.strict_tools
    async with serve_engine(models=models, native=native, is_strict=is_strict, host=options.host, port=options.port) as url:
        print(url, flush=True)
        await stopped.wait()


if __name__ == "__main__":
    main()

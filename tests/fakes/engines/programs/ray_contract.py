"""Stands in for ``ray start``: its flags, what it prints, the token it asks for, and its processes that outlive their parent.

Run as a program. Members and vLLM talk to the head over a socket of their own: a first line says who they are, and the
connection is their membership, so the head knows how many GPUs the cluster has. ``RAY_CONTRACT_FAIL`` makes it die at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field

LINE = "Ray runtime started."


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line; a flag that Ray does not have ends the program as it does there."""
    assert argv[:1] == ["start"], argv
    parser = argparse.ArgumentParser(prog="ray start", allow_abbrev=False)
    for flag in ("--head", "--disable-usage-stats", "--block"):
        parser.add_argument(flag, action="store_true")
    for name in ("--address", "--node-ip-address", "--include-dashboard"):
        parser.add_argument(name)
    for name in ("--port", "--num-gpus"):
        parser.add_argument(name, type=int)
    args = parser.parse_args(argv[1:])
    assert args.block, "its processes would not be ours"
    assert args.head is not bool(args.address), "a node begins a cluster or joins one"
    assert args.head or args.include_dashboard is None, "of the head alone"
    return args


@dataclass
class Head:
    """The cluster as its head knows it. ``waiting``: drivers that need more GPUs than there are."""

    token: str
    gpus: int
    writers: dict[asyncio.StreamWriter, int] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = json.loads(await reader.readline())
        if said.get("token") != self.token:
            writer.write(b'{"error": "InvalidAuthToken"}\n')
            writer.close()
            return
        if "gpus" in said:
            self.writers[writer] = said["gpus"]
            writer.write(b'{"joined": true}\n')
            self._tell()
            await reader.read()
            self.writers.pop(writer, None)
            self._tell()
        else:
            await self._drive(said["needs"], writer)
        writer.close()

    async def _drive(self, needs: int, writer: asyncio.StreamWriter) -> None:
        has_them = False
        while True:
            enough = self.gpus + sum(self.writers.values()) >= needs
            if has_them is not enough:
                has_them = enough
                writer.write(json.dumps({"ready": enough}).encode() + b"\n")
            changed = self.changed
            await changed.wait()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


async def begin(args: argparse.Namespace) -> None:
    head = Head(os.environ["RAY_AUTH_TOKEN"], args.num_gpus)
    server = await asyncio.start_server(head.serve, args.node_ip_address, args.port)
    print(f"Local node IP: {args.node_ip_address}\n\n{LINE}\n", flush=True)
    await server.serve_forever()


async def join(args: argparse.Namespace) -> None:
    host, _, port = args.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(json.dumps({"token": os.environ["RAY_AUTH_TOKEN"], "gpus": args.num_gpus}).encode() + b"\n")
    answer = json.loads(await reader.readline())
    if not answer.get("joined"):
        sys.exit(f"ray.exceptions.AuthenticationError: {answer}")
    print(f"Local node IP: {args.node_ip_address}\n\n{LINE}\n", flush=True)
    await reader.read()  # Ray's own patience with a head that is gone is a minute; nobody here waits for it
    await asyncio.Event().wait()


def main() -> None:
    args = parse(sys.argv[1:])
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) == args.num_gpus
    assert os.environ["VLLM_HOST_IP"] == args.node_ip_address
    if os.environ.get("RAY_CONTRACT_FAIL"):
        sys.exit("RuntimeError: Failed to start the node: no space left on device")
    # Of its processes none ends by itself when the parent dies.
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", "ray::raylet"])
    asyncio.run(begin(args) if args.head else join(args))


if __name__ == "__main__":
    main()

"""vLLM on Ray: one replica over several nodes. The head starts Ray and vLLM and serves; the others lend their GPUs to it.

Options as in Ray's "Cluster Management CLI" and vLLM's "Parallelism and Scaling". Ray's ports take commands from whoever
reaches them; from Ray 2.52 on they ask for a token, which is made for each replica and known to its members alone.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from runner.definitions.plan import Cluster, LoadPlan, Progress, Report
from runner.engines.cluster import Channel, Gathering, Note, join_head, split_address
from runner.engines.http_engine import ServerProcess
from runner.engines.port import Call, Capabilities, EngineStats, FlushOutcome, FlushRequest, FlushResult, Health, Response
from runner.engines.process import Child, child_environment, gpu_environment, kill_rest, list_tree
from runner.engines.tgi import free_ports
from runner.engines.vllm_command import find_python
from runner.errors import EngineError, ReplicaUnloaded
from runner.limits import limits

_STARTED = "Ray runtime started"
Value = TypeVar("Value")


def find_ray() -> str:
    """Return the command of Ray beside vLLM's interpreter. Raises EngineError that says how to get it."""
    python = find_python()
    found = Path(python).with_name("ray")
    if not os.access(found, os.X_OK):
        raise EngineError(f"Ray is not installed beside vLLM: there is no {found}; run {python} -m pip install ray")
    return str(found)


def build_head_command(ray: str, cluster: Cluster, port: int) -> list[str]:
    return [ray, "start", "--head", f"--port={port}", "--include-dashboard=false", *_common_flags(cluster)]


def build_member_command(ray: str, cluster: Cluster, address: str) -> list[str]:
    return [ray, "start", f"--address={address}", *_common_flags(cluster)]


def _common_flags(cluster: Cluster) -> list[str]:
    host, _ = split_address(cluster.own.address)
    # --block keeps Ray's processes below ours: they end with us.
    return [f"--node-ip-address={host}", f"--num-gpus={len(cluster.own.gpus)}", "--disable-usage-stats", "--block"]


def build_environment(cluster: Cluster, *, address: str, token: str) -> dict[str, str]:
    """Return what Ray's processes, and vLLM's among them, see: the GPUs of this node's part alone."""
    host, _ = split_address(cluster.own.address)
    return {
        **child_environment(),
        **gpu_environment(cluster.own.gpus),
        "RAY_ADDRESS": address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "VLLM_HOST_IP": host,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


class RayProcess:
    """Ray on this node, held by us."""

    def __init__(self, label: str) -> None:
        self.child = Child(f"Ray {label}")
        self._has_started = asyncio.Event()

    async def start(self, command: list[str], environment: Mapping[str, str]) -> None:
        """Return when Ray runs here. Raises EngineError with its last words."""
        self._has_started.clear()
        await self.child.start_foreign(command, environment, self._read)
        started, gone = asyncio.create_task(self._has_started.wait()), asyncio.create_task(self.child.wait_gone())
        try:
            await asyncio.wait({started, gone}, timeout=limits().cluster.ray_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            started.cancel()
            gone.cancel()
        if not self._has_started.is_set():
            is_running = self.child.is_running
            await self.child.kill()
            words = f"within {limits().cluster.ray_s:g} s" if is_running else self.child.last_lines()
            raise EngineError(f"Ray did not start on this node: {words}")

    async def stop(self) -> None:
        """Kill Ray with all that it started. Raises EngineError when something of it stays."""
        tree = await asyncio.to_thread(list_tree, self.child.pid)
        await self.child.kill()
        if left := await kill_rest(tree):
            raise EngineError(f"processes {left} of Ray cannot be killed: they wait for a driver; restart the machine")

    def _read(self, line: str) -> None:
        if _STARTED in line:
            self._has_started.set()


class RayHead:
    """Loads a replica over several nodes: members are gathered, Ray is started on all of them, then vLLM on this one.

    ``vllm`` starts the server, which ``check`` asks for its health. The loader is its own ``child``: what is seen of the
    processes of this node is seen of both, and the loss of a member ends them all.
    """

    is_attached = False

    def __init__(
        self, cluster: Cluster, plan: LoadPlan, vllm: ServerProcess, check: Callable[[], Awaitable[Health]]
    ) -> None:  # fmt: skip
        self._cluster = cluster
        self._check = check
        self._path = str(plan.path)
        self._vllm = vllm
        self._ray = RayProcess(plan.model_id)
        self._gathering: Gathering | None = None
        self._lost: asyncio.Future[EngineError] = asyncio.Future()
        self._end: EngineError | None = None
        self.environment: dict[str, str] = {}
        """What vLLM needs to find Ray, while that runs."""

    @property
    def child(self) -> RayHead:
        return self

    @property
    def pids(self) -> tuple[int, ...]:
        return (*self._vllm.child.pids, *self._ray.child.pids)

    async def load(self, report: Report) -> None:
        self._lost, self._end = asyncio.Future(), None
        try:
            await self._load(report)
        except BaseException as error:
            self._end = error if isinstance(error, EngineError) else EngineError("the load was cancelled")
            raise

    async def _load(self, report: Report) -> None:
        bounds, cluster = limits().cluster, self._cluster
        self._gathering = gathering = Gathering(cluster, self._note_loss)
        await gathering.open()
        others = len(cluster.members) - 1
        report(Progress(f"waiting for {others} other node{'s' if others > 1 else ''}", 0.0))
        await self._unless_lost(gathering.gather(bounds.join_s))
        for channel, ready in await self._unless_lost(gathering.expect("ready", bounds.join_s)):
            if ready.path != self._path:
                raise EngineError(
                    f"{channel.name} has the model at {ready.path} and the head at {self._path}; vLLM on Ray needs one path"
                )
        host, _ = split_address(cluster.own.address)
        [port] = await asyncio.to_thread(free_ports, 1)
        address, token = f"{host}:{port}", secrets.token_hex(32)
        self.environment = build_environment(cluster, address=address, token=token)
        report(Progress("starting Ray", 0.02))
        command = build_head_command(await asyncio.to_thread(find_ray), cluster, port)
        await self._unless_lost(self._ray.start(command, self.environment))
        gathering.tell(Note(say="ray", address=address, token=token))
        await self._unless_lost(gathering.expect("joined", bounds.ray_s + bounds.meet_s))
        await self._unless_lost(self._vllm.load(report))
        gathering.tell(Note(say="serving"))

    async def _unless_lost(self, work: Coroutine[None, None, Value]) -> Value:
        """Return what ``work`` returns. Raises EngineError as soon as a member is gone."""
        task = asyncio.create_task(work)
        try:
            every: set[asyncio.Future[Any]] = {task, self._lost}
            await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._lost.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return task.result()

    def _note_loss(self, error: EngineError) -> None:
        if not self._lost.done():
            self._lost.set_result(error)

    async def unload(self, *, gently: bool) -> None:
        """End the replica on every member. Raises EngineError when something of it stays on this one."""
        if self._end is None and self._gathering is not None and await self._check() is not Health.OK:
            self._end = EngineError(f"vLLM does not answer on the head {self._cluster.own.name}")
        try:
            await self._vllm.unload(gently=gently)
        finally:
            try:
                await self._ray.stop()
            finally:
                gathering, self._gathering, self.environment = self._gathering, None, {}
                if gathering is not None:
                    reason = str(self._end) if self._end is not None else f"{self._cluster.own.name} unloaded it"
                    is_orderly = self._end is None or isinstance(self._end, ReplicaUnloaded)
                    await gathering.close(reason, is_orderly=is_orderly)

    async def wait_gone(self) -> None:
        """Wait for the end of vLLM, of Ray or of a member. Raises EngineError that says which."""
        await _first_of(self._vllm.child.wait_gone(), self._ray.child.wait_gone(), beside=self._lost)
        if self._lost.done():
            self._end = self._lost.result()
        else:
            what = "Ray" if self._vllm.child.is_running else "vLLM"
            self._end = EngineError(f"{what} ended on the head {self._cluster.own.name}")
        raise self._end


class RayMember:
    """The part of a replica that this node lends to the head: an engine that takes no requests.

    It is loaded while the head serves. When the connection to the head ends, Ray ends here, and the other way round.
    """

    name = "vllm"
    loop = None
    poll_s, restart_max_s = 2.0, 120.0
    capabilities = Capabilities(endpoints=(), keeps_nothing=True)

    def __init__(self, cluster: Cluster, plan: LoadPlan) -> None:
        self._cluster = cluster
        self._path = str(plan.path)
        self._ray = RayProcess(plan.model_id)
        self._channel: Channel | None = None
        self._end: EngineError | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        return self._ray.child.pids

    async def load(self, report: Report) -> None:
        try:
            await self._load(report)
        except BaseException as error:
            self._end = error if isinstance(error, EngineError) else EngineError("the load was cancelled")
            await self.unload(gently=False)
            raise

    async def _load(self, report: Report) -> None:
        bounds, cluster, self._end = limits().cluster, self._cluster, None
        report(Progress(f"joining the head {cluster.head.name}", 0.0))
        ray = await asyncio.to_thread(find_ray)
        self._channel = channel = await join_head(cluster, within_s=bounds.join_s)
        channel.keep_alive()
        channel.send(Note(say="ready", path=self._path))
        told = await channel.expect("ray", 2 * bounds.join_s + bounds.ray_s)
        report(Progress("starting Ray", 0.05))
        environment = build_environment(cluster, address=told.address, token=told.token)
        await self._ray.start(build_member_command(ray, cluster, told.address), environment)
        channel.send(Note(say="joined"))
        report(Progress(f"{cluster.head.name} loads the model", None))
        serving = asyncio.create_task(channel.expect("serving", limits().engines.server_load_s + bounds.ray_s))
        await _first_of(serving, self._ray.child.wait_gone())
        if serving.cancelled():
            raise EngineError(f"Ray ended on {cluster.own.name}: {self._ray.child.last_lines()}")
        await serving

    async def unload(self, *, gently: bool) -> None:
        """Leave the replica, which ends it everywhere. Raises EngineError when Ray stays."""
        del gently
        if self._end is None and not self._ray.child.is_running:
            self._end = EngineError(f"Ray ended on {self._cluster.own.name}")
        channel, self._channel = self._channel, None
        if channel is not None:
            reason = str(self._end) if self._end is not None else f"{self._cluster.own.name} unloaded it"
            is_orderly = self._end is None or isinstance(self._end, ReplicaUnloaded)
            await channel.close(reason, is_orderly=is_orderly)
        await self._ray.stop()

    async def wait_gone(self) -> None:
        """Wait for the end of Ray here, or of the replica. Raises EngineError that says which."""
        assert self._channel is not None
        ended = asyncio.create_task(self._channel.receive())
        await _first_of(ended, self._ray.child.wait_gone())
        if not ended.cancelled():
            error = ended.exception()
            self._end = error if isinstance(error, EngineError) else EngineError(f"{self._channel.name} broke the protocol")
        else:
            self._end = EngineError(f"Ray ended on {self._cluster.own.name}")
        raise self._end

    async def health(self) -> Health:
        return Health.OK if self._channel is not None and self._ray.child.is_running else Health.UNREACHABLE

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        del request
        return FlushOutcome(FlushResult.NOTHING_KEPT, f"the head {self._cluster.head.name} has what is kept")

    def stream(self, call: Call) -> AbstractAsyncContextManager[Response]:
        del call
        raise aiohttp.ClientConnectionError("this node only lends its GPUs to the head of the replica")

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        del fields
        raise EngineError("this node only lends its GPUs to the head of the replica")

    async def read_metrics(self) -> str:
        return ""


def make_member(plan: LoadPlan, client: aiohttp.ClientSession) -> RayMember:
    """Return the part of a replica over several nodes that this one has, where it is not the head."""
    del client
    assert plan.cluster is not None
    return RayMember(plan.cluster, plan)


async def _first_of(*waits: Awaitable[object], beside: asyncio.Future[EngineError] | None = None) -> None:
    """Return when one of them is done, or ``beside``; the others, but not that one, are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    every: list[asyncio.Future[Any]] = [*tasks, *([beside] if beside is not None else [])]
    try:
        await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

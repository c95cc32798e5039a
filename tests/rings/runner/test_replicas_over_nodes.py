"""One replica over several real nodes, with programs that speak as vLLM and Ray do: all members or none, and how it ends."""

from __future__ import annotations

import asyncio
import base64
import shutil
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner.definitions.plan import Cluster, Member
from runner.engines.cluster import Gathering, Note, join_head
from runner.errors import EngineError
from runner.operations.keys import Identity, load_identity
from tests.fakes.control_process import free_port
from tests.fakes.engines.cases import build_driver, write_contract_python
from tests.fakes.model_files import write_folder
from tests.fakes.policies import Fleet
from tests.fakes.runners.governed import Control, enrol
from tests.fakes.runners.process import RunningBox, is_alive, run_box
from tests.fakes.scripted_gateway import run_gateway
from tests.fakes.waiting import eventually
from wire import bridge
from wire.ids import new_uuid7

pytestmark = pytest.mark.timeout(180)

MODEL = "big"
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 8,
}
REFUSED = "op_token_refused"


@dataclass
class Node:
    """A node of the fleet: its process, and the gateway that it is connected to."""

    name: str
    process: RunningBox
    control: Control
    address: str

    @property
    def runner_id(self) -> str:
        return self.control.governance.runner_id

    @property
    def replica(self) -> bridge.ReplicaInfo | None:
        """What it said last of the model; None = it has nothing of it."""
        told = [message for message in self.control.box.messages if isinstance(message, bridge.Telemetry)]
        return next((one for one in told[-1].replicas if one.model == MODEL), None) if told else None

    async def shows(self, state: str | None) -> bridge.ReplicaInfo | None:
        def is_so() -> bool:
            return (self.replica.state if self.replica is not None else None) == state

        await eventually(is_so, f"{self.name} shows the replica as {state}")
        return self.replica

    def engines(self) -> list[psutil.Process]:
        return [process for child in self.process.children() for process in [child, *child.children(recursive=True)]]


@dataclass
class Rack:
    """Nodes that know each other, and the people who approve for them."""

    nodes: dict[str, Node]

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def members(self, *names: str) -> list[dict[str, object]]:
        nodes = [self.nodes[name] for name in names or self.nodes]
        return [{"node": node.runner_id, "address": node.address, "gpus": [0, 1]} for node in nodes]

    def approve(self, *names: str, **changes: Any) -> dict[str, bridge.OpCommand]:
        """Return the command of each node for one approved load over all of them: one statement, a token for each."""
        params = {"modelId": MODEL, "members": self.members(*names), **changes}
        op_id, now, nodes = new_uuid7().hex, time.time(), [self.nodes[name] for name in names or self.nodes]
        targets = [node.runner_id for node in nodes]
        return {
            node.name: node.control.command("model-load", params, op_id=op_id, now=now, targets=targets) for node in nodes
        }  # fmt: skip

    async def carry_out(self, commands: dict[str, bridge.OpCommand]) -> dict[str, bridge.OpStatus]:
        ends = await asyncio.gather(*(self.nodes[name].control.carry_out(one) for name, one in commands.items()))
        return dict(zip(commands, ends, strict=True))

    async def load(self, *names: str) -> list[psutil.Process]:
        """Load the model over these nodes and return the processes that hold it."""
        ends = await self.carry_out(self.approve(*names))
        assert [end.state for end in ends.values()] == ["succeeded"] * len(ends), ends
        return [process for name in names or self.nodes for process in self.nodes[name].engines()]


async def gone(processes: Sequence[psutil.Process]) -> None:
    await eventually(lambda: not any(map(is_alive, processes)), "nothing of Ray or vLLM is left")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc) to build a driver library")
    return build_driver(tmp_path_factory.mktemp("driver"), "WITH_V3")


@asynccontextmanager
async def run_node(folder: Path, name: str, fleet: Fleet, driver: Path, **env: str) -> AsyncIterator[Node]:
    place, address = folder / name, f"127.0.0.1:{free_port()}"
    place.mkdir()
    await enrol(place / "data", fleet)
    options = ("--name", name, "--data", str(place / "data"), "--cluster-address", address)
    surroundings = {
        "MODEL_BASE_PATH": str(folder / "models"), "MUSTER_VLLM_PYTHON": str(folder / "python-of-vllm"),
        "LD_LIBRARY_PATH": str(driver), "MUSTER_JOIN_S": "20", **env,
    }  # fmt: skip
    async with run_gateway() as gateway, run_box(place, gateway.url, *options, env=surroundings) as process:
        yield Node(name, process, Control(await gateway.accept(), fleet), address)


@asynccontextmanager
async def run_rack(folder: Path, driver: Path, *names: str, **env: dict[str, str]) -> AsyncIterator[Rack]:
    """Start these nodes, the first as the head; ``env``: further variables of some of them."""
    write_folder(folder / "models" / MODEL, CONFIG)
    write_contract_python(folder)
    fleet = Fleet()
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(run_node(folder, name, fleet, driver, **env.get(name, {}))) for name in names]
        yield Rack({node.name: node for node in nodes})


async def test_a_model_is_served_by_its_head_and_lent_gpus_by_the_others_until_it_is_unloaded(
    tmp_path: Path, driver: Path
) -> None:
    async with run_rack(tmp_path, driver, "head", "left", "right") as rack:
        head, left = rack["head"], rack["left"]
        commands = rack.approve()
        ends = await rack.carry_out(commands)
        for name, end in ends.items():
            receipt = rack[name].control.read(end)
            assert (end.state, receipt.outcome, receipt.operation) == ("succeeded", "succeeded", "model-load")
        processes = [process for node in rack.nodes.values() for process in node.engines()]
        served, lent = await head.shows("loaded"), await left.shows("reserved")
        assert served is not None
        assert lent is not None
        assert served.members == lent.members == [node.runner_id for node in rack.nodes.values()]
        assert (served.replica_id, served.gpus, lent.gpus) == (lent.replica_id, [0, 1], [0, 1])
        assert (head.control.box.models(), left.control.box.models()) == ([MODEL], []), "the head alone is sent requests"
        answer = await (await head.control.box.open({"model": MODEL, "messages": [{"role": "user", "content": "x"}]})).finish()
        assert answer.status == 200
        vllm = " ".join(
            next(process.cmdline() for process in head.engines() if "vllm_contract.py" in " ".join(process.cmdline()))
        )
        for flag in ("--tensor-parallel-size 2", "--pipeline-parallel-size 3", "--distributed-executor-backend ray"):
            assert flag in vllm
        # The GPUs that it lends are for nothing else, and it answers nothing itself.
        other = await left.control.carry_out(left.control.command("model-load", {"modelId": MODEL}))
        assert (other.state, "over several nodes, with head as head" in other.message) == ("failed", True)
        refused = await (await left.control.box.open({"model": MODEL, "messages": []}, model=MODEL)).expect_end()
        assert (refused.error, refused.retryable, "is served by head" in refused.message) == ("busy", True, True)
        # The token of one member operates no other, and none twice.
        for name, token_of in (("left", "right"), ("right", "head")):
            stolen = bridge.OpCommand(
                op_id=new_uuid7().hex,
                use=1,
                operation="model-load",
                body=commands[token_of].body,
                token=commands[token_of].token,
            )
            replayed = await rack[name].control.carry_out(stolen)
            assert (replayed.state, replayed.code) == ("refused", REFUSED)
        gone_from = await head.control.carry_out(head.control.command("model-unload", {"modelId": MODEL}))
        assert gone_from.state == "succeeded"
        for node in rack.nodes.values():
            await node.shows(None)
        await gone(processes)
        again = await rack.load("right", "left")
        await rack["left"].shows("reserved")
        unloaded = await left.control.carry_out(left.control.command("model-unload", {"modelId": MODEL}))
        assert unloaded.state == "succeeded", "any member ends it"
        await rack["right"].shows(None)
        await gone(again)


async def test_a_member_that_refuses_or_is_never_asked_leaves_nothing_on_the_others(tmp_path: Path, driver: Path) -> None:
    async with run_rack(
        tmp_path, driver, "head", "left", "right", **{name: {"MUSTER_JOIN_S": "2"} for name in ("head", "left", "right")}
    ) as rack:
        commands = rack.approve()
        # The control plane is gone after two of three; the third gets its token when it is back, which is too late.
        late = commands.pop("right")
        ends = await rack.carry_out(commands)
        for end in ends.values():
            assert (end.state, "right did not join within 2 s" in end.message) == ("failed", True), end
        assert rack["head"].control.read(ends["head"]).outcome == rack["left"].control.read(ends["left"]).outcome == "failed"
        end = await rack["right"].control.carry_out(late)
        assert (end.state, "the head head was not joined at" in end.message) == ("failed", True), end
        # The same commands again change nothing: each was carried out once.
        assert await rack.carry_out(commands) == ends
        for node in rack.nodes.values():
            await node.shows("failed")
            assert node.engines() == []
        # A member whose own check fails says so at once.
        missing = [*rack.members("head"), {**rack.members("left")[0], "gpus": [0, 7]}]
        ends = await rack.carry_out(rack.approve("head", "left", members=missing))
        assert [(end.state, "is to be loaded on GPU 7" in end.message) for end in ends.values()] == [("failed", True)] * 2, ends
        await rack.load()


@pytest.mark.parametrize("victim", ["head", "left"])
async def test_the_death_of_one_node_ends_the_replica_everywhere_with_a_reason(
    tmp_path: Path, driver: Path, victim: str
) -> None:
    async with run_rack(tmp_path, driver, "head", "left", "right") as rack:
        processes = await rack.load()
        rack[victim].process.signal(signal.SIGKILL)
        for name in {"head", "left", "right"} - {victim}:
            lost = await rack[name].shows("failed")
            assert lost is not None
            assert f"the connection to {victim}" in lost.detail, lost
            assert rack[name].control.box.models() == []
        await gone(processes)
        # What is left is free for the next load.
        left_over = [name for name in ("head", "left", "right") if name != victim]
        await rack.load(*left_over)


async def test_the_death_of_a_node_while_the_replica_is_loaded_frees_the_others(tmp_path: Path, driver: Path) -> None:
    (tmp_path / "models" / MODEL).mkdir(parents=True)
    (tmp_path / "models" / MODEL / "contract.json").write_text('{"hang": true}')
    async with run_rack(tmp_path, driver, "head", "left", "right") as rack:
        commands = rack.approve()
        loading = asyncio.create_task(rack.carry_out({name: commands[name] for name in ("head", "right")}))
        await rack["left"].control.box.send(commands["left"])
        await eventually(
            lambda: any(
                status.stage == "setting up the KV cache" for status in rack["head"].control.statuses(commands["head"].op_id)
            ),
            "vLLM is started on the head",
        )
        processes = [process for node in rack.nodes.values() for process in node.engines()]
        assert len(processes) > 6
        rack["left"].process.signal(signal.SIGKILL)
        for name, end in (await loading).items():
            assert (end.state, "the connection to left" in end.message) == ("failed", True), end
            assert rack[name].control.read(end).outcome == "failed"
        await gone(processes)


async def test_a_node_on_which_ray_does_not_start_ends_the_load_with_its_words(tmp_path: Path, driver: Path) -> None:
    async with run_rack(tmp_path, driver, "head", "left", "right", left={"RAY_CONTRACT_FAIL": "1"}) as rack:
        for name, end in (await rack.carry_out(rack.approve())).items():
            assert (end.state, "no space left on device" in end.message) == ("failed", True), (name, end)
            assert rack[name].engines() == []


# What members say to each other


HEAD, LEFT, STRANGER = "head", "left", "stranger"


@pytest.fixture
def identities(tmp_path: Path) -> dict[str, Identity]:
    made = {}
    for name in (HEAD, LEFT, STRANGER):
        (tmp_path / name).mkdir()
        made[name] = load_identity(tmp_path / name, name)
    return made


def cluster_of(identities: dict[str, Identity], own: str, port: int, *, key_of: str = "", **changes: Any) -> Cluster:
    """The approved replica over head and left as a node sees it that signs with the key of ``key_of``."""
    members = tuple(Member(identities[name].certified_id, f"127.0.0.1:{port}", (0,)) for name in (HEAD, LEFT))
    signer = identities[key_of or own]
    fields: dict[str, Any] = {
        "replica_id": "op.1", "digest": "d" * 64, "members": members,
        "own": next((member for member in members if member.node == identities[own].certified_id), members[1]),
        "public_key": signer.public_key, "sign": signer.private_key.sign,
    }  # fmt: skip
    return Cluster(**(fields | changes))


@asynccontextmanager
async def gathering_of(cluster: Cluster) -> AsyncIterator[Gathering]:
    gathering = Gathering(cluster, lambda _: None)
    await gathering.open()
    try:
        yield gathering
    finally:
        await gathering.close("", is_orderly=True)


@pytest.mark.parametrize("who", ["another key", "a stranger", "another replica", "another statement", "a false head"])
async def test_a_member_or_head_that_is_not_who_was_approved_is_not_believed(identities: dict[str, Identity], who: str) -> None:
    port = free_port()
    head, member = cluster_of(identities, HEAD, port), cluster_of(identities, LEFT, port)
    match who:
        case "another key":
            member = cluster_of(identities, LEFT, port, key_of=STRANGER)
        case "a stranger":
            member = replace(member, own=Member(identities[STRANGER].certified_id, "127.0.0.1:1", (0,)), members=member.members)
            member = replace(member, public_key=identities[STRANGER].public_key, sign=identities[STRANGER].private_key.sign)
        case "another replica":
            member = replace(member, replica_id="op.2")
        case "another statement":
            member = replace(member, digest="e" * 64)
        case _:
            head = cluster_of(identities, HEAD, port, key_of=STRANGER)
    async with gathering_of(head) as gathering:
        if who == "another key":  # it takes itself for let in until the head hangs up on what it proved
            channel = await join_head(member, within_s=0.1)
            with pytest.raises(EngineError, match="the connection to head ended"):
                await channel.expect("ray", 5.0)
            await channel.close()
        else:
            with pytest.raises(EngineError, match="was not joined"):
                await join_head(member, within_s=0.1)
        with pytest.raises(EngineError, match="left did not join within"):
            await gathering.gather(0.05)


async def test_the_token_of_ray_crosses_the_network_sealed_and_a_changed_byte_ends_the_connection(
    identities: dict[str, Identity],
) -> None:
    port, between = free_port(), free_port()
    seen, flips = bytearray(), asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            seen.extend(data)
            writer.write(data.swapcase() if flips.is_set() else data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_head = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, to_head[1]), pump(to_head[0], writer))

    member = cluster_of(identities, LEFT, between)
    async with gathering_of(cluster_of(identities, HEAD, port)) as gathering:
        server = await asyncio.start_server(relay, "127.0.0.1", between)
        channel = await join_head(member, within_s=5.0)
        await gathering.gather(5.0)
        channel.send(Note(say="ready", path="/models/big"))
        assert [note.path for _, note in await gathering.expect("ready", 5.0)] == ["/models/big"]
        gathering.tell(Note(say="ray", address="10.0.0.1:6379", token="the token of Ray"))
        assert (await channel.expect("ray", 5.0)).token == "the token of Ray"
        assert b"token of Ray" not in seen
        assert base64.b64encode(b"the token of Ray")[:12] not in seen
        flips.set()
        gathering.tell(Note(say="serving"))
        with pytest.raises(EngineError, match=r"the connection to head broke \(InvalidTag\)"):
            await channel.receive()
        await channel.close()
        server.close()

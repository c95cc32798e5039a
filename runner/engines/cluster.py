"""Members of one replica over several nodes: they prove to each other who they are, and each hears when another is gone.

The head listens at its cluster address while it has the replica; every other member dials it. Both ends sign the beginning with
the keys that their runner ids name, and those ids stand in the statement that people signed. What follows is encrypted: the
token of Ray is among it. A connection that ends, or falls silent, ends the replica on both sides.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_der_public_key

from runner.definitions.plan import Cluster, Member
from runner.errors import EngineError, ReplicaUnloaded
from runner.limits import limits
from wire import clock
from wire.optoken.op_token import owns_runner_id
from wire.unreadable import UNREADABLE

log = logging.getLogger(__name__)

_DOMAIN = b"muster-cluster/v1\x00"
Value = TypeVar("Value")


class _Hello(msgspec.Struct, kw_only=True):
    """First line of a member. ``share``: of X25519; binary members are base64."""

    replica_id: str
    digest: str
    node: str
    public_key: bytes
    share: bytes


class _Answer(msgspec.Struct, kw_only=True):
    """Line of the head that follows; the member answers with its own ``signature``."""

    public_key: bytes
    share: bytes
    signature: bytes


class _Proof(msgspec.Struct, kw_only=True):
    signature: bytes


class Note(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What members say to each other.

    ``ready``: a member can begin, with the ``path`` of its files. ``ray``: Ray listens at the head's ``address`` and asks for
    ``token``. ``joined``: a member is in Ray's cluster. ``serving``: the head answers requests. ``end``: the replica is over,
    for this ``reason``; ``is_orderly``: because it was unloaded.
    """

    say: Literal["alive", "ready", "ray", "joined", "serving", "end"]
    path: str = ""
    address: str = ""
    token: str = ""
    reason: str = ""
    is_orderly: bool = False


class _Refused(Exception):
    """The other end is not who it must be, or does not speak this protocol."""


class Channel:
    """One authenticated connection between head and member. ``lost`` ends with why the replica is over."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, node: str, keys: tuple[bytes, bytes]
    ) -> None:
        self.node, self.name = node, node.partition("#")[0]
        self._reader, self._writer = reader, writer
        self._sealing, self._opening = (ChaCha20Poly1305(key) for key in keys)
        self._sent = self._received = 0
        self._beating: asyncio.Task[None] | None = None

    def send(self, note: Note) -> None:
        """Send a note, without waiting; one to a member that is gone is dropped."""
        sealed = self._sealing.encrypt(self._sent.to_bytes(12, "big"), msgspec.json.encode(note), None)
        self._sent += 1
        if not self._writer.is_closing():
            self._writer.write(base64.b64encode(sealed) + b"\n")

    async def receive(self) -> Note:
        """Return the next note; what keeps the connection alive is left out. Raises EngineError when the other end is gone."""
        while True:
            try:
                line = await self._read_line()
                if not line.endswith(b"\n"):
                    raise EngineError(f"the connection to {self.name} ended")
                plain = self._opening.decrypt(self._received.to_bytes(12, "big"), base64.b64decode(line), None)
                note = msgspec.json.decode(plain, type=Note)
            except TimeoutError:
                raise EngineError(f"{self.name} was not heard for {limits().cluster.silent_s:g} s") from None
            except (OSError, ValueError, InvalidTag, *UNREADABLE) as error:
                raise EngineError(f"the connection to {self.name} broke ({type(error).__name__})") from None
            self._received += 1
            if note.say == "end":
                raise (ReplicaUnloaded if note.is_orderly else EngineError)(note.reason or f"{self.name} ended the replica")
            if note.say != "alive":
                return note

    async def _read_line(self) -> bytes:
        with contextlib.suppress(TimeoutError):
            return await _within(self._reader.readline(), limits().cluster.silent_s)
        # When this process itself stood still, what came meanwhile has yet to be read.
        return await _within(self._reader.readline(), limits().cluster.beat_s)

    async def expect(self, say: str, within_s: float) -> Note:
        """Return the next note, which must be this. Raises EngineError."""
        try:
            note = await _within(self.receive(), within_s)
        except TimeoutError:
            raise EngineError(f"{self.name} did not say that it is {say} within {within_s:g} s") from None
        if note.say != say:
            raise EngineError(f"{self.name} said {note.say} where it had to say {say}")
        return note

    def keep_alive(self) -> None:
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            self.send(Note(say="alive"))
            await asyncio.sleep(limits().cluster.beat_s)

    async def close(self, reason: str = "", *, is_orderly: bool = False) -> None:
        """Say why, where there is a reason, and hang up."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        if reason:
            self.send(Note(say="end", reason=reason, is_orderly=is_orderly))
        with contextlib.suppress(OSError, TimeoutError):
            await _within(self._writer.drain(), limits().cluster.farewell_s)
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await _within(self._writer.wait_closed(), limits().cluster.farewell_s)


async def _within(work: Awaitable[Value], within_s: float) -> Value:
    # Not wait_for, which in Python 3.11 swallows a cancellation that comes together with the end.
    async with asyncio.timeout(within_s):
        return await work


def _derive_keys(own: X25519PrivateKey, other: bytes, transcript: bytes) -> tuple[bytes, bytes]:
    """Return the keys for what the head says and for what the member says."""
    shared = own.exchange(X25519PublicKey.from_public_bytes(other))
    both = HKDF(algorithm=hashes.SHA256(), length=64, salt=transcript, info=_DOMAIN).derive(shared)
    return both[:32], both[32:]


def _verify(node: str, public_key: bytes, signature: bytes, message: bytes) -> None:
    if not owns_runner_id(node, public_key):
        raise _Refused(f"its key is not that of {node}")
    try:
        key = load_der_public_key(public_key)
        if not isinstance(key, Ed25519PublicKey):
            raise _Refused(f"its key is not that of {node}")
        key.verify(signature, message)
    except (InvalidSignature, ValueError):
        raise _Refused(f"it did not prove that it is {node}") from None


def _transcribe(hello: bytes, share: bytes) -> bytes:
    return hashlib.sha256(_DOMAIN + hello + share).digest()


async def _read(reader: asyncio.StreamReader, kind: type[Value]) -> tuple[bytes, Value]:
    line = await reader.readline()
    try:
        return line, msgspec.json.decode(line, type=kind)
    except UNREADABLE:
        raise _Refused("it speaks another protocol") from None


async def _meet_head(cluster: Cluster, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel:
    own = X25519PrivateKey.generate()
    hello = msgspec.json.encode(_Hello(
        replica_id=cluster.replica_id, digest=cluster.digest, node=cluster.own.node, public_key=cluster.public_key,
        share=own.public_key().public_bytes_raw(),
    )) + b"\n"  # fmt: skip
    writer.write(hello)
    _, answer = await _read(reader, _Answer)
    transcript = _transcribe(hello, answer.share)
    _verify(cluster.head.node, answer.public_key, answer.signature, b"head\x00" + transcript)
    writer.write(msgspec.json.encode(_Proof(signature=cluster.sign(b"member\x00" + transcript))) + b"\n")
    await writer.drain()
    of_head, of_member = _derive_keys(own, answer.share, transcript)
    return Channel(reader, writer, node=cluster.head.node, keys=(of_member, of_head))


async def _meet_member(cluster: Cluster, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel:
    own = X25519PrivateKey.generate()
    line, hello = await _read(reader, _Hello)
    if (hello.replica_id, hello.digest) != (cluster.replica_id, cluster.digest):
        raise _Refused("it means another replica")
    if hello.node not in {member.node for member in cluster.members[1:]}:
        raise _Refused("it is not among those that were approved")
    share = own.public_key().public_bytes_raw()
    transcript = _transcribe(line, share)
    answer = _Answer(public_key=cluster.public_key, share=share, signature=cluster.sign(b"head\x00" + transcript))
    writer.write(msgspec.json.encode(answer) + b"\n")
    _, proof = await _read(reader, _Proof)
    _verify(hello.node, hello.public_key, proof.signature, b"member\x00" + transcript)
    of_head, of_member = _derive_keys(own, hello.share, transcript)
    return Channel(reader, writer, node=hello.node, keys=(of_head, of_member))


async def join_head(cluster: Cluster, *, within_s: float) -> Channel:
    """Dial the head until it answers. Raises EngineError: it cannot be reached, or is somebody else."""
    give_up_at, problem = clock.monotonic() + within_s, "nothing was tried"
    while True:
        writer = None
        try:
            async with asyncio.timeout(limits().cluster.meet_s):
                reader, writer = await asyncio.open_connection(*split_address(cluster.head.address))
                return await _meet_head(cluster, reader, writer)
        except TimeoutError:
            problem = "it does not answer"
        except (OSError, ValueError, _Refused) as error:
            problem = str(error)
        if writer is not None:
            writer.close()
        if clock.monotonic() >= give_up_at:
            raise EngineError(
                f"the head {cluster.head.name} was not joined at {cluster.head.address} within {within_s:g} s: {problem}"
            )
        await asyncio.sleep(limits().cluster.retry_s)


async def decline(cluster: Cluster, reason: str) -> None:
    """Tell the head that this member takes no part, if it can be reached; it then need not wait."""
    with contextlib.suppress(EngineError):
        channel = await join_head(cluster, within_s=limits().cluster.meet_s)
        await channel.close(f"{cluster.own.name}: {reason}")


class Gathering:
    """The members of a replica as its head has them. ``on_loss`` is called once, with the first that ends the replica."""

    def __init__(self, cluster: Cluster, on_loss: Callable[[EngineError], None]) -> None:
        self._cluster = cluster
        self._on_loss = on_loss
        self._server: asyncio.Server | None = None
        self._channels: dict[str, Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._joined = asyncio.Event()
        self._notes: dict[str, asyncio.Queue[Note]] = {}

    async def open(self) -> None:
        """Listen for members. Raises EngineError."""
        address = self._cluster.own.address
        try:
            self._server = await asyncio.start_server(self._accept, *split_address(address))
        except OSError as error:
            raise EngineError(f"the cluster address {address} cannot be listened on: {error.strerror}") from None

    async def gather(self, within_s: float) -> None:
        """Return when every member is there. Raises EngineError that names those that are not."""
        try:
            await _within(self._joined.wait(), within_s)
        except TimeoutError:
            missing = [member.name for member in self._missing()]
            raise EngineError(f"{', '.join(missing)} did not join within {within_s:g} s") from None

    async def expect(self, say: str, within_s: float) -> list[tuple[Channel, Note]]:
        """Return what every member says next, which must be this. Raises EngineError."""
        found = []
        for node, notes in self._notes.items():
            channel = self._channels[node]
            try:
                note = await _within(notes.get(), within_s)
            except TimeoutError:
                raise EngineError(f"{channel.name} did not say that it is {say} within {within_s:g} s") from None
            if note.say != say:
                raise EngineError(f"{channel.name} said {note.say} where it had to say {say}")
            found.append((channel, note))
        return found

    def tell(self, note: Note) -> None:
        for channel in self._channels.values():
            channel.send(note)

    async def close(self, reason: str, *, is_orderly: bool) -> None:
        """End the replica on every member that is still there."""
        if self._server is not None:
            self._server.close()
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close(reason, is_orderly=is_orderly) for channel in channels.values()))
        self._server = None

    def _missing(self) -> list[Member]:
        return [member for member in self._cluster.members[1:] if member.node not in self._channels]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= limits().cluster.connections:
            writer.close()
            return
        self._tasks.add(task := asyncio.create_task(self._greet(reader, writer)))
        task.add_done_callback(self._tasks.discard)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = None
        try:
            async with asyncio.timeout(limits().cluster.meet_s):
                met = await _meet_member(self._cluster, reader, writer)
            if met.node in self._channels:
                raise _Refused("it is here already")
            channel = met
        except (OSError, ValueError, TimeoutError, _Refused) as error:
            log.warning("cluster refuses a connection peer=%s reason=%s", writer.get_extra_info("peername"), error)
            return
        finally:
            if channel is None:
                writer.close()
        self._channels[channel.node] = channel
        self._notes[channel.node] = asyncio.Queue(maxsize=limits().cluster.notes)
        channel.keep_alive()
        if not self._missing():
            self._joined.set()
        await self._follow(channel)

    async def _follow(self, channel: Channel) -> None:
        try:
            while True:
                self._notes[channel.node].put_nowait(await channel.receive())
        except asyncio.QueueFull:
            self._on_loss(EngineError(f"{channel.name} says more than it should"))
        except EngineError as error:
            self._on_loss(error)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; an IPv6 address stands in brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is no HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)

"""Agent messages of the central-server document: registration, heartbeats and commands of a foreign program on a node.

JSON objects. Members that are not listed are skipped: the document says nothing of versions, so an agent may say more. What is
marked "ours" an agent written from the document alone neither sends nor reads.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from wire.bridge import NodeGovernance, TicketPublicKey, UsageReport
from wire.unreadable import UNREADABLE

METALYARD = "metalyard"
"""Names the protocol of such a session where protocols are told apart."""
METALYARD_RELAY = "metalyard+relay"
"""The same, of an agent that asked for requests over its socket and has not opened it yet."""

LOAD_MODEL, EVICT_MODEL, DRAIN, SHUTDOWN = "load_model", "evict_model", "drain", "shutdown"


class AgentError(ValueError):
    """A message that cannot be used. ``param`` is the path of the member at fault, empty = the whole."""

    def __init__(self, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class Platform(msgspec.Struct, kw_only=True):
    os: str = ""
    os_version: str = ""
    arch: str = ""


class AgentGpu(msgspec.Struct, kw_only=True):
    """A GPU as registered: what does not change. Memory in MiB. ``gpu_id`` is unique on the node alone."""

    gpu_id: str
    vendor: str = ""
    model: str = ""
    vram_mb: int | None = None
    compute_capability: str = ""
    driver_version: str = ""
    cuda_version: str = ""
    status: str = "available"


class AgentModel(msgspec.Struct, kw_only=True):
    """A model on the node; only one that is ``loaded`` gets requests."""

    model_id: str
    quantization: str = ""
    vram_required_mb: int | None = None
    loaded: bool = False


class Network(msgspec.Struct, kw_only=True):
    """``endpoint``: ``host:port`` or a URL at which the node answers requests over HTTP; empty = at none."""

    endpoint: str = ""
    nat_type: str = ""
    public_ip: str = "auto-detect"


class Capacity(msgspec.Struct, kw_only=True):
    max_concurrent_requests: int = 1
    max_context_tokens: int | None = None


class Wishes(msgspec.Struct, kw_only=True):
    """What an agent asks for (ours). ``relay``: requests over the session's socket, as muster v1 frames.

    ``tickets``: clients that come to its endpoint with a ticket, which it verifies, uses once and reports.
    """

    relay: bool = False
    tickets: bool = False


class AgentRegister(msgspec.Struct, kw_only=True):
    """Body of ``POST /api/v1/register``. ``endpoint`` stands for ``network.endpoint`` where that is empty.

    Ours: ``config``, ``node_name`` (what operators read), ``api_key`` (what calls of the endpoint authenticate with) and
    ``governance`` (how the node decides about operations, as a muster v1 node says it; without it it is sent no load or evict).
    """

    agent_id: str
    agent_version: str = ""
    auth_token: str = msgspec.field(default="")
    platform: Platform = msgspec.field(default_factory=Platform)
    gpus: list[AgentGpu] = []
    models_available: list[AgentModel] = []
    endpoint: str = ""
    network: Network = msgspec.field(default_factory=Network)
    capacity: Capacity = msgspec.field(default_factory=Capacity)
    config: Wishes = msgspec.field(default_factory=Wishes)
    node_name: str = ""
    api_key: str | None = None
    governance: NodeGovernance | None = None

    def __repr__(self) -> str:  # credentials stay out of logs
        return f"AgentRegister(agent_id={self.agent_id!r})"


class AgentConfig(msgspec.Struct, kw_only=True):
    """What an agent goes by. Times in seconds; ``time``: this server's clock, ISO 8601 UTC.

    ``ticket_keys`` verify tickets (``wire.ticket``), whose audience is the ``node_id`` of the registration. An agent that asked
    for tickets is told of others by a ``ticket_keys`` message on its socket, and in each answer to its heartbeats by HTTP.
    """

    stale_after_s: float
    dead_after_s: float
    max_message_bytes: int
    gateways: list[str]
    time: str
    warnings: list[str]
    ticket_keys: list[TicketPublicKey]


class AgentRegistered(msgspec.Struct, kw_only=True):
    """Answer to a registration. ``heartbeat_interval`` in seconds; ``session_id`` is to be kept secret."""

    session_id: str
    heartbeat_interval: float
    config: AgentConfig
    node_id: str


class GpuState(msgspec.Struct, kw_only=True):
    """A GPU as it is now. Memory in MiB, temperature in Celsius, power in watts; None = unknown."""

    gpu_id: str
    load_percent: float | None = None
    vram_used_mb: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    active_requests: int = 0


class AgentHeartbeat(msgspec.Struct, tag="heartbeat", tag_field="type", kw_only=True):
    """A sign of life. ``timestamp`` is the agent's clock: it is stored, never believed.

    ``models_loaded`` None: as told before. ``status`` (ours): ``draining`` asks for no further work.
    """

    timestamp: str = ""
    gpu_states: list[GpuState] = []
    models_loaded: list[str] | None = None
    queue_depth: int = 0
    status: Literal["available", "draining", "error"] = "available"
    last_error: str = ""


class AgentCommand(msgspec.Struct, tag="command", tag_field="type", kw_only=True):
    """What an agent is to do. Loads and evictions are governed operations: ``params`` hold ``opToken``, which proves that."""

    command_id: str
    command: str
    params: dict[str, Any]  # Any: JSON

    def __repr__(self) -> str:  # the token stays out of logs
        return f"AgentCommand(command_id={self.command_id!r}, command={self.command!r})"


class AgentCommandStatus(msgspec.Struct, tag="command_status", tag_field="type", kw_only=True):
    """Where a command stands. ``state``: running, succeeded, failed, refused or interrupted; ``progress`` 0.0 to 1.0.

    Ours: ``code`` (why not, for programs), ``result`` and ``receipt`` as in ``wire.bridge.OpStatus``.
    """

    command_id: str
    state: str
    progress: float | None = None
    message: str = ""
    code: str = ""
    result: dict[str, Any] = {}  # Any: JSON
    receipt: str = ""


AgentMessage = AgentHeartbeat | AgentCommandStatus | UsageReport
"""``UsageReport`` (ours) as muster v1 nodes say it; an answer of the same kind names every report in it."""

_encoder = msgspec.json.Encoder()
_registers = msgspec.json.Decoder(AgentRegister)
_messages: msgspec.json.Decoder[AgentMessage] = msgspec.json.Decoder(AgentMessage)


def encode(message: msgspec.Struct) -> bytes:
    """Return the compact JSON of a message."""
    return _encoder.encode(message)


class _Bearer(msgspec.Struct):
    auth_token: str = ""


_bearers = msgspec.json.Decoder(_Bearer)


def find_token(body: bytes) -> str:
    """Return the ``auth_token`` of a registration whatever else is wrong with it; empty = none can be found."""
    try:
        return _bearers.decode(body).auth_token
    except UNREADABLE:
        return ""


def decode_register(body: bytes) -> AgentRegister:
    """Parse the body of a registration. Raises AgentError."""
    try:
        return _registers.decode(body)
    except UNREADABLE as error:
        raise _explain(error) from None


def decode_message(frame: str | bytes) -> AgentMessage:
    """Parse what an agent says in its session. Raises AgentError."""
    try:
        return _messages.decode(frame)
    except UNREADABLE as error:
        raise _explain(error) from None


def _explain(error: Exception) -> AgentError:
    # msgspec ends its text with the path of the member: "... - at `$.gpus[0].vram_mb`".
    text, _, path = str(error).partition(" - at `$")
    return AgentError(text, param=path.rstrip("`").lstrip("."))

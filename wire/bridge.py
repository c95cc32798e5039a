"""Worker protocol messages: bridge v1 (``2026-04-bridge-v1``) and the JSON half of muster v1.

JSON text frames, one object per frame, discriminated by ``type``. Field order below is the order on the wire.
A foreign worker ends its session on an unknown ``type``; extra fields it tolerates. So everything muster v1 adds is
either an optional field, or a message sent only to a node that announced ``MUSTER_V1``.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from wire.unreadable import UNREADABLE

BRIDGE_V1 = "2026-04-bridge-v1"
BRIDGE_VERSIONS = frozenset({BRIDGE_V1, "1"})
"""How workers write bridge v1: its name, or the number in ModelRelay's documents. One that writes nothing speaks it too."""
MUSTER_V1 = "2026-11-muster-v1"

CancelReason = str | dict[str, str]
"""One of the reason words below, or ``{"other": text}``."""

CANCEL_CLIENT_DISCONNECT = "client_disconnect"
CANCEL_TIMEOUT = "timeout"
CANCEL_GRACEFUL_SHUTDOWN = "graceful_shutdown"
CANCEL_WORKER_DISCONNECT = "worker_disconnect"
CANCEL_REQUEUE_EXHAUSTED = "requeue_exhausted"
CANCEL_SERVER_SHUTDOWN = "server_shutdown"

NAME_TAKEN = "another live box uses this name and credential; give one another --name or its own credential"
"""The reason of a close 1008 that refuses a second node. Nodes that do not know it take it for a refused credential."""


class Message(msgspec.Struct, tag_field="type", omit_defaults=True, kw_only=True):
    """Base of every JSON frame."""


CPU = "cpu"
"""What says of a replica or a model that it uses no GPU."""


class GpuInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One GPU as the node sees it. Memory in MiB, temperature in Celsius, power in watts; a field is None when unknown.

    ``gpu_id``: the node's own name for it, unique on the node; empty = the index names it. ``group``: GPUs of one PCI or NVLink
    group share the word. ``max_batch``: requests at once; ``max_context_tokens``: prompt and answer of one request together.
    """

    index: int
    name: str
    memory_total_mb: int | None = None
    memory_used_mb: int | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    gpu_id: str = ""
    vendor: str = ""
    compute_capability: str = ""
    driver_version: str = ""
    runtime_version: str = ""
    group: str = ""
    max_batch: int | None = None
    max_context_tokens: int | None = None
    active_requests: int | None = None


RESERVED = "reserved"
"""State of a part of a replica over several nodes that another one of them serves."""


class ReplicaInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One loaded (or loading) copy of a model on the node. ``state``: unloaded, loading, loaded, unloading or failed,
    or ``reserved``.

    ``detail``: what a load is doing, or why it failed. ``progress`` is the share of the load that is done, 0.0 to 1.0, and
    ``eta_s`` the seconds it still takes. Memory in MiB: ``memory_mb`` is measured, ``weights_mb`` and ``kv_mb`` are its
    known parts; None = unknown. ``endpoints`` are the API paths this model answers, empty = those of the registration.
    ``context_tokens``: prompt and answer of one request together. ``kept``: an approval keeps the model loaded, so the node
    loads it again by itself after a restart; where it cannot, the state is failed and ``detail`` says why. ``gave_up_ms``: Unix
    time in milliseconds at which the node stopped trying until its next start; None = it has not. ``gpus``: the numbers of the
    GPUs that it is on, as in ``GpuInfo``; empty = the node does not say. ``device``: ``cpu`` = it is on none; else empty.
    ``members``: the runner ids of the nodes that it is over, the head first, and ``replica_id`` names it on all of them; empty
    where it is on this node alone.
    """

    model: str
    state: str
    engine: str = ""
    slots: int = 0
    active: int = 0
    detail: str = ""
    progress: float | None = None
    eta_s: float | None = None
    memory_mb: int | None = None
    weights_mb: int | None = None
    kv_mb: int | None = None
    endpoints: list[str] = []
    context_tokens: int | None = None
    kept: bool = False
    gave_up_ms: int | None = None
    gpus: list[int] = []
    device: str = ""
    replica_id: str = ""
    members: list[str] = []

    @property
    def percent(self) -> int | None:
        """How much of a load is done, in whole percent; None = not known."""
        return int(100 * self.progress) if self.progress is not None else None


class ModelFacts(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What the node knows of one of its models, loaded or not: what a load takes and what it may set.

    ``estimate_mb``: memory in MiB of ``estimate_replicas`` replicas, measured by ``observed_load_delta`` or taken from the size
    of the files (``model_artifact_size``), None when that is ``unavailable``. ``replica_max``: most replicas of a load;
    ``target_inflight``: requests that one takes at once, ``configured_target_inflight`` what the settings say.
    ``load_constraints``: by the name of a load's field, its kind, limits and default, as in llm-pool's
    ``GET /v1/admin/models``. ``device``: ``cpu`` = it is set up to use no GPU; else empty. ``quantization``: of its files, as
    they say; empty = they do not.
    """

    name: str
    backend: str = ""
    quantization: str = ""
    state: str = ""
    replicas: int = 0
    loaded_replicas: int = 0
    replica_max: int = 0
    target_inflight: int = 0
    configured_target_inflight: int = 0
    estimate_mb: int | None = None
    estimate_replicas: int = 0
    estimate_source: str = ""
    load_constraints: dict[str, dict[str, Any]] = {}
    device: str = ""


class MemoryInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The memory that models share on the node, in MiB: that of its GPUs, or of the host where it has none (``kind``).

    ``weights_mb`` and ``kv_mb`` are what the loaded models are known to hold of ``used_mb``. ``models``: what loads of the
    node's models take and may set; None = as told before in this session.
    """

    kind: str = "gpu"
    total_mb: int | None = None
    used_mb: int | None = None
    weights_mb: int | None = None
    kv_mb: int | None = None
    models: list[ModelFacts] | None = None


class TokenCounts(msgspec.Struct, kw_only=True):
    """Token usage as the engine reported it. ``cached_tokens``: of the prompt, those it had cached."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int = 0


class NodeGovernance(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How a node decides about operations. ``level``: L0, L1 or L2; ``runner_id``: the audience of tokens for it.

    ``public_key``: its Ed25519 key as SPKI DER in base64url, which signs receipts and which ``runner_id`` names.
    ``op_keys``: HMAC keys by id in base64url, the newest last, that tokens for it are signed with. ``policy_*``: what it
    pinned, 0 and empty = nothing yet. ``witness_*``: the last audit checkpoint that it saw (root in base64). ``clock_ms``: Unix
    time in milliseconds. ``keeps_models``: its loads take ``keepLoaded``. ``reloads_settings``: it knows the operation
    ``settings-reload``. ``cluster_address``: where other nodes of a replica reach it; empty = it takes part in none.
    """

    level: str
    runner_id: str
    public_key: str
    op_keys: dict[str, str] = {}
    policy_version: int = 0
    policy_sha256: str = ""
    policy_error: str = ""
    witness_size: int = 0
    witness_root: str = ""
    clock_ms: int = 0
    keeps_models: bool = False
    reloads_settings: bool = False
    cluster_address: str = ""


class TicketPublicKey(msgspec.Struct, kw_only=True):
    """A key with which nodes verify tickets. ``public_key``: the 32 bytes of an Ed25519 key in base64url, without padding."""

    kid: str
    public_key: str
    alg: str = "EdDSA"


class TicketUsage(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What became of a request that came with a ticket. ``status``: running, or how a request ends (``wire.contract``).

    ``record_id`` as in the ticket; it may be left out, because the ticket's own id names it too.
    ``usage``: as the engine counted, None = it did not say. ``code``: why not, for programs. ``inference_ms``: from the
    ticket's first use to the last byte; ``queue_ms`` of them it waited.
    """

    ticket_id: str
    record_id: str = ""
    model: str = ""
    status: str
    endpoint: str = ""
    is_streaming: bool = False
    usage: TokenCounts | None = None
    http_status: int = 0
    code: str = ""
    inference_ms: int = 0
    queue_ms: int = 0
    bytes_out: int = 0


# server -> worker


class RegisterAck(Message, tag="register_ack"):
    """Accepts a registration. What follows ``protocol_version`` goes to muster v1 nodes only.

    ``ticket_keys``: what tickets for this node, whose audience is ``node_id``, are verified with; None = this server takes no
    ``usage_report``. ``time_ms``: the server's clock in Unix milliseconds.
    """

    worker_id: str
    models: list[str]
    warnings: list[str] = []
    protocol_version: str | None = None
    node_id: str | None = None
    heartbeat_interval_s: float | None = None
    window_bytes: int | None = None
    gateways: list[str] = []
    accepting: bool | None = None
    ticket_keys: list[TicketPublicKey] | None = None
    time_ms: int | None = None


class Request(Message, tag="request"):
    """Dispatches one HTTP request to a bridge v1 worker. ``body`` is the raw JSON text of the client."""

    request_id: str
    model: str
    endpoint_path: str
    is_streaming: bool
    body: str
    headers: dict[str, str] = {}


class Cancel(Message, tag="cancel"):
    """Asks the worker to stop a request; bridge v1 workers answer nothing."""

    request_id: str
    reason: CancelReason


class Ping(Message, tag="ping"):
    """Asks for a ``pong``."""

    timestamp_unix_ms: int | None = None


class GracefulShutdown(Message, tag="graceful_shutdown"):
    """Tells the worker to finish what runs and take nothing new."""

    reason: str | None = None
    drain_timeout_secs: int | None = None


class ModelsRefresh(Message, tag="models_refresh"):
    """Asks for a ``models_update``."""

    reason: str | None = None


class NodeNotice(Message, tag="node_notice"):
    """muster v1: what the control plane holds about this node, so that its owner can see it locally.

    ``drain_s``: in so many seconds what still runs is cut, because the node is drained; None = it may end.
    """

    status: str
    mode: str
    cordoned: bool = False
    drain_s: int | None = None


class OpCommand(Message, tag="op_command"):
    """muster v1: an operation to carry out. ``body`` is what the model-runner API takes, without its token.

    ``use`` counts from 1 how often the approval behind ``op_id`` is carried out. The same (op_id, use) may come several times
    and is carried out once; every time the node answers with an ``op_status``.
    """

    op_id: str
    use: int
    operation: str
    body: dict[str, Any]  # Any: JSON, here and below
    token: str

    # The token stays out of logs.
    def __repr__(self) -> str:
        return f"OpCommand(op_id={self.op_id!r}, use={self.use}, operation={self.operation!r})"


class OpQuery(Message, tag="op_query"):
    """muster v1: asks for the ``op_status`` of an operation; permits nothing."""

    op_id: str
    use: int


class PolicyOffer(Message, tag="policy_offer"):
    """muster v1: policies that follow the one this node holds, oldest first, each as in ``wire.optoken.approval`` bundles."""

    policies: list[dict[str, Any]]


class CheckpointOffer(Message, tag="checkpoint_offer"):
    """muster v1: the newest audit checkpoint (a C2SP signed note) and why it extends the one of ``old_size`` entries.

    ``proof``: hashes of an RFC 9162 consistency proof, in base64. ``wants_name``: the node signs its runner id with what it
    saw; a control plane of an earlier release does not ask, and takes no other form.
    """

    note: str
    old_size: int
    proof: list[str] = []
    wants_name: bool = False


class TicketKeys(Message, tag="ticket_keys"):
    """muster v1: replaces the ``ticket_keys`` of the session. For nodes that registered a ``ticket_url``."""

    keys: list[TicketPublicKey]


class UsageTaken(Message, tag="usage_taken"):
    """muster v1: what the server knows of tickets, or never will: their status by id. The node does not repeat that.

    ``refused``: why those of them had no effect, in a sentence.
    """

    taken: dict[str, str]
    refused: dict[str, str] = {}


class NodeAuthorities(Message, tag="node_authorities"):
    """muster v1: the certificates (PEM) of the internal CAs that hold, empty = there is none. For nodes that take certificates.

    Each is answered with a ``certificate_request``.
    """

    certificates: str


class NodeCertificate(Message, tag="node_certificate"):
    """muster v1: answers a request: a certificate (PEM) for the host of the ``ticket_url``, or the ``error``: why not."""

    certificate: str = ""
    error: str = ""


class LogQuery(Message, tag="log_query"):
    """muster v1: asks for the last lines of the node's own log. For nodes that registered ``tells_log``.

    Answered by a ``log_tail`` with the same ``query_id``; a node that was asked a moment ago answers nothing.
    """

    query_id: str


class HubQuery(Message, tag="hub_query"):
    """muster v1: asks for repositories of the node's hub that a text names. For nodes that registered ``searches_hub``.

    Answered by a ``hub_answer`` with the same ``query_id``.
    """

    query_id: str
    text: str


# worker -> server


class Register(Message, tag="register"):
    """First frame of a session. Everything after ``current_load`` is muster v1.

    ``instance_id`` is random per process start: the same node may hold one session on each gateway with the same
    instance. The same node started again has another and replaces its session; another node, by its key, or a program that was
    replaced is refused with ``NAME_TAKEN`` while that session lives. ``endpoints`` lists the paths its
    engine speaks natively. ``available`` and ``memory`` as in ``Telemetry``. ``ticket_url``: where clients reach the node's own
    HTTP API with a ticket; empty = it takes none. ``takes_certificates``: it wants one of the internal CA for that URL.
    ``tells_log``: it answers a ``log_query``; runners of earlier releases, and those whose owner forbids it, do not say so.
    ``searches_hub``: it answers a ``hub_query``.
    """

    worker_name: str = "worker"
    models: list[str] = []
    max_concurrent: int = 1
    protocol_version: str | None = None
    current_load: int = 0
    instance_id: str | None = None
    agent_version: str | None = None
    owner_name: str | None = None
    endpoints: list[str] = []
    gpus: list[GpuInfo] = []
    replicas: list[ReplicaInfo] = []
    available: list[str] = []
    memory: MemoryInfo | None = None
    governance: NodeGovernance | None = None
    ticket_url: str = ""
    takes_certificates: bool = False
    tells_log: bool = False
    searches_hub: bool = False


class ResponseChunk(Message, tag="response_chunk"):
    """One piece of a streamed response body."""

    request_id: str
    chunk: str


class ResponseComplete(Message, tag="response_complete"):
    """Ends a response; carries the whole body when it was not streamed."""

    request_id: str
    status_code: int
    headers: dict[str, str] = {}
    body: str | None = None
    token_counts: TokenCounts | None = None


class Pong(Message, tag="pong"):
    """Answers a ``ping`` with the number of live requests."""

    current_load: int = 0
    timestamp_unix_ms: int | None = None


class ModelsUpdate(Message, tag="models_update"):
    """Replaces the model list of the worker."""

    models: list[str]
    current_load: int = 0


class WorkerError(Message, tag="error"):
    """Reports a failure, of one request when ``request_id`` is set."""

    request_id: str | None = None
    code: str = ""
    message: str = ""


class Telemetry(Message, tag="telemetry"):
    """muster v1: the node's own view, sent every few seconds and on change."""

    current_load: int = 0
    gpus: list[GpuInfo] = []
    replicas: list[ReplicaInfo] = []
    available: list[str] = []
    """Models that are on the node or that it may fetch, and that are not loaded."""
    memory: MemoryInfo | None = None
    queue_depth: int = 0
    avg_wait_ms: int | None = None
    last_error: str | None = None


class ModeChange(Message, tag="mode_change"):
    """muster v1: the owner lends (``spare_on``) or takes back (``spare_off``) the node."""

    mode: Literal["spare_on", "spare_off"]
    reason: str = ""


class Draining(Message, tag="draining"):
    """muster v1: the node is about to leave; it finishes what runs and wants nothing new."""

    reason: str = ""


class OpStatus(Message, tag="op_status"):
    """muster v1: where an operation stands on this node.

    ``state``: running, succeeded, failed, refused (nothing was done), interrupted (cut off by the end of the program) or
    unknown (never heard of). ``fraction`` 0.0 to 1.0 and ``eta_s`` while it runs. ``code`` and ``message`` say why not;
    ``result`` is the answer of the model-runner API; ``receipt`` is signed by the node, for every end but ``refused``.
    """

    op_id: str
    use: int
    state: str
    stage: str = ""
    fraction: float | None = None
    eta_s: float | None = None
    code: str = ""
    message: str = ""
    result: dict[str, Any] = {}
    receipt: str = ""


class GovernanceReport(Message, tag="governance_report"):
    """muster v1: what changed in how the node decides: a policy taken over or refused, a key renewed, a checkpoint seen.

    ``witness_signature``: of the node over the checkpoint it saw, which ``witness_note`` shows as the log signed it;
    ``witness_alarm``: why the last one it was offered contradicts the one it holds.
    """

    governance: NodeGovernance
    witness_signature: str = ""
    witness_note: str = ""
    witness_alarm: str = ""


class UsageReport(Message, tag="usage_report"):
    """muster v1: what became of requests that came with tickets; repeated until ``usage_taken`` names each that has ended.

    For servers whose ``register_ack`` had ``ticket_keys``.
    """

    reports: list[TicketUsage]


class CertificateRequest(Message, tag="certificate_request"):
    """muster v1: whether the node's port shows a certificate that clients can verify now, and a wish for the next one.

    ``csr``: a PKCS #10 request (PEM) by the key that the port shows already, of which only the key counts; empty = no wish.
    """

    is_held: bool
    csr: str = ""


class LogLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One line of a node's log. ``at_ms``: Unix time in milliseconds; ``level``: info, warning, error or critical."""

    at_ms: int
    level: str
    text: str


class LogTail(Message, tag="log_tail"):
    """muster v1: the last lines of the runner's own log, the oldest first: no prompts, no credentials, nothing of any file.

    ``left_out``: how many older lines at warning and above the runner has dropped since its start.
    """

    query_id: str
    lines: list[LogLine]
    left_out: int = 0


class HubModel(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A repository of a hub. ``task``: what the hub says it is for; ``is_gated``: its terms have to be accepted there.

    ``files``: its GGUF files, by which a node loads one of them; empty = it has none, and is loaded as a whole.
    """

    name: str
    downloads: int = 0
    task: str = ""
    is_gated: bool = False
    files: list[str] = []


class HubAnswer(Message, tag="hub_answer"):
    """muster v1: repositories that the node may fetch, the most fetched first; or the ``error``: why there are none."""

    query_id: str
    models: list[HubModel] = []
    error: str = ""


ServerMessage = (
    RegisterAck
    | Request
    | Cancel
    | Ping
    | GracefulShutdown
    | ModelsRefresh
    | NodeNotice
    | OpCommand
    | OpQuery
    | PolicyOffer
    | CheckpointOffer
    | TicketKeys
    | UsageTaken
    | NodeAuthorities
    | NodeCertificate
    | LogQuery
    | HubQuery
)
WorkerMessage = (
    Register
    | ResponseChunk
    | ResponseComplete
    | Pong
    | ModelsUpdate
    | WorkerError
    | Telemetry
    | ModeChange
    | Draining
    | OpStatus
    | GovernanceReport
    | UsageReport
    | CertificateRequest
    | LogTail
    | HubAnswer
)

_encoder = msgspec.json.Encoder()
_server_decoder: msgspec.json.Decoder[ServerMessage] = msgspec.json.Decoder(ServerMessage)
_worker_decoder: msgspec.json.Decoder[WorkerMessage] = msgspec.json.Decoder(WorkerMessage)


class ProtocolError(ValueError):
    """A frame that the protocol does not allow; the session ends with close code 1002."""


def encode_message(message: Message) -> str:
    """Return the compact JSON text of a message."""
    return _encoder.encode(message).decode()


def decode_worker_message(frame: str | bytes) -> WorkerMessage:
    """Parse a frame that a worker sent. Raises ProtocolError."""
    try:
        return _worker_decoder.decode(frame)
    except UNREADABLE as error:
        raise ProtocolError(f"worker frame: {error}") from None


def decode_server_message(frame: str | bytes) -> ServerMessage:
    """Parse a frame that the server sent. Raises ProtocolError."""
    try:
        return _server_decoder.decode(frame)
    except UNREADABLE as error:
        raise ProtocolError(f"server frame: {error}") from None

"""The closed vocabularies of the node and gateway contract v1: statuses, modes and error codes.

Every service uses these names; none invents its own. What a code means on HTTP lives with the error classes
that raise it (``gateway.errors``, ``nodes.errors``); those of the control plane have one base.
"""

from __future__ import annotations

from enum import StrEnum


class NodeStatus(StrEnum):
    """Contract "Node Status"."""

    OFFLINE = "offline"
    AVAILABLE = "available"
    BUSY = "busy"
    DRAINING = "draining"
    ERROR = "error"


class NodeMode(StrEnum):
    """Contract "Node Mode": whether the owner lends the node at the moment."""

    SPARE_ON = "spare_on"
    SPARE_OFF = "spare_off"


class RequestState(StrEnum):
    """Contract "Request Status", plus ``cancelled`` for a caller that left."""

    QUEUED = "queued"
    ASSIGNED = "assigned"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    REJECTED = "rejected"
    CANCELLED = "cancelled"


class ErrorCode(StrEnum):
    """Contract "Request Error Codes", plus codes for surfaces the contract leaves open."""

    NO_AVAILABLE_NODE = "NO_AVAILABLE_NODE"
    NODE_STALE = "NODE_STALE"
    NODE_DRAINING = "NODE_DRAINING"
    NODE_UNHEALTHY = "NODE_UNHEALTHY"
    MODEL_NOT_ALLOWED = "MODEL_NOT_ALLOWED"
    PROMPT_TOO_LARGE = "PROMPT_TOO_LARGE"
    MAX_TOKENS_TOO_LARGE = "MAX_TOKENS_TOO_LARGE"
    REQUEST_TIMEOUT = "REQUEST_TIMEOUT"
    FORWARDED_REQUEST_FAILED = "FORWARDED_REQUEST_FAILED"
    REQUEST_INTERRUPTED = "REQUEST_INTERRUPTED"
    INVALID_API_KEY = "INVALID_API_KEY"
    INVALID_NODE_TOKEN = "INVALID_NODE_TOKEN"
    RATE_LIMITED = "RATE_LIMITED"
    BAD_REQUEST = "BAD_REQUEST"
    # Not in the contract: needed by surfaces it does not describe.
    NOT_FOUND = "NOT_FOUND"
    BODY_TOO_LARGE = "BODY_TOO_LARGE"
    INVALID_ADMIN_TOKEN = "INVALID_ADMIN_TOKEN"
    INTERNAL_ERROR = "INTERNAL_ERROR"
    CLIENT_CLOSED_REQUEST = "CLIENT_CLOSED_REQUEST"
    TICKET_UNUSED = "TICKET_UNUSED"
    # Two names that clients of OpenAI compare with.
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    RESPONSE_NOT_FOUND = "previous_response_not_found"
    # Governance: which rule refused stands in ``param`` or in the text.
    APPROVAL_REFUSED = "APPROVAL_REFUSED"
    STATE_CHANGED = "STATE_CHANGED"
    FROZEN = "FROZEN"
    NO_POLICY = "NO_POLICY"
    TOO_MANY_OPEN = "TOO_MANY_OPEN"
    NOT_PERMITTED = "NOT_PERMITTED"


OPEN_REQUEST_STATES = frozenset({RequestState.QUEUED, RequestState.ASSIGNED, RequestState.RUNNING})
FINAL_REQUEST_STATES = frozenset(RequestState) - OPEN_REQUEST_STATES

"""What an operation is asked for with and what it is answered, in the words of the model-runner specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from runner.engines.port import FlushScope


class LoadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/models/load``. ``overrides`` are the backend's own fields; most others are those of the specification.

    ``keepLoaded``: the runner loads the model again by itself after every restart, until it is unloaded by an operation.
    """

    modelId: str  # noqa: N815  # names of the specification, here and below
    quantization: str | None = None
    maxContextLength: int | None = None  # noqa: N815
    gpuMemoryBudgetMB: int | None = None  # noqa: N815
    evictModel: str | None = None  # noqa: N815
    overrides: dict[str, object] = {}
    keepLoaded: bool | None = None  # noqa: N815
    verifiedOpToken: Any = None  # noqa: N815  # Any: an object, its text, or base64url of it


class UnloadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/models/unload``. ``force`` ends what runs instead of waiting for it."""

    modelId: str  # noqa: N815
    force: bool = False
    verifiedOpToken: Any = None  # noqa: N815  # as above


class FlushBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/cache/flush``."""

    scope: FlushScope
    tenantId: str | None = None  # noqa: N815
    modelId: str | None = None  # noqa: N815
    tag: str | None = None
    verifiedOpToken: Any = None  # noqa: N815  # as above


class ReloadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The operation ``settings-reload``, which has no parameters. Over the node's own port its owner asks without a token."""

    verifiedOpToken: Any = None  # noqa: N815  # as above


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP status and a JSON object."""

    status: int
    body: dict[str, object]

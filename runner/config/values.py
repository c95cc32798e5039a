"""What the process is told at its start, as values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner.limits import Limits


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """An OpenAI-compatible server that somebody else runs. ``url`` ends before ``/v1``.

    ``translate``: surfaces that gateways are to translate although the server may answer them. ``tidies``: chunks of its chat
    streams are put right for strict clients.
    """

    url: str
    key: str = field(default="", repr=False)
    models: tuple[str, ...] = ()
    translate: tuple[str, ...] = ()
    tidies: bool = False


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """One GGUF model that llama.cpp serves from the start. ``context_tokens`` is per slot; ``translate`` as of a backend."""

    model_path: Path
    model_name: str
    context_tokens: int
    threads: int
    translate: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """The box's own HTTP port. ``metrics_port`` None = metrics on the same port; ``key`` empty = none asked for."""

    host: str
    port: int
    key: str = field(repr=False)
    has_metrics: bool
    metrics_port: int | None


@dataclass(frozen=True, slots=True)
class ApiWish:
    """What flags and environment say of that port; None = the settings file may say, else the default."""

    host: str | None
    port: int | None
    key: str = field(repr=False)
    has_metrics: bool
    metrics_port: int | None


@dataclass(frozen=True, slots=True)
class OperationsConfig:
    """Who may load, unload and flush. ``level`` is 0, 1 or 2; ``is_level_given``: the owner named it.

    ``key_path``: the owner's own keys of tokens, None = the box makes its own at levels 1 and 2, and has none at level 0.
    ``runner_id``: the audience of tokens below level 2, "" = the name of the box. ``ops_per_hour``: how many may begin.
    ``counted_signers``: names that count towards ``min_signers`` below level 2, None = any.
    """

    key_path: Path | None
    level: int
    is_level_given: bool
    min_signers: int
    runner_id: str
    ops_per_hour: int
    counted_signers: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class FilesConfig:
    """Where things lie. ``data`` None = nothing is kept over a restart. Settings paths as in the llm-pool specification:
    those in the data folder need not be there.
    """

    data: Path | None
    model_base: Path | None
    hf_home: Path | None
    settings: Path | None
    local_settings: Path | None
    hub_allow: tuple[str, ...]

    def find_settings(self) -> tuple[Path | None, Path | None]:
        """Return the settings file and the local one to read now: one of the data folder only when it is there by now."""
        return self._find(self.settings), self._find(self.local_settings)

    def _find(self, path: Path | None) -> Path | None:
        own = () if self.data is None else (self.data / "settings.json", self.data / "local.json")
        is_optional = path in own
        return None if path is None or (is_optional and not path.is_file()) else path


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Everything the process needs to know. ``engine`` None = only what settings or operations load.

    ``log_level`` None = not given: the settings file may say. ``environment`` is what names limits, weights and engine
    defaults in variables of open-ended names. ``keeps_engine_errors``: the log has what engines say when they fail.
    ``limits``: what the process installs.
    """

    gateways: tuple[str, ...]
    token: str = field(repr=False)
    name: str
    provider: str
    owner: str
    max_concurrent: int
    max_queue_depth: int
    memory_budget_mb: int | None
    threads: int
    gpu_ids: tuple[int, ...]
    engine: BackendConfig | LlamaConfig | None
    api: ApiWish | None
    operations: OperationsConfig
    files: FilesConfig
    log_level: str | None
    log_json: bool
    keeps_engine_errors: bool
    limits: Limits
    environment: Mapping[str, str] = field(repr=False)

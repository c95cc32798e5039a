"""Options of the runner: flags win over the environment, that over defaults."""

from runner.config.reading import TINY_MODEL_NAME, TINY_MODEL_PATH, normalise_gateway, read_config, settle_api
from runner.config.values import (
    ApiConfig,
    ApiWish,
    BackendConfig,
    FilesConfig,
    LlamaConfig,
    OperationsConfig,
    RunnerConfig,
)

__all__ = [
    "TINY_MODEL_NAME", "TINY_MODEL_PATH", "ApiConfig", "ApiWish", "BackendConfig", "FilesConfig", "LlamaConfig",
    "OperationsConfig", "RunnerConfig", "normalise_gateway", "read_config", "settle_api",
]  # fmt: skip

"""Settings of the gateway that must fail at start, not at the first request that needs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error


def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: object) -> list[CheckMessage]:
    """Return what is wrong with the settings of the gateway."""
    return _check_tokenizers(settings.TOKENIZERS_DIR)


def _check_tokenizers(root: str) -> list[CheckMessage]:
    if not root or Path(root).is_dir():
        return []
    return [
        Error(
            f"MUSTER_TOKENIZERS_DIR names {root!r}, which is no folder.",
            hint="Name a folder with one folder for each model's tokenizer.json, or leave it empty: boxes then count tokens.",
            id="gateway.E001",
        )
    ]

"""Whisper through faster-whisper, each model in a child process that brings OpenAI's audio endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from runner.engines.library_child import LibraryEngine, LibraryKind, read_option
from runner.engines.port import TRANSCRIPTIONS, Capabilities, LoadPlan
from runner.limits import limits

TRANSLATIONS = "/v1/audio/translations"


def _settings(plan: LoadPlan) -> Mapping[str, object]:
    limit_mb = read_option(plan.options, "max_upload_mb", int) or limits().engines.whisper_upload_mb
    return {"max_upload_bytes": limit_mb * 1024 * 1024}


def _capabilities(plan: LoadPlan, info: Mapping[str, object]) -> Capabilities:
    """Translations only where the model knows languages. A client that leaves is noticed between segments."""
    translates = info.get("multilingual", True) is True
    return Capabilities(
        endpoints=(TRANSCRIPTIONS, TRANSLATIONS) if translates else (TRANSCRIPTIONS,),
        version=str(info.get("version", "")),
        max_inflight=plan.slots,
        keeps_nothing=True,
        isolates_tenants=True,
        reports_progress=True,
        audio_input=True,
    )


KIND = LibraryKind(
    name="whisper",
    module="runner.engines.children.whisper",
    distribution="faster-whisper",
    title="Whisper",
    needs="a folder with a Whisper model.bin of CTranslate2",
    settings=_settings,
    capabilities=_capabilities,
)
WhisperEngine = partial(LibraryEngine, kind=KIND)
"""The adapter, for a plan and a client; it also takes the option ``max_upload_mb``."""

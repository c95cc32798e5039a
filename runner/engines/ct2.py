"""CTranslate2 text models, each in a child process. It has no HTTP server of its own, so the child brings ours."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from runner.engines.library_child import LibraryEngine, LibraryKind
from runner.engines.port import CHAT, COMPLETIONS, TOKENIZE, Capabilities, LoadPlan


def _settings(plan: LoadPlan) -> Mapping[str, object]:
    return {"context_tokens": plan.context_tokens or 0}


def _capabilities(plan: LoadPlan, info: Mapping[str, object]) -> Capabilities:
    """Chat only where the model brings a template."""
    has_chat = info.get("chat", True) is True
    context_tokens = info.get("context_tokens")
    return Capabilities(
        endpoints=(CHAT, COMPLETIONS, TOKENIZE) if has_chat else (COMPLETIONS, TOKENIZE),
        version=str(info.get("version", "")),
        max_inflight=plan.slots,
        context_tokens=context_tokens if isinstance(context_tokens, int) else None,
        keeps_nothing=True,
        isolates_tenants=True,
        reports_progress=True,
        counts_tokens=True,
    )


KIND = LibraryKind(
    name="ct2",
    module="runner.engines.children.ct2",
    distribution="ctranslate2",
    title="CTranslate2",
    needs="a folder with a CTranslate2 model.bin",
    settings=_settings,
    capabilities=_capabilities,
)
Ct2Engine = partial(LibraryEngine, kind=KIND)
"""The adapter, for a plan and a client."""

"""Settings of governance that must fail at start, not at the first operation."""

from __future__ import annotations

from collections.abc import Sequence

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.utils.module_loading import import_string

_NEEDED = ("name", "title", "is_remote", "clean", "describe", "preview", "find_signer", "carry_out")


def check_operations(app_configs: Sequence[AppConfig] | None, **kwargs: object) -> list[CheckMessage]:
    """Return what is wrong with ``OPERATIONS``."""
    found: list[CheckMessage] = []
    for name, path in settings.OPERATIONS.items():
        try:
            kind = import_string(path)
        except ImportError as error:
            hint = "Name an object as governance.registry.OperationKind describes it."
            found.append(Error(f"OPERATIONS[{name!r}] cannot be imported: {error}", hint=hint, id="governance.E001"))
            continue
        missing = [member for member in _NEEDED if not hasattr(kind, member)]
        if missing or kind.name != name:
            found.append(Error(f"OPERATIONS[{name!r}] is {path}, which lacks {missing or 'that name'}", id="governance.E002"))
    return found

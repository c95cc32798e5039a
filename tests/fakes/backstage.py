"""The operator's hands: a process inside the control plane that calls service functions by name, one JSON line each.

The services are what the admin pages and the REST API call; going through them in a process of its own keeps Django
out of the test process and reaches the same database as every other part of the stack.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import json
import os
import sys
import uuid
from typing import Any  # JSON in, JSON out: the two ends of this pipe know the types


def encode(value: Any) -> Any:
    """Return ``value`` in JSON's terms; a Django row becomes its column values."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, (uuid.UUID, datetime.datetime)):
        return str(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(name): encode(item) for name, item in value.items()}
    if hasattr(value, "_meta"):
        return {field.attname: encode(getattr(value, field.attname)) for field in value._meta.concrete_fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return repr(value)


def decode(value: Any) -> Any:
    """Return ``value`` with ``{"$id": "node_…"}`` turned into the UUID it prints, and ``{"$budgets": {kind: amount}}`` made."""
    if isinstance(value, dict) and set(value) == {"$id"}:
        return uuid.UUID(str(value["$id"]).rpartition("_")[2])
    if isinstance(value, dict) and set(value) == {"$budgets"}:
        from gateway.values import Budget, BudgetKind

        return [Budget(BudgetKind(kind), amount) for kind, amount in value["$budgets"].items()]
    return value


def answer(line: str) -> dict[str, Any]:
    from django.db import connections

    call = json.loads(line)
    module, _, name = call["function"].rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
        result = function(**{key: decode(item) for key, item in call["arguments"].items()})
        return {"result": encode(result)}
    except Exception as error:  # noqa: BLE001  (the edge of a process: every failure belongs to the caller)
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        # The database may have been restarted between two calls.
        connections.close_all()


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    import django

    django.setup()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

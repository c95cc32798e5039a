"""Prepares a fresh, migrated database for a run and prints what the run needs as one line of JSON.

Started as its own process (``python -m benchmarks.provision MODEL…``) with the environment of Muster's processes, so
that the benchmark itself never loads Django.
"""

from __future__ import annotations

import json
import sys

import django

UNLIMITED_RPM = 1_000_000_000
ACTOR = "benchmark"


def provision(models: list[str]) -> dict[str, str]:
    """Create a tenant, a key without a practical limit, the models, and one credential for each kind of box."""
    from gateway.services import allow_model, create_api_key, create_tenant
    from nodes.models import Provider
    from nodes.services import create_credential, create_provider

    create_tenant(name="bench", actor=ACTOR)
    _key, key_text = create_api_key(
        name="bench", tenant_name="bench", actor=ACTOR, requests_per_minute=UNLIMITED_RPM, allowed_models=models
    )
    for model in models:
        allow_model(name=model, actor=ACTOR)
    if not Provider.objects.filter(name="local").exists():
        create_provider(name="local", actor=ACTOR)
    _direct, direct_text = create_credential(name="bench-direct", provider_name="local", actor=ACTOR)
    _relay, relay_text = create_credential(name="bench-relay", provider_name="local", max_nodes=8, actor=ACTOR)
    return {"api_key": key_text, "direct_secret": direct_text, "relay_secret": relay_text}


def main(models: list[str]) -> int:
    """Provision for ``models`` and print what came of it."""
    django.setup()
    print(json.dumps(provision(models)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

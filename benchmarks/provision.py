"""Prepares a fresh, migrated database for a run and prints what the run needs as one line of JSON.

Started as its own process (``python -m benchmarks.provision KEYS MODEL…``) with the environment of Muster's processes, so
that the benchmark itself never loads Django.
"""

from __future__ import annotations

import json
import sys

import django

UNLIMITED_RPM = 1_000_000_000
MAX_NODES = 2_000
ACTOR = "benchmark"


def provision(models: list[str], *, keys: int) -> dict[str, str]:
    """Create a tenant, ``keys`` keys without a practical limit, the models, and one credential for each kind of node."""
    from gateway.models import ApiKey
    from gateway.services.keys import create_api_key
    from gateway.services.models import allow_model
    from gateway.services.tenants import create_tenant
    from nodes.models import Provider
    from nodes.services.credentials import create_credential, create_provider
    from wire.credentials import CredentialKind, mint_credential

    create_tenant(name="bench", actor=ACTOR)
    key, key_text = create_api_key(
        name="bench", tenant_name="bench", actor=ACTOR, requests_per_minute=UNLIMITED_RPM, allowed_models=models
    )
    minted = [mint_credential(CredentialKind.CLIENT) for _ in range(keys - 1)]
    ApiKey.objects.bulk_create(
        ApiKey(
            name=f"bench-{number}", tenant=key.tenant, keyid=other.keyid, digest=other.digest,
            requests_per_minute=UNLIMITED_RPM, allowed_models=models,
        )
        for number, other in enumerate(minted)
    )  # fmt: skip
    for model in models:
        allow_model(name=model, actor=ACTOR)
    if not Provider.objects.filter(name="local").exists():
        create_provider(name="local", actor=ACTOR)
    _direct, direct_text = create_credential(name="bench-direct", provider_name="local", actor=ACTOR)
    _relay, relay_text = create_credential(name="bench-relay", provider_name="local", max_nodes=MAX_NODES, actor=ACTOR)
    return {"api_key": key_text, "direct_secret": direct_text, "relay_secret": relay_text}


def main(keys: int, models: list[str]) -> int:
    """Provision for ``models`` and print what came of it."""
    django.setup()
    print(json.dumps(provision(models, keys=keys)))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

"""Tenants by name: the names that are accepted, and the variables of the environment that end in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runner.errors import ConfigError, InvalidRequest
from runner.limits import limits

ANONYMOUS = "anonymous"
DEFAULT = "default"
"""Stands for every tenant that has no variable of its own."""
_WEIGHT_PREFIX = "TENANT_WEIGHT_"


def clean_tenant(text: str) -> str:
    """Return the tenant that a request names (``X-Tenant-ID``), ``anonymous`` when it names none. Raises InvalidRequest."""
    tenant = text.strip()
    if not tenant:
        return ANONYMOUS
    if not _is_name(tenant):
        message = f"X-Tenant-ID must be at most {limits().admission.tenant_chars} printable ASCII characters"
        raise InvalidRequest(message, param="X-Tenant-ID")
    return tenant


def read_tenant_variables(env: Mapping[str, str], prefix: str) -> dict[str, tuple[str, str]]:
    """Return ``{tenant: (variable, its text)}`` of the variables ``<prefix><tenant>``. Raises ConfigError."""
    found: dict[str, tuple[str, str]] = {}
    for variable, text in env.items():
        if not variable.startswith(prefix):
            continue
        tenant = variable[len(prefix) :]
        if not tenant or tenant != tenant.strip() or not _is_name(tenant):
            shape = f"{prefix}<tenant>, the tenant at most {limits().admission.tenant_chars} printable ASCII characters"
            raise ConfigError(f"{variable!a} names no tenant: write {shape}")
        found[tenant] = (variable, text)
    return found


def read_weights(env: Mapping[str, str]) -> Callable[[str], float]:
    """Return the weight of a tenant as ``TENANT_WEIGHT_<tenant>=2.5`` sets it.

    Those without one have that of ``TENANT_WEIGHT_default``, or 1. Raises ConfigError.
    """
    weights = {
        tenant: _read_weight(variable, text) for tenant, (variable, text) in read_tenant_variables(env, _WEIGHT_PREFIX).items()
    }
    usual = weights.pop(DEFAULT, 1.0)
    return lambda tenant: weights.get(tenant, usual)


def _is_name(text: str) -> bool:
    return len(text) <= limits().admission.tenant_chars and text.isascii() and text.isprintable()


def _read_weight(variable: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= limits().admission.weight:
        raise ConfigError(
            f"{variable} must be a number above 0 and at most {limits().admission.weight:g}, such as 2.5, not {text!r}"
        )
    return weight

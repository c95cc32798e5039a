"""The sections of the settings that are not models: the service, fairness between tenants, costs of remote models. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from runner.definitions.kinds import Enum, Integer, Kind, Number, Text, type_name
from runner.errors import InvalidSettings
from runner.limits import limits

LOG_LEVELS = ("debug", "info", "warning", "error")

_WEIGHT = Number(minimum=0.0, is_above_minimum=True)
_MONEY = Number(minimum=0.0)


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """Where the runner's API listens; None = not said here."""

    host: str | None = None
    port: int | None = None
    log_level: str | None = None


class Fairness(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of tenants in a model's time, and how many of their requests run (softly) and wait (at most)."""

    weights: dict[str, float] = {}
    soft_inflight_per_key: int = 1
    pending_per_key: int = 32
    pending_per_executor: int = 128


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What a million tokens of a remote model cost, in the currency of the settings."""

    input_per_million: float
    output_per_million: float


@dataclass(frozen=True, slots=True)
class Remote:
    """Limits for models that cost money. ``monthly_cap`` holds for a tenant without one of its own in ``caps``.

    None = no cap; 0 = nothing may be spent. Amounts are in ``currency``; ``prices`` by model id.
    """

    currency: str = "USD"
    monthly_cap: float | None = None
    caps: Mapping[str, float] = field(default_factory=dict)
    prices: Mapping[str, Price] = field(default_factory=dict)

    def cap_for(self, tenant: str) -> float | None:
        """Return what a tenant may spend in a month, None for any amount."""
        return self.caps.get(tenant, self.monthly_cap)


_SERVICE_FIELDS: Mapping[str, Kind] = {
    "host": Text(what="a host name or address", nullable=True),
    "port": Integer(minimum=1, maximum=65535, unit="port", nullable=True),
    "log_level": Enum(values=LOG_LEVELS, nullable=True),
}
_FAIRNESS_FIELDS: Mapping[str, Kind] = {
    "soft_inflight_per_key": Integer(minimum=1, maximum=1024, unit="requests"),
    "pending_per_key": Integer(minimum=1, maximum=65536, unit="requests"),
    "pending_per_executor": Integer(minimum=1, maximum=65536, unit="requests"),
}
_PRICE_FIELDS: Mapping[str, Kind] = {"input_per_million": _MONEY, "output_per_million": _MONEY}
_CURRENCY = Text(what="three letters such as EUR", is_valid=lambda text: len(text) == 3 and text.isascii() and text.isupper())


def read_service(value: object) -> Service:
    """Return the ``service`` section. Raises InvalidSettings."""
    return msgspec.convert(_read_fields(value, "service", _SERVICE_FIELDS), Service)


def read_fairness(value: object) -> Fairness:
    """Return the ``engine.fairness`` section. Raises InvalidSettings."""
    path = "engine.fairness"
    fields = dict(read_object(value, path, {*_FAIRNESS_FIELDS, "weights"}))
    weights = _read_tenants(fields.pop("weights", {}), f"{path}.weights", _WEIGHT)
    return msgspec.convert({**_read_fields(fields, path, _FAIRNESS_FIELDS), "weights": weights}, Fairness)


def read_remote(value: object, *, remote_models: Collection[str]) -> Remote:
    """Return the ``engine.remote`` section. A price must belong to one of ``remote_models``. Raises InvalidSettings."""
    path = "engine.remote"
    fields = read_object(value, path, {"currency", "monthly_cap", "prices"})
    currency = fields.get("currency", "USD")
    check_value(currency, f"{path}.currency", _CURRENCY)
    cap_path = f"{path}.monthly_cap"
    caps = read_object(fields.get("monthly_cap", {}), cap_path, {"default", "tenants"})
    default = caps.get("default")
    check_value(default, f"{cap_path}.default", Number(minimum=0.0, nullable=True))
    prices: dict[str, Price] = {}
    for model_id, price in read_object(fields.get("prices", {}), f"{path}.prices", None).items():
        where = f"{path}.prices.{_name(model_id)}"
        if model_id not in remote_models:
            raise InvalidSettings(f"{where} is not the id of an openai_compatible model of these settings", param=where)
        prices[model_id] = _read_price(price, where)
    return Remote(
        currency=str(currency),
        monthly_cap=None if default is None else msgspec.convert(default, float),
        caps=_read_tenants(caps.get("tenants", {}), f"{cap_path}.tenants", _MONEY),
        prices=prices,
    )


def read_object(value: object, path: str, known: Collection[str] | None) -> Mapping[str, object]:
    """Return an object whose names are among ``known`` (None = any). Raises InvalidSettings naming the dotted path."""
    if not isinstance(value, Mapping):
        raise refuse(value, path or "the settings", "an object")
    for name in value:
        if known is not None and name not in known:
            dotted = f"{path}.{_name(name)}".lstrip(".")
            raise InvalidSettings(f"{dotted} is unknown; allowed here: {', '.join(sorted(known))}", param=dotted)
    return value


def check_value(value: object, path: str, kind: Kind) -> None:
    """Raise InvalidSettings unless the value is allowed; numbers are repeated, strings are not, for they may be secret."""
    if not kind.accepts(value):
        raise refuse(value, path, kind.allowed())


def refuse(value: object, path: str, allowed: str) -> InvalidSettings:
    """Return the error for a value that cannot be used."""
    got = type_name(value)
    if isinstance(value, bool | int | float):
        got += f" ({str(value)[:40]})"
    return InvalidSettings(f"{path} must be {allowed}, not {got}", param=path)


def _read_fields(value: object, path: str, kinds: Mapping[str, Kind]) -> Mapping[str, object]:
    fields = read_object(value, path, kinds.keys())
    for name, given in fields.items():
        check_value(given, f"{path}.{name}", kinds[name])
    return fields


def _read_price(value: object, path: str) -> Price:
    fields = _read_fields(value, path, _PRICE_FIELDS)
    for name in _PRICE_FIELDS:
        if name not in fields:
            raise InvalidSettings(f"{path}.{name} is missing; it must be {_MONEY.allowed()}", param=f"{path}.{name}")
    return msgspec.convert(fields, Price)


def _read_tenants(value: object, path: str, kind: Number) -> dict[str, float]:
    tenants: dict[str, float] = {}
    for tenant, number in read_object(value, path, None).items():
        if not tenant or len(tenant) > limits().admission.tenant_chars or tenant != tenant.strip() or not tenant.isprintable():
            raise InvalidSettings(
                f"{path}: a tenant is named by 1 to {limits().admission.tenant_chars} printable characters", param=path
            )
        check_value(number, f"{path}.{tenant}", kind)
        tenants[tenant] = msgspec.convert(number, float)
    return tenants


def _name(name: str) -> str:
    return name if name.isprintable() and len(name) <= 80 else "(a name)"

"""Tenants by name: their names, the weights and request rates that the environment gives them.

A rate is an exact moving window, in this process only.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runner.errors import ConfigError, InvalidRequest, RateLimitExceeded
from runner.limits import limits
from wire import clock

ANONYMOUS = "anonymous"
DEFAULT = "default"
"""Stands for every tenant that has no variable of its own."""
_WEIGHT_PREFIX = "TENANT_WEIGHT_"
_RATE_PREFIX = "TENANT_RATE_LIMIT_"
_FALLBACK_VARIABLE = "DEFAULT_RATE_LIMIT"
_SWITCH_VARIABLE = "ENABLE_MULTI_TENANT"
_SWITCH_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_RATE = re.compile(r"\s*([0-9]{1,9})\s*req\s*/\s*([a-z]+)\s*", re.IGNORECASE)
_UNITS = {"s": "s", "sec": "s", "second": "s", "min": "min", "minute": "min", "h": "hour", "hour": "hour"}
_PERIODS_S = {"s": 1.0, "min": 60.0, "hour": 3600.0}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RateState:
    """Where a tenant stands: ``reset_at`` is the Unix second at which the window next gives a request back.

    All three are None when no rate applies.
    """

    limit: int | None
    remaining: int | None
    reset_at: int | None


UNLIMITED = RateState(limit=None, remaining=None, reset_at=None)


@dataclass(frozen=True, slots=True)
class Rate:
    """``limit`` requests per ``unit`` (s, min or hour)."""

    limit: int
    unit: str

    @property
    def period_s(self) -> float:
        """Length of the window in seconds."""
        return _PERIODS_S[self.unit]


class TenantRates:
    """The windows of all tenants. ``by_tenant`` are the tenants that have a rate of their own, ``usual`` is that of the others.

    Not ``is_multi_tenant``: everybody shares one window of the usual rate.
    """

    def __init__(
        self,
        *,
        by_tenant: Mapping[str, Rate],
        usual: Rate | None,
        is_multi_tenant: bool,
    ) -> None:
        self.is_multi_tenant = is_multi_tenant
        self._usual = usual
        self._own = {tenant: (rate, deque[float]()) for tenant, rate in by_tenant.items()} if is_multi_tenant else {}
        self._strangers: OrderedDict[str, deque[float]] = OrderedDict()
        self._shared: deque[float] = deque()

    @property
    def stranger_count(self) -> int:
        """Tenants without a rate of their own that have a window now."""
        return len(self._strangers)

    def key_of(self, tenant: str) -> str:
        """Return the name under which a tenant is counted: its own, or ``default`` where all share one."""
        return tenant if self.is_multi_tenant else DEFAULT

    def take(self, tenant: str) -> RateState:
        """Count a request that begins now. Raises RateLimitExceeded, and then counts nothing."""
        now = clock.monotonic()
        own = self._own.get(tenant)
        if own is not None:
            rate, window = own
            return self._take_from(window, rate, tenant, now)
        if self._usual is None:
            return UNLIMITED
        key = self.key_of(tenant)
        state = self._take_from(self._stranger_window(key, self._usual, now), self._usual, tenant, now)
        # Refused requests do not get here, so the windows stay in the order in which they will be empty.
        if key in self._strangers:
            self._strangers.move_to_end(key)
        return state

    def _take_from(self, window: deque[float], rate: Rate, tenant: str, now: float) -> RateState:
        period_s = rate.period_s
        while window and window[0] <= now - period_s:
            window.popleft()
        is_over = len(window) >= rate.limit
        if not is_over:
            window.append(now)
        wait_s = window[0] + period_s - now
        reset_at = math.ceil(clock.unix_s() + wait_s)
        if is_over:
            raise RateLimitExceeded(
                f"Tenant {tenant} exceeded {rate.limit} req/{rate.unit}",
                retry_after_s=wait_s,
                details={"limit": rate.limit, "remaining": 0, "resetAt": reset_at},
            )
        return RateState(limit=rate.limit, remaining=rate.limit - len(window), reset_at=reset_at)

    def _stranger_window(self, key: str, rate: Rate, now: float) -> deque[float]:
        window = self._strangers.get(key)
        if window is not None:
            return window
        while self._strangers:
            oldest = next(iter(self._strangers.values()))
            if oldest and oldest[-1] > now - rate.period_s:
                break
            self._strangers.popitem(last=False)
        if len(self._strangers) >= limits().admission.tenant_windows:
            return self._shared
        window = self._strangers[key] = deque()
        return window


def read_rates(env: Mapping[str, str]) -> TenantRates:
    """Return the rates of ``TENANT_RATE_LIMIT_<tenant>=100req/min`` (or req/s, req/hour).

    Other tenants have that of ``TENANT_RATE_LIMIT_default``, else of ``DEFAULT_RATE_LIMIT``, else none. With
    ``ENABLE_MULTI_TENANT=false`` all share that one. Raises ConfigError, which names the variable.
    """
    variables = read_tenant_variables(env, _RATE_PREFIX)
    rates = {tenant: _read_rate(variable, text) for tenant, (variable, text) in variables.items()}
    usual = rates.pop(DEFAULT, None)
    fallback_text = env.get(_FALLBACK_VARIABLE, "")
    fallback = _read_rate(_FALLBACK_VARIABLE, fallback_text) if fallback_text.strip() else None
    return TenantRates(
        by_tenant=rates,
        usual=usual if usual is not None else fallback,
        is_multi_tenant=_read_switch(env.get(_SWITCH_VARIABLE, "")),
    )


def _read_rate(variable: str, text: str) -> Rate:
    match = _RATE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{variable} must look like 100req/min, 5req/s or 2000req/hour, not {text!r}")
    limit = int(match[1])
    if not 1 <= limit <= limits().admission.rate:
        raise ConfigError(f"{variable} must allow from 1 to {limits().admission.rate} requests, not {limit}")
    return Rate(limit, unit)


def _read_switch(text: str) -> bool:
    word = text.strip().lower()
    if not word:
        return True
    if word not in _SWITCH_WORDS:
        raise ConfigError(f"{_SWITCH_VARIABLE} must be true or false, not {text!r}")
    return _SWITCH_WORDS[word]


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

"""Names, weights and request rates of tenants, as the environment sets them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping

import pytest

from runner.admission import RateState, TenantRates, clean_tenant, read_rates, read_weights
from runner.admission.rates import Rate
from runner.errors import ConfigError, InvalidRequest, RateLimitExceeded
from runner.limits import limits
from tests.fakes.clock import install_virtual_clock


class Rates:
    """Rates under a clock that the test turns."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.clock = install_virtual_clock(unix_s=1_745_880_000.0)
        self.rates = read_rates(env)

    def take(self, tenant: str, times: int = 1) -> RateState:
        """Take several times, and return the last state."""
        for _ in range(times - 1):
            self.rates.take(tenant)
        return self.rates.take(tenant)

    def is_refused(self, tenant: str) -> bool:
        try:
            self.rates.take(tenant)
        except RateLimitExceeded:
            return True
        return False


def test_a_tenant_beyond_its_rate_hears_the_limit_and_when_to_come_again() -> None:
    box = Rates({"TENANT_RATE_LIMIT_community-x": "100req/min"})
    assert box.take("community-x") == RateState(limit=100, remaining=99, reset_at=1_745_880_060)
    box.clock.advance(29.5)
    assert box.take("community-x", 99) == RateState(limit=100, remaining=0, reset_at=1_745_880_060)
    with pytest.raises(RateLimitExceeded, match=r"^Tenant community-x exceeded 100 req/min$") as caught:
        box.take("community-x")
    error = caught.value
    assert (error.code, error.status, error.retry_after_s) == ("rate_limit_exceeded", 429, 30.5)
    assert error.details == {"limit": 100, "remaining": 0, "resetAt": 1_745_880_060}


def test_the_window_moves_and_does_not_jump() -> None:
    box = Rates({"DEFAULT_RATE_LIMIT": "2req/s"})
    box.take("a")
    box.clock.advance(0.9)
    box.take("a")
    assert box.is_refused("a")
    box.clock.advance(0.1)  # the first is a second old, the other is not
    assert not box.is_refused("a")
    assert box.is_refused("a")
    box.clock.advance(0.9)
    assert not box.is_refused("a")


def test_refused_requests_are_not_counted() -> None:
    box = Rates({"DEFAULT_RATE_LIMIT": "1req/min"})
    box.take("a")
    for _ in range(10):
        box.clock.advance(5.9)
        assert box.is_refused("a")
    box.clock.advance(1.0)
    assert not box.is_refused("a")


@pytest.mark.parametrize(
    ("text", "period_s"),
    [
        ("1req/s", 1.0),
        ("1req/second", 1.0),
        ("1req/min", 60.0),
        (" 1 REQ / minute ", 60.0),
        ("1req/h", 3600.0),
        ("1req/hour", 3600.0),
    ],
)
def test_a_rate_is_per_second_minute_or_hour(text: str, period_s: float) -> None:
    box = Rates({"TENANT_RATE_LIMIT_a": text})
    box.take("a")
    box.clock.advance(period_s - 0.01)
    assert box.is_refused("a")
    box.clock.advance(0.02)
    assert not box.is_refused("a")


def test_tenants_have_windows_of_their_own_and_the_rate_that_is_set_for_them() -> None:
    box = Rates({
        "TENANT_RATE_LIMIT_a": "1req/min", "TENANT_RATE_LIMIT_default": "2req/min", "DEFAULT_RATE_LIMIT": "9req/min",
    })  # fmt: skip
    assert [box.take(tenant).limit for tenant in "abc"] == [1, 2, 2]
    assert box.is_refused("a")
    assert box.take("b").remaining == 0
    assert box.is_refused("b")
    assert box.take("c").remaining == 0


def test_without_any_rate_nobody_is_limited() -> None:
    box = Rates({"TENANT_RATE_LIMIT_a": "1req/min"})
    assert box.take("b", 1000) == RateState(limit=None, remaining=None, reset_at=None)
    assert box.rates.stranger_count == 0


def test_without_tenants_all_share_one_window() -> None:
    box = Rates({"ENABLE_MULTI_TENANT": "false", "DEFAULT_RATE_LIMIT": "2req/min", "TENANT_RATE_LIMIT_a": "50req/min"})
    box.take("a")
    box.take("b")
    assert box.is_refused("a")
    assert box.is_refused("c")
    assert [box.rates.key_of(tenant) for tenant in "ab"] == ["default", "default"]


def test_with_tenants_each_is_counted_under_its_own_name() -> None:
    rates = read_rates({"ENABLE_MULTI_TENANT": "TRUE"})
    assert (rates.is_multi_tenant, rates.key_of("a")) == (True, "a")


def test_invented_tenants_do_not_grow_memory_without_bound() -> None:
    box = Rates({"DEFAULT_RATE_LIMIT": "3req/min", "TENANT_RATE_LIMIT_known": "5req/min"})
    for number in range(limits().admission.tenant_windows):
        box.take(f"stranger-{number}")
    assert box.take("late-1").remaining == 2
    assert box.take("late-2").remaining == 1  # one window for all that come now
    tracemalloc.start()
    for number in range(20_000):
        box.is_refused(f"invented-{number}")
    grown_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown_bytes < 100_000
    assert box.rates.stranger_count == limits().admission.tenant_windows
    assert box.is_refused("invented-again")
    assert box.take("stranger-5").remaining == 1
    assert box.take("known").remaining == 4


def test_windows_that_are_over_make_room() -> None:
    box = Rates({"DEFAULT_RATE_LIMIT": "3req/min"})
    for number in range(limits().admission.tenant_windows):
        box.take(f"stranger-{number}")
    box.clock.advance(59.0)
    box.take("stranger-0")
    box.clock.advance(2.0)
    assert box.take("late").remaining == 2
    assert box.rates.stranger_count == 2
    assert box.take("stranger-0").remaining == 1


@pytest.mark.parametrize(
    "text", ["", "100", "100/min", "req/min", "-1req/min", "0req/min", "1.5req/s", "100req/day", "999999req/s", "x"]
)
def test_a_rate_that_cannot_be_read_names_its_variable(text: str) -> None:
    with pytest.raises(ConfigError, match="TENANT_RATE_LIMIT_community-x"):
        read_rates({"TENANT_RATE_LIMIT_community-x": text})
    if text:
        with pytest.raises(ConfigError, match="DEFAULT_RATE_LIMIT"):
            read_rates({"DEFAULT_RATE_LIMIT": text})


@pytest.mark.parametrize(
    "variable", ["TENANT_RATE_LIMIT_", "TENANT_RATE_LIMIT_ a", "TENANT_RATE_LIMIT_caf\u00e9", "TENANT_RATE_LIMIT_" + "x" * 129]
)
def test_a_variable_that_names_no_tenant_is_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match="names no tenant"):
        read_rates({variable: "1req/s"})


def test_the_switch_for_tenants_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="ENABLE_MULTI_TENANT must be true or false"):
        read_rates({"ENABLE_MULTI_TENANT": "perhaps"})


def test_rates_can_be_made_without_the_environment() -> None:
    rates = TenantRates(by_tenant={"a": Rate(1, "hour")}, usual=None, is_multi_tenant=True)
    assert rates.take("a").limit == 1
    with pytest.raises(RateLimitExceeded, match="exceeded 1 req/hour"):
        rates.take("a")


def test_weights_are_those_of_the_operator_and_one_otherwise() -> None:
    weight_of = read_weights({"TENANT_WEIGHT_community-x": "2.5", "TENANT_RATE_LIMIT_b": "1req/s"})
    assert (weight_of("community-x"), weight_of("b"), weight_of("default")) == (2.5, 1.0, 1.0)
    assert read_weights({"TENANT_WEIGHT_default": "0.5", "TENANT_WEIGHT_a": "4"})("b") == 0.5


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1001", "two"])
def test_a_weight_that_cannot_be_used_names_its_variable(text: str) -> None:
    with pytest.raises(ConfigError, match="TENANT_WEIGHT_a must be a number above 0"):
        read_weights({"TENANT_WEIGHT_a": text})


def test_tenants_are_trimmed_and_the_nameless_are_anonymous() -> None:
    assert [clean_tenant(text) for text in ("  community-x ", "", "   ", "a b", "x" * 128)] == [
        "community-x", "anonymous", "anonymous", "a b", "x" * 128,
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["x" * 129, "caf\u00e9", "a\x00b", "a\nb", "a\x7f", "\u202eb"])
def test_a_tenant_that_is_no_short_printable_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="128 printable ASCII") as caught:
        clean_tenant(text)
    assert caught.value.param == "X-Tenant-ID"

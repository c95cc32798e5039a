"""Which models may answer a name, in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.limits import limits
from gateway.errors import GatewayError, ModelNotAllowed, ModelUnknown, NoAvailableNode
from gateway.routing import AUTO, Alias, Route, Target, choose_by_weight, may_use, resolve


def alias(name: str, **weights: int) -> Alias:
    return Alias(name, tuple(Target(model, weight) for model, weight in weights.items()))


def table(*aliases: Alias) -> dict[str, Alias]:
    return {one.name: one for one in aliases}


def allow_only(*models: str, key: Sequence[str] = ()) -> Callable[[str, str], GatewayError | None]:
    """Return a rule: these models are allow-listed, and the key names these (none: all)."""

    def refuse(model: str, via: str) -> GatewayError | None:
        if model not in models:
            return ModelUnknown(f"no {model}")
        return None if may_use(frozenset(key), model, via=via) else ModelNotAllowed(f"not {model}")

    return refuse


ALL = allow_only(*"abcdefgh")


def route(
    name: str,
    *,
    aliases: Mapping[str, Alias] | None = None,
    refuse: Callable[[str, str], GatewayError | None] = ALL,
    fallbacks: Mapping[str, Sequence[str]] | None = None,
    extra: Sequence[str] = (),
    served: Sequence[str] = (),
    chosen: int = 0,
) -> str:
    """Return the candidates in one word."""
    found = resolve(
        name,
        aliases=aliases or {},
        refuse=refuse,
        fallbacks_of=lambda model: (fallbacks or {}).get(model, ()),
        rank_auto=lambda: served,
        extra=extra,
        choose=lambda weights: chosen,
    )
    assert found.asked == name
    return "".join(found.models)


def test_a_model_without_alias_or_fallbacks_is_its_own_only_candidate() -> None:
    assert route("a") == "a"


def test_what_the_client_names_comes_before_the_fallbacks_of_the_model() -> None:
    assert route("a", extra=("c", "b"), fallbacks={"a": ("d", "b")}) == "acbd"


def test_only_the_fallbacks_of_the_first_candidate_count() -> None:
    assert route("a", fallbacks={"a": ("b",), "b": ("c",)}) == "ab"


def test_an_alias_wins_over_a_model_of_its_name_and_may_lead_to_it() -> None:
    assert route("a", aliases=table(alias("a", b=1))) == "b"
    assert route("a", aliases=table(alias("a", a=1, b=9)), chosen=1) == "ab"


def test_a_target_is_a_model_even_when_an_alias_has_its_name() -> None:
    assert route("x", aliases=table(alias("x", a=1), alias("a", b=1))) == "a"


@pytest.mark.parametrize(("chosen", "expected"), [(0, "cab"), (1, "acb"), (2, "bca")], ids=["first", "second", "third"])
def test_the_choice_comes_first_and_the_others_follow_by_weight(chosen: int, expected: str) -> None:
    assert route("x", aliases=table(alias("x", a=5, b=1, c=7)), chosen=chosen) == expected


def test_weights_are_offered_heaviest_first_and_zero_only_stands_in() -> None:
    offered: list[Sequence[int]] = []
    found = resolve(
        "x",
        aliases=table(alias("x", a=0, b=2, c=3, d=0)),
        refuse=lambda model, via: None,
        fallbacks_of=lambda model: (),
        rank_auto=tuple,
        choose=lambda weights: offered.append(weights) or 1,  # type: ignore[func-returns-value]  # remembers and chooses
    )
    assert offered == [[3, 2]]
    assert found == Route("x", ("b", "c", "a", "d"))


def test_what_the_key_may_not_use_is_left_out_before_the_choice() -> None:
    aliases = table(alias("x", a=5, b=1, c=7))
    assert route("x", aliases=aliases, refuse=allow_only("a", "b"), chosen=1) == "ba"
    assert route("a", refuse=allow_only("a", "c"), extra=("b", "c"), fallbacks={"a": ("d",)}) == "ac"


def test_when_none_is_left_the_error_is_that_of_the_first() -> None:
    with pytest.raises(ModelUnknown, match="no z"):
        route("z", extra=("y",))
    with pytest.raises(ModelNotAllowed, match="not b"):
        route("x", aliases=table(alias("x", z=1, b=2)), refuse=allow_only("b", key=("c",)))


def test_a_model_that_is_refused_is_replaced_by_what_the_client_names() -> None:
    assert route("z", extra=("b",), fallbacks={"b": ("c",)}) == "bc"


def test_an_alias_that_the_client_names_as_a_fallback_stands_for_its_targets() -> None:
    assert route("a", aliases=table(alias("x", b=1, c=2)), extra=("x", "d")) == "acbd"


def test_auto_takes_what_is_served_best_first_and_leaves_out_what_the_key_may_not_use() -> None:
    assert route(AUTO, served="cab", fallbacks={"c": ("d",)}) == "cabd"
    assert route(AUTO, served="cab", refuse=allow_only("a", "b", "c", key=("a", "b"))) == "ab"
    assert route("z", extra=(AUTO,), served="ba") == "ba"


@pytest.mark.parametrize("served", ["", "z"], ids=["nothing", "nothing for this key"])
def test_auto_without_a_model_is_a_matter_of_time(served: str) -> None:
    with pytest.raises(NoAvailableNode) as refusal:
        route(AUTO, served=served)
    assert type(refusal.value) is NoAvailableNode
    assert refusal.value.retry_after_s


def test_an_alias_called_auto_takes_its_place() -> None:
    assert route(AUTO, aliases=table(alias(AUTO, b=1)), served="a") == "b"


def test_a_key_that_names_an_alias_may_use_its_targets_through_it_alone() -> None:
    refuse = allow_only(*"abcd", key=("x",))
    aliases = table(alias("x", a=1, b=0), alias("y", a=1))
    assert route("x", aliases=aliases, refuse=refuse, fallbacks={"a": ("c",)}) == "ab"
    for name in ("a", "y"):
        with pytest.raises(ModelNotAllowed):
            route(name, aliases=aliases, refuse=refuse)


def test_a_key_that_names_models_reaches_them_by_any_name() -> None:
    assert route("x", aliases=table(alias("x", a=1, b=9)), refuse=allow_only(*"ab", key=("a",))) == "a"


def test_what_a_client_names_is_bounded() -> None:
    asked: list[str] = []

    def refuse(model: str, via: str) -> GatewayError | None:
        asked.append(model)
        return ModelUnknown(model)

    with pytest.raises(ModelUnknown):
        route("a", refuse=refuse, extra=[f"m{number}" for number in range(100_000)])
    assert len(asked) == limits().gateway.candidates + 1


NAMES = st.sampled_from([*"abcdefgh", "x", "y", AUTO])
MODELS = st.lists(st.sampled_from("abcdefghz"), max_size=30)
ALIASES = st.dictionaries(
    st.sampled_from(["x", "y", "a", AUTO]),
    st.dictionaries(st.sampled_from("abcdefghz"), st.integers(0, 3), min_size=1, max_size=limits().gateway.candidates),
    max_size=4,
)


@given(NAMES, ALIASES, st.lists(NAMES, max_size=40), MODELS, MODELS, st.integers(0, 99))
def test_candidates_are_few_each_once_and_all_usable(
    name: str, aliases: dict[str, dict[str, int]], extra: list[str], own: list[str], served: list[str], draw: int
) -> None:
    made = table(*(alias(each, **weights) for each, weights in aliases.items()))
    try:
        found = resolve(
            name, aliases=made, refuse=allow_only(*"abcdefgh"), fallbacks_of=lambda model: own, rank_auto=lambda: served,
            extra=extra, choose=lambda weights: draw % len(weights),
        )  # fmt: skip
    except (ModelUnknown, NoAvailableNode):
        assert not set(served) & set("abcdefgh") or name != AUTO or AUTO in made
        return
    assert 1 <= len(found.models) <= limits().gateway.candidates
    assert len(set(found.models)) == len(found.models)
    assert set(found.models) <= set("abcdefgh")
    if name in made and any(weight for model, weight in aliases[name].items() if model != "z"):
        assert aliases[name][found.models[0]] > 0


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [(0.0, 0), (0.299, 0), (0.3, 1), (0.899, 1), (0.9, 2), (0.999999, 2)],
    ids=["lowest", "end of first", "start of second", "end of second", "start of third", "highest"],
)
def test_a_draw_falls_into_the_share_of_its_weight(drawn: float, expected: int) -> None:
    assert choose_by_weight([3, 6, 1], draw=lambda: drawn) == expected


def test_shares_follow_the_weights() -> None:
    draws = iter(range(1000))
    counted = [0, 0, 0]
    for _ in range(1000):
        counted[choose_by_weight([5, 3, 2], draw=lambda: (next(draws) + 0.5) / 1000)] += 1
    assert counted == [500, 300, 200]

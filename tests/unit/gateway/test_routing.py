"""Which models may answer a name, in which order, how often a key may ask, and what a list of models shows."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import anthropic.types
import openai.types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.limits import GatewayLimits, limits
from gateway import errors
from gateway.request.identity import RateLimiter
from gateway.request.models import Admission, AliasEntry, Catalogue
from gateway.request.records import Recorder, RecordWriter
from gateway.routing import AUTO, Alias, Target, may_use, resolve
from gateway.values import CHAT_PATH, Caller, InferenceRequest, ModelEntry, PoolOptions
from gateway.views.models import ListedModel, ModelList, cut_page, render_anthropic, render_openai, render_page
from nodes.links import LinkRegistry
from tests.fakes.clock import install_virtual_clock
from tests.fakes.examples import examples
from tests.fakes.links import FakeLink


def alias(name: str, **weights: int) -> Alias:
    return Alias(name, tuple(Target(model, weight) for model, weight in weights.items()))


def table(*aliases: Alias) -> dict[str, Alias]:
    return {one.name: one for one in aliases}


def allow_only(*models: str, key: Sequence[str] = ()) -> Callable[[str, str], errors.GatewayError | None]:
    """Return a rule: these models are allow-listed, and the key names these (none: all)."""

    def refuse(model: str, via: str) -> errors.GatewayError | None:
        if model not in models:
            return errors.ModelUnknown(f"no {model}")
        return None if may_use(frozenset(key), model, via=via) else errors.ModelNotAllowed(f"not {model}")

    return refuse


ALL = allow_only(*"abcdefgh")


def route(
    name: str,
    *,
    aliases: Mapping[str, Alias] | None = None,
    refuse: Callable[[str, str], errors.GatewayError | None] = ALL,
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
    return "".join(found)


X = table(alias("x", a=5, b=1, c=7))


@pytest.mark.parametrize(
    ("name", "things", "expected"),
    [
        ("a", {"extra": "cb", "fallbacks": {"a": "db"}}, "acbd"),  # what the client names comes before the model's own
        ("a", {"fallbacks": {"a": "b", "b": "c"}}, "ab"),  # those of the first candidate alone count
        ("a", {"aliases": table(alias("a", b=1))}, "b"),  # an alias wins over a model of its name
        ("a", {"aliases": table(alias("a", a=1, b=9)), "chosen": 1}, "ab"),  # and may lead to it
        ("x", {"aliases": table(alias("x", a=1), alias("a", b=1))}, "a"),  # a target is a model
        ("x", {"aliases": X}, "cab"),  # the choice comes first, and the others follow by weight
        ("x", {"aliases": X, "chosen": 2}, "bca"),
        ("x", {"aliases": X, "chosen": 1, "refuse": allow_only("a", "b")}, "ba"),  # what is refused is left out before
        ("a", {"extra": "bc", "fallbacks": {"a": "d"}, "refuse": allow_only("a", "c")}, "ac"),
        ("z", {"extra": "b", "fallbacks": {"b": "c"}}, "bc"),
        ("a", {"aliases": table(alias("x", b=1, c=2)), "extra": "xd"}, "acbd"),
        (AUTO, {"served": "cab", "fallbacks": {"c": "d"}}, "cabd"),
        (AUTO, {"served": "cab", "refuse": allow_only("a", "b", "c", key=("a", "b"))}, "ab"),
        ("z", {"extra": (AUTO,), "served": "ba"}, "ba"),
        (AUTO, {"aliases": table(alias(AUTO, b=1)), "served": "a"}, "b"),
        ("x", {"aliases": table(alias("x", a=1, b=9)), "refuse": allow_only("a", "b", key=("a",))}, "a"),
        (
            "x",
            {"aliases": table(alias("x", a=1, b=0)), "refuse": allow_only(*"abc", key=("x",)), "fallbacks": {"a": "c"}},
            "ab",
        ),
    ],
)
def test_candidates_stand_in_their_order(name: str, things: dict[str, Any], expected: str) -> None:
    assert route(name, **things) == expected


@pytest.mark.parametrize(
    ("name", "things", "error"),
    [
        ("z", {"extra": "y"}, errors.ModelUnknown("no z")),
        ("x", {"aliases": table(alias("x", z=1, b=2)), "refuse": allow_only("b", key=("c",))}, errors.ModelNotAllowed("not b")),
        (AUTO, {"served": ""}, errors.NoAvailableNode("No node serves a model that this key may use; please retry.")),
        (AUTO, {"served": "z"}, errors.NoAvailableNode("No node serves a model that this key may use; please retry.")),
        # A key that names an alias may use its targets through it alone.
        ("a", {"aliases": table(alias("x", a=1)), "refuse": allow_only(*"ab", key=("x",))}, errors.ModelNotAllowed("not a")),
        ("y", {"aliases": table(alias("y", a=1)), "refuse": allow_only("a", key=("x",))}, errors.ModelNotAllowed("not a")),
    ],
)  # fmt: skip
def test_with_no_candidate_left_the_error_is_that_of_the_first(
    name: str, things: dict[str, Any], error: errors.GatewayError
) -> None:
    with pytest.raises(errors.GatewayError) as refusal:
        route(name, **things)
    assert (type(refusal.value), refusal.value.message) == (type(error), error.message)
    assert bool(refusal.value.retry_after_s) == (name == AUTO)


def test_what_a_client_names_is_bounded() -> None:
    asked: list[str] = []

    def refuse(model: str, via: str) -> errors.GatewayError | None:
        asked.append(model)
        return errors.ModelUnknown(model)

    with pytest.raises(errors.ModelUnknown):
        route("a", refuse=refuse, extra=[f"m{number}" for number in range(100_000)])
    assert len(asked) == limits().gateway.candidates + 1


NAMES = st.sampled_from([*"abcdefgh", "x", "y", AUTO])
MODELS = st.lists(st.sampled_from("abcdefghz"), max_size=30)
ALIASES = st.dictionaries(
    st.sampled_from(["x", "y", "a", AUTO]),
    st.dictionaries(st.sampled_from("abcdefghz"), st.integers(0, 3), min_size=1, max_size=limits().gateway.candidates),
    max_size=4,
)


@examples(40)
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
    except (errors.ModelUnknown, errors.NoAvailableNode):
        assert not set(served) & set("abcdefgh") or name != AUTO or AUTO in made
        return
    assert 1 <= len(found) <= limits().gateway.candidates
    assert len(set(found)) == len(found)
    assert set(found) <= set("abcdefgh")
    if name in made and any(weight for model, weight in aliases[name].items() if model != "z"):
        assert aliases[name][found[0]] > 0


KEY, OTHER = uuid.UUID(int=1), uuid.UUID(int=2)


def test_a_lowered_limit_holds_at_once_and_says_when_it_would_pass() -> None:
    clock = install_virtual_clock()
    limiter = RateLimiter()
    for second in range(10):
        clock.monotonic_s = 1000.0 + second
        state = limiter.take(KEY, 10)
        assert (state.limit, state.remaining, state.reset_s) == (10, 9 - second, 60.0 - second)
    with pytest.raises(errors.RateLimited) as caught:
        limiter.take(KEY, 2)
    assert caught.value.retry_after_s == pytest.approx(1008 + 60 - 1009)
    assert limiter.take(OTHER, 1).remaining == 0
    clock.monotonic_s += caught.value.retry_after_s or 0
    limiter.take(KEY, 2)
    clock.monotonic_s += 0.25
    assert limiter.peek(KEY, 5) == limiter.peek(KEY, 5)
    assert limiter.peek(KEY, 5).headers() == [
        (b"x-ratelimit-limit-requests", b"5"),
        (b"x-ratelimit-remaining-requests", b"3"),
        (b"x-ratelimit-reset-requests", b"1s"),
    ]


def test_idle_keys_are_forgotten_and_busy_ones_are_not() -> None:
    clock = install_virtual_clock()
    limiter = RateLimiter()
    books = Recorder(uuid.uuid4(), RecordWriter(accept_s=1.0, max_pending=1000), limiter)
    for number in range(100):
        who = Caller(uuid.UUID(int=number + 3), "k", "t", 1, frozenset())
        books.record_refusal(
            errors.BadRequest("no"), who, InferenceRequest(endpoint="/v1/models", paths=("/v1/models",), model=""), uuid.uuid4()
        )
    limiter.take(KEY, 5)
    clock.monotonic_s += 30
    limiter.take(OTHER, 5)
    clock.monotonic_s += 31
    books.forget_idle()
    assert limiter.peek(OTHER, 5).remaining == 4
    assert limiter._windows.keys() == {OTHER.int}


@examples(40)
@given(limit=st.integers(1, 5), steps=st.lists(st.floats(0, 40, allow_nan=False), min_size=1, max_size=60))
def test_never_more_than_the_limit_in_any_minute_and_never_fewer_than_could_pass(limit: int, steps: list[float]) -> None:
    clock = install_virtual_clock()
    limiter = RateLimiter()
    taken: list[float] = []
    for step in steps:
        clock.monotonic_s += step
        in_window = sum(at > clock.monotonic_s - 60.0 for at in taken)
        try:
            limiter.take(KEY, limit)
        except errors.RateLimited as refusal:
            assert in_window == limit
            wait = refusal.retry_after_s
            assert wait is not None
            assert 0 < wait <= 60.0
            assert sum(at > clock.monotonic_s + wait - 60.0 + 1e-6 for at in taken) < limit
        else:
            assert in_window < limit
            taken.append(clock.monotonic_s)


def make_admission(*known: str) -> Admission:
    catalogue = Catalogue(GatewayLimits())
    catalogue.apply_models([entry("m", max_tokens=100), entry("known", allowed=False)])
    return Admission(catalogue, lambda name: name in known, lambda models, path: [])


def a_request(model: str = "m", *, prompt_chars: int = 1, max_tokens: int | None = None) -> InferenceRequest:
    return InferenceRequest(
        endpoint=CHAT_PATH, paths=(CHAT_PATH,), model=model, is_streaming=False, max_tokens=max_tokens,
        prompt_chars=prompt_chars, body=b"", headers={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("allowed", "request_", "error", "status", "param"),
    [
        ((), a_request("nobody"), errors.ModelUnknown, 404, "model"),
        ((), a_request("declared"), errors.ModelNotAllowed, 400, "model"),
        ((), a_request("known"), errors.ModelNotAllowed, 400, "model"),
        (("other",), a_request(), errors.ModelNotAllowed, 400, "model"),
        ((), a_request(prompt_chars=1001), errors.PromptTooLarge, 400, "messages"),
        ((), a_request(max_tokens=101), errors.MaxTokensTooLarge, 400, "max_tokens"),
    ],
)
def test_the_first_broken_rule_is_named(
    allowed: tuple[str, ...], request_: InferenceRequest, error: type[errors.GatewayError], status: int, param: str
) -> None:
    assert [row.name for row in make_admission().admit(caller("m"), a_request(prompt_chars=1000, max_tokens=100))] == ["m"]
    with pytest.raises(error) as caught:
        make_admission("declared").admit(caller(*allowed), request_)
    assert type(caught.value) is error
    assert (caught.value.status, caught.value.param, caught.value.retryable) == (status, param, False)


HIDDEN = "project-nightjar-70b"


def hide_model(*, is_allowed: bool) -> Admission:
    def rank(names: Iterable[str], _paths: tuple[str, ...]) -> list[str]:
        return list(names)

    catalogue = Catalogue(GatewayLimits())
    row = ModelEntry(HIDDEN, is_allowed, "", max_tokens=9, max_prompt_chars=9, max_queue=9, created=0)
    catalogue.apply_models([row])
    catalogue.apply_aliases([AliasEntry(None, Alias("fast", (Target(HIDDEN), Target("gone"))))])
    return Admission(catalogue, lambda name: False, rank)


@pytest.mark.parametrize("is_allowed", [True, False], ids=["allowed", "not allowed"])
@pytest.mark.parametrize(
    "name", ["fast", "auto", "other", "Mine", "mine ", "mine\u200b", "m\u0456ne", "ｍine"], ids=ascii
)  # fmt: skip
def test_a_refusal_names_what_was_asked_for_and_never_the_model_behind_it(name: str, is_allowed: bool) -> None:
    """And what looks like the name of an allowed one is another."""
    options = PoolOptions(fallback_models=("fast",))
    with pytest.raises(errors.GatewayError) as refused:
        hide_model(is_allowed=is_allowed).route(caller("mine"), name, (CHAT_PATH,), options)
    assert HIDDEN not in refused.value.message
    assert name in refused.value.message or name == "auto"


def entry(name: str, *, allowed: bool = True, context_tokens: int | None = None, max_tokens: int = 1000) -> ModelEntry:
    return ModelEntry(
        name, allowed, "muster", max_tokens, max_prompt_chars=1000, max_queue=1, created=86400, context_tokens=context_tokens
    )


def entry_of_alias(name: str, *targets: tuple[str, int], tenant: str | None = None) -> AliasEntry:
    return AliasEntry(tenant, Alias(name, tuple(Target(*target) for target in targets), created=86401))


def caller(*models: str, tenant: str = "acme") -> Caller:
    return Caller(KEY, "k", tenant, 1, frozenset(models))


def make_list(
    *, models: list[ModelEntry], aliases: list[AliasEntry], served: str = "abc", contexts: Sequence[dict[str, int]] = ({},)
) -> ModelList:
    """``contexts``: for each node what it says of its context windows."""
    catalogue, registry = Catalogue(GatewayLimits()), LinkRegistry()
    catalogue.apply_models(models)
    catalogue.apply_aliases(aliases)
    for said in contexts:
        link = FakeLink(*served)
        link.contexts = said
        registry.add(link)
    return ModelList(catalogue, registry)


def names(found: ModelList, who: Caller | None) -> list[str]:
    return [model.name for model in found.read(who)]


def test_what_is_allowed_and_served_is_listed_by_name_with_the_aliases_that_lead_to_it() -> None:
    models = [entry("b"), entry("a"), entry("c", allowed=False), entry("d")]
    leading, nobody, hidden = [("b", 1), ("d", 9)], ("d", 1), ("c", 1)
    aliases = [entry_of_alias("anything", *leading), entry_of_alias("nobody", nobody), entry_of_alias("hidden", hidden)]
    found = make_list(models=models, aliases=aliases)
    assert names(found, caller()) == ["a", "anything", "b"]
    (shown,) = [model for model in found.read(caller()) if model.targets]
    assert (shown.name, shown.owned_by, shown.targets, shown.created) == ("anything", "alias", ("b",), 86401)
    assert names(make_list(models=[entry("a"), entry("d")], aliases=[entry_of_alias("a", ("d", 1))]), None) == []


def test_a_key_sees_what_it_may_use_and_the_aliases_of_its_tenant() -> None:
    own, others = entry_of_alias("x", ("b", 1), tenant="acme"), entry_of_alias("y", ("a", 1), tenant="umbrella")
    found = make_list(models=[entry("a"), entry("b")], aliases=[entry_of_alias("x", ("a", 1)), own, others])
    assert [model.targets for model in found.read(caller()) if model.name == "x"] == [("b",)]
    for who, seen in ((caller(), "abx"), (caller(tenant="umbrella"), "abxy"), (None, "abx")):
        assert names(found, who) == list(seen)
    aliases = [entry_of_alias("x", ("a", 2), ("b", 1)), entry_of_alias("y", ("b", 1))]
    found = make_list(models=[entry("a"), entry("b")], aliases=aliases)
    assert (names(found, caller("a")), names(found, caller("y"))) == (["a", "x"], ["y"])
    assert found.find(caller("a"), "x") == ListedModel("x", 86401, "alias", 1000, None, ("a",))
    assert found.find(caller("y"), "b") is None


def test_limits_are_those_that_hold_whichever_model_and_box_answers() -> None:
    models = [entry("a", context_tokens=8192), entry("b", context_tokens=512), entry("c", max_tokens=300)]
    aliases = [entry_of_alias("x", ("a", 1), ("b", 1)), entry_of_alias("y", ("a", 1), ("c", 1))]
    found = make_list(models=models, aliases=aliases)
    limits = {model.name: (model.context_tokens, model.max_tokens) for model in found.read(None)}
    assert limits == {"a": (8192, 1000), "b": (512, 512), "c": (None, 300), "x": (512, 512), "y": (8192, 300)}
    models, contexts = [entry("a"), entry("b", context_tokens=100), entry("c")], [{"a": 4096, "b": 4096}, {"a": 512}, {}]
    found = make_list(models=models, aliases=[], contexts=contexts)
    assert {model.name: model.context_tokens for model in found.read(None)} == {"a": 512, "b": 100, "c": None}


def test_sdks_read_the_shape_and_unknown_limits_are_left_out() -> None:
    known, bare = ListedModel("x", 86400, "alias", 100, 4096, ("a", "b")), ListedModel("a", 86400, "muster", 100, None)
    assert render_openai(known) == {
        "id": "x", "object": "model", "created": 86400, "owned_by": "alias", "context_window": 4096, "max_output_tokens": 100,
        "x_muster": {"targets": ("a", "b")},
    }  # fmt: skip
    plain = render_openai(bare)
    assert set(plain) == {"id", "object", "created", "owned_by", "max_output_tokens"}
    assert openai.types.Model.model_validate(plain, strict=True).id == "a"
    info = anthropic.types.ModelInfo.model_validate(render_anthropic(known))
    assert (info.id, info.display_name, info.max_input_tokens, info.max_tokens) == ("x", "x", 4096, 100)
    assert (info.created_at.isoformat(), info.lifecycle) == ("1970-01-02T00:00:00+00:00", "active")
    assert "max_input_tokens" not in render_anthropic(bare)


FIVE = [ListedModel(name, 0, "muster", 1, None) for name in ("a", "b", "c", "d/e", "f")]


PAGES = [
    (b"", "a b c d/e f", False), (b"limit=2", "a b", True), (b"limit=2&after_id=b", "c d/e", True),
    (b"limit=2&after_id=d%2Fe", "f", False), (b"after_id=bb", "c d/e f", False), (b"after_id=f", "", False),
    (b"limit=2&before_id=f", "c d/e", True), (b"limit=2&before_id=c", "a b", False), (b"before_id=a", "", False),
    (b"beta=true&limit=1&lifecycle=active", "a", True),
]  # fmt: skip


def test_a_page_is_what_stands_next_to_its_cursor() -> None:
    for query, page, has_more in PAGES:
        shown = render_page(cut_page(FIVE, query))
        found = [str(model["id"]) for model in shown["data"]]  # type: ignore[attr-defined]  # JSON
        assert (found, shown["has_more"]) == (page.split(), has_more), query
        assert (shown["first_id"], shown["last_id"]) == ((found[0], found[-1]) if found else (None, None))


def test_what_cannot_be_a_page_is_refused_with_its_parameter() -> None:
    wrong: list[tuple[bytes, str | None]] = [(b"limit=" + limit, "limit") for limit in (b"0", b"1001", b"%C2%B2", b"9" * 20)]
    for query, param in [*wrong, (b"before_id=a&after_id=b", "before_id"), (b"&".join([b"a=1"] * 33), None)]:
        with pytest.raises(errors.BadRequest) as refusal:
            cut_page(FIVE, query)
        assert refusal.value.param == param, query

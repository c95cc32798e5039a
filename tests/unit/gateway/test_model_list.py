"""What ``GET /v1/models`` lists for whom, in which shape, and how Anthropic's clients page through it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import anthropic.types
import openai.types
import pytest

from core.limits import GatewayLimits
from gateway.catalogue import AliasEntry, Catalogue, ModelEntry
from gateway.errors import BadRequest
from gateway.routing import Alias, Target
from gateway.values import Caller
from gateway.views.models import (
    ListedModel,
    ModelList,
    cut_page,
    render_anthropic,
    render_openai,
    render_page,
)
from nodes.links import LinkRegistry
from tests.unit.nodes.link_fakes import FakeLink


def entry(name: str, *, allowed: bool = True, context_tokens: int | None = None, max_tokens: int = 1000) -> ModelEntry:
    return ModelEntry(
        name=name, allowed=allowed, owned_by="muster", max_tokens=max_tokens, max_prompt_chars=1, max_queue=1, created=86400,
        context_tokens=context_tokens,
    )  # fmt: skip


def alias(name: str, *targets: tuple[str, int], tenant: str | None = None) -> AliasEntry:
    return AliasEntry(tenant, Alias(name, tuple(Target(*target) for target in targets), created=86401))


def caller(*models: str, tenant: str = "acme") -> Caller:
    return Caller(
        key_id=uuid.UUID(int=1), key_name="k", tenant=tenant, requests_per_minute=1, allowed_models=frozenset(models)
    )  # fmt: skip


def make_list(
    *, models: list[ModelEntry], aliases: list[AliasEntry], served: str = "abc", contexts: Sequence[dict[str, int]] = ({},)
) -> ModelList:
    """``contexts``: for each box what it says of its context windows."""
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
    found = make_list(
        models=[entry("b"), entry("a"), entry("c", allowed=False), entry("d")],
        aliases=[alias("anything", ("b", 1), ("d", 9)), alias("nobody", ("d", 1)), alias("hidden", ("c", 1))],
    )
    assert names(found, caller()) == ["a", "anything", "b"]
    (shown,) = [model for model in found.read(caller()) if model.targets]
    assert (shown.name, shown.owned_by, shown.targets, shown.created) == ("anything", "alias", ("b",), 86401)


def test_a_tenant_sees_its_own_aliases_and_nobody_elses() -> None:
    found = make_list(
        models=[entry("a"), entry("b")],
        aliases=[alias("x", ("a", 1)), alias("x", ("b", 1), tenant="acme"), alias("y", ("a", 1), tenant="umbrella")],
    )
    assert [model.targets for model in found.read(caller()) if model.name == "x"] == [("b",)]
    assert names(found, caller()) == ["a", "b", "x"]
    assert names(found, caller(tenant="umbrella")) == ["a", "b", "x", "y"]
    assert names(found, None) == ["a", "b", "x"]


def test_an_alias_hides_the_model_of_its_name_also_when_nothing_answers_it() -> None:
    assert names(make_list(models=[entry("a"), entry("b")], aliases=[alias("a", ("b", 1))]), None) == ["a", "b"]
    assert names(make_list(models=[entry("a"), entry("d")], aliases=[alias("a", ("d", 1))]), None) == []


def test_a_key_sees_what_it_names_and_the_aliases_of_that() -> None:
    found = make_list(models=[entry("a"), entry("b")], aliases=[alias("x", ("a", 2), ("b", 1)), alias("y", ("b", 1))])
    assert names(found, caller("a")) == ["a", "x"]
    assert found.find(caller("a"), "x") == ListedModel("x", 86401, "alias", 1000, None, ("a",))
    assert names(found, caller("y")) == ["y"]
    assert found.find(caller("y"), "b") is None


def test_limits_are_those_that_hold_whichever_model_answers() -> None:
    found = make_list(
        models=[entry("a", context_tokens=8192), entry("b", context_tokens=512), entry("c", max_tokens=300)],
        aliases=[alias("x", ("a", 1), ("b", 1)), alias("y", ("a", 1), ("c", 1)), alias("z", ("c", 1))],
    )
    limits = {model.name: (model.context_tokens, model.max_tokens) for model in found.read(None)}
    assert limits == {
        "a": (8192, 1000), "b": (512, 512), "c": (None, 300), "x": (512, 512), "y": (8192, 300), "z": (None, 300),
    }  # fmt: skip


def test_a_context_window_is_the_operators_or_else_the_smallest_that_a_box_reports() -> None:
    found = make_list(
        models=[entry("a"), entry("b", context_tokens=100), entry("c")],
        aliases=[],
        contexts=[{"a": 4096, "b": 4096}, {"a": 512}, {}],
    )
    assert {model.name: model.context_tokens for model in found.read(None)} == {"a": 512, "b": 100, "c": None}


def test_openai_sdk_reads_the_shape_and_unknown_limits_are_left_out() -> None:
    known = ListedModel("x", 86400, "alias", 100, 4096, ("a", "b"))
    assert render_openai(known) == {
        "id": "x", "object": "model", "created": 86400, "owned_by": "alias", "context_window": 4096, "max_output_tokens": 100,
        "x_muster": {"targets": ("a", "b")},
    }  # fmt: skip
    plain = render_openai(ListedModel("a", 86400, "muster", 100, None))
    assert set(plain) == {"id", "object", "created", "owned_by", "max_output_tokens"}
    assert openai.types.Model.model_validate(plain, strict=True).id == "a"


def test_anthropic_sdk_reads_the_shape_and_unknown_limits_are_left_out() -> None:
    shown = render_anthropic(ListedModel("x", 86400, "alias", 100, 4096, ("a",)))
    info = anthropic.types.ModelInfo.model_validate(shown)
    assert (info.id, info.display_name, info.max_input_tokens, info.max_tokens) == ("x", "x", 4096, 100)
    assert (info.created_at.isoformat(), info.lifecycle) == ("1970-01-02T00:00:00+00:00", "active")
    assert "max_input_tokens" not in render_anthropic(ListedModel("a", 86400, "muster", 100, None))


FIVE = [ListedModel(name, 0, "muster", 1, None) for name in ("a", "b", "c", "d/e", "f")]


@pytest.mark.parametrize(
    ("query", "page", "has_more"),
    [
        (b"", "a b c d/e f", False),
        (b"limit=5", "a b c d/e f", False),
        (b"limit=2", "a b", True),
        (b"limit=2&after_id=b", "c d/e", True),
        (b"limit=2&after_id=d%2Fe", "f", False),
        (b"after_id=bb", "c d/e f", False),
        (b"after_id=f", "", False),
        (b"limit=2&before_id=f", "c d/e", True),
        (b"limit=2&before_id=c", "a b", False),
        (b"before_id=a", "", False),
        (b"beta=true&limit=1&lifecycle=active", "a", True),
    ],
)
def test_a_page_is_what_stands_next_to_its_cursor(query: bytes, page: str, has_more: bool) -> None:
    shown = render_page(cut_page(FIVE, query))
    found = [str(model["id"]) for model in shown["data"]]  # type: ignore[attr-defined]  # JSON
    assert (found, shown["has_more"]) == (page.split(), has_more)
    assert (shown["first_id"], shown["last_id"]) == ((found[0], found[-1]) if found else (None, None))


def test_walking_forwards_and_backwards_meets_every_model_once() -> None:
    page = cut_page(FIVE, b"limit=2")
    forwards = [*page.models]
    while page.has_more:
        page = cut_page(FIVE, f"limit=2&after_id={page.models[-1].name}".encode())
        forwards += page.models
    page = cut_page(FIVE, b"limit=2&before_id=zzz")
    backwards = [*page.models]
    while page.has_more:
        page = cut_page(FIVE, f"limit=2&before_id={page.models[0].name}".encode())
        backwards = [*page.models, *backwards]
    assert forwards == backwards == FIVE


@pytest.mark.parametrize(
    ("query", "param"),
    [
        (b"limit=0", "limit"),
        (b"limit=1001", "limit"),
        (b"limit=-1", "limit"),
        (b"limit=%C2%B2", "limit"),
        (b"limit=99999999999999999999", "limit"),
        (b"before_id=a&after_id=b", "before_id"),
        (b"&".join([b"a=1"] * 33), None),
    ],
    ids=["zero", "too many", "negative", "not ascii", "huge", "both ways", "too many parameters"],
)
def test_what_cannot_be_a_page_is_refused_with_its_parameter(query: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as refusal:
        cut_page(FIVE, query)
    assert refusal.value.param == param

"""What a body of a request may hold: numbers within bounds, not too much in one value, no forgotten field."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from gateway.dialects import SURFACES
from gateway.errors import BadRequest
from runner.errors import InvalidRequest
from runner.serving.request import check_bounds, check_crowd
from wire.bounds import BOUNDS, find_out_of_bounds
from wire.limits import WIRE
from wire.messages_fields import HONOURED, find_unhonoured

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
REFUSED = [
    (CHAT, "temperature", 9, "between 0 and 2; it is 9"), (CHAT, "temperature", -0.1, "between 0 and 2; it is -0.1"),
    (CHAT, "max_tokens", 0, "at least 1; it is 0"), (CHAT, "max_completion_tokens", 0, "at least 1; it is 0"),
    (CHAT, "top_p", 1.5, "between 0 and 1; it is 1.5"), (CHAT, "presence_penalty", -3, "between -2 and 2; it is -3"),
    (CHAT, "n", 0, "between 1 and 128; it is 0"), (COMPLETIONS, "temperature", 2.5, "between 0 and 2; it is 2.5"),
    (COMPLETIONS, "max_tokens", -1, "at least 0; it is -1"), (RESPONSES, "temperature", 9, "between 0 and 2; it is 9"),
    (RESPONSES, "max_output_tokens", 0, "at least 1; it is 0"), (MESSAGES, "temperature", 1.5, "between 0 and 1; it is 1.5"),
    (MESSAGES, "max_tokens", 0, "at least 1; it is 0"), (MESSAGES, "top_k", -1, "at least 0; it is -1"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "field", "value", "words"), REFUSED)
def test_gateway_and_node_say_alike_which_field_and_what_it_may_be(path: str, field: str, value: float, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        SURFACES[path].parse(json.dumps({"model": "m", **ASKED[path], field: value}).encode(), {})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert caught.value.message == f"The field '{field}' must be {words}."
    with pytest.raises(InvalidRequest) as refused:
        check_bounds(path, {"model": "m", field: value})
    assert (refused.value.param, refused.value.message) == (field, caught.value.message)


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, bounds in BOUNDS.items() for name in bounds])
def test_what_stands_on_a_bound_is_served(path: str, name: str) -> None:
    for value in BOUNDS[path][name]:
        if value is not None:
            body = {"model": "m", **ASKED[path], name: value}
            assert find_out_of_bounds(path, body) is None
            SURFACES[path].parse(json.dumps(body).encode(), {})


@pytest.mark.parametrize("number", ["1e400", "9" * 400, "9" * 5000, "-1e400", "1e-400"])
def test_a_number_beyond_all_measure_is_judged_too(number: str) -> None:
    body = json.dumps({"model": "m", **ASKED[CHAT]}).encode()[:-1] + f',"temperature":{number}}}'.encode()
    if number == "1e-400":
        SURFACES[CHAT].parse(body, {})
        return
    with pytest.raises(BadRequest) as caught:
        SURFACES[CHAT].parse(body, {})
    assert caught.value.param == "temperature"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("value", [None, "9", True, [], {}])
def test_what_is_no_number_is_not_judged_here(value: object) -> None:
    assert find_out_of_bounds(CHAT, {"temperature": value}) is None


def members(count: int) -> dict[str, object]:
    """Return an object of so many members."""
    return {f"k{number}": 1 for number in range(count)}


def tool(**properties: object) -> dict[str, object]:
    """Return a tool of a chat with these properties in its schema."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}


def schema(**members_of_it: object) -> dict[str, object]:
    """Return a wish for an answer of a shape."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": members_of_it}}


def repeat(count: int) -> str:
    """Return what a grammar and a pattern take for so many letters that may be left out."""
    return "[a-z+]* " * (count - 1) + "[a-z]?"


GOOD_GRAMMAR = "root ::= r0  # what is it? *** a comment +++\n" + "\n".join(
    f'r{number} ::= "{{*+?\\"{{" [*+?{{\\]]+ ws "a"? (ws | r{number + 1})*' for number in range(200)
)
HELLO = {"role": "user", "content": "hi"}
CROWDS: list[tuple[str | None, dict[str, object], dict[str, object], int]] = [
    (None, members(WIRE.body_members - 8), members(WIRE.body_members), WIRE.body_members),
    ("metadata", {"metadata": members(WIRE.body_members)}, {"metadata": {"a": [members(WIRE.body_members + 1)]}},
     WIRE.body_members),
    ("logit_bias", {"logit_bias": members(WIRE.body_biases)}, {"logit_bias": members(WIRE.body_biases + 1)}, WIRE.body_biases),
    ("logit_bias", {"logit_bias": {}}, {"logit_bias": members(2000)}, WIRE.body_biases),
    ("logit_bias", {"logit_bias": [[1, 2]] * WIRE.body_biases}, {"logit_bias": [[1, 2]] * (WIRE.body_biases + 1)},
     WIRE.body_biases),
    ("tools", {"tools": [tool(**members(900))] * 3}, {"tools": [tool(**members(WIRE.body_members + 1))]}, WIRE.body_members),
    ("tools", {"tools": [tool(a={"enum": ["e"] * WIRE.shape_choices})]}, {"tools": [tool(a={"enum": [1] * 1001})]},
     WIRE.shape_choices),
    ("response_format", {"response_format": schema(enum=["e"] * 1000)}, {"response_format": schema(enum=[1] * 1001)}, 1000),
    ("text", {"text": schema(properties=members(200))}, {"text": schema(properties=members(201))}, WIRE.shape_members),
    ("grammar", {"grammar": GOOD_GRAMMAR}, {"grammar": f"{GOOD_GRAMMAR}\nroot ::= {repeat(51)}"}, WIRE.shape_repeats),
    ("grammar", {"grammar": f"root ::= {repeat(50)}"}, {"grammar": "root ::= " + "[a-z]* " * 2000}, WIRE.shape_repeats),
    ("text", {"text": schema(pattern=repeat(50), enum=["*"] * 99)}, {"text": schema(pattern=repeat(51))}, WIRE.shape_repeats),
    ("tools", {"tools": [tool(a={"pattern": repeat(50)})] * 9}, {"tools": [tool(a={"pattern": repeat(51)})]},
     WIRE.shape_repeats),
    ("messages", {"messages": [HELLO] * WIRE.body_turns}, {"messages": [HELLO] * (WIRE.body_turns + 1)}, WIRE.body_turns),
    ("input", {"input": [HELLO] * WIRE.body_turns}, {"input": [HELLO] * (WIRE.body_turns + 1)}, WIRE.body_turns),
    ("dry_sequence_breakers", {"dry_sequence_breakers": ["a"] * 100}, {"dry_sequence_breakers": ["a"] * 101},
     WIRE.body_breakers),
    ("seed", {"seed": 10 ** (WIRE.body_number_chars - 1)}, {"seed": 10**WIRE.body_number_chars}, WIRE.body_number_chars),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("field", "good", "bad", "bound"), CROWDS)
def test_a_body_with_too_much_in_one_value_is_refused_and_one_with_as_much_as_allowed_passes(
    path: str, field: str | None, good: dict[str, object], bad: dict[str, object], bound: int
) -> None:
    start = {"model": "m", **ASKED[path]}

    def at_gateway(more: dict[str, object]) -> None:
        SURFACES[path].parse(json.dumps(start | more).encode(), {"content-type": "application/json"})

    def at_node(more: dict[str, object]) -> None:
        check_crowd(json.dumps(start | more).encode())

    at_gateway(good)
    at_node(good)
    with pytest.raises(BadRequest) as refused:
        at_gateway(bad)
    with pytest.raises(InvalidRequest) as refused_by_node:
        at_node(bad)
    assert refused.value.param == refused_by_node.value.param == field
    assert refused.value.message == refused_by_node.value.message
    assert str(bound) in refused.value.message
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"input": list(range(20_000))}, id="token ids"),
        pytest.param({"input": ["text"] * 20_000}, id="texts to embed"),
        pytest.param({"messages": [{"role": "user", "content": 'say "{": 1, ' * 5000 + "9" * 5000}]}, id="marks in a text"),
        pytest.param({"messages": [{"role": "user", "content": "so: " * 5000}]}, id="colons in a text"),
        pytest.param({"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}] * 9000}]}, id="parts"),
        pytest.param({"messages": [{"role": "user", "content": '"pattern": "' + "what?! *** " * 5000}]}, id="signs in a text"),
        pytest.param({"tools": [tool(pattern={"description": '"pattern":"' + "?" * 99})]}, id="signs in a description"),
        pytest.param({"stop": ["s"] * 9000}, id="stop words"),
        pytest.param({"metadata": [members(900)] * 20}, id="many objects that are each small enough"),
    ],
)
def test_much_in_many_values_passes(more: dict[str, object]) -> None:
    check_crowd(json.dumps({"model": "m", **more}).encode())


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"a":"' + b'\\"' * 500_000, id="a text that does not end"),
        pytest.param(b'{"a":' + b'{"":' * 100_000, id="objects that do not end"),
        pytest.param(b'{"a":' + b"[" * 400_000, id="lists that do not end"),
        pytest.param(b'{"a":' + b" " * 1_000_000 + b"}", id="blanks"),
        pytest.param(b'{"a":[' + b"[        \t" * 400_000, id="blanks behind brackets"),
        pytest.param(b'{"a":' + b"-" * 1_000_000, id="signs"),
    ],
)
def test_reading_how_much_a_body_holds_takes_time_by_its_size_alone(body: bytes) -> None:
    half = max(min(read_cost(body[: len(body) // 2]) for _ in range(3)), 0.002)
    assert read_cost(body) < 8 * half


@pytest.mark.parametrize("form", ['{"grammar":"%s"}', '{"text":{"pattern":"%s"}}'])
@pytest.mark.parametrize("sign", ["[", '\\"', "*", "#", "\\\\", "?("])
def test_reading_how_often_a_grammar_repeats_takes_time_by_its_size_alone(form: str, sign: str) -> None:
    half = max(min(read_cost((form % (sign * 100_000)).encode()) for _ in range(3)), 0.002)
    assert read_cost((form % (sign * 200_000)).encode()) < 8 * half


def read_cost(body: bytes) -> float:
    """Return the seconds of a core that a node takes to see how much a body holds."""
    began = time.process_time()
    with contextlib.suppress(InvalidRequest):
        check_crowd(body)
    return time.process_time() - began


SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
PLAIN: dict[str, Any] = {
    "model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "system": "s", "stream": True,
    "temperature": 0.5, "top_p": 1, "top_k": 4, "stop_sequences": ["x"], "tools": [], "metadata": {"user_id": "u"},
    "cache_control": {"type": "ephemeral"}, "allow_remote": True,
}  # fmt: skip


TOOL: dict[str, Any] = {"type": "tool", "name": "f"}
SHAPED = {"output_config": {"format": SCHEMA, "effort": "low"}}
FORGOTTEN: list[tuple[str, dict[str, Any], str]] = [
    ("llamacpp", {"output_config": {"format": SCHEMA}}, "output_config.format"),
    ("llama-server", SHAPED, "output_config.format output_config.effort"),
    ("llamacpp", {"output_format": SCHEMA}, "output_format"),
    ("llamacpp", {"output_config": {"format": None}}, ""), ("llamacpp", {"output_config": {}}, ""),
    ("llamacpp", {"output_config": None}, ""), ("llamacpp", {"seed": 7}, "seed"),
    ("llamacpp", {"service_tier": "auto"}, "service_tier"),
    ("llamacpp", {"context_management": {"edits": []}}, "context_management"),
    ("llamacpp", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ""),
    ("llamacpp", {"thinking": {"type": "adaptive"}}, ""), ("llamacpp", {"thinking": {"type": "disabled"}}, "thinking.type"),
    ("llamacpp", {"tool_choice": {"type": "any"}}, ""), ("llamacpp", {"tool_choice": {"type": "none"}}, "tool_choice.type"),
    ("llamacpp", {"tool_choice": TOOL}, "tool_choice.name tool_choice.type"),
    ("llamacpp", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}, ""),
    ("llamacpp", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use"),
    ("vllm", SHAPED, "output_config.format"), ("vllm", {"tool_choice": TOOL}, ""),
    ("vllm", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"), ("somebody-elses", SHAPED, ""),
    *((engine, {}, "") for engine in HONOURED),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "fields", "forgotten"), FORGOTTEN)
def test_what_an_engine_would_forget_is_found_by_its_path(engine: str, fields: dict[str, Any], forgotten: str) -> None:
    assert find_unhonoured([engine], json.dumps({**PLAIN, **fields}).encode()) == tuple(forgotten.split())


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"thinking":5,"tool_choice":"x"}', b'{"output_config":"x"}', b"\xff"])
def test_what_cannot_be_read_is_somebody_elses_to_refuse(body: bytes) -> None:
    assert find_unhonoured(["llamacpp"], body) in ((), ("output_config",))


def test_replicas_of_two_engines_are_asked_for_what_both_honour() -> None:
    body = json.dumps({**PLAIN, "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}).encode()
    assert find_unhonoured(["vllm", "llamacpp"], body) == ("thinking.type", "output_config.effort")

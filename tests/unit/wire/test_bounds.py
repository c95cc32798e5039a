"""Numbers that the originals refuse are refused, with field, bounds and value, on the gateway and on a node's own port."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects import SURFACES
from gateway.errors import BadRequest
from runner.errors import InvalidRequest
from runner.serving.request import check_bounds
from wire.bounds import BOUNDS, find_out_of_bounds

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
REFUSED = [
    (CHAT, "temperature", 9, "between 0 and 2; it is 9"),
    (CHAT, "temperature", -0.1, "between 0 and 2; it is -0.1"),
    (CHAT, "max_tokens", 0, "at least 1; it is 0"),
    (CHAT, "max_completion_tokens", 0, "at least 1; it is 0"),
    (CHAT, "top_p", 1.5, "between 0 and 1; it is 1.5"),
    (CHAT, "presence_penalty", -3, "between -2 and 2; it is -3"),
    (CHAT, "n", 0, "between 1 and 128; it is 0"),
    (COMPLETIONS, "temperature", 2.5, "between 0 and 2; it is 2.5"),
    (COMPLETIONS, "max_tokens", -1, "at least 0; it is -1"),
    (RESPONSES, "temperature", 9, "between 0 and 2; it is 9"),
    (RESPONSES, "max_output_tokens", 0, "at least 1; it is 0"),
    (MESSAGES, "temperature", 1.5, "between 0 and 1; it is 1.5"),
    (MESSAGES, "max_tokens", 0, "at least 1; it is 0"),
    (MESSAGES, "top_k", -1, "at least 0; it is -1"),
]
each_refused = pytest.mark.parametrize(("path", "field", "value", "words"), REFUSED)


@each_refused
def test_the_gateway_says_which_field_and_what_it_may_be(path: str, field: str, value: float, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        SURFACES[path].parse(json.dumps({"model": "m", **ASKED[path], field: value}).encode(), {})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert caught.value.message == f"The field '{field}' must be {words}."


@each_refused
def test_a_nodes_own_port_says_the_same(path: str, field: str, value: float, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_bounds(path, {"model": "m", field: value})
    assert (caught.value.param, caught.value.message) == (field, f"The field '{field}' must be {words}.")


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


def test_zero_tokens_of_a_completion_are_a_question_about_its_prompt() -> None:
    body = {"model": "m", "prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": 1}
    assert SURFACES[COMPLETIONS].parse(json.dumps(body).encode(), {}).max_tokens == 0

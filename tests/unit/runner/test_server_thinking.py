"""What a chat completion for a server of somebody else's says of thinking."""

from __future__ import annotations

import json

import pytest

from runner.definitions.plan import LoadPlan
from runner.engines.elsewhere import set_thinking


@pytest.mark.parametrize(
    ("wanted", "given", "sent"),
    [
        (None, {}, {}),
        (False, {}, {"enable_thinking": False}),
        (True, {"chat_template_kwargs": None}, {"enable_thinking": True}),
        (False, {"chat_template_kwargs": {"a": [1]}}, {"a": [1], "enable_thinking": False}),
        (False, {"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
    ],
)
def test_the_settings_hold_where_the_client_says_nothing(
    wanted: bool | None, given: dict[str, object], sent: dict[str, object]
) -> None:
    plan = LoadPlan("m", "tabbyapi", options={} if wanted is None else {"enable_thinking": wanted})
    body = json.dumps({"model": "m", "messages": [], "temperature": 0.10, **given}).encode()
    changed = json.loads(set_thinking(plan, body))
    assert (changed.pop("chat_template_kwargs", None) or {}) == sent
    assert changed == {"model": "m", "messages": [], "temperature": 0.1}


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"chat_template_kwargs": 7}', b"\xff"])
def test_a_body_that_cannot_be_read_is_left_to_the_server(body: bytes) -> None:
    assert set_thinking(LoadPlan("m", "tabbyapi", options={"enable_thinking": True}), body) == body

"""What an engine's own Messages would take and forget."""

from __future__ import annotations

import json
from typing import Any

import pytest

from wire.messages_fields import HONOURED, find_unhonoured

SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
PLAIN: dict[str, Any] = {
    "model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "system": "s", "stream": True,
    "temperature": 0.5, "top_p": 1, "top_k": 4, "stop_sequences": ["x"], "tools": [], "metadata": {"user_id": "u"},
    "cache_control": {"type": "ephemeral"}, "allow_remote": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "fields", "forgotten"),
    [
        ("llamacpp", {"output_config": {"format": SCHEMA}}, ("output_config.format",)),
        (
            "llama-server",
            {"output_config": {"format": SCHEMA, "effort": "low"}},
            ("output_config.format", "output_config.effort"),
        ),
        ("llamacpp", {"output_format": SCHEMA}, ("output_format",)),
        ("llamacpp", {"output_config": {"format": None}}, ()),
        ("llamacpp", {"output_config": {}}, ()),
        ("llamacpp", {"output_config": None}, ()),
        ("llamacpp", {"seed": 7}, ("seed",)),
        ("llamacpp", {"service_tier": "auto"}, ("service_tier",)),
        ("llamacpp", {"context_management": {"edits": []}}, ("context_management",)),
        ("llamacpp", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ()),
        ("llamacpp", {"thinking": {"type": "adaptive"}}, ()),
        ("llamacpp", {"thinking": {"type": "disabled"}}, ("thinking.type",)),
        ("llamacpp", {"tool_choice": {"type": "any"}}, ()),
        ("llamacpp", {"tool_choice": {"type": "none"}}, ("tool_choice.type",)),
        ("llamacpp", {"tool_choice": {"type": "tool", "name": "f"}}, ("tool_choice.name", "tool_choice.type")),
        ("llamacpp", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}, ()),
        (
            "llamacpp",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ("tool_choice.disable_parallel_tool_use",),
        ),
        ("vllm", {"output_config": {"format": SCHEMA, "effort": "low"}}, ("output_config.format",)),
        ("vllm", {"tool_choice": {"type": "tool", "name": "f"}}, ()),
        ("vllm", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ("thinking.type",)),
        ("somebody-elses", {"output_config": {"format": SCHEMA}}, ()),
    ],
)
def test_what_an_engine_would_forget_is_found_by_its_path(
    engine: str, fields: dict[str, Any], forgotten: tuple[str, ...]
) -> None:
    assert find_unhonoured([engine], json.dumps({**PLAIN, **fields}).encode()) == forgotten


@pytest.mark.parametrize("engine", HONOURED)
def test_what_every_engine_honours_is_left_to_it(engine: str) -> None:
    assert find_unhonoured([engine], json.dumps(PLAIN).encode()) == ()


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"thinking":5,"tool_choice":"x"}', b'{"output_config":"x"}', b"\xff"])
def test_what_cannot_be_read_is_somebody_elses_to_refuse(body: bytes) -> None:
    assert find_unhonoured(["llamacpp"], body) in ((), ("output_config",))


def test_replicas_of_two_engines_are_asked_for_what_both_honour() -> None:
    body = json.dumps({**PLAIN, "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}).encode()
    assert find_unhonoured(["vllm", "llamacpp"], body) == ("thinking.type", "output_config.effort")

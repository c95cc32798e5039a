"""Chat templates of model folders, in the sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.engines.children.textserver.fields import ChatFields, parse_chat
from runner.engines.children.textserver.templates import ChatTemplate, read_template, special_tokens
from runner.engines.children.web import Refusal


def asked(text: str = "Hi", **fields: object) -> ChatFields:
    return parse_chat(json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode())


def test_messages_specials_and_the_prompt_for_an_answer_reach_the_template() -> None:
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    source = "{{ bos_token }}" + turns + "{% if add_generation_prompt %}>{% endif %}"
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(asked()) == "<s>[user]Hi>"


def test_what_the_template_says_itself_reaches_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(Refusal, match="roles must alternate") as caught:
        template.render(asked())
    assert caught.value.param == "messages"


def test_an_error_inside_the_template_tells_nothing_of_the_conversation() -> None:
    with pytest.raises(Refusal) as caught:
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render(asked("a secret"))
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"]
)
def test_a_template_cannot_leave_the_sandbox_or_change_what_it_is_given(source: str) -> None:
    with pytest.raises(Refusal):
        ChatTemplate(source, {}).render(asked())


def test_tools_go_to_a_template_that_takes_them_and_are_refused_by_one_that_does_not() -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    taking = ChatTemplate("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}", {})
    assert "look_up" in taking.render(asked(tools=tools))
    assert taking.render(asked(tools=tools, tool_choice="none")) == ""
    with pytest.raises(Refusal) as caught:
        ChatTemplate("{{ messages[0].content }}", {}).render(asked(tools=tools))
    assert caught.value.param == "tools"


def test_a_broken_template_is_a_fault_of_the_model() -> None:
    with pytest.raises(ValueError, match="line 1"):
        ChatTemplate("{% for %}", {})


def test_the_template_file_goes_before_the_one_in_the_tokenizer_settings(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    assert read_template(tmp_path) == "D"
    (tmp_path / "chat_template.jinja").write_text("F", encoding="utf-8")
    assert read_template(tmp_path) == "F"


def test_special_tokens_may_be_texts_or_objects() -> None:
    assert special_tokens({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
    }


@pytest.mark.parametrize(
    ("default", "kwargs", "rendered"),
    [(None, None, "unset"), (False, None, "False"), (True, {"other": 1}, "True"), (False, {"enable_thinking": True}, "True")],
)
def test_thinking_is_as_the_settings_say_unless_the_request_does(
    default: bool | None, kwargs: dict[str, object] | None, rendered: str
) -> None:
    template = ChatTemplate("{{ enable_thinking if enable_thinking is defined else 'unset' }}", {}, default)
    fields = asked()
    fields.chat_template_kwargs = kwargs
    assert template.render(fields) == rendered

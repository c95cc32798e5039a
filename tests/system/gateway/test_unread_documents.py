"""A document, picture or sound that an engine cannot take, or would leave out without a word."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects import SURFACES
from tests.system.gateway.test_pipeline import Make, make_gateway

__all__ = ["make_gateway"]

pytestmark = pytest.mark.timeout(180)  # above the sum of the waits and the start of a server
CHAT = "/v1/chat/completions"
PDF = "JVBERi0xLjQ="
HELLO = {"role": "user", "content": "Hello"}
DOCUMENT = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}}
PLAIN = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A text"}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PDF}}
FILE = {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
LLAMA_WORDS = "unsupported content[].type"
VLLM_WORDS = (
    "Unsupported chat content part type: 'file'. Supported types: audio_url, image_url, text. (parameter=type, value=file)"
)
TABBY_WORDS = "Input should be 'text' or 'image_url' in messages.1.content.2.type"


def ask_about(*blocks: dict[str, Any]) -> dict[str, Any]:
    """Return the second turn of a conversation."""
    return {"role": "user", "content": [{"type": "text", "text": "What is this?"}, *blocks]}


FOUND = {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "A text"}]}
NESTED = {"type": "tool_result", "tool_use_id": "t", "content": [DOCUMENT]}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}


@pytest.mark.parametrize(
    ("engine", "blocks", "path"),
    [
        ("llamacpp", [DOCUMENT], CHAT),
        ("llama-server", [PLAIN], CHAT),
        ("llamacpp", [NESTED], CHAT),
        ("llamacpp", [FOUND], CHAT),
        ("llamacpp", [PICTURE, {"type": "text", "text": 'a "document"'}], "/v1/messages"),
        ("vllm", [DOCUMENT], "/v1/messages"),
        ("", [DOCUMENT], "/v1/messages"),
    ],
    ids=[
        "a file",
        "a text",
        "in a result of a tool",
        "what a search found",
        "none",
        "an engine that refuses",
        "nobody knows which engine",
    ],
)
async def test_a_document_is_said_in_chat_to_an_engine_whose_messages_leave_it_out(
    make_gateway: Make, engine: str, blocks: list[dict[str, Any]], path: str
) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT, "/v1/messages"})
    link.engines = {"m": frozenset({engine})} if engine else {}
    request = gateway.ask(surface=SURFACES["/v1/messages"], max_tokens=5, messages=[HELLO, CALL, ask_about(*blocks)])
    stream = await request.on(link)
    assert stream.request.path == path
    if path == CHAT:
        assert (b'"file_data"' in stream.request.body) is (blocks in ([DOCUMENT], [NESTED]))
        assert (b"A text" in stream.request.body) is (blocks in ([PLAIN], [FOUND]))
    stream.answer(json.dumps({"error": {"message": LLAMA_WORDS, "code": 400}}).encode(), status=400)
    await request.done()
    assert request.client.status == 400


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("engine", "fields", "path", "said"),
    [
        ("llamacpp", {"output_config": FORMAT}, CHAT, b'"response_format":{"type":"json_schema"'),
        ("llama-server", {"output_config": FORMAT}, CHAT, b'"response_format":{"type":"json_schema"'),
        ("vllm", {"output_config": FORMAT}, CHAT, b'"response_format":{"type":"json_schema"'),
        ("llamacpp", {"thinking": {"type": "disabled"}}, CHAT, b'"enable_thinking":false'),
        ("llamacpp", {"seed": 7}, CHAT, b'"seed":7'),
        ("llamacpp", {"metadata": {"user_id": "u"}, "top_k": 3}, "/v1/messages", b'"top_k"'),
        ("vllm", {"output_config": {"effort": "low"}}, "/v1/messages", b'"effort"'),
        ("", {"output_config": FORMAT}, "/v1/messages", b'"output_config"'),
    ],
)
async def test_what_an_engines_own_messages_would_forget_is_said_in_chat(
    make_gateway: Make, engine: str, fields: dict[str, Any], path: str, said: bytes
) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT, "/v1/messages"})
    link.engines = {"m": frozenset({engine})} if engine else {}
    request = gateway.ask(surface=SURFACES["/v1/messages"], max_tokens=5, messages=[HELLO], **fields)
    stream = await request.on(link)
    assert stream.request.path == path
    assert said in stream.request.body
    stream.answer(b'{"error":{"message":"no"}}', status=400)
    await request.done()


async def test_a_node_that_knows_no_chat_gets_the_request_as_it_is(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={"/v1/messages"})
    link.engines = {"m": frozenset({"llamacpp"})}
    request = gateway.ask(surface=SURFACES["/v1/messages"], max_tokens=5, messages=[HELLO], output_config=FORMAT)
    stream = await request.on(link)
    assert stream.request.path == "/v1/messages"
    stream.answer(b'{"error":{"message":"no"}}', status=400)
    await request.done()


async def test_a_document_that_can_be_said_in_no_words_is_refused_before_an_engine_leaves_it_out(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT, "/v1/messages"})
    link.engines = {"m": frozenset({"llamacpp"})}
    somewhere = {"type": "document", "source": {"type": "file", "file_id": "file_1"}}
    request = gateway.ask(surface=SURFACES["/v1/messages"], max_tokens=5, messages=[ask_about(somewhere)])
    await request.done()
    assert (request.client.status, request.error["param"]) == (400, "messages[0].content[1].source.type")
    assert link.streams == []


async def refuse(make: Make, surface: str, words: str, **fields: Any) -> dict[str, Any]:
    """Ask, have the engine refuse with these words, and return the error that the client gets."""
    gateway = make()
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=SURFACES[surface], max_tokens=5, **fields)
    stream = await request.on(link)
    stream.answer(json.dumps({"error": {"message": words, "type": "invalid_request_error", "code": 400}}).encode(), status=400)
    await request.done()
    assert request.client.status == 400
    error: dict[str, Any] = json.loads(request.client.body)["error"]
    return error


@pytest.mark.parametrize("words", [LLAMA_WORDS, VLLM_WORDS, TABBY_WORDS], ids=["llama.cpp", "vLLM", "TabbyAPI"])
@pytest.mark.parametrize(
    ("surface", "fields", "place", "kind"),
    [
        ("/v1/messages", {"messages": [HELLO, ask_about(PLAIN, DOCUMENT)]}, "messages[1].content[2]", "document"),
        (
            "/v1/messages",
            {"messages": [HELLO, ask_about({"type": "tool_result", "tool_use_id": "t", "content": [DOCUMENT]})]},
            "messages[1].content[1].content[0]",
            "document",
        ),
        ("/v1/responses", {"input": [HELLO, ask_about(FILE)]}, "input[1].content[1]", "file"),
    ],
    ids=["messages", "result of a tool", "responses"],
)
async def test_a_document_that_the_engine_cannot_read_is_named_by_its_field(
    make_gateway: Make, words: str, surface: str, fields: dict[str, Any], place: str, kind: str
) -> None:
    if "tool_result" in json.dumps(fields):
        call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        fields = {"messages": [fields["messages"][0], {"role": "assistant", "content": [call]}, fields["messages"][1]]}
        place = place.replace("messages[1]", "messages[2]")
    error = await refuse(make_gateway, surface, words, **fields)
    assert error["param"] == place
    assert error["message"] == f"The {kind} in '{place}' cannot be given to this model. Its engine says: {words}"


async def test_a_picture_is_named_when_the_engine_speaks_of_pictures(make_gateway: Make) -> None:
    words = "At most 0 image(s) may be provided in one prompt."
    error = await refuse(make_gateway, "/v1/messages", words, messages=[HELLO, ask_about(DOCUMENT, PICTURE)])
    assert (error["param"], error["code"]) == ("messages[1].content[2]", "BAD_REQUEST")


@pytest.mark.parametrize("words", ["temperature must be at most 2", "unknown sampler"])
async def test_another_refusal_of_a_request_with_a_document_stays_what_it_is(make_gateway: Make, words: str) -> None:
    error = await refuse(make_gateway, "/v1/messages", words, messages=[ask_about(DOCUMENT)])
    assert (error["message"], error["param"]) == (words, None)


async def test_a_refusal_of_a_text_names_no_document(make_gateway: Make) -> None:
    error = await refuse(make_gateway, "/v1/messages", LLAMA_WORDS, messages=[ask_about(PLAIN)])
    assert (error["message"], error["param"]) == (LLAMA_WORDS, None)

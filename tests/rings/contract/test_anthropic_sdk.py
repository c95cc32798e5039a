"""The official anthropic SDK against the gateway, in front of a box that speaks Messages and one that speaks chat alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any  # request bodies are JSON

import anthropic
import pytest
import pytest_asyncio
from anthropic.types import ImageBlockParam, MessageParam, ToolParam, ToolResultBlockParam

from conformance.engine import speech
from tests.fakes.lab import MESSAGES, Lab, engine_box, unique
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.asyncio

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="  # one red pixel
WEATHER: ToolParam = {
    "name": speech.TOOL,
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}},
}
CLOCK: ToolParam = {"name": speech.OTHER_TOOL, "input_schema": {"type": "object"}}


@pytest_asyncio.fixture
async def sdk(lab: Lab) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """A client with the demo key that does not try again by itself."""
    async with anthropic.AsyncAnthropic(
        api_key=lab.stack.ready.api_key, base_url=lab.gateway.url, max_retries=0, timeout=60
    ) as client:
        yield client


@pytest_asyncio.fixture(params=["native", "translated"])
async def model(lab: Lab, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A model of a box that answers /v1/messages itself, and of one that the gateway translates for."""
    name = await lab.model()
    async with engine_box(lab, name, native=[MESSAGES] if request.param == "native" else []):
        yield name


def ask(text: str) -> list[MessageParam]:
    return [{"role": "user", "content": text}]


async def test_the_sdk_gets_a_whole_message(sdk: anthropic.AsyncAnthropic, model: str) -> None:
    message = await sdk.messages.create(model=model, max_tokens=64, system="Be brief.", messages=ask("hi [[cached]]"))
    assert [block.text for block in message.content if block.type == "text"] == [speech.TEXT]
    assert (message.model, message.role, message.stop_reason, message.stop_sequence) == (model, "assistant", "end_turn", None)
    assert message.usage.input_tokens == speech.PROMPT_TOKENS - speech.CACHED_TOKENS
    assert message.usage.cache_read_input_tokens == speech.CACHED_TOKENS
    assert message.usage.output_tokens == len(speech.TEXT_PIECES)


async def test_the_stream_helper_builds_the_message_from_its_events(sdk: anthropic.AsyncAnthropic, model: str) -> None:
    async with sdk.messages.stream(model=model, max_tokens=64, messages=ask("hi")) as stream:
        text = [piece async for piece in stream.text_stream]
        message = await stream.get_final_message()
    assert "".join(text) == speech.TEXT
    assert len(text) == len(speech.TEXT_PIECES)
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", len(speech.TEXT_PIECES))
    assert message.usage.input_tokens == speech.PROMPT_TOKENS


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_a_tool_is_called_and_its_result_taken(sdk: anthropic.AsyncAnthropic, model: str, *, streams: bool) -> None:
    messages = ask("weather? [[parallel_tools]]")
    asked: dict[str, Any] = {"model": model, "max_tokens": 64, "tools": [WEATHER, CLOCK]}
    if streams:
        async with sdk.messages.stream(messages=messages, **asked) as stream:
            message: anthropic.types.Message = await stream.get_final_message()
    else:
        message = await sdk.messages.create(messages=messages, **asked)
    assert message.stop_reason == "tool_use"
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [(call.id, call.name) for call in calls] == [
        (speech.CALL_ID, speech.TOOL),
        (speech.OTHER_CALL_ID, speech.OTHER_TOOL),
    ]
    assert [call.input for call in calls] == [{"city": "Paris", "unit": "celsius"}, {"zone": "Europe/Paris"}]
    results: list[ToolResultBlockParam] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "12 °C"} for call in calls
    ]
    answered: list[MessageParam] = [
        *messages,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    after = await sdk.messages.create(messages=answered, **asked)
    assert [block.text for block in after.content if block.type == "text"] == ["The tool has answered."]


async def test_thoughts_are_blocks_of_their_own_before_the_text(sdk: anthropic.AsyncAnthropic, model: str) -> None:
    async with sdk.messages.stream(
        model=model, max_tokens=2048, thinking={"type": "enabled", "budget_tokens": 1024}, messages=ask("hi [[thinking]]")
    ) as stream:
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].type == "thinking"
    assert message.content[0].thinking == speech.THOUGHT


async def test_an_image_reaches_the_engine(sdk: anthropic.AsyncAnthropic, model: str) -> None:
    image: ImageBlockParam = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    question: MessageParam = {"role": "user", "content": [image, {"type": "text", "text": "What is it? [[echo]]"}]}
    message = await sdk.messages.create(model=model, max_tokens=64, messages=[question])
    assert message.content[0].type == "text"
    assert PIXEL in message.content[0].text


async def test_tokens_are_counted_before_anything_is_sent(sdk: anthropic.AsyncAnthropic, model: str) -> None:
    short = await sdk.messages.count_tokens(model=model, messages=ask("hi"))
    long = await sdk.messages.count_tokens(model=model, messages=ask("hi"), system="Be brief. " * 50, tools=[WEATHER])
    assert 0 < short.input_tokens < long.input_tokens


async def test_models_are_listed_and_retrieved_in_anthropics_shape(lab: Lab, sdk: anthropic.AsyncAnthropic) -> None:
    name = await lab.model()
    await lab.box(name)

    async def listed() -> bool:
        return name in [found.id async for found in sdk.models.list()]

    await eventually(listed, what="the model is listed")
    found = await sdk.models.retrieve(name)
    assert (found.id, found.type, found.display_name) == (name, "model", name)
    assert found.created_at.tzinfo is not None


async def test_the_beta_surface_is_the_same_surface(sdk: anthropic.AsyncAnthropic, model: str) -> None:
    message = await sdk.beta.messages.create(
        model=model, max_tokens=64, messages=[{"role": "user", "content": "hi"}], betas=["no-such-beta-2099-01-01"]
    )
    assert [block.text for block in message.content if block.type == "text"] == [speech.TEXT]


async def test_a_wrong_key_is_an_authentication_error(sdk: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError) as caught:
        await sdk.with_options(api_key="mst_wrong").messages.create(model="any", max_tokens=8, messages=ask("hi"))
    assert caught.value.type == "authentication_error"
    assert caught.value.request_id


async def test_an_unknown_model_is_a_not_found_error(sdk: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await sdk.messages.create(model=unique("unheard-of"), max_tokens=8, messages=ask("hi"))
    assert caught.value.type == "not_found_error"


async def test_a_field_that_cannot_be_read_is_a_bad_request_that_names_it(sdk: anthropic.AsyncAnthropic, model: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match="messages") as caught:
        await sdk.messages.create(model=model, max_tokens=8, messages=[])
    assert caught.value.type == "invalid_request_error"


async def test_a_prompt_that_is_too_long_is_said_in_the_words_that_agents_know(
    sdk: anthropic.AsyncAnthropic, model: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await sdk.messages.create(model=model, max_tokens=8, messages=ask("hi [[error_400_context]]"))
    assert caught.value.type == "invalid_request_error"
    assert "prompt is too long: 5312 tokens > 4096 maximum" in caught.value.message


@pytest.mark.parametrize(
    ("status", "error"),
    [(429, anthropic.RateLimitError), (500, anthropic.InternalServerError), (503, anthropic.InternalServerError)],
)
async def test_an_engines_error_is_typed(
    sdk: anthropic.AsyncAnthropic, model: str, status: int, error: type[anthropic.APIStatusError]
) -> None:
    with pytest.raises(error) as caught:
        await sdk.messages.create(model=model, max_tokens=8, messages=ask(f"hi [[error_{status}]]"))
    assert caught.value.type in {"rate_limit_error", "api_error", "overloaded_error"}
    assert caught.value.response.status_code >= 429


async def test_a_model_without_a_box_is_an_overloaded_error(sdk: anthropic.AsyncAnthropic, hasty_lab: Lab) -> None:
    name = await hasty_lab.model()
    hasty = sdk.with_options(base_url=hasty_lab.gateway.url)
    with pytest.raises(anthropic.InternalServerError) as caught:
        await hasty.messages.create(model=name, max_tokens=8, messages=ask("hi"))
    assert caught.value.type == "overloaded_error"
    assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_a_stream_that_breaks_raises_and_never_ends_as_if_whole(sdk: anthropic.AsyncAnthropic, model: str) -> None:
    kinds: list[str] = []
    with pytest.raises(anthropic.APIError):
        async with sdk.messages.stream(model=model, max_tokens=64, messages=ask("hi [[cut]]")) as stream:
            kinds.extend([event.type async for event in stream])
    assert "message_stop" not in kinds


async def test_the_sdk_waits_as_long_as_the_gateway_says_and_asks_again(lab: Lab, sdk: anthropic.AsyncAnthropic) -> None:
    name = await lab.model()
    box = await lab.box(name, endpoints=[MESSAGES])
    task = asyncio.create_task(sdk.with_options(max_retries=1).messages.create(model=name, max_tokens=8, messages=ask("hi")))
    busy = await box.stream()
    await box.head(busy, status=429, headers={"retry-after": "1"})
    refused_at = time.monotonic()
    await box.data(busy, b'{"type":"error","error":{"type":"rate_limit_error","message":"busy"}}')
    await box.end(busy)
    again = await box.stream()
    assert time.monotonic() - refused_at >= 1, "without Retry-After the SDK waits half a second"
    usage = b'"usage":{"input_tokens":1,"output_tokens":1}'
    await box.answer(
        again,
        b'{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"now"}],'
        b'"stop_reason":"end_turn","stop_sequence":null,' + usage + b"}",
    )
    message = await task
    assert [block.text for block in message.content if block.type == "text"] == ["now"]

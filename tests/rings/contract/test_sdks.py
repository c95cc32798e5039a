"""The official Python SDKs of OpenAI and Anthropic against the gateway: helpers, typed errors and retries.

What an answer holds, the conformance table checks; what the SDKs make of translations, tests/unit/gateway/test_sdks.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any  # request bodies are JSON

import anthropic
import openai
import pytest
import pytest_asyncio
from anthropic.types import MessageParam, ToolParam, ToolResultBlockParam
from openai.types.chat import ChatCompletionFunctionToolParam
from openai.types.responses import FunctionToolParam

from conformance.engine import speech
from tests.fakes.lab import MESSAGES, RESPONSES, Lab, engine_box, unique
from tests.fakes.scripted_box import Stream
from tests.fakes.scripted_worker import delta_text
from tests.fakes.waiting import eventually
from wire.bridge import ReplicaInfo

pytestmark = pytest.mark.asyncio
WEATHER: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {"name": speech.TOOL, "description": "The weather in a city.", "parameters": {"type": "object"}},
}
CLOCK: ChatCompletionFunctionToolParam = {"type": "function", "function": {"name": speech.OTHER_TOOL}}
CALLED = [
    (speech.CALL_ID, speech.TOOL, "".join(speech.ARGUMENTS)),
    (speech.OTHER_CALL_ID, speech.OTHER_TOOL, "".join(speech.OTHER_ARGUMENTS)),
]
ANTHROPIC_WEATHER: ToolParam = {
    "name": speech.TOOL,
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}},
}
ANTHROPIC_CLOCK: ToolParam = {"name": speech.OTHER_TOOL, "input_schema": {"type": "object"}}


@pytest_asyncio.fixture
async def sdk(lab: Lab) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client with the demo key, which does not try again by itself."""
    url, key = lab.gateway.url + "/v1", lab.stack.ready.api_key
    async with openai.AsyncOpenAI(api_key=key, base_url=url, max_retries=0, timeout=60) as client:
        yield client


@pytest_asyncio.fixture
async def claude(lab: Lab) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client with the demo key, which does not try again by itself."""
    url, key = lab.gateway.url, lab.stack.ready.api_key
    async with anthropic.AsyncAnthropic(api_key=key, base_url=url, max_retries=0, timeout=60) as client:
        yield client


@pytest_asyncio.fixture(params=["native", "translated"])
async def model(lab: Lab, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A model of a node that answers Messages and Responses itself, and of one that the gateway translates for."""
    name = await lab.model()
    async with engine_box(lab, name, native=[MESSAGES, RESPONSES] if request.param == "native" else []):
        yield name


def ask(text: str) -> list[MessageParam]:
    return [{"role": "user", "content": text}]


async def test_models_are_listed_and_retrieved_in_the_shape_of_each_sdk(
    lab: Lab, sdk: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    name = await lab.model()
    await lab.box(name)

    async def listed() -> bool:
        return name in [found.id async for found in sdk.models.list()]

    await eventually(listed, "the model is listed")
    assert name in [found.id async for found in claude.models.list()]
    assert (await sdk.models.retrieve(name)).id == name
    found = await claude.models.retrieve(name)
    assert (found.id, found.type, found.display_name) == (name, "model", name)
    assert found.created_at.tzinfo is not None


# OpenAI


async def test_a_stream_that_breaks_raises_an_api_error(lab: Lab, sdk: openai.AsyncOpenAI) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    task = asyncio.create_task(
        sdk.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}], stream=True)
    )
    job = await worker.job()
    await worker.chunk(job, delta_text(job, "begun"))
    stream = await task
    worker.die()
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass


async def test_the_sdk_sends_recordings_prompts_and_inputs_to_boxes(lab: Lab, sdk: openai.AsyncOpenAI) -> None:
    model = await lab.model()
    paths = ["/v1/audio/transcriptions", "/v1/images/generations", "/v1/embeddings", "/v1/completions"]
    box = await lab.box(model, replicas=[ReplicaInfo(model=model, state="loaded", endpoints=paths)])

    async def answered(path: str, body: bytes) -> Stream:
        stream = await box.stream()
        assert stream.meta.path == path
        await box.answer(stream, body)
        return stream

    sound = bytes(range(256)) * 100
    heard = asyncio.create_task(sdk.audio.transcriptions.create(model=model, file=("a.wav", sound), language="de"))
    assert sound in bytes((await answered(paths[0], b'{"text":"hallo"}')).body)
    assert (await heard).text == "hallo"

    drawn = asyncio.create_task(sdk.images.generate(model=model, prompt="a llama"))
    await answered(paths[1], b'{"created":1,"data":[{"b64_json":"aGk="}]}')
    assert ((await drawn).data or [])[0].b64_json == "aGk="

    embedded = asyncio.create_task(sdk.embeddings.create(model=model, input=["a"], encoding_format="float"))
    vector = b'{"object":"embedding","index":0,"embedding":[0.5]}'
    answer = b'{"object":"list","model":"m","data":[' + vector + b'],"usage":{"prompt_tokens":1,"total_tokens":1}}'
    await answered(paths[2], answer)
    assert (await embedded).data[0].embedding == [0.5]

    completed = asyncio.create_task(sdk.completions.create(model=model, prompt="once"))
    choice = b'{"index":0,"text":" upon","finish_reason":"stop","logprobs":null}'
    text = b'{"id":"c","object":"text_completion","created":1,"model":"m","choices":[' + choice + b"]}"
    await answered(paths[3], text)
    assert (await completed).choices[0].text == " upon"


async def test_the_stream_helper_builds_tool_calls_and_their_results_go_back(sdk: openai.AsyncOpenAI, model: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "weather? [[interleaved_tools]]"}]
    async with sdk.chat.completions.stream(model=model, messages=messages, tools=[WEATHER, CLOCK]) as stream:
        completion = await stream.get_final_completion()
    message = completion.choices[0].message
    calls = message.tool_calls or []
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == CALLED
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 °C"} for call in calls]
    answered = [*messages, message.model_dump(exclude_none=True), *results]
    after = await sdk.chat.completions.create(model=model, messages=answered, tools=[WEATHER, CLOCK])
    assert after.choices[0].message.content == "The tool has answered."


async def test_a_compacted_conversation_goes_on(sdk: openai.AsyncOpenAI, model: str) -> None:
    talk: list[Any] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    compacted = await sdk.responses.compact(model=model, input=talk)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.usage.output_tokens == len(speech.TEXT_PIECES)
    later: list[Any] = [
        *(item.to_dict(warnings=False) for item in compacted.output),
        {"role": "user", "content": "go on [[echo]]"},
    ]
    response = await sdk.responses.create(model=model, input=later, store=False)
    assert f"Summary of the conversation so far:\\n{speech.TEXT}" in response.output_text


async def test_the_stream_helper_builds_a_response_from_its_events(sdk: openai.AsyncOpenAI, model: str) -> None:
    async with sdk.responses.stream(model=model, input="hi [[thinking]]", store=False) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        response = await stream.get_final_response()
    assert "".join(deltas) == response.output_text == speech.TEXT
    assert [item.type for item in response.output] == ["reasoning", "message"]


async def test_a_response_calls_tools_and_takes_their_results(sdk: openai.AsyncOpenAI, model: str) -> None:
    tools: list[Any] = [_flat(WEATHER), _flat(CLOCK), {"type": "web_search"}]
    asked: list[Any] = [{"role": "user", "content": "weather? [[parallel_tools]]"}]
    async with sdk.responses.stream(model=model, input=asked, tools=tools, store=False) as stream:
        response = await stream.get_final_response()
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == CALLED
    results: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "12 °C"} for call in calls]
    sent: list[Any] = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in calls]
    after = await sdk.responses.create(model=model, input=[*asked, *sent, *results], tools=tools, store=False)
    assert after.output_text == "The tool has answered."


def _flat(tool: ChatCompletionFunctionToolParam) -> FunctionToolParam:
    function = tool["function"]
    return {"type": "function", "name": function["name"], "parameters": function.get("parameters", {}), "strict": False}


async def test_refusals_are_the_errors_that_openais_sdk_has_for_them(lab: Lab, sdk: openai.AsyncOpenAI, model: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.AuthenticationError) as wrong:
        await sdk.with_options(api_key="mst_wrong").chat.completions.create(model=model, messages=messages)
    assert (wrong.value.code, bool(wrong.value.request_id)) == ("INVALID_API_KEY", True)
    with pytest.raises(openai.NotFoundError) as unknown:
        await sdk.chat.completions.create(model=unique("unheard-of"), messages=messages)
    assert (unknown.value.code, unknown.value.type) == ("MODEL_NOT_ALLOWED", "not_found_error")
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as forgotten:
        await sdk.responses.create(model=model, input="hi", previous_response_id="resp_unheard_of")
    assert "previous_response" in f"{forgotten.value.code} {forgotten.value.param} {forgotten.value.message}"
    with pytest.raises(openai.BadRequestError) as long:
        await sdk.responses.create(model=model, input="hi [[error_400_context]]", store=False)
    assert long.value.code == "context_length_exceeded"
    for status, error in ((429, openai.RateLimitError), (503, openai.InternalServerError)):
        with pytest.raises(error, match="the engine's own words"):
            await sdk.chat.completions.create(model=model, messages=[{"role": "user", "content": f"hi [[error_{status}]]"}])
    with pytest.raises((openai.APIError, RuntimeError)):
        async with sdk.responses.stream(model=model, input="hi [[cut]]", store=False) as stream:
            await stream.get_final_response()


async def test_openais_sdk_waits_as_long_as_the_gateway_says_and_asks_again(lab: Lab, sdk: openai.AsyncOpenAI) -> None:
    name = await lab.model()
    box = await lab.box(name)
    asking = sdk.with_options(max_retries=1).chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}])
    task = asyncio.create_task(asking)
    busy = await box.stream()
    await box.head(busy, status=429, headers={"retry-after": "1"})
    refused_at = time.monotonic()
    await box.data(busy, b'{"error":{"message":"busy","type":"rate_limit_error","param":null,"code":null}}')
    await box.end(busy)
    again = await box.stream()
    assert time.monotonic() - refused_at >= 1, "without Retry-After the SDK waits half a second"
    choice = b'{"index":0,"message":{"role":"assistant","content":"now"},"finish_reason":"stop"}'
    await box.answer(again, b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[' + choice + b"]}")
    assert (await task).choices[0].message.content == "now"


# Anthropic


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_a_tool_is_called_and_its_result_taken(claude: anthropic.AsyncAnthropic, model: str, *, streams: bool) -> None:
    messages = ask("weather? [[parallel_tools]]")
    asked: dict[str, Any] = {"model": model, "max_tokens": 64, "tools": [ANTHROPIC_WEATHER, ANTHROPIC_CLOCK]}
    if streams:
        async with claude.messages.stream(messages=messages, **asked) as stream:
            message: anthropic.types.Message = await stream.get_final_message()
    else:
        message = await claude.messages.create(messages=messages, **asked)
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
    after = await claude.messages.create(messages=answered, **asked)
    assert [block.text for block in after.content if block.type == "text"] == ["The tool has answered."]


async def test_thoughts_are_blocks_of_their_own_before_the_text(claude: anthropic.AsyncAnthropic, model: str) -> None:
    async with claude.messages.stream(
        model=model, max_tokens=2048, thinking={"type": "enabled", "budget_tokens": 1024}, messages=ask("hi [[thinking]]")
    ) as stream:
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].type == "thinking"
    assert message.content[0].thinking == speech.THOUGHT


async def test_tokens_are_counted_before_anything_is_sent(claude: anthropic.AsyncAnthropic, model: str) -> None:
    short = await claude.messages.count_tokens(model=model, messages=ask("hi"))
    long = await claude.messages.count_tokens(
        model=model, messages=ask("hi"), system="Be brief. " * 50, tools=[ANTHROPIC_WEATHER]
    )
    assert 0 < short.input_tokens < long.input_tokens


async def test_the_beta_surface_is_the_same_surface(claude: anthropic.AsyncAnthropic, model: str) -> None:
    message = await claude.beta.messages.create(
        model=model, max_tokens=64, messages=[{"role": "user", "content": "hi"}], betas=["no-such-beta-2099-01-01"]
    )
    assert [block.text for block in message.content if block.type == "text"] == [speech.TEXT]


async def test_refusals_are_the_errors_that_anthropics_sdk_has_for_them(claude: anthropic.AsyncAnthropic, model: str) -> None:
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        await claude.with_options(api_key="mst_wrong").messages.create(model="any", max_tokens=8, messages=ask("hi"))
    assert (wrong.value.type, bool(wrong.value.request_id)) == ("authentication_error", True)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await claude.messages.create(model=unique("unheard-of"), max_tokens=8, messages=ask("hi"))
    assert unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="messages") as empty:
        await claude.messages.create(model=model, max_tokens=8, messages=[])
    assert empty.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 5312 tokens > 4096 maximum"):
        await claude.messages.create(model=model, max_tokens=8, messages=ask("hi [[error_400_context]]"))
    for status, error in ((429, anthropic.RateLimitError), (503, anthropic.InternalServerError)):
        with pytest.raises(error) as failed:
            await claude.messages.create(model=model, max_tokens=8, messages=ask(f"hi [[error_{status}]]"))
        assert failed.value.type in {"rate_limit_error", "api_error", "overloaded_error"}


async def test_a_stream_that_breaks_raises_and_never_ends_as_if_whole(claude: anthropic.AsyncAnthropic, model: str) -> None:
    kinds: list[str] = []
    with pytest.raises(anthropic.APIError):
        async with claude.messages.stream(model=model, max_tokens=64, messages=ask("hi [[cut]]")) as stream:
            kinds.extend([event.type async for event in stream])
    assert "message_stop" not in kinds


async def test_anthropics_sdk_waits_as_long_as_the_gateway_says_and_asks_again(
    lab: Lab, claude: anthropic.AsyncAnthropic
) -> None:
    name = await lab.model()
    box = await lab.box(name, endpoints=[MESSAGES])
    task = asyncio.create_task(claude.with_options(max_retries=1).messages.create(model=name, max_tokens=8, messages=ask("hi")))
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

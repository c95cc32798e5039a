"""The official openai SDK against the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any  # request bodies are JSON

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionContentPartImageParam, ChatCompletionFunctionToolParam
from openai.types.responses import FunctionToolParam

from conformance.engine import speech
from tests.fakes.lab import RESPONSES, Lab, engine_box, unique
from tests.fakes.scripted_box import Stream
from tests.fakes.scripted_worker import ScriptedWorker, delta_text
from tests.fakes.waiting import eventually
from wire.bridge import ReplicaInfo

pytestmark = pytest.mark.asyncio

PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
WEATHER: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {"name": speech.TOOL, "description": "The weather in a city.", "parameters": {"type": "object"}},
}
CLOCK: ChatCompletionFunctionToolParam = {"type": "function", "function": {"name": speech.OTHER_TOOL}}
CALLED = [
    (speech.CALL_ID, speech.TOOL, "".join(speech.ARGUMENTS)),
    (speech.OTHER_CALL_ID, speech.OTHER_TOOL, "".join(speech.OTHER_ARGUMENTS)),
]


@pytest_asyncio.fixture
async def sdk(lab: Lab) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client with the demo key that does not try again by itself."""
    async with openai.AsyncOpenAI(
        api_key=lab.stack.ready.api_key, base_url=lab.gateway.url + "/v1", max_retries=0, timeout=60
    ) as client:
        yield client


async def test_the_sdk_lists_models_and_retrieves_one(lab: Lab, sdk: openai.AsyncOpenAI) -> None:
    model = await lab.model()
    await lab.worker(model)

    async def listed() -> bool:
        return model in [found.id async for found in sdk.models.list()]

    await eventually(listed, what="the model is listed")
    assert (await sdk.models.retrieve(model)).id == model


async def test_the_sdk_chats(lab: Lab, sdk: openai.AsyncOpenAI) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    task = asyncio.create_task(sdk.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}]))
    await worker.answer(await worker.job(), "hello there")
    assert (await task).choices[0].message.content == "hello there"


async def answer_with_usage(worker: ScriptedWorker) -> None:
    job = await worker.job()
    for piece in ("hel", "lo"):
        await worker.chunk(job, delta_text(job, piece))
    await worker.chunk(job, delta_text(job, "", finish="stop"))
    usage = '{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}'
    head = '"id":"chatcmpl-scripted","object":"chat.completion.chunk","created":1775000000'
    await worker.chunk(job, f'data: {{{head},"model":"m","choices":[],"usage":{usage}}}\n\n')
    await worker.chunk(job, "data: [DONE]\n\n")
    await worker.complete(job, headers={"content-type": "text/event-stream"})


async def test_the_sdk_streams_with_usage(lab: Lab, sdk: openai.AsyncOpenAI) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    answering = asyncio.create_task(answer_with_usage(worker))
    stream = await sdk.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    async for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    await answering
    assert text == "hello"
    assert usage is not None
    assert usage.total_tokens == 11


async def test_a_wrong_key_is_an_authentication_error(lab: Lab, sdk: openai.AsyncOpenAI) -> None:
    model = await lab.model()
    with pytest.raises(openai.AuthenticationError) as caught:
        await sdk.with_options(api_key="mst_wrong").chat.completions.create(model=model, messages=[])
    assert caught.value.code == "INVALID_API_KEY"
    assert caught.value.request_id


async def test_an_unknown_model_is_a_not_found_error(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.chat.completions.create(model=unique("unheard-of"), messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "MODEL_NOT_ALLOWED"
    assert caught.value.type == "not_found_error"


async def test_a_used_up_key_is_a_rate_limit_error_that_says_when_to_come_back(lab: Lab, sdk: openai.AsyncOpenAI) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    _, text = lab.operate("gateway.services.create_api_key", name=unique("key"), tenant_name="default", requests_per_minute=1)
    limited = sdk.with_options(api_key=text)

    async def first_passes() -> bool:
        try:
            task = asyncio.create_task(
                limited.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
            )
            job = asyncio.create_task(worker.job())
            await asyncio.wait({task, job}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                job.cancel()
                await task
            await worker.answer(await job)
            await task
        except openai.AuthenticationError:
            return False
        return True

    await eventually(first_passes, what="the new key works")
    with pytest.raises(openai.RateLimitError) as caught:
        await limited.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "RATE_LIMITED"
    assert int(caught.value.response.headers["retry-after"]) >= 1


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


async def test_the_sdk_raises_a_bad_request_on_a_path_that_the_model_does_not_answer(lab: Lab, sdk: openai.AsyncOpenAI) -> None:
    model = await lab.model()
    await lab.box(model)
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.audio.transcriptions.create(model=model, file=("a.wav", b"RIFF"))
    assert (caught.value.code, caught.value.param) == ("BAD_REQUEST", "model")


@pytest_asyncio.fixture
async def model(lab: Lab) -> AsyncIterator[str]:
    """A model of a box in front of the scripted engine, which speaks chat."""
    name = await lab.model()
    async with engine_box(lab, name):
        yield name


@pytest_asyncio.fixture(params=["native", "translated"])
async def responder(lab: Lab, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A model of a box that answers /v1/responses itself, and of one that the gateway translates for."""
    name = await lab.model()
    async with engine_box(lab, name, native=[RESPONSES] if request.param == "native" else []):
        yield name


@pytest.mark.parametrize("script", ["parallel_tools", "interleaved_tools"])
async def test_the_stream_helper_builds_tool_calls_and_their_results_go_back(
    sdk: openai.AsyncOpenAI, model: str, script: str
) -> None:
    messages: list[Any] = [{"role": "user", "content": f"weather? [[{script}]]"}]
    async with sdk.chat.completions.stream(model=model, messages=messages, tools=[WEATHER, CLOCK]) as stream:
        completion = await stream.get_final_completion()
    message = completion.choices[0].message
    calls = message.tool_calls or []
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == CALLED
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 °C"} for call in calls]
    answered = [*messages, message.model_dump(exclude_none=True), *results]
    after = await sdk.chat.completions.create(model=model, messages=answered, tools=[WEATHER, CLOCK])
    assert after.choices[0].message.content == "The tool has answered."


async def test_a_compacted_conversation_goes_on(sdk: openai.AsyncOpenAI, responder: str) -> None:
    talk: list[Any] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    compacted = await sdk.responses.compact(model=responder, input=talk)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.usage.output_tokens == len(speech.TEXT_PIECES)
    later: list[Any] = [
        *(item.to_dict(warnings=False) for item in compacted.output),
        {"role": "user", "content": "go on [[echo]]"},
    ]
    response = await sdk.responses.create(model=responder, input=later, store=False)
    assert f"Summary of the conversation so far:\\n{speech.TEXT}" in response.output_text


async def test_an_image_reaches_the_engine_as_a_data_url(sdk: openai.AsyncOpenAI, model: str) -> None:
    image: ChatCompletionContentPartImageParam = {"type": "image_url", "image_url": {"url": PIXEL}}
    completion = await sdk.chat.completions.create(
        model=model, messages=[{"role": "user", "content": [image, {"type": "text", "text": "What is it? [[echo]]"}]}]
    )
    assert PIXEL in (completion.choices[0].message.content or "")


async def test_a_response_is_whole_and_counted(sdk: openai.AsyncOpenAI, responder: str) -> None:
    response = await sdk.responses.create(model=responder, instructions="Be brief.", input="hi [[cached]]", store=False)
    assert (response.output_text, response.status, response.model) == (speech.TEXT, "completed", responder)
    assert response.usage is not None
    assert response.usage.input_tokens == speech.PROMPT_TOKENS
    assert response.usage.input_tokens_details.cached_tokens == speech.CACHED_TOKENS
    assert response.usage.output_tokens == len(speech.TEXT_PIECES)


async def test_the_stream_helper_builds_a_response_from_its_events(sdk: openai.AsyncOpenAI, responder: str) -> None:
    async with sdk.responses.stream(model=responder, input="hi [[thinking]]", store=False) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        response = await stream.get_final_response()
    assert "".join(deltas) == response.output_text == speech.TEXT
    assert [item.type for item in response.output] == ["reasoning", "message"]


@pytest.mark.parametrize("script", ["parallel_tools", "interleaved_tools"])
async def test_a_response_calls_tools_and_takes_their_results(sdk: openai.AsyncOpenAI, responder: str, script: str) -> None:
    tools: list[Any] = [_flat(WEATHER), _flat(CLOCK), {"type": "web_search"}]
    asked: list[Any] = [{"role": "user", "content": f"weather? [[{script}]]"}]
    async with sdk.responses.stream(model=responder, input=asked, tools=tools, store=False) as stream:
        response = await stream.get_final_response()
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == CALLED
    results: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "12 °C"} for call in calls]
    sent: list[Any] = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in calls]
    after = await sdk.responses.create(model=responder, input=[*asked, *sent, *results], tools=tools, store=False)
    assert after.output_text == "The tool has answered."


def _flat(tool: ChatCompletionFunctionToolParam) -> FunctionToolParam:
    function = tool["function"]
    return {"type": "function", "name": function["name"], "parameters": function.get("parameters", {}), "strict": False}


async def test_an_unknown_previous_response_is_named_as_such(sdk: openai.AsyncOpenAI, responder: str) -> None:
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as caught:
        await sdk.responses.create(model=responder, input="hi", previous_response_id="resp_unheard_of")
    assert "previous_response" in f"{caught.value.code} {caught.value.param} {caught.value.message}"


@pytest.mark.parametrize(
    ("status", "error"),
    [(429, openai.RateLimitError), (500, openai.InternalServerError), (503, openai.InternalServerError)],
)
async def test_an_engines_error_is_typed_and_its_words_arrive(
    sdk: openai.AsyncOpenAI, model: str, status: int, error: type[openai.APIStatusError]
) -> None:
    with pytest.raises(error, match="the engine's own words") as caught:
        await sdk.chat.completions.create(model=model, messages=[{"role": "user", "content": f"hi [[error_{status}]]"}])
    assert caught.value.request_id
    assert caught.value.code is None or isinstance(caught.value.code, str)


async def test_a_prompt_that_is_too_long_has_the_code_that_agents_look_for(sdk: openai.AsyncOpenAI, responder: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.responses.create(model=responder, input="hi [[error_400_context]]", store=False)
    assert caught.value.code == "context_length_exceeded"


async def test_a_stream_without_an_ending_raises(sdk: openai.AsyncOpenAI, responder: str) -> None:
    with pytest.raises((openai.APIError, RuntimeError)):
        async with sdk.responses.stream(model=responder, input="hi [[cut]]", store=False) as stream:
            await stream.get_final_response()


async def test_the_sdk_waits_as_long_as_the_gateway_says_and_asks_again(lab: Lab, sdk: openai.AsyncOpenAI) -> None:
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

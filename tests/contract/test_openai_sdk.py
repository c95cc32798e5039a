"""The official openai SDK against the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from tests.contract.lab import Lab, unique
from tests.contract.scripted_box import Stream
from tests.contract.scripted_worker import ScriptedWorker, delta_text
from tests.contract.waiting import eventually
from wire.bridge import ReplicaInfo

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def sdk(lab: Lab) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client with the demo key that does not try again by itself."""
    async with openai.AsyncOpenAI(
        api_key=lab.stack.ready.api_key, base_url=lab.gateway.url + "/v1", max_retries=0, timeout=20
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
    assert caught.value.type == "invalid_request_error"


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

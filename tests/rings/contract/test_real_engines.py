"""A real node with real engines behind the real gateway: text, embeddings and recordings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import openai
import pytest

from runner.config import TINY_MODEL_PATH
from tests.fakes.lab import Lab, unique
from tests.fakes.models.make import speech_wav, whisper_dir
from tests.fakes.runners.process import run_box
from tests.fakes.waiting import eventually

pytestmark = [pytest.mark.timeout(400)]


def write_box(folder: Path, chat: str, vectors: str, speech: str) -> dict[str, str]:
    """Lay out models and settings; return the variables that name them."""
    models, data = folder / "models", folder / "data"
    models.mkdir()
    data.mkdir()
    for name in (chat, vectors):
        shutil.copy(TINY_MODEL_PATH, models / f"{name}.gguf")
    shutil.copytree(whisper_dir(), models / speech)
    settings = {
        chat: {"model_path": f"{chat}.gguf", "enabled": True, "target_inflight": 2},
        vectors: {"model_path": f"{vectors}.gguf", "enabled": True, "gguf_embedding": True},
        speech: {"backend": "whisper", "model_path": speech, "enabled": True},
    }
    (data / "settings.json").write_text(json.dumps({"engine": {"backend": "gguf", "models": settings}}))
    return {"MUSTER_DATA": str(data), "MODEL_BASE_PATH": str(models)}


async def test_text_embeddings_and_recordings_reach_the_engines_of_one_box(lab: Lab, tmp_path: Path) -> None:
    names = chat, vectors, speech = [unique(name) for name in ("chat", "vectors", "speech")]
    for name in names:
        await lab.allow(name)
    env = {"MUSTER_TOKEN": lab.secret, **write_box(tmp_path, *names)}
    sdk = openai.AsyncOpenAI(api_key=lab.stack.ready.api_key, base_url=lab.gateway.url + "/v1", max_retries=0, timeout=90)
    async with run_box(tmp_path, lab.gateway.url, "--name", unique("real"), "--threads", "1", env=env), sdk:

        async def offers_all() -> bool:
            return set(names) <= {model.id async for model in sdk.models.list()}

        await eventually(offers_all, what="its models are offered", within_s=90)

        # Without a temperature of 0 the model may draw its end as the first token.
        said = await sdk.completions.create(model=chat, prompt="Muster is", max_tokens=8, temperature=0)
        assert said.choices[0].text
        stream = await sdk.chat.completions.create(
            model=chat, messages=[{"role": "user", "content": "Explain lambda."}], max_tokens=12, stream=True, temperature=0
        )  # fmt: skip
        assert [chunk async for chunk in stream if chunk.choices and chunk.choices[0].delta.content]

        found = await sdk.embeddings.create(model=vectors, input=["one text", "another"], encoding_format="float")
        assert len(found.data) == 2
        assert len(found.data[0].embedding) > 16
        assert found.data[0].embedding != found.data[1].embedding

        heard = await sdk.audio.transcriptions.create(
            model=speech, file=("speech.wav", speech_wav().read_bytes()), response_format="verbose_json",
            timestamp_granularities=["word"],
        )  # fmt: skip
        assert float(heard.duration) > 1
        assert heard.words

        with pytest.raises(openai.BadRequestError) as refused:
            await sdk.embeddings.create(model=chat, input="x")
        assert "/v1/chat/completions" in str(refused.value)

"""A pool request as a chat completion, backend by backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from runner.definitions.fields import Backend, ModelDefinition
from runner.errors import InvalidRequest, ModalityUnsupported, RemoteNotAllowed
from runner.serving.responses.request import PoolRequest

DEFAULT_INSTRUCTION = "Do what the user asks. Answer in the user's language unless told otherwise, and add nothing else."
"""The system message of requests that bring no instructions."""

TRANSLATE_GEMMA = "translategemma_template"


@dataclass(frozen=True, slots=True)
class PoolBackend:
    """How a backend takes part. ``decoding``: its chat field for each pool field it honours, None = it serves no chat.

    ``is_local`` False: requests must say ``allow_remote``. ``takes_template_kwargs``: it hands ``chat_template_kwargs`` to
    the model's template. ``reads_language_kwargs``: it takes TranslateGemma's languages from there and the text as it is.
    """

    decoding: Mapping[str, str] | None
    is_local: bool = True
    takes_template_kwargs: bool = True
    reads_language_kwargs: bool = False


_OPENAI = {"top_p": "top_p", "temperature": "temperature", "max_tokens": "max_tokens", "stop": "stop"}
_SAMPLERS = {**_OPENAI, "top_k": "top_k", "repetition_penalty": "repetition_penalty"}
_LLAMA = {**_OPENAI, "top_k": "top_k", "repetition_penalty": "repeat_penalty"}

POOL_BACKENDS: Mapping[Backend, PoolBackend] = {
    "gguf": PoolBackend(_LLAMA, reads_language_kwargs=True),
    "llama_server": PoolBackend(_LLAMA, reads_language_kwargs=True),
    "ct2": PoolBackend({**_SAMPLERS, "beam_size": "beam_size"}),
    "vllm": PoolBackend(_SAMPLERS),
    "exllamav3": PoolBackend(_SAMPLERS),
    "tabbyapi": PoolBackend(_SAMPLERS),
    "tgi": PoolBackend(_OPENAI, takes_template_kwargs=False),
    "attached": PoolBackend(_OPENAI),
    "openai_compatible": PoolBackend(_OPENAI, is_local=False, takes_template_kwargs=False),
    "whisper": PoolBackend(None),
    "comfyui": PoolBackend(None),
}
"""``repeat_penalty`` is llama.cpp's own name; TGI's chat route has neither top_k nor a repetition penalty."""


class ChatTranslation(msgspec.Struct, frozen=True, kw_only=True):
    """``body`` for ``/v1/chat/completions``; ``ignored`` are fields the client gave that the backend does not have."""

    body: bytes
    ignored: tuple[str, ...] = ()


def to_chat(request: PoolRequest, definition: ModelDefinition) -> ChatTranslation:
    """Return the request as a chat completion for the model; streams ask for usage.

    Raises RemoteNotAllowed for a remote model without ``allow_remote``, ModalityUnsupported for a model that does not
    chat, InvalidRequest where the model's prompt format needs or knows no languages.
    """
    backend = POOL_BACKENDS[definition.backend]
    if not backend.is_local and not request.allow_remote:
        raise RemoteNotAllowed(f"{request.model} is a remote model; say allow_remote: true to use it", param="allow_remote")
    options = definition.options
    if backend.decoding is None or options.get("gguf_embedding") or options.get("vllm_task") == "embed":
        raise ModalityUnsupported(f"{request.model} does not generate text", param="model")
    body: dict[str, object] = {"model": request.model, **_translate_messages(request, definition, backend)}
    ignored = [f"decoding.{name}" for name in sorted(request.given) if name not in backend.decoding]
    for name, chat_name in backend.decoding.items():
        value = getattr(request.decoding, name)
        if name != "stop" or value:
            body[chat_name] = value
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if definition.prompt_format == TRANSLATE_GEMMA and request.instructions:
        ignored.append("instructions")
    return ChatTranslation(body=msgspec.json.encode(body), ignored=tuple(ignored))


def _translate_messages(request: PoolRequest, definition: ModelDefinition, backend: PoolBackend) -> dict[str, object]:
    kwargs: dict[str, object] = {}
    if definition.enable_thinking is not None and backend.takes_template_kwargs:
        kwargs["enable_thinking"] = definition.enable_thinking
    if definition.prompt_format == TRANSLATE_GEMMA:
        languages = _read_languages(request)
        content: object = request.input
        if not backend.reads_language_kwargs:
            content = [{"type": "text", **languages, "text": request.input}]
        elif backend.takes_template_kwargs:
            kwargs |= languages
        messages = [{"role": "user", "content": content}]
    else:
        _refuse_languages(request)
        instructions = DEFAULT_INSTRUCTION if request.instructions is None else request.instructions
        messages = [{"role": "system", "content": instructions}] if instructions else []
        messages.append({"role": "user", "content": request.input})
    return {"messages": messages, **({"chat_template_kwargs": kwargs} if kwargs else {})}


def _read_languages(request: PoolRequest) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("source_lang_code", "target_lang_code"):
        code = getattr(request, name)
        if code is None:
            raise InvalidRequest(f"{name} is missing; {request.model} translates and must be told both languages", param=name)
        found[name] = code
    return found


def _refuse_languages(request: PoolRequest) -> None:
    for name in ("source_lang_code", "target_lang_code"):
        if getattr(request, name) is not None:
            raise InvalidRequest(
                f"{name} is for models with prompt_format {TRANSLATE_GEMMA}; put the languages into instructions",
                param=name,
            )

"""The HTTP server that a text library gets in its child process: OpenAI's chat and completions over a narrow port.

``TextModel`` is the port, ``TextServer`` the server; the rest is what lies between: fields of a request, the chat template,
pieces of text, worker threads, and the shapes of answers (OpenAI API reference).
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import jinja2
import msgspec
from aiohttp import web
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import UNSET, Meta, UnsetType

from runner.engines.children import SCOPE_HEADER, Parent, Settings
from runner.engines.children.web import Pipe, Refusal, Slots, as_event, make_app, serve, stream_events
from runner.limits import limits
from wire import clock
from wire.unreadable import UNREADABLE

# ---- the port of a library ----


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the model reads it: ``count`` tokens, in the library's own form."""

    count: int
    native: Any  # Any: tokens of CTranslate2, a tensor of ExLlamaV3


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to generate. ``temperature`` 0 or ``top_k`` 1 is greedy; ``top_k`` 0 and ``top_p`` 1.0 cut nothing off.

    ``ignores_end``: go on to ``max_tokens`` where the model would end. ``scope`` names what may share cached prefixes: only
    prompts of the same scope do; empty = with no other prompt. ``goes_on``: the prompt ends with the beginning of the answer.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    beam_size: int = 1
    seed: int | None = None
    ignores_end: bool = False
    scope: str = ""
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of the answer: ``tokens`` new tokens, whose text may come later (never half a character). A step without any
    says only that the model is still at it, so that the reader can be looked for.

    ``finish`` is set on the last step: ``stop`` (the model ended) or ``length``. ``cached_tokens`` of the prompt were not
    computed again; None = not known yet.
    """

    text: str
    tokens: int
    finish: str = ""
    cached_tokens: int | None = None


class TextModel(Protocol):
    """A loaded model. ``context_tokens`` is prompt and answer together; ``specials`` are the texts a template may use."""

    context_tokens: int
    specials: dict[str, str]

    def tokenise(self, text: str) -> Prompt:
        """Return the tokens of ``text``, special tokens recognised, none added."""

    def generate(self, prompt: Prompt, sampling: Sampling) -> Generator[Step, None, None]:
        """Yield steps; called in a worker thread, several at once. Closing it stops the generation.

        Raises RuntimeError or ValueError when the library refuses.
        """

    def stats(self) -> dict[str, int]:
        """Return what the library counts: kv_total_tokens, kv_used_tokens, kv_cached_tokens, kv_bytes; empty = nothing."""

    def flush(self) -> int | None:
        """Forget every cached prefix; return how many tokens that were. None = a generation runs, nothing was done."""

    def unload(self) -> None:
        """Give the memory back; return when that has been seen. Raises RuntimeError when it does not happen in time."""


# ---- fields of a request ----

Count = Annotated[int, Meta(ge=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Fields(msgspec.Struct, kw_only=True):
    """What both endpoints take; null is the default, as with OpenAI. Names of vLLM and llama.cpp where it has none."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    beam_size: Annotated[int, Meta(ge=1, le=16)] | None = None
    seed: int | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    max_tokens: Count | None = None
    ignore_eos: bool | None = None
    n: Literal[1] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def goes_on(self) -> bool:
        return False

    def check(self) -> None:
        # Refused rather than ignored: no engine behind this server does any of it.
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise Refusal(f"{name} is not supported by this engine", param=name, code="unsupported_parameter")

    def sampling(self, *, limit: int, scope: str) -> Sampling:
        penalty = self.repetition_penalty or self.repeat_penalty
        return Sampling(
            max_tokens=min(limit, self.most_tokens or limit),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=self.top_p or 1.0,
            repetition_penalty=penalty or 1.0,
            beam_size=self.beam_size or 1,
            seed=self.seed,
            ignores_end=self.ignore_eos is True,
            scope=scope,
            goes_on=self.goes_on,
        )


class ChatFields(_Fields, kw_only=True):
    prompt_field: ClassVar[str] = "messages"
    """The field that a prompt which is too long is blamed on."""
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]  # Any: a template may read whatever a message carries
    max_completion_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None  # Any: JSON schemas, for the template
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: Literal[False] | None = None
    response_format: dict[str, Any] | None = None  # Any: only its type is read
    chat_template_kwargs: dict[str, Any] | None = None  # Any: variables of the template
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def goes_on(self) -> bool:
        return self.continue_final_message is True

    def check(self) -> None:
        _Fields.check(self)
        if (self.response_format or {}).get("type", "text") != "text":
            raise Refusal("this engine answers in plain text only", param="response_format", code="response_format_unsupported")
        for number, message in enumerate(self.messages):
            message["content"] = _plain_content(message.get("content"), f"messages[{number}].content")
            if not isinstance(message.get("role"), str) or not message["role"]:
                raise Refusal("a message needs a role", param=f"messages[{number}].role")
        if self.continue_final_message:
            if self.add_generation_prompt is not False:
                said = "continue_final_message needs add_generation_prompt to be false"
                raise Refusal(said, param="add_generation_prompt")
            if self.messages[-1]["role"] != "assistant" or not self.messages[-1]["content"].strip():
                raise Refusal("there is no message of the assistant's to go on with", param="messages")


class CompletionFields(_Fields, kw_only=True):
    """Body of ``/v1/completions``. Prompts as lists of tokens are refused: tokens differ between engines."""

    prompt_field: ClassVar[str] = "prompt"
    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=1)]
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None
    logprobs: Literal[0] | UnsetType | None = UNSET

    @property
    def text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens or 16


class _Kind(msgspec.Struct):
    messages: msgspec.Raw | UnsetType = UNSET


Fields = TypeVar("Fields", bound=_Fields)
Decoded = TypeVar("Decoded")


def read_fields(kind: type[Fields], body: bytes) -> Fields:
    """Return the checked fields of a body. Raises Refusal."""
    fields = _decode(kind, body)
    fields.check()
    return fields


def _decode(kind: type[Decoded], body: bytes) -> Decoded:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        missing = re.search(r"required field `(\w+)`", problem)
        param = missing.group(1) if missing else path.rstrip("`").lstrip(".").replace("[...]", "") or None
        raise Refusal(f"{param}: {problem}" if param and not missing else problem, param=param) from None
    except UNREADABLE:
        raise Refusal("the body is not JSON", code="invalid_json") from None


def _plain_content(content: object, param: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal("content is a text or a list of parts", param=param)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refusal("this model takes parts of text only", param=param, code="unsupported_content")
        texts.append(part["text"])
    return "".join(texts)


# ---- the chat template, rendered in jinja2's sandbox as Hugging Face does it ----


def read_template(folder: Path) -> str | None:
    """Return the template of a model: ``chat_template.jinja``, else that of ``tokenizer_config.json``; None = it has none."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    settings = read_json(folder / "tokenizer_config.json")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def read_json(path: Path) -> dict[str, Any]:  # Any: JSON
    """Return the object in a file, an empty one when there is no such file. Raises ValueError for anything else in it."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")  # noqa: TRY004  # a file's content, not an argument
    return found


def special_tokens(settings: dict[str, Any]) -> dict[str, str]:  # Any: JSON
    """Return the special tokens that chat templates name; an entry may be a text or an object with ``content``."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


class ChatTemplate:
    """A compiled template; ``enable_thinking`` holds where a request does not say. Raises ValueError for what is none."""

    def __init__(self, source: str, specials: dict[str, str], enable_thinking: bool | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: clock.now().astimezone().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template cannot be read, line {error.lineno}") from None
        self._specials = specials
        self._defaults = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._takes_tools = "tools" in source

    def render(self, fields: ChatFields) -> str:
        """Return the prompt of a conversation. Raises Refusal when the template does not accept it."""
        tools = fields.tools if fields.tool_choice != "none" else None
        if tools and not self._takes_tools:
            raise Refusal("the chat template of this model takes no tools", param="tools", code="unsupported_parameter")
        values = {**self._defaults, **(fields.chat_template_kwargs or {}), **self._specials}
        messages, begun = fields.messages, ""
        if fields.continue_final_message:
            # What a template does to the text of a message, it does to no answer of the model: so the text stands behind it.
            messages, begun = messages[:-1], messages[-1]["content"]
        adds_prompt = fields.add_generation_prompt is not False or bool(begun)
        try:
            return self._template.render(values, messages=messages, tools=tools, add_generation_prompt=adds_prompt) + begun
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            # What the template says itself is meant for the client; anything else could quote the conversation.
            said = f": {error}" if isinstance(error, _Said) else ""
            raise Refusal(f"the chat template does not accept these messages{said}", param="messages") from None


class _Said(jinja2.TemplateError):
    """The template called ``raise_exception``."""


def _raise(message: object) -> None:
    raise _Said(str(message)[:300])


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


# ---- from tokens to text that may be sent: whole characters, and nothing that could begin a stop string ----

REPLACEMENT = "\ufffd"


class Detokeniser:
    """Decodes one answer token by token. ``decode`` turns ids into text and shows broken characters as U+FFFD.

    ``before``: the last tokens of a prompt with whose text the answer goes on.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._broken_tokens = limits().children.broken_tokens
        self._ids: list[int] = list(before)
        self._from = 0
        self._to = len(self._ids)

    def add(self, token: int) -> str:
        """Return the text that ``token`` completes, empty while a character is still incomplete."""
        self._ids.append(token)
        # The last few are decoded again: a token's text depends on what precedes it (a leading space, half a character).
        known = self._decode(self._ids[self._from : self._to])
        text = self._decode(self._ids[self._from :])
        if text.endswith(REPLACEMENT) and len(self._ids) - self._to < self._broken_tokens:
            return ""
        self._from, self._to = self._to, len(self._ids)
        return text[len(known) :]

    def finish(self) -> str:
        known = self._decode(self._ids[self._from : self._to])
        text = self._decode(self._ids[self._from :])[len(known) :]
        self._from = self._to = len(self._ids)
        return text.rstrip(REPLACEMENT)  # of a character that was cut in two


class StopStrings:
    """Ends a text before the first of some strings, wherever the borders between its pieces lie."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def add(self, piece: str) -> str:
        """Return what may be sent now; ``hit`` is set when a stop string was found, and nothing more comes then."""
        if self.hit:
            return ""
        text = self._held + piece
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


# ---- answers ----


@dataclass(slots=True)
class Usage:
    """Counts and times of one generation, filled in as it goes on; times in milliseconds."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    tokenize_ms: float = 0.0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0

    def counts(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def timings(self) -> dict[str, object]:
        # Named as llama.cpp's server names them; ``tokenize_ms`` is our addition.
        return {
            "prompt_n": self.prompt_tokens - self.cached_tokens,
            "cache_n": self.cached_tokens,
            "prompt_ms": round(self.prompt_ms, 3),
            "predicted_n": self.completion_tokens,
            "predicted_ms": round(self.predicted_ms, 3),
            "tokenize_ms": round(self.tokenize_ms, 3),
        }


class Shape:
    """The objects of one answer; ``chat`` tells the two endpoints apart."""

    def __init__(self, *, chat: bool, number: str, model: str, created: int) -> None:
        self._chat = chat
        prefix, kind = ("chatcmpl-", "chat.completion") if chat else ("cmpl-", "text_completion")
        self._head = {"id": prefix + number, "object": kind, "created": created, "model": model}
        self._chunk_head = {**self._head, "object": "chat.completion.chunk" if chat else kind}

    def opening(self) -> bytes:
        return self._event([self._choice(None, {"role": "assistant", "content": ""})]) if self._chat else b""

    def piece(self, text: str) -> bytes:
        return self._event([self._choice(None, {"content": text}, text)])

    def closing(self, finish: str, usage: Usage, *, with_usage: bool) -> bytes:
        """Return the last events: the reason, the usage if asked for, and ``[DONE]``; the last object has the timings."""
        last = [self._choice(finish, {})]
        if not with_usage:
            return self._event(last, timings=usage.timings()) + b"data: [DONE]\n\n"
        return self._event(last) + self._event([], usage=usage.counts(), timings=usage.timings()) + b"data: [DONE]\n\n"

    def whole(self, text: str, finish: str, usage: Usage) -> dict[str, object]:
        choice: dict[str, object] = {"index": 0, "finish_reason": finish, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {**self._head, "choices": [choice], "usage": usage.counts(), "timings": usage.timings()}

    def _event(self, choices: list[dict[str, object]], **more: object) -> bytes:
        return as_event({**self._chunk_head, "choices": choices, **more})

    def _choice(self, finish: str | None, delta: dict[str, object], text: str = "") -> dict[str, object]:
        said: dict[str, object] = {"delta": delta} if self._chat else {"text": text}
        return {"index": 0, **said, "logprobs": None, "finish_reason": finish}


# ---- generations ----


class Generation:
    """One request on its way through a slot. ``usage`` and ``finish`` are final at the end of ``pieces``, which are texts.

    ``text`` makes the prompt, and may take long. Raises Refusal.
    """

    def __init__(
        self, model: TextModel, slots: Slots, fields: ChatFields | CompletionFields, text: Callable[[], str], scope: str
    ) -> None:
        self._model = model
        self._slots = slots
        self._fields = fields
        self._text = text
        self._scope = scope
        self.pieces: Pipe[str] = Pipe()
        self.usage = Usage()
        self.finish = "stop"

    async def start(self) -> None:
        await self._slots.take()
        self._slots.start(lambda: self.pieces.run(self._work))
        await self.pieces.get()

    def _work(self) -> None:
        prompt, sampling = self._prepare()
        if self.pieces.put(""):  # says that the prompt is accepted: nothing has been sent before it
            self._generate(prompt, sampling)

    def _prepare(self) -> tuple[Prompt, Sampling]:
        started = clock.monotonic()
        prompt = self._model.tokenise(self._text())
        self.usage.tokenize_ms = 1000 * (clock.monotonic() - started)
        self.usage.prompt_tokens = prompt.count
        left = self._model.context_tokens - prompt.count
        if not prompt.count:
            raise Refusal("the prompt is empty", param=self._fields.prompt_field)
        if left < 1:
            raise Refusal(
                f"the prompt has {prompt.count} tokens, the context {self._model.context_tokens}; shorten the prompt",
                param=self._fields.prompt_field,
                code="context_length_exceeded",
                details={"n_prompt_tokens": prompt.count, "n_ctx": self._model.context_tokens},
            )
        return prompt, self._fields.sampling(limit=left, scope=self._scope)

    def _generate(self, prompt: Prompt, sampling: Sampling) -> None:
        stops, usage = StopStrings(self._fields.stops), self.usage
        started = clock.monotonic()
        first_at = 0.0
        # The steps are a Python generator: closing it is what stops the library.
        with closing(self._model.generate(prompt, sampling)) as steps:
            for step in steps:
                if step.tokens or step.finish:
                    now = clock.monotonic()
                    first_at = first_at or now
                    usage.prompt_ms, usage.predicted_ms = 1000 * (first_at - started), 1000 * (now - first_at)
                usage.completion_tokens += step.tokens
                usage.cached_tokens = usage.cached_tokens if step.cached_tokens is None else step.cached_tokens
                self.finish = step.finish or self.finish
                text = stops.add(step.text)
                if (text and not self.pieces.put(text)) or self.pieces.is_left:
                    return
                if stops.hit:
                    self.finish = "stop"
                    return
        if rest := stops.finish():
            self.pieces.put(rest)


# ---- the server ----


class TextServer:
    def __init__(self, model: TextModel, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._slots = Slots(count=settings["slots"], max_waiting=limits().children.waiting)
        # A thread of its own for those who only want to know how long a prompt is: it waits for no generation.
        self._counting = Slots(count=1, max_waiting=limits().children.waiting_counts)
        source = read_template(Path(settings["folder"]))
        self._template = ChatTemplate(source, model.specials, settings["enable_thinking"]) if source is not None else None

    @property
    def info(self) -> dict[str, object]:
        """What the parent should know: context_tokens, and whether chat works."""
        return {"context_tokens": self._model.context_tokens, "chat": self._template is not None}

    def make(self) -> web.Application:
        app = make_app(key=self._settings["key"], max_body_bytes=limits().children.body_bytes)
        app.router.add_get("/stats", self.stats)
        app.router.add_post("/flush", self.flush)
        app.router.add_post("/v1/chat/completions", partial(self._answer, ChatFields))
        app.router.add_post("/v1/completions", partial(self._answer, CompletionFields))
        app.router.add_post("/v1/tokenize", self.tokenize)
        app.on_cleanup.append(self._close)
        return app

    async def stats(self, _request: web.Request) -> web.Response:
        return web.json_response({"running": self._slots.running, "waiting": self._slots.waiting, **self._model.stats()})

    async def flush(self, _request: web.Request) -> web.Response:
        """Forget cached prefixes: ``{"entries": tokens}``, or 409 while a generation runs."""
        entries = await asyncio.get_running_loop().run_in_executor(None, self._model.flush)
        if entries is None:
            raise Refusal("a generation is running", code="busy", status=409)
        return web.json_response({"entries": entries})

    async def tokenize(self, request: web.Request) -> web.Response:
        """Answer ``/v1/tokenize``: ``{"count", "max_model_len"}`` of what either endpoint would read."""
        body = await request.read()
        is_chat = _decode(_Kind, body).messages is not UNSET
        prompt = self._prompt_of(read_fields(ChatFields, body) if is_chat else read_fields(CompletionFields, body))
        counts: list[int] = []
        await self._counting.take()
        try:
            await asyncio.wrap_future(self._counting.start(lambda: counts.append(self._model.tokenise(prompt()).count)))
        except (RuntimeError, ValueError, MemoryError):
            raise Refusal("the engine failed", code="engine_failed", status=500) from None
        return web.json_response({"count": counts[0], "max_model_len": self._model.context_tokens})

    def _prompt_of(self, fields: ChatFields | CompletionFields) -> Callable[[], str]:
        if isinstance(fields, CompletionFields):
            return lambda: fields.text
        template = self._template
        if template is None:
            raise Refusal("this model has no chat template; use /v1/completions", code="modality_unsupported")
        return lambda: template.render(fields)  # later, in a thread: it may take long

    async def _answer(self, kind: type[ChatFields] | type[CompletionFields], request: web.Request) -> web.StreamResponse:
        fields = read_fields(kind, await request.read())
        scope = request.headers.get(SCOPE_HEADER, "")
        generation = Generation(self._model, self._slots, fields, self._prompt_of(fields), scope)
        shape = Shape(
            chat=isinstance(fields, ChatFields),
            number=uuid.uuid4().hex,
            model=fields.model or self._settings["model_name"],
            created=int(clock.unix_s()),
        )
        try:
            await generation.start()
            if fields.stream:
                return await stream_events(request, _events(generation, shape, with_usage=fields.wants_usage))
            text = "".join([piece async for piece in generation.pieces.rest()])
            return web.json_response(shape.whole(text, generation.finish, generation.usage))
        finally:
            generation.pieces.leave()

    async def _close(self, _app: web.Application) -> None:
        self._slots.close()
        self._counting.close()


async def _events(generation: Generation, shape: Shape, *, with_usage: bool) -> AsyncIterator[bytes]:
    yield shape.opening()
    async for piece in generation.pieces.rest():
        yield shape.piece(piece)
    yield shape.closing(generation.finish, generation.usage, with_usage=with_usage)


def serve_text(model: TextModel, settings: Settings, parent: Parent) -> None:
    """Serve ``model`` until the parent closes standard input. Raises ValueError when its chat template is broken.

    Settings: model_name, key, slots, folder, which may hold a chat template, and enable_thinking, what that is told where a
    request does not say.
    """
    server = TextServer(model, settings)
    asyncio.run(serve(server.make(), parent, server.info))

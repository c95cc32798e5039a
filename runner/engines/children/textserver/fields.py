"""Bodies of requests: checked, with defaults, refused by the name of the field at fault."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from runner.engines.children.textserver.model import Sampling
from runner.engines.children.web import Refusal
from wire.unreadable import UNREADABLE

Count = Annotated[int, Meta(ge=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct):
    """What a stream carries beside the text."""

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
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def check(self) -> None:
        """Refuse what no engine behind this server does, rather than ignore it. Raises Refusal."""
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise Refusal(f"{name} is not supported by this engine", param=name, code="unsupported_parameter")

    def sampling(self, *, limit: int, asked: int | None, scope: str) -> Sampling:
        """Return how to generate; ``limit`` is what is left of the context, ``asked`` what the client wants at most."""
        penalty = self.repetition_penalty or self.repeat_penalty
        return Sampling(
            max_tokens=min(limit, asked or limit),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=self.top_p or 1.0,
            repetition_penalty=penalty or 1.0,
            beam_size=self.beam_size or 1,
            seed=self.seed,
            ignores_end=self.ignore_eos is True,
            scope=scope,
        )


class ChatFields(_Fields, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]  # Any: a template may read whatever a message carries
    max_completion_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None  # Any: JSON schemas, for the template
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: Literal[False] | None = None
    response_format: dict[str, Any] | None = None  # Any: only its type is read
    chat_template_kwargs: dict[str, Any] | None = None  # Any: variables of the template

    @property
    def most_tokens(self) -> int | None:
        """Tokens wanted at most."""
        return self.max_completion_tokens or self.max_tokens

    def check(self) -> None:
        """As above, and the messages. Raises Refusal."""
        _Fields.check(self)
        if (self.response_format or {}).get("type", "text") != "text":
            raise Refusal("this engine answers in plain text only", param="response_format", code="response_format_unsupported")
        for number, message in enumerate(self.messages):
            message["content"] = _plain_content(message.get("content"), f"messages[{number}].content")
            if not isinstance(message.get("role"), str) or not message["role"]:
                raise Refusal("a message needs a role", param=f"messages[{number}].role")


class CompletionFields(_Fields, kw_only=True):
    """Body of ``/v1/completions``. Prompts as lists of tokens are refused: tokens differ between engines."""

    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=1)]
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None
    logprobs: Literal[0] | UnsetType | None = UNSET

    @property
    def text(self) -> str:
        """The prompt."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]

    @property
    def most_tokens(self) -> int | None:
        """Tokens wanted at most; 16 unless told, as OpenAI has it."""
        return self.max_tokens or 16


class _Kind(msgspec.Struct):
    """What tells the two apart."""

    messages: msgspec.Raw | UnsetType = UNSET


_chat = msgspec.json.Decoder(ChatFields)
_completion = msgspec.json.Decoder(CompletionFields)
_kind = msgspec.json.Decoder(_Kind)


def parse_chat(body: bytes) -> ChatFields:
    """Return the checked fields. Raises Refusal."""
    fields: ChatFields = _decode(_chat, body)
    fields.check()
    return fields


def parse_completion(body: bytes) -> CompletionFields:
    """Return the checked fields. Raises Refusal."""
    fields: CompletionFields = _decode(_completion, body)
    fields.check()
    return fields


def parse_either(body: bytes) -> ChatFields | CompletionFields:
    """Return the checked fields of a body with messages, else of one with a prompt. Raises Refusal."""
    return parse_completion(body) if _decode(_kind, body).messages is UNSET else parse_chat(body)


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:  # Any: the decoder's own type
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        words, _, path = str(error).partition(" - at `$")
        missing = re.search(r"required field `(\w+)`", words)
        param = missing.group(1) if missing else path.rstrip("`").lstrip(".").replace("[...]", "") or None
        raise Refusal(f"{param}: {words}" if param and not missing else words, param=param) from None
    except UNREADABLE:
        raise Refusal("the body is not JSON", code="invalid_json") from None


def _plain_content(content: object, param: str) -> str:
    """Return the text of a message; parts of text are joined, anything else is refused."""
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

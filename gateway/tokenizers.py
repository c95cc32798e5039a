"""Tokenizers of models in folders that an operator filled, and the process of its own in which they count.

A chat template comes from whoever made the model. jinja2's sandbox keeps it from our objects; what it may take of time and
memory is bounded by the process that renders it: a timer and the limits of the kernel. One that cannot be stopped otherwise
ends with its process, which costs one count.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

import msgspec

from core.limits import GatewayLimits, install, limits
from wire import clock

if TYPE_CHECKING:
    from jinja2 import Environment
    from tokenizers import Tokenizer

_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")
_encoder = msgspec.json.Encoder()


class UnusableFolder(Exception):
    """There is no tokenizer of that name, or it cannot be used; the text says why, to an operator."""


class TemplateFailed(Exception):
    """The template does not take this conversation, or goes beyond its bounds. Says nothing of either."""


class ProcessLost(Exception):
    """The process ended instead of counting."""


class _Chat(msgspec.Struct):
    """The fields of a chat completion that decide how long its prompt is. Any: JSON."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_chat_decoder = msgspec.json.Decoder(_Chat)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as chat templates read it: contents are text, arguments of tool calls are objects. Any: JSON.

    ``media``: pictures, recordings and files, which are left out of the contents. ``variables``: what the client hands to
    the template.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    variables: dict[str, Any]
    media: int

    def to_text(self) -> str:
        """Return all of it one after the other, as no template would have it."""
        parts = [_encoder.encode(self.tools).decode()] if self.tools else []
        for message in self.messages:
            parts.append(str(message["content"]))
            if message.get("tool_calls"):
                parts.append(_encoder.encode(message["tool_calls"]).decode())
        return "\n".join(parts)

    @property
    def framing_tokens(self) -> int:
        return limits().gateway.token_message * len(self.messages) + limits().gateway.token_answer

    @property
    def media_tokens(self) -> int:
        return limits().gateway.token_media * self.media


def read_prompt(chat: bytes) -> ChatPrompt:
    fields = _chat_decoder.decode(chat)
    media = 0
    for message in fields.messages:
        content = message.get("content")
        if isinstance(content, list):  # parts stand on lines of their own, as vLLM joins them
            texts = [part.get("text", part.get("refusal")) if isinstance(part, dict) else part for part in content]
            kept = [text for text in texts if isinstance(text, str)]
            media += len(texts) - len(kept)
            content = "\n".join(kept)
        message["content"] = content if isinstance(content, str) else ""
        for call in message.get("tool_calls") or ():
            _open_arguments(call.get("function"))
    return ChatPrompt(fields.messages, fields.tools or None, fields.chat_template_kwargs or {}, media)


def estimate_tokens(prompt: ChatPrompt) -> int:
    return -(-len(prompt.to_text().encode()) // limits().gateway.token_bytes) + prompt.framing_tokens + prompt.media_tokens


def _open_arguments(function: Any) -> None:  # Any: JSON
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return
    try:
        opened = json.loads(arguments)
    except (ValueError, RecursionError):
        return
    if isinstance(opened, dict):
        function["arguments"] = opened


class _Question(msgspec.Struct):
    folder: str
    chat: bytes


class _Answer(msgspec.Struct):
    """``tokens`` None: the prompt is too long to be counted here. ``unusable``: why the folder is, if it is."""

    tokens: int | None = None
    is_estimated: bool = False
    unusable: str = ""


_question_decoder = msgspec.msgpack.Decoder(_Question)
_answer_decoder = msgspec.msgpack.Decoder(_Answer)
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from gateway.tokenizers import serve; serve()"
_PACKAGES = str(Path(__file__).parents[1])


class TokenizerProcess:
    """The process that counts with the tokenizers below ``root``, as its parent has it. It blocks: call it in a thread."""

    def __init__(self, root: Path) -> None:
        # What gets out of the sandbox finds no secret there: not in the environment, and not in an open file.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, _PACKAGES, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback may quote the conversation
            env={},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        self.is_lost = False
        self._send(msgspec.json.encode(limits().gateway))

    def count(self, folder: str, chat: bytes) -> tuple[int, bool] | None:
        """Return what ``ModelTokenizer.count`` says of a chat completion. Raises UnusableFolder, ProcessLost."""
        self._send(msgspec.msgpack.encode(_Question(folder, chat)))
        said = None if self.is_lost else _read_frame(self._from)
        if said is None:
            self.close()
            raise ProcessLost("its process ended before it had counted")
        answer = _answer_decoder.decode(said)
        if answer.unusable:
            raise UnusableFolder(answer.unusable)
        return None if answer.tokens is None else (answer.tokens, answer.is_estimated)

    def close(self) -> None:
        """End it, whatever it does. Whoever waits for a count hears that it is lost."""
        self.is_lost = True
        self._process.kill()
        self._process.wait()
        for pipe in (self._to, self._from):
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # it had not read what was written last

    def _send(self, frame: bytes) -> None:
        try:
            _write_frame(self._to, frame)
        except (OSError, ValueError):  # ValueError: closed meanwhile
            self.is_lost = True


def _write_frame(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(len(frame).to_bytes(4, "big") + frame)
    pipe.flush()


def _read_frame(pipe: IO[bytes]) -> bytes | None:
    try:
        head = pipe.read(4)
        return pipe.read(int.from_bytes(head, "big")) if len(head) == 4 else None
    except ValueError:  # closed meanwhile
        return None


def serve() -> None:
    """Be the process: count for the one that started this one until it closes the pipe."""
    import resource

    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    bounds = _read_frame(source)
    if bounds is None:
        return
    install(replace(limits(), gateway=msgspec.json.decode(bounds, type=GatewayLimits)))
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))
    folders = TokenizerFolders(Path(sys.argv[2]))
    while (frame := _read_frame(source)) is not None:
        question = _question_decoder.decode(frame)
        try:
            counted = folders.get(question.folder).count(read_prompt(question.chat))
            answer = _Answer() if counted is None else _Answer(*counted)
        except UnusableFolder as error:
            answer = _Answer(unusable=str(error))
        except Exception as error:  # noqa: BLE001  # process edge: the parent hears what a foreign library raised
            answer = _Answer(unusable=type(error).__name__)
        _write_frame(sink, msgspec.msgpack.encode(answer))


@contextmanager
def bounded() -> Iterator[None]:
    """Bound what is done meanwhile in time and memory, in the main thread of a process. Raises TemplateFailed, MemoryError.

    What stays in one long call of the interpreter, deaf to the timer, is ended by the kernel with the whole process.
    """
    import resource

    bounds, used = limits().gateway, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = math.ceil(used.ru_utime + used.ru_stime + bounds.template_s) + 1  # the timer comes first
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    room = {resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_AS: pages * resource.getpagesize() + bounds.template_bytes}
    before = {kind: resource.getrlimit(kind) for kind in room}
    handler = signal.signal(signal.SIGPROF, _give_up)
    for kind, most in room.items():
        resource.setrlimit(kind, (most, before[kind][1]))
    signal.setitimer(signal.ITIMER_PROF, bounds.template_s, bounds.template_s)  # of its own time: a machine may stand still
    try:
        yield
    finally:
        signal.signal(signal.SIGPROF, signal.SIG_IGN)  # a signal that comes now must not keep the limits from being lifted
        signal.setitimer(signal.ITIMER_PROF, 0)
        for kind, was in before.items():
            resource.setrlimit(kind, was)
        signal.signal(signal.SIGPROF, handler)


def _give_up(_signal: int, _frame: object) -> None:
    raise TemplateFailed


class ChatTemplate:
    """A compiled template, rendered as Hugging Face does it. Raises ValueError when ``source`` is none."""

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        import jinja2

        if len(source) > limits().gateway.template_source_chars:
            raise ValueError(f"the chat template has more than {limits().gateway.template_source_chars} characters")
        try:
            with bounded():
                self._template = _make_environment().from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, TemplateFailed) as error:
            raise ValueError(f"the chat template cannot be read ({type(error).__name__})") from None
        self._specials = dict(specials)

    def render(self, prompt: ChatPrompt) -> str:
        """Return the text that the model would read. Raises TemplateFailed."""
        import jinja2

        values = {
            **prompt.variables,
            **self._specials,
            "messages": prompt.messages,
            "tools": prompt.tools,
            "documents": None,
            "add_generation_prompt": True,
        }
        pieces, length = [], 0
        try:
            with bounded():
                for piece in self._template.generate(values):
                    length += len(piece)
                    if length > limits().gateway.template_chars:
                        raise TemplateFailed
                    pieces.append(piece)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError):
            raise TemplateFailed from None
        except MemoryError:
            raise TemplateFailed from None
        return "".join(pieces)


def _make_environment() -> Environment:
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, by which templates mark what an assistant said; it prints what is in it."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: object) -> None:
        del message  # may quote the conversation
        raise jinja2.TemplateError

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
        optimized=False,  # what a template says of constants is worked out when it is rendered, within its bounds
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: clock.now().astimezone().strftime(layout)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """A tokenizer with the chat template of its model; without one, messages are put one after the other."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    def count(self, prompt: ChatPrompt) -> tuple[int, bool] | None:
        """Return the tokens of a prompt, and whether some are guessed (no template, or pictures); None = it is too long."""
        plain = prompt.to_text()
        if len(plain) > limits().gateway.template_chars:
            return None
        try:
            text = None if self.template is None else self.template.render(prompt)
        except TemplateFailed:
            text = None
        if text is None:
            tokens = len(self.tokenizer.encode(plain, add_special_tokens=True)) + prompt.framing_tokens
        else:
            tokens = len(self.tokenizer.encode(text, add_special_tokens=False))
        return tokens + prompt.media_tokens, text is None or prompt.media > 0


State = tuple[tuple[int, int], ...]
"""Time of change in nanoseconds and size of each file, (0, 0) = it is not there."""


class TokenizerFolders:
    """The tokenizers below ``root``, loaded anew when their files change; the ``count_folders`` used last stay in memory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loaded: OrderedDict[Path, tuple[State, ModelTokenizer]] = OrderedDict()

    def get(self, name: str) -> ModelTokenizer:
        """Return the tokenizer in the folder ``name``. Raises UnusableFolder."""
        folder = find_folder(self._root, name)
        state = tuple(_look_at(folder / name) for name in (_TOKENIZER, _SETTINGS, _TEMPLATE))
        known = self._loaded.get(folder)
        if known is None or known[0] != state:
            known = self._loaded[folder] = (state, load_tokenizer(folder))
        self._loaded.move_to_end(folder)
        while len(self._loaded) > limits().gateway.count_folders:
            self._loaded.popitem(last=False)
        return known[1]


def find_folder(root: Path, name: str) -> Path:
    """Return the folder ``name`` below ``root``, links resolved. Raises UnusableFolder for any other place."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or not name.isprintable():
        raise UnusableFolder("the name is not that of a folder below the root")
    try:
        base = root.resolve(strict=True)
        folder = base.joinpath(*parts).resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links that go round in circles
        raise UnusableFolder("there is no such folder") from None
    if folder == base or not folder.is_relative_to(base):
        raise UnusableFolder("the folder lies outside the root")
    return folder


def load_tokenizer(folder: Path) -> ModelTokenizer:
    """Read the files of a folder. Raises UnusableFolder."""
    from tokenizers import Tokenizer

    text = _read(folder / _TOKENIZER)
    if text is None:
        raise UnusableFolder(f"it has no {_TOKENIZER}")
    _parse(text, _TOKENIZER)  # says what is wrong with a broken file; the library's words do not
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _parse(_read(folder / _SETTINGS) or "{}", _SETTINGS)
    return ModelTokenizer(tokenizer, _read_template(folder, settings))


def _read_template(folder: Path, settings: dict[str, Any]) -> ChatTemplate | None:  # Any: JSON
    source = _read(folder / _TEMPLATE)
    if source is None:
        found = settings.get("chat_template")
        if isinstance(found, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        source = found if isinstance(found, str) else None
    if source is None:
        return None
    specials: dict[str, str] = {}
    for name in _SPECIALS:
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            specials[name] = token
    try:
        return ChatTemplate(source, specials)
    except ValueError as error:
        raise UnusableFolder(str(error)) from None


def _look_at(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)


def _read(path: Path) -> str | None:
    """Return a file's text, None when there is none. Raises UnusableFolder."""
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > limits().gateway.count_file_bytes:
            raise UnusableFolder(f"{path.name} has more than {limits().gateway.count_file_bytes} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableFolder(f"{path.name} cannot be read ({type(error).__name__})") from None


def _parse(text: str, name: str) -> dict[str, Any]:  # Any: JSON
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise UnusableFolder(f"{name} is not JSON") from None
    if not isinstance(found, dict):
        raise UnusableFolder(f"{name} does not hold a JSON object")
    return found

"""``muster chat``: talk to a model through the gateway, as a client does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from controlplane.launcher.console import LauncherError, say
from controlplane.launcher.files import read_json, replace_file
from controlplane.launcher.installation import credentials_path, installation_path
from core.limits import limits
from wire import COMMAND

_HELP = """\
/model [NAME]  which model, or another one     /system [TEXT]  instructions     /new  forget the conversation
/save FILE     write the conversation          /quit           or Ctrl-D        Ctrl-C ends an answer"""


@dataclass(slots=True)
class Chat:
    """One conversation with the gateway at ``url``, as the owner of ``key``."""

    url: str
    key: str
    model: str = ""
    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    def list_models(self) -> list[str]:
        """Return what the key may use. Raises LauncherError."""
        try:
            answer = self._client().get(f"{self.url}/models")
        except httpx.HTTPError as error:
            raise LauncherError(f"{self.url} does not answer: {error}. Does the gateway run?") from None
        if answer.status_code != httpx.codes.OK:
            raise LauncherError(f"{self.url} answers {answer.status_code}: {read_error(answer.text)}")
        return [str(entry["id"]) for entry in answer.json()["data"]]

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer as it comes. Raises LauncherError; the turn counts only when something was answered."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "stream": True, "messages": [*system, *self.turns, {"role": "user", "content": text}]}
        said = ""
        try:
            with self._client() as client, client.stream("POST", f"{self.url}/chat/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                    raise LauncherError(f"{answer.status_code}: {read_error(answer.text)}")
                for piece in read_stream(answer.iter_lines()):
                    said += piece
                    yield piece
        except httpx.HTTPError as error:
            raise LauncherError(f"the answer broke off: {str(error) or type(error).__name__}") from None
        finally:
            if said:
                self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]

    def _client(self) -> httpx.Client:
        bounds = limits().console
        wait = httpx.Timeout(bounds.chat_answer_s, connect=bounds.operate_answer_s)
        return httpx.Client(timeout=wait, headers={"Authorization": f"Bearer {self.key}"}, trust_env=False)


def read_stream(lines: Iterator[str]) -> Iterator[str]:
    """Yield the texts of a stream of server-sent events. Raises LauncherError for an error in it."""
    for line in lines:
        if not line.startswith("data:") or line.removeprefix("data:").strip() in ("", "[DONE]"):
            continue
        try:
            event: dict[str, Any] = json.loads(line.removeprefix("data:"))
        except ValueError:
            continue
        if event.get("error"):
            raise LauncherError(read_error(json.dumps(event)))
        for choice in event.get("choices") or ():
            piece = (choice.get("delta") or {}).get("content")
            if piece:
                yield str(piece)


def read_error(text: str) -> str:
    """Return the message of an answer that is an error, or its beginning."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text[:200]


def run_chat(data: Path, *, url: str, key_file: Path | None, model: str) -> int:
    """Hold a conversation until the person leaves. Raises LauncherError when there is nobody to talk to."""
    chat = Chat(find_url(data, url), find_key(data, key_file), model)
    models = chat.list_models()
    if not models:
        raise LauncherError(f"this key may use no model: {COMMAND} manage allow_model NAME, and connect a node that has it")
    if model and model not in models:
        raise LauncherError(f"this key may not use {model}, or nobody has it; there are {', '.join(models[:10])}")
    chat.model = model or models[0]
    if sys.stdin.isatty():
        say(f"{chat.model} at {chat.url}. /help lists commands.")
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:  # an empty line; Ctrl-D or /quit leaves
            say("")
            continue
        if text in ("/quit", "/exit"):
            return 0
        if text.startswith("/"):
            say(obey(chat, text))
        elif text:
            _print_answer(chat, text)


def _print_answer(chat: Chat, text: str) -> None:
    try:
        for piece in chat.ask(text):
            sys.stdout.write(piece)
            sys.stdout.flush()
        say("")
    except KeyboardInterrupt:
        say(" (stopped)")
    except LauncherError as error:
        say(f"({error})")


def obey(chat: Chat, line: str) -> str:
    """Carry out a command of the conversation and return what to say."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/model" if not rest:
            return "\n".join(f"{'*' if each == chat.model else ' '} {each}" for each in chat.list_models())
        case "/model":
            if rest not in chat.list_models():
                return f"This key may not use {rest}, or nobody has it."
            chat.model = rest
            return f"{rest} answers from here on."
        case "/system":
            chat.system = rest
            return "The instructions hold from the next turn on." if rest else "There are no instructions any more."
        case "/new":
            chat.turns.clear()
            return "The conversation is forgotten."
        case "/save" if rest:
            kept = {"model": chat.model, "system": chat.system, "messages": chat.turns}
            try:
                replace_file(Path(rest).expanduser(), f"{json.dumps(kept, indent=1, ensure_ascii=False)}\n".encode())
            except OSError as error:
                return f"Cannot write {rest}: {error.strerror}"
            return f"Wrote {len(chat.turns) // 2} turns to {rest}"
        case _:
            return _HELP


def find_url(data: Path, given: str) -> str:
    """Return the base URL with ``/v1``: the one given, MUSTER_BASE_URL, or that of the installation on ``data``."""
    told = given or os.environ.get("MUSTER_BASE_URL") or read_json(installation_path(data)).get("gateway_url")
    url = str(told or "http://127.0.0.1:8080").rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def find_key(data: Path, file: Path | None) -> str:
    """Return the key: of the file, of MUSTER_API_KEY, or the one that the first start made. Raises LauncherError."""
    try:
        key = file.read_text(encoding="utf-8").strip() if file else os.environ.get("MUSTER_API_KEY", "")
    except OSError as error:
        raise LauncherError(f"cannot read {file}: {error.strerror}") from None
    key = key or str(read_json(credentials_path(data)).get("api_key") or "")
    if not key.isascii() or not key:
        raise LauncherError("there is no key: set MUSTER_API_KEY, or name a file that holds one with --key-file")
    return key

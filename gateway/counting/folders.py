"""Tokenizers of models in folders that an operator filled: found below one root, loaded once, loaded anew when they change.

Everything here blocks and belongs into a thread.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from core.limits import limits
from gateway.counting.templates import ChatTemplate, TemplateFailed
from gateway.counting.values import ChatPrompt, UnusableFolder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")

State = tuple[tuple[int, int], ...]
"""Time of change in nanoseconds and size of each file, (0, 0) = it is not there."""


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """A tokenizer with the chat template of its model; without one, messages are put one after the other."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    def count(self, prompt: ChatPrompt) -> tuple[int, bool] | None:
        """Return the tokens of a prompt, and whether some of them are guessed: without a template, or for pictures.

        None for a prompt that is too long to be counted here.
        """
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


class TokenizerFolders:
    """The tokenizers below ``root``; at most eight stay in memory, those used last. For use in any number of threads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loaded: OrderedDict[Path, tuple[State, ModelTokenizer]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> ModelTokenizer:
        """Return the tokenizer in the folder ``name``. Raises UnusableFolder.

        Others wait while one is loaded: two at once would need the memory of two.
        """
        folder = find_folder(self._root, name)
        with self._lock:
            state = _look_at(folder)
            known = self._loaded.get(folder)
            if known is None or known[0] != state:
                known = (state, load_tokenizer(folder))
                self._loaded[folder] = known
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
    from tokenizers import Tokenizer  # 10 MB that a gateway without tokenizers does not need

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
    try:
        return ChatTemplate(source, _find_specials(settings))
    except ValueError as error:
        raise UnusableFolder(str(error)) from None


def _find_specials(settings: dict[str, Any]) -> dict[str, str]:  # Any: JSON
    """Return the special tokens that templates name; an entry is a text or an object with ``content``."""
    found: dict[str, str] = {}
    for name in _SPECIALS:
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _look_at(folder: Path) -> State:
    return tuple(_look_at_file(folder / name) for name in (_TOKENIZER, _SETTINGS, _TEMPLATE))


def _look_at_file(path: Path) -> tuple[int, int]:
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

"""What pages say in other languages: whole, compiled, and with the same values in each sentence."""

from __future__ import annotations

import re

import pytest

from tools import messages

_VALUE = re.compile(r"%\(\w+\)[a-z]|%%|\{\w*\}")


@pytest.mark.parametrize("language", messages.LANGUAGES)
def test_what_is_served_is_what_was_translated(language: str) -> None:
    compiled = messages.path_of(language).with_name("django.mo").read_bytes()
    assert compiled == messages.compile_catalogue(messages.read_catalogue(language)), "run ./muster messages"


@pytest.mark.parametrize("language", messages.LANGUAGES)
def test_a_translation_has_the_values_of_its_text(language: str) -> None:
    wrong = []
    for message in messages.read_catalogue(language):
        texts = (message.id,) if isinstance(message.id, str) else tuple(message.id)
        wanted = {value for text in texts for value in _VALUE.findall(text)}
        said = (message.string,) if isinstance(message.string, str) else tuple(message.string or ())
        for text in said if message.id else ():
            found = set(_VALUE.findall(text))
            # A plural form may say "one" where the other has a number.
            if text and not (found <= wanted and (len(texts) > 1 or found == wanted)):
                wrong.append((texts[0], text))
    assert not wrong


@pytest.mark.parametrize("language", messages.LANGUAGES)
def test_every_text_of_the_tree_is_translated(language: str) -> None:
    catalogue = messages.read_catalogue(language)
    found = {message.id for message in messages.collect() if message.id}
    known = {message.id for message in catalogue if message.id}
    assert found == known, "run ./muster messages"
    assert messages.find_missing(catalogue) == [], "write them into controlplane/locale, then run ./muster messages"

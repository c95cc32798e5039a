"""Catalogue of translations: ``muster messages`` collects what pages say, and compiles it.

What is marked for translation in Python and in templates goes into ``django.po`` of each language. A person writes the
translation there; the compiled ``django.mo`` is kept in the repository, so that an installation needs no tool for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.extract import DEFAULT_KEYWORDS, extract
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po
from django.utils.translation.template import templatize

from controlplane.launcher.console import say
from controlplane.launcher.environment import ROOT

LANGUAGES = ("de",)
_FOLDER = ROOT / "controlplane" / "locale"
_SOURCES = ("controlplane", "core", "gateway", "governance", "nodes", "wire")
_KEYWORDS = {
    **DEFAULT_KEYWORDS,
    "gettext_lazy": None,
    "ngettext_lazy": (1, 2),
    "gettext_noop": None,
    "pgettext_lazy": ((1, "c"), 2),
}


_HEADER_NOISE = tuple(f'"{name}' for name in ("POT-", "PO-", "Project-", "Report-", "Last-", "Language-Team", "Generated-By"))


_NO_DATE = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Found:
    """One text and where it stands. ``singular_and_plural``: one text, or both forms; ``context``: of ``pgettext``."""

    singular_and_plural: str | tuple[str, ...]
    place: str
    context: str | None


def run_messages() -> int:
    """Bring every catalogue up to what the tree says, and compile it. Returns how many texts lack a translation, at most 1."""
    template = collect()
    missing = 0
    for language in LANGUAGES:
        catalogue = read_catalogue(language)
        catalogue.update(template, no_fuzzy_matching=True)
        catalogue.header_comment = "# What pages say, in other words. ./muster messages keeps it up to date."
        catalogue.obsolete.clear()
        missing += len(lacks := find_missing(catalogue))
        folder = path_of(language).parent
        folder.mkdir(parents=True, exist_ok=True)
        path_of(language).write_bytes(print_po(catalogue))
        (folder / "django.mo").write_bytes(compile_catalogue(catalogue))
        say(f"{language}: {len(catalogue)} texts, {len(lacks)} without a translation")
        for text in lacks[:20]:
            say(f"  {text}")
    return min(missing, 1)


def collect() -> Catalog:
    """Return every text of the tree that is marked for translation, each with the files it stands in."""
    catalogue = Catalog(charset="utf-8", fuzzy=False)
    for found in [*_find_in_python(), *_find_in_templates()]:
        catalogue.add(found.singular_and_plural, locations=[(found.place, 0)], context=found.context)
    return catalogue


def path_of(language: str) -> Path:
    return _FOLDER / language / "LC_MESSAGES" / "django.po"


def read_catalogue(language: str) -> Catalog:
    """Return what is translated so far; an empty catalogue of a language that has none yet."""
    path = path_of(language)
    if not path.exists():
        return Catalog(locale=language, charset="utf-8", fuzzy=False)
    with path.open("rb") as file:
        return read_po(file, locale=language)


def find_missing(catalogue: Catalog) -> list[str]:
    """Return the texts that have no translation, or not one for each plural form."""
    return [
        message.id if isinstance(message.id, str) else message.id[0]
        for message in catalogue
        if message.id and not all(message.string if isinstance(message.string, tuple) else (message.string,))
    ]


def print_po(catalogue: Catalog) -> bytes:
    written = BytesIO()
    write_po(written, catalogue, width=120, sort_output=True, include_lineno=False)
    # Of the header only what gettext reads: its dates would make a change out of every run.
    lines = written.getvalue().decode().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(_HEADER_NOISE)).encode()


def compile_catalogue(catalogue: Catalog) -> bytes:
    """Return the catalogue as gettext reads it, the same bytes for the same texts."""
    written, compiled = BytesIO(), read_po(BytesIO(print_po(catalogue)), locale=catalogue.locale)
    compiled.creation_date = compiled.revision_date = _NO_DATE
    write_mo(written, compiled)
    return written.getvalue()


def _find_in_python() -> Iterator[Found]:
    for folder in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "migrations" not in path.parts:
                yield from _extract(path.read_bytes(), str(path.relative_to(ROOT)))


def _find_in_templates() -> Iterator[Found]:
    for path in sorted((ROOT / "templates").rglob("*")):
        if path.suffix in {".html", ".txt"}:
            yield from _extract_template(path, str(path.relative_to(ROOT)))
    unfold = find_spec("unfold")
    assert unfold is not None  # the server's pages stand on it
    assert unfold.origin is not None
    # The theme brings no languages: what it says and Django does not is said by us.
    known = _read_django()
    for path in sorted((Path(unfold.origin).parent / "templates").rglob("*.html")):
        yield from (found for found in _extract_template(path, "unfold") if found.singular_and_plural not in known)


def _extract_template(path: Path, place: str) -> Iterator[Found]:
    # Django writes a template as calls of gettext among its lines, which are indented as no program is.
    lines = templatize(path.read_text(encoding="utf-8"), origin=str(path)).splitlines()
    return _extract("\n".join(line.strip() for line in lines).encode(), place)


def _extract(source: bytes, place: str) -> Iterator[Found]:
    for _, texts, _, context in extract("python", BytesIO(source), keywords=_KEYWORDS):
        yield Found(texts if isinstance(texts, str) else tuple(texts), place, context)


def _read_django() -> set[str | tuple[str, ...]]:
    django = find_spec("django")
    assert django is not None
    assert django.origin is not None
    known: set[str | tuple[str, ...]] = set()
    for folder in ("conf", "contrib/admin", "contrib/auth"):
        with (Path(django.origin).parent / folder / "locale" / LANGUAGES[0] / "LC_MESSAGES" / "django.po").open("rb") as file:
            known |= {message.id if isinstance(message.id, str) else tuple(message.id) for message in read_po(file)}
    return known

"""The table of requirements: each a small function with the sentence it checks and the clients that break without it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from conformance.target import Target

Check = Callable[[Target], Awaitable[None]]


class Surface(StrEnum):
    """The parts of the API, in the order of the report."""

    FRAMING = "framing"
    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    MODELS = "models"
    AUDIO = "audio"
    IMAGES = "images"
    ERRORS = "errors"


@dataclass(frozen=True, slots=True)
class Row:
    """One requirement. ``needs``: the surface that must be there; ``needs_script``: only the scripted engine can show it.

    ``is_slow``: it waits for a silence of the engine, so it takes no turn from the others.
    ``check`` returns when the requirement is fulfilled and raises Violation or NotApplicable.
    """

    id: str
    surface: Surface
    requirement: str
    clients: str
    check: Check
    needs: Surface | None
    needs_script: bool
    is_slow: bool


_rows: dict[str, Row] = {}


def requirement(
    row_id: str,
    text: str,
    *,
    clients: str,
    needs_script: bool = False,
    needs: Surface | None = None,
    is_slow: bool = False,
) -> Callable[[Check], Check]:
    """Register a check as the row ``row_id``, whose first word is its surface."""

    def register(check: Check) -> Check:
        add_row(row_id, text, check, clients=clients, needs_script=needs_script, needs=needs, is_slow=is_slow)
        return check

    return register


def add_row(
    row_id: str,
    text: str,
    check: Check,
    *,
    clients: str,
    needs_script: bool = False,
    needs: Surface | None = None,
    is_slow: bool = False,
) -> None:
    """Do the same for a check that serves several rows. Raises ValueError for an id that is taken."""
    surface = Surface(row_id.partition(".")[0])
    if row_id in _rows:
        raise ValueError(f"two rows are called {row_id}")
    wanted = needs or (None if surface in {Surface.FRAMING, Surface.MODELS, Surface.ERRORS} else surface)
    _rows[row_id] = Row(row_id, surface, text, clients, check, wanted, needs_script, is_slow)


def list_rows(only: Iterable[str] = ()) -> list[Row]:
    """Return the rows by surface; ``only``: surfaces, or beginnings of ids. Raises ValueError for a word that fits no row."""
    import conformance.rows as every_row

    assert every_row.MODULES
    order = list(Surface)
    rows = sorted(_rows.values(), key=lambda row: order.index(row.surface))
    words = [word for word in only if word]
    for word in words:
        if not any(row.id.startswith(word) for row in rows):
            raise ValueError(f"no requirement begins with {word!r}; the surfaces are {', '.join(Surface)}")
    return [row for row in rows if not words or any(row.id.startswith(word) for word in words)]

"""Formats of messages that chat and push services take from a webhook. Pure.

Sources: docs.slack.dev (incoming webhooks, section blocks), discord.com/developers (execute webhook, embeds),
learn.microsoft.com (Workflows: an Adaptive Card in a message), docs.ntfy.sh (publish as JSON).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from core.limits import limits
from governance.models import WebhookEndpoint
from governance.states import Severity

Format = WebhookEndpoint.Format


@dataclass(frozen=True, slots=True)
class Chat:
    """A message for people. ``severity`` None: it is no alert. ``label``: its severity in words; ``is_over``: an end."""

    title: str
    text: str
    link: str
    severity: Severity | None = None
    label: str = ""
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Look:
    """How urgent something looks. Colour is never the only sign: the label stands beside it."""

    colour: int
    style: str
    priority: int
    tag: str


_PLAIN = _Look(0x667085, "default", 3, "bell")
_OVER = _Look(0x12B76A, "good", 3, "white_check_mark")
_LOOKS = {
    Severity.DOWN: _Look(0xD92D20, "attention", 5, "rotating_light"),
    Severity.IMPAIRED: _Look(0xF79009, "warning", 4, "warning"),
    Severity.NOTICE: _Look(0x2E90FA, "accent", 3, "information_source"),
}
_MARKDOWN = re.compile(r"([\\*_~`|\[\]<>#])")
_TOPIC = re.compile(r"/([-_A-Za-z0-9]{1,64})/?")


def find_topic(url: str) -> str:
    """Return the topic that an address of ntfy ends in; empty when it ends in none."""
    found = _TOPIC.fullmatch(urlsplit(url).path)
    return found[1] if found else ""


def write_post(format_name: str, chat: Chat, url: str) -> tuple[str, bytes]:
    """Return where a message goes and its bytes. Raises KeyError for the generic format, which is no chat."""
    target = _find_root(url) if format_name == Format.NTFY else url
    members = _WRITERS[format_name](chat, url)
    return target, json.dumps(members, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def _write_slack(chat: Chat, _url: str) -> dict[str, object]:
    title, text = _escape_slack(chat.title), _escape_slack(_cut(chat.text, limits().governance.slack_chars))
    lines = [f"*<{_escape_slack(chat.link)}|{title}>*", text] if chat.link else [f"*{title}*", text]
    blocks: list[dict[str, object]] = [_section("\n".join(lines))]
    if chat.label:
        blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": _escape_slack(chat.label)}]})
    return {"text": title, "blocks": blocks}


def _section(text: str) -> dict[str, object]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text}}


def _escape_slack(text: str) -> str:
    # Slack reads <!channel> as a call to everybody.
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _write_discord(chat: Chat, _url: str) -> dict[str, object]:
    bounds = limits().governance
    embed: dict[str, object] = {
        "title": _cut(_escape_discord(chat.title), bounds.discord_title_chars),
        "description": _cut(_escape_discord(chat.text), bounds.discord_chars),
        "color": _look_of(chat).colour,
    }  # fmt: skip
    if chat.link:
        embed["url"] = chat.link
    if chat.label:
        embed["footer"] = {"text": chat.label}
    # Names of nodes and models call nobody.
    return {"embeds": [embed], "allowed_mentions": {"parse": []}}


def _escape_discord(text: str) -> str:
    # A node that calls itself [pay here](https://…) shall make no link.
    return _MARKDOWN.sub(r"\\\1", text)


def _write_teams(chat: Chat, _url: str) -> dict[str, object]:
    text = _cut(chat.text, limits().governance.teams_chars)
    body = [_run(chat.title, weight="bolder", size="medium", color=_look_of(chat).style)]
    body += [_run(line) for line in text.splitlines() if line]
    if chat.label:
        body.append(_run(chat.label, isSubtle=True))
    card: dict[str, object] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.4", "body": body,
    }  # fmt: skip
    if chat.link:
        card["actions"] = [{"type": "Action.OpenUrl", "title": "Muster", "url": chat.link}]
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
    return {"type": "message", "attachments": [attachment]}


def _run(text: str, **style: object) -> dict[str, object]:
    # A TextBlock would read Markdown.
    return {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text, **style}]}


def _write_ntfy(chat: Chat, url: str) -> dict[str, object]:
    look, most = _look_of(chat), limits().governance.ntfy_bytes
    text = chat.text.encode()[:most].decode(errors="ignore") or chat.title
    members: dict[str, object] = {"topic": find_topic(url), "title": chat.title, "message": text, "priority": look.priority}
    members["tags"] = [look.tag, chat.label] if chat.label else [look.tag]
    return members | ({"click": chat.link} if chat.link else {})


def _find_root(url: str) -> str:
    # ntfy takes JSON at its root alone; a token may stand in the query.
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, "/", parts.query, ""))


def _look_of(chat: Chat) -> _Look:
    return _OVER if chat.is_over else _PLAIN if chat.severity is None else _LOOKS[chat.severity]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


_WRITERS: Mapping[str, Callable[[Chat, str], dict[str, object]]] = {
    Format.SLACK: _write_slack, Format.DISCORD: _write_discord, Format.TEAMS: _write_teams, Format.NTFY: _write_ntfy,
}  # fmt: skip

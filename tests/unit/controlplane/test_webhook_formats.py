"""What chat and push services are sent, byte for byte, and that no name in it calls anybody."""

from __future__ import annotations

import json
from typing import Any

import pytest

from governance.states import Severity
from governance.webhook_formats import Chat, find_topic, write_post

LINK = "https://muster.example.com/admin/governance/alert/7/change/"
ALERT = Chat(
    "rig <b> & co is offline.", "Check its power.\nSince 2026-11-28 21:00:00 UTC.", LINK, Severity.DOWN, "down"
)  # fmt: skip
HOOK = "https://hooks.example.com/T0/B0/secret?wait=true"


def run(text: str, **style: object) -> dict[str, Any]:
    return {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text, **style}]}


GOLDEN: dict[str, tuple[str, dict[str, Any]]] = {
    "slack": (HOOK, {
        "text": "rig &lt;b&gt; &amp; co is offline.",
        "blocks": [
            {"type": "section", "text": {"type": "mrkdwn", "text":
                f"*<{LINK}|rig &lt;b&gt; &amp; co is offline.>*\nCheck its power.\nSince 2026-11-28 21:00:00 UTC."}},
            {"type": "context", "elements": [{"type": "mrkdwn", "text": "down"}]},
        ],
    }),
    "discord": (HOOK, {
        "embeds": [{
            "title": "rig \\<b\\> & co is offline.", "description": "Check its power.\nSince 2026-11-28 21:00:00 UTC.",
            "color": 0xD92D20, "url": LINK, "footer": {"text": "down"},
        }],
        "allowed_mentions": {"parse": []},
    }),
    "teams": (HOOK, {
        "type": "message",
        "attachments": [{
            "contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None,
            "content": {
                "$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.4",
                "body": [
                    run("rig <b> & co is offline.", weight="bolder", size="medium", color="attention"),
                    run("Check its power."), run("Since 2026-11-28 21:00:00 UTC."), run("down", isSubtle=True),
                ],
                "actions": [{"type": "Action.OpenUrl", "title": "Muster", "url": LINK}],
            },
        }],
    }),
    "ntfy": ("https://ntfy.sh/?auth=abc", {
        "topic": "my-topic", "title": "rig <b> & co is offline.", "message": "Check its power.\nSince 2026-11-28 21:00:00 UTC.",
        "priority": 5, "tags": ["rotating_light", "down"], "click": LINK,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_a_message_is_what_the_service_takes(name: str) -> None:
    url = "https://ntfy.sh/my-topic?auth=abc" if name == "ntfy" else HOOK
    target, body = write_post(name, ALERT, url)
    assert (target, json.loads(body)) == GOLDEN[name]


@pytest.mark.parametrize("name", GOLDEN)
def test_an_end_and_what_is_no_alert_look_calm_and_long_texts_are_cut(name: str) -> None:
    url = "https://ntfy.sh/my-topic"
    over = write_post(name, Chat("t", "x", LINK, Severity.DOWN, "down", is_over=True), url)[1].decode()
    plain = write_post(name, Chat("t", "x", ""), url)[1].decode()
    for calm in (over, plain):
        assert "attention" not in calm
        assert "rotating_light" not in calm
        assert str(0xD92D20) not in calm
    assert len(write_post(name, Chat("t" * 200, "ü" * 50_000, LINK), url)[1]) < 28_000


@pytest.mark.parametrize(
    ("url", "topic"),
    [("https://ntfy.sh/my-topic", "my-topic"), ("https://ntfy.sh/my_topic/?auth=x", "my_topic"), ("https://ntfy.sh/", ""),
        ("https://ntfy.sh/a/b", ""), ("https://ntfy.sh/my topic", ""), (f"https://ntfy.sh/{'x' * 65}", "")],
)  # fmt: skip
def test_a_topic_of_ntfy_is_the_whole_path(url: str, topic: str) -> None:
    assert find_topic(url) == topic


def test_a_name_makes_no_link_and_calls_nobody() -> None:
    sly = Chat("[pay](https://evil.test) <!channel>", "<https://evil.test|here> @everyone", "")
    embed = json.loads(write_post("discord", sly, HOOK)[1])["embeds"][0]
    assert embed["title"] == r"\[pay\](https://evil.test) \<!channel\>"
    assert embed["description"] == r"\<https://evil.test\|here\> @everyone"
    (section,) = json.loads(write_post("slack", sly, HOOK)[1])["blocks"]
    said = section["text"]["text"]
    assert said == "*[pay](https://evil.test) &lt;!channel&gt;*\n&lt;https://evil.test|here&gt; @everyone"

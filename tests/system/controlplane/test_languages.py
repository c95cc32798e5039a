"""The language of pages, of what is pushed to them, and of answers to programs."""

from __future__ import annotations

import pytest
from django.conf import settings
from django.test import Client
from django.urls import reverse
from django.utils import translation

from controlplane.live import read_language
from core.models import User

pytestmark = pytest.mark.django_db
GERMAN = "de-AT,de;q=0.9,en;q=0.5"


@pytest.fixture
def boss() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    return client


@pytest.mark.parametrize(("asked", "answered"), [(GERMAN, "de"), ("fr", "en"), ("", "en")])
def test_a_page_takes_a_language_that_the_browser_asks_for(boss: Client, asked: str, answered: str) -> None:
    page = boss.get(reverse("admin:gateway_tenant_changelist"), headers={"accept-language": asked})

    assert page.headers["Content-Language"] == answered
    assert f'<html lang="{answered}"' in page.text
    assert "Accept-Language" in page.headers["Vary"]
    assert translation.get_language() == "en", "the thread serves the next person"


def test_a_chosen_language_stays(boss: Client) -> None:
    page = reverse("admin:gateway_tenant_changelist")

    answer = boss.post(reverse("set_language"), {"language": "de", "next": page})

    assert (answer.status_code, answer.headers["Location"]) == (302, page)
    assert boss.get(page, headers={"accept-language": "en"}).headers["Content-Language"] == "de"


def test_programs_are_answered_in_english(boss: Client) -> None:
    answer = boss.get("/api/v1/usage", headers={"accept-language": GERMAN})

    assert answer.status_code == 401
    assert "Content-Language" not in answer.headers
    assert "token" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("cookie", "asked", "language"), [("", GERMAN, "de"), ("en", GERMAN, "en"), ("xx", "", "en")])
def test_a_socket_speaks_the_language_of_its_page(cookie: str, asked: str, language: str) -> None:
    scope = {"cookies": {settings.LANGUAGE_COOKIE_NAME: cookie}, "headers": [(b"accept-language", asked.encode())]}

    assert read_language(scope) == language

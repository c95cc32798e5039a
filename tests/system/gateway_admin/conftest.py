"""Who looks at the gateway's pages."""

from __future__ import annotations

import pytest
from django.test import Client

from tests.fakes.nodes import make_operator


@pytest.fixture
def boss() -> Client:
    """The browser of an operator who signed in with a passkey."""
    client = Client()
    client.force_login(make_operator())
    session = client.session
    session["muster_assurance"] = "passkey"
    session.save()
    return client

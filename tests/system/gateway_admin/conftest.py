"""Who looks at the gateway's pages."""

from __future__ import annotations

import pytest
from django.test import Client

from tests.fakes.governed_team import open_session
from tests.fakes.nodes import make_operator


@pytest.fixture
def boss() -> Client:
    """The browser of an operator who signed in with a passkey."""
    return open_session(make_operator())

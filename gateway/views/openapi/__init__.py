"""``GET /openapi.json``: the client API as OpenAPI 3.1, written by hand from what the surfaces take and give.

A client library can be made from it, and a fuzzer is: what it says is held against the running gateway.
"""

from __future__ import annotations

from gateway.views.openapi.answers import ANSWERS
from gateway.views.openapi.bodies import BODIES
from gateway.views.openapi.operations import PATHS, make_failures
from gateway.views.openapi.terms import Schema

__all__ = ["make_document"]


def make_document(version: str) -> Schema:
    """Return the document of a gateway of that version."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Muster gateway",
            "version": version,
            "description": "The APIs of OpenAI and Anthropic in front of boxes that people own.",
        },
        "paths": PATHS,
        "components": {
            "schemas": {**BODIES, **ANSWERS},
            "responses": make_failures(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "A client key, mst_…"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
            },
        },
        "security": [{"bearer": []}, {"header": []}],
    }

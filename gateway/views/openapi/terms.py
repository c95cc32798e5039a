"""Short words for JSON Schema (draft 2020-12, the one of OpenAPI 3.1), in which the document is written."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
"""A JSON Schema. Any: JSON."""

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
OBJECT: Schema = {"type": "object"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_OF_THE_MODEL = "How much a model allows stands in GET /v1/models."
LIMIT: Schema = {**POSITIVE, "minimum": 0, "description": _OF_THE_MODEL}
POSITIVE_LIMIT: Schema = {**POSITIVE, "description": _OF_THE_MODEL}
MODEL: Schema = {
    "type": "string",
    "minLength": 1,
    "maxLength": 200,
    "pattern": r"^[\x20-\x7e]+$",
    "description": "A model, an alias of one, or auto.",
}


def ref(name: str) -> Schema:
    """Return a reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def const(value: str) -> Schema:
    """Return the schema of exactly one text."""
    return {"const": value}


def choice(*values: str) -> Schema:
    """Return the schema of a few texts."""
    return {"type": "string", "enum": list(values)}


def listed(item: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    """Return the schema of a list."""
    schema: Schema = {"type": "array", "items": item}
    if least:
        schema["minItems"] = least
    return schema if most is None else {**schema, "maxItems": most}


def either(*schemas: Schema) -> Schema:
    """Return the schema of a value that is of one of several kinds."""
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    """Return the schema of a value that may be null."""
    return either(schema, {"type": "null"})


def members(required: str = "", /, **properties: Schema) -> Schema:
    """Return the schema of an object; ``required``: names with blanks between. It may have members that are not listed."""
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required.split()
    return schema

"""What the server and the GPU node agree on, byte for byte. Pure Python: no Django, no asyncio, no network."""

RELEASE = "0.1.0"
"""Of this program and of all its parts, as ``pyproject.toml`` says it."""

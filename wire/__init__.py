"""What the server and the GPU box agree on, byte for byte. Pure Python: no Django, no asyncio, no network."""

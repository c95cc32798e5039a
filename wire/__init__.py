"""What the server and the GPU node agree on, byte for byte. Pure Python: no Django, no asyncio, no network."""

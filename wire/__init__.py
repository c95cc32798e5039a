"""What the server and the GPU node agree on, byte for byte. Pure Python: no Django, no asyncio, no network."""

from pathlib import Path

RELEASE = "0.2.0"
"""Of this program and of all its parts. It stands here alone: the build of the packages reads it from this line."""
IS_CHECKOUT = (Path(__file__).resolve().parents[1] / "muster").is_file()
"""Whether we run from a copy of the repository. In an installed package that name is the folder of ``import muster``."""
COMMAND = "./muster" if IS_CHECKOUT else "muster"
"""How a person types the launcher on this machine."""

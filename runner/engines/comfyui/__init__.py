"""ComfyUI: a server of somebody else's that runs graphs of nodes, offered as OpenAI's image generations."""

from runner.engines.comfyui.engine import ComfyUiEngine

__all__ = ["ComfyUiEngine"]

"""What can be done to boxes once it is approved. ``settings.OPERATIONS`` names these objects."""

from __future__ import annotations

from nodes.operations.holding import NodeDrain, NodeEvict
from nodes.operations.models_on_boxes import CacheFlush, ModelLoad, ModelUnload, SettingsReload

MODEL_LOAD = ModelLoad()
MODEL_UNLOAD = ModelUnload()
CACHE_FLUSH = CacheFlush()
NODE_DRAIN = NodeDrain()
NODE_EVICT = NodeEvict()
SETTINGS_RELOAD = SettingsReload()

__all__ = ["CACHE_FLUSH", "MODEL_LOAD", "MODEL_UNLOAD", "NODE_DRAIN", "NODE_EVICT", "SETTINGS_RELOAD"]

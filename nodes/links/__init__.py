"""Ways to reach a node, behind one port: ``Link.open_stream(request, sink) -> Stream``."""

from __future__ import annotations

from nodes.links.port import EndKind, Link, LinkCondition, LinkEnd, Sink, Stream
from nodes.links.registry import LinkRegistry

__all__ = ["EndKind", "Link", "LinkCondition", "LinkEnd", "LinkRegistry", "Sink", "Stream"]

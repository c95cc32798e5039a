"""From an opened stream to the engine and back: one HTTP exchange per stream, under credit, deadline and cancel."""

from runner.relay.exchange import Relay, Send, Upstream

__all__ = ["Relay", "Send", "Upstream"]

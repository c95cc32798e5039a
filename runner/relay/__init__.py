"""From an opened stream to an answer and back, under credit, deadline and cancel."""

from runner.relay.exchange import Relay, Send

__all__ = ["Relay", "Send"]

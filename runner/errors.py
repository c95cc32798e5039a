"""What can go wrong on the box, one tree. Messages are for the owner of the box and never carry secrets or prompts."""

from __future__ import annotations


class RunnerError(Exception):
    """Base of everything this program raises on purpose."""


class ConfigError(RunnerError):
    """An option cannot be used; the text names it and says what would do."""


class EngineError(RunnerError):
    """The engine did not start or does not serve."""


class SessionLost(RunnerError):
    """The socket to a gateway is gone, or may not be used any more."""


class AuthRefused(SessionLost):
    """The gateway does not accept this box's credential."""


class StreamClosed(RunnerError):
    """The stream has already ended, so nothing more may be sent on it."""


class BoxBusy(RunnerError):
    """Every slot and every place in the local queue is taken, or the box is leaving."""

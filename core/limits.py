"""Limits of a server process: every bound and time-out of ours, what it is counted in, and what happens at it.

``limits()`` is read where a bound applies; whoever serves each request takes its section once, when it is built. No module
keeps a number of its own (``tests/test_architecture.py`` names the few that are no bounds). ``docs/settings.md`` is made from
this file and from ``runner/limits.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """Database, hints and throttles of every process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernanceLimits:
    """Operations, approvals, audit and sign-in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """Links to nodes, what nodes report, and commands to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Requests: their admission, queue, relay, records and dialects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleLimits:
    """Pages of the control plane, its live pushes, the playground, and its servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherLimits:
    """``./muster up``: the embedded servers and the processes that it supervises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All limits of one process."""

    core: CoreLimits = field(default_factory=CoreLimits)
    governance: GovernanceLimits = field(default_factory=GovernanceLimits)
    nodes: NodeLimits = field(default_factory=NodeLimits)
    gateway: GatewayLimits = field(default_factory=GatewayLimits)
    console: ConsoleLimits = field(default_factory=ConsoleLimits)
    launcher: LauncherLimits = field(default_factory=LauncherLimits)


_current = Limits()


def limits() -> Limits:
    """Return the limits of this process."""
    return _current


def install(chosen: Limits) -> Limits:
    """Let ``chosen`` hold from now on; return what held before. The settings do it at the start of a process, and tests."""
    global _current
    before, _current = _current, chosen
    return before

"""What the box has and what is used of it: GPUs, the host, and the processes of an engine."""

from runner.telemetry.processes import TreeMemory
from runner.telemetry.readings import Reading, Telemetry, open_telemetry

__all__ = ["Reading", "Telemetry", "TreeMemory", "open_telemetry"]

"""Prometheus counters of the node registry. Label values come from closed sets."""

from __future__ import annotations

from prometheus_client import Counter

SESSIONS = Counter("muster_worker_sessions_total", "Worker sessions opened", ["protocol"])
AUTH_FAILURES = Counter("muster_worker_auth_failures_total", "Worker sockets refused at authentication", ["reason"])
EJECTIONS = Counter("muster_node_ejections_total", "Times a node was held back for how it answered", ["reason"])
FRAMES_DROPPED = Counter("muster_worker_frames_dropped_total", "Late frames of streams that were over")

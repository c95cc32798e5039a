"""Everything that is due, whoever forgot to ring: called every few seconds by the web process and by a worker."""

from __future__ import annotations

from governance.services.runs import run_due
from governance.services.sweeps import is_anything_open, sweep_operations


def reconcile() -> int:
    """Sweep, then work on what is due; any number of processes may. Returns how many runs were looked at.

    What the sweep stumbles over does not keep approved operations from being carried out.
    """
    if not is_anything_open():
        return 0
    try:
        sweep_operations()
    finally:
        done = run_due()
    return done

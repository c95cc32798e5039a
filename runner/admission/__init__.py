"""Who is served when: one fair queue per model, one budget of waiting requests for the box, request rates per tenant."""

from runner.admission.queue import FairQueue, KeyShare, Priority, QueueLimits, Turn, WaitBudget
from runner.admission.tenants import ANONYMOUS, RateState, TenantRates, clean_tenant, read_rates, read_weights

__all__ = [
    "ANONYMOUS",
    "FairQueue",
    "KeyShare",
    "Priority",
    "QueueLimits",
    "RateState",
    "TenantRates",
    "Turn",
    "WaitBudget",
    "clean_tenant",
    "read_rates",
    "read_weights",
]

"""Who is served when: one fair queue per model, one budget of waiting requests for the box, request rates per tenant."""

from runner.admission.fair_queue import FairQueue
from runner.admission.rates import RateState, TenantRates, read_rates
from runner.admission.shares import KeyShare, Priority, QueueLimits, Turn
from runner.admission.tenants import ANONYMOUS, clean_tenant, read_weights
from runner.admission.waits import WaitBudget

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

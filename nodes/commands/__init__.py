"""Operations on their way to boxes: rows that say what is to be delivered, and what the boxes answer.

Over a socket a gateway process delivers them, over HTTP a Celery task (``direct``). Neither permits anything: that is what the
token in the row is for, which the box judges by itself. ``direct`` is not listed here: a
gateway does without the HTTP client that it loads, and is back sooner after a kill.
"""

from __future__ import annotations

from nodes.commands.delivery import Ask, Delivery, Send, plan_deliveries
from nodes.commands.rows import Command, put_command
from nodes.commands.statuses import FINAL_STATES, store_status

__all__ = [
    "FINAL_STATES",
    "Ask",
    "Command",
    "Delivery",
    "Send",
    "plan_deliveries",
    "put_command",
    "store_status",
]

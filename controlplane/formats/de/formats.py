"""Dates with seconds as German readers write them. Numbers are Django's own for German."""

from __future__ import annotations

DATE_FORMAT = SHORT_DATE_FORMAT = "d.m.Y"
TIME_FORMAT = "H:i:s"
DATETIME_FORMAT = "d.m.Y H:i:s"
SHORT_DATETIME_FORMAT = "d.m.Y H:i"

"""How the pages of approvals print people and times."""

from __future__ import annotations

from datetime import datetime

from django import template
from django.utils.translation import gettext as _

from controlplane.templatetags.muster import print_duration
from wire import clock

register = template.Library()


@register.filter
def initials(name: str) -> str:
    """Return up to two letters that stand for a person: AB of ana.berg, BE of ben."""
    parts = [part for part in name.replace("_", ".").replace("-", ".").replace("@", ".").replace(" ", ".").split(".") if part]
    return (parts[0][0] + parts[1][0] if len(parts) > 1 else name[:2]).upper()


@register.filter
def ends(at: datetime) -> str:
    """Return when something runs out, as people say it."""
    left_s = (at - clock.now()).total_seconds()
    return _("expires in %(left)s") % {"left": print_duration(left_s)} if left_s > 0 else _("expired")


@register.filter
def since(at: datetime) -> str:
    """Return how long ago something was."""
    return _("%(time)s ago") % {"time": print_duration(max(0.0, (clock.now() - at).total_seconds()))}

"""What stands around a page: the sidebar, the tabs and the way to the page (``controlplane.navigation``)."""

from __future__ import annotations

from django import template
from django.template import Context

from controlplane.navigation import Shell, read_shell

register = template.Library()


@register.simple_tag(takes_context=True)
def build_shell(context: Context) -> Shell:
    page = {name: context[name] for name in ("title", "original") if name in context}
    return read_shell(context.get("request"), page)

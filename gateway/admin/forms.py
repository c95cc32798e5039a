"""Fields that several of the gateway's forms ask for."""

from __future__ import annotations

from django import forms
from unfold.widgets import UnfoldAdminIntegerFieldWidget, UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget

from core.limits import limits


def limit_field(label: str, help_text: str) -> forms.IntegerField:
    """Return a field for a limit of at least 1 that may be left empty."""
    return forms.IntegerField(
        label=label,
        help_text=help_text,
        required=False,
        min_value=1,
        max_value=limits().gateway.record_integer,
        widget=UnfoldAdminIntegerFieldWidget,
    )


class DateInput(UnfoldAdminTextInputWidget):  # type: ignore[misc]  # Unfold ships no types
    """The browser's own date picker: no script of ours."""

    input_type = "date"


class NameListField(forms.CharField):
    """Names, one to a line. Cleans to a list without blanks and doubles."""

    widget = UnfoldAdminTextareaWidget(attrs={"rows": 4})

    def clean(self, value: str) -> list[str]:
        """Return the names in their order."""
        lines = (line.strip() for line in super().clean(value).splitlines())
        return list(dict.fromkeys(line for line in lines if line))

    def prepare_value(self, value: object) -> object:
        """Return what the box shows: one name to a line."""
        return "\n".join(value) if isinstance(value, list) else value

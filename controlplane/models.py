"""The operators of a Muster installation."""

from __future__ import annotations

from django.contrib.auth.models import AbstractUser


class User(AbstractUser):
    """A person who signs in to the control plane. A model of our own so that later fields need no table swap."""

    class Meta(AbstractUser.Meta):
        verbose_name = "operator"
        verbose_name_plural = "operators"

"""The issuer of single sign-on, as an operator describes it. Standard library only: the launcher reads settings with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Issuer:
    """An OpenID Connect issuer at ``url``, which people know by ``name``.

    ``roles``: of each of its groups, such as ("operator",) or ("tenant-admin:research",). ``default_role``: of who has no such
    group; "none" lets nobody in without one. ``allowed_domains``: of verified e-mail addresses, empty = all.
    """

    url: str
    client_id: str
    client_secret: str = field(repr=False)
    name: str
    scopes: tuple[str, ...]
    groups_claim: str
    roles: Mapping[str, tuple[str, ...]]
    default_role: str
    allowed_domains: tuple[str, ...]

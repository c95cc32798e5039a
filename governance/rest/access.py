"""Who calls, about which operation: what every view of this API begins with."""

from __future__ import annotations

import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, cast

from django.contrib.auth import get_user_model
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.views import APIView

from governance.errors import GovernanceError, NotPermitted, OperationNotFound
from governance.operations.values import Proposer
from governance.rest.parsing import StrictJsonParser
from wire.contract import ErrorCode
from wire.ids import parse_id

if TYPE_CHECKING:
    from core.models import User


class NothingThere(GovernanceError):
    """What is asked for does not exist yet."""

    code = ErrorCode.NOT_FOUND
    status = HTTPStatus.NOT_FOUND.value


class Caller(Protocol):
    """The holder of an admin token, as the authentication of the REST framework leaves it in ``request.user``."""

    @property
    def proposer(self) -> Proposer:
        """As whom it asks."""

    @property
    def token(self) -> str:
        """The token itself, as ``token:<name>#<key id>``."""

    @property
    def owner_id(self) -> int | None:
        """The person whose token it is; None for a token of nobody."""


class OneRenderer(DefaultContentNegotiation):
    """Every address answers in one format, whatever ``Accept`` says."""

    def select_renderer(
        self,
        request: Request,
        renderers: Any,  # Any: Django REST framework's signature
        format_suffix: str | None = None,
    ) -> tuple[BaseRenderer, str]:
        """Return the only renderer."""
        return renderers[0], renderers[0].media_type


class GovernanceView(APIView):
    """Base of the views: strict JSON in, JSON out."""

    parser_classes = (StrictJsonParser,)
    content_negotiation_class = OneRenderer


def get_caller(request: Request) -> Caller:
    """Return who calls."""
    return cast("Caller", request.user)  # what DEFAULT_AUTHENTICATION_CLASSES puts there


def find_owner(request: Request) -> User | None:
    """Return the person whose token it is; None for a token of nobody."""
    owner_id = get_caller(request).owner_id
    return None if owner_id is None else get_user_model().objects.filter(pk=owner_id, is_active=True).first()


def require_owner(request: Request, *, purpose: str) -> User:
    """Return the person whose token it is. Raises NotPermitted. ``purpose`` completes "Only a person can …"."""
    owner = find_owner(request)
    if owner is None:
        raise NotPermitted(f"Only a person can {purpose}: use an admin token that belongs to one.")
    return owner


def read_op_id(text: str) -> uuid.UUID:
    """Return the id of an operation, printed (``op_…``) or bare. Raises OperationNotFound for anything else."""
    op_id = parse_id("op", text)
    if op_id is None:
        raise OperationNotFound("There is no such operation; its id is op_ and 32 hexadecimal digits.", param="op_id")
    return op_id

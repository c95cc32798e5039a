"""What a request of this API carries and who sends it: strict JSON, forms, the caller, the operation it is about.

What people will sign must not be readable in two ways. Types are taken as written: "5" is no number and 1 is no text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

from django.contrib.auth import get_user_model
from rest_framework import serializers
from rest_framework.exceptions import ParseError, ValidationError
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.views import APIView

from core.limits import limits
from governance.admin_tokens import TokenHolder
from governance.errors import GovernanceError, NotFound, NotPermitted
from governance.operations.policies import ApproverChoice
from governance.states import ApprovalState
from wire.contract import ErrorCode
from wire.ids import parse_id
from wire.optoken.approval import MAX_APPROVERS, MAX_INTEGER, MAX_KEYS_EACH, MAX_TARGETS, MAX_TEXT_CHARS

if TYPE_CHECKING:
    from core.models import User


class BodyTooLarge(GovernanceError, code=ErrorCode.BODY_TOO_LARGE, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
    """More bytes than any request of this API needs."""


class StrictJsonParser(BaseParser):
    """JSON in UTF-8, less what two readers could read differently: names given twice, fractions, NaN, NUL, half surrogates."""

    media_type = "application/json"

    def parse(
        self,
        stream: IO[Any],  # Any: Django REST framework's signature; bytes in truth
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the value. Raises BodyTooLarge (413), ParseError and ValidationError (400), which names the field."""
        raw = stream.read(limits().governance.api_body_bytes + 1)
        if len(raw) > limits().governance.api_body_bytes:
            raise BodyTooLarge(f"The body is larger than {limits().governance.api_body_bytes} bytes.")
        try:
            value = json.loads(
                raw.decode(), object_pairs_hook=_read_object, parse_float=_Unsignable, parse_constant=_Unsignable
            )
            _check(value, path="")  # goes less deep than the reader of some Pythons
        except UnicodeDecodeError:
            raise ParseError("The body is not UTF-8.") from None
        except (ValueError, RecursionError) as error:
            reason = (
                str(error) if isinstance(error, json.JSONDecodeError | _NameTwice) else "it goes beyond what JSON readers take"
            )
            raise ParseError(f"The body is not JSON that can be used: {reason}.") from None
        return value


class _NameTwice(ValueError):
    """An object gives a name twice."""


class _Unsignable(str):
    """The text of a number that cannot be signed; kept until it is known where it stands."""

    __slots__ = ()


def _read_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _NameTwice(f"the name {twice[:60]!r} stands twice in one object")
    return members


def _check(value: object, *, path: str) -> None:
    match value:
        case _Unsignable():
            _refuse(path, f"{value[:40]} cannot be signed; give a whole number, or text")
        case str():
            if "\0" in value or not _is_whole(value):
                _refuse(path, "a NUL or half a surrogate pair cannot be signed")
        case int() if abs(value) > MAX_INTEGER:
            _refuse(path, f"whole numbers go to {MAX_INTEGER}, which every JSON reader holds exactly")
        case list():
            for item in value:
                _check(item, path=path)
        case dict():
            for name, item in value.items():
                _check(name, path=path)
                _check(item, path=f"{path}.{name}" if path else name)
        case _:
            return


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(path: str, text: str) -> NoReturn:
    raise ValidationError({path[:200]: [text]} if path else [text])


# Who calls, about what


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
    """Base of the views: strict JSON in, JSON out. ``needs`` and ``is_per_tenant``: as ``MayCall`` reads them."""

    parser_classes = (StrictJsonParser,)
    content_negotiation_class = OneRenderer


def get_caller(request: Request) -> TokenHolder:
    return cast("TokenHolder", request.user)  # what DEFAULT_AUTHENTICATION_CLASSES puts there


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
    """Return the id of an operation, printed (``op_…``) or bare. Raises NotFound for anything else."""
    op_id = parse_id("op", text)
    if op_id is None:
        raise NotFound("There is no such operation; its id is op_ and 32 hexadecimal digits.", param="op_id")
    return op_id


# Forms

EARLIEST, LATEST = datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
"""Times beyond these are typing errors, and arithmetic with them may leave the calendar."""


class Text(serializers.CharField):
    """Text that was sent as text."""

    def to_internal_value(self, data: object) -> str:
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class WholeNumber(serializers.IntegerField):
    """A whole number that was sent as a number."""

    def to_internal_value(self, data: Any) -> int:  # Any: Django REST framework's signature
        if type(data) is not int:
            self.fail("invalid")
        return super().to_internal_value(data)


class Flag(serializers.BooleanField):
    """True or false, and no word for them."""

    def to_internal_value(self, data: object) -> bool:
        if not isinstance(data, bool):
            self.fail("invalid", input=data)
        return data


class Moment(serializers.DateTimeField):
    """A time of this century."""

    def to_internal_value(self, value: Any) -> datetime:  # Any: Django REST framework's signature
        if not isinstance(value, str):
            self.fail("invalid", format="2026-11-21T08:00:00Z")
        moment = super().to_internal_value(value)
        if not EARLIEST <= moment <= LATEST:
            raise ValidationError(f"Give a time between {EARLIEST.year} and {LATEST.year}.")
        return moment


class Form(serializers.Serializer[Any]):  # Any: a form has no model
    """The body of a request."""

    def to_internal_value(self, data: Any) -> Any:  # Any: Django REST framework's signature
        # A mistyped limit must not pass for no limit.
        if isinstance(data, Mapping) and (unknown := sorted(set(data) - set(self.fields))):
            known = ", ".join(sorted(self.fields))
            raise ValidationError({unknown[0][:60]: [f"There is no such field; there are: {known}."]})
        return super().to_internal_value(data)


def read_form(form: type[serializers.Serializer[Any]], data: object) -> dict[str, Any]:  # Any: a form's own members
    """Return the members of a body or a query. Raises ValidationError, which names the field."""
    filled = form(data=data)
    filled.is_valid(raise_exception=True)
    return dict(filled.validated_data)


class ProposalForm(Form):
    """Body of ``POST /operations``."""

    operation = Text(max_length=40, help_text="What is to be done, such as model-load")
    op_class = Text(
        max_length=40,
        required=False,
        default="",
        allow_blank=True,
        help_text="Class of the policy; left out: named like the operation",
    )
    targets = serializers.ListField(
        child=Text(max_length=MAX_TEXT_CHARS, trim_whitespace=False), required=False, default=list, max_length=MAX_TARGETS,
        help_text="The nodes or things it is for, in the order in which they are dealt with; none: the control plane",
    )  # fmt: skip
    params = serializers.DictField(required=False, default=dict, help_text="Everything the operation needs; signed as it is")
    reason = Text(max_length=1000, help_text="For the approvers; only its digest is signed")
    not_before = Moment(required=False, allow_null=True, default=None, help_text="Left out: now")
    not_after = Moment(required=False, allow_null=True, default=None, help_text="Left out: as long as the class allows")
    max_uses = WholeNumber(
        required=False,
        default=1,
        min_value=1,
        max_value=limits().governance.operation_uses,
        help_text="More than 1: a standing approval",
    )
    stops_on_failure = Flag(required=False, default=True, help_text="Whether targets behind a failed one are skipped")
    reviews = Text(
        max_length=60, required=False, allow_null=True, default=None, help_text="Of break-glass-review: the operation reviewed"
    )

    def validate_reviews(self, value: str | None) -> uuid.UUID | None:
        """Return the id of the operation that is reviewed."""
        op_id = None if value is None else parse_id("op", value)
        if value is not None and op_id is None:
            raise ValidationError("Give the id of an operation: op_ and 32 hexadecimal digits.")
        return op_id


class ProofForm(Form):
    """A signature over the digest of the statement. ``clientDataJSON`` and ``authenticatorData``: of a passkey only."""

    type = serializers.ChoiceField(choices=["webauthn", "ed25519"])
    approver = Text(max_length=150, help_text="User name")
    keyid = Text(max_length=300)
    signature = Text(max_length=1000, help_text="base64url without padding, as the two below")
    clientDataJSON = Text(max_length=8192, required=False)  # noqa: N815 - WebAuthn's name
    authenticatorData = Text(max_length=8192, required=False)  # noqa: N815 - WebAuthn's name


class ApprovalForm(Form):
    """Body of ``POST …/approvals``."""

    proof = ProofForm()
    comment = Text(max_length=500, required=False, default="", allow_blank=True)


class RejectionForm(Form):
    """Body of ``POST …/rejections``."""

    comment = Text(max_length=500, help_text="Why; the requester reads it")


class EmptyForm(Form):
    """Body of a request that says all in its address: none, or ``{}``."""


class SilenceForm(Form):
    """Body of ``POST …/silence``."""

    until = Moment(help_text="At most 90 days ahead")
    reason = Text(max_length=limits().governance.alert_reason_chars)
    lasting = Flag(required=False, default=False, help_text="Also what begins later of this kind, for the same object")


class FreezeForm(Form):
    """Body of ``POST /freeze``."""

    reason = Text(max_length=300)


class ApproverForm(Form):
    """One person of the next policy."""

    username = Text(max_length=150)
    groups = serializers.ListField(child=Text(max_length=60), required=False, default=list, max_length=32)
    key_ids = serializers.ListField(
        child=WholeNumber(min_value=1, max_value=limits().governance.api_id),
        min_length=1,
        max_length=MAX_KEYS_EACH,
        help_text="Keys of this person",
    )


class DraftForm(Form):
    """Body of ``POST /policy/drafts``."""

    approvers = serializers.ListField(child=ApproverForm(), min_length=1, max_length=MAX_APPROVERS)
    thresholds = serializers.DictField(
        child=WholeNumber(min_value=1, max_value=MAX_APPROVERS), required=False, default=dict, help_text="Class → approvals"
    )
    classes = serializers.DictField(
        child=serializers.DictField(), required=False, allow_null=True, default=None,
        help_text="Whole classes in the place of the usual ones, with the members of a policy document",
    )  # fmt: skip
    is_solo = Flag(required=False, default=False, help_text="One person alone may ask and approve; shown everywhere")
    expires_at = Moment(required=False, allow_null=True, default=None)
    reason = Text(max_length=1000)

    def validate_approvers(self, value: list[dict[str, Any]]) -> list[ApproverChoice]:  # Any: validated members
        """Return the people as the service takes them."""
        return [ApproverChoice(one["username"], tuple(one["groups"]), tuple(one["key_ids"])) for one in value]


class ListForm(serializers.Serializer[Any]):  # Any: a form has no model
    """Query of ``GET /operations``."""

    state = serializers.ChoiceField(choices=[state.value for state in ApprovalState], required=False)
    operation = serializers.CharField(max_length=40, required=False)
    requested_by = serializers.CharField(max_length=200, required=False, help_text="A user name, or token:<name>#<key id>")
    limit = serializers.IntegerField(
        min_value=1, max_value=limits().governance.api_page_max_rows, required=False, default=limits().governance.api_page_rows
    )
    cursor = serializers.CharField(max_length=80, required=False, help_text="next_cursor of the page before")


class AlertListForm(serializers.Serializer[Any]):  # Any: a form has no model
    """Query of ``GET /alerts``."""

    state = serializers.ChoiceField(
        choices=["open", "silenced", "ended", "all"], required=False, default="open", help_text="open: and not silenced"
    )
    kind = serializers.CharField(max_length=40, required=False)
    limit = serializers.IntegerField(
        required=False, default=limits().governance.api_page_rows, min_value=1, max_value=limits().governance.api_page_max_rows
    )
    cursor = serializers.IntegerField(
        required=False, min_value=1, max_value=limits().governance.api_id, help_text="The `next_cursor` of a page"
    )


class ChainForm(serializers.Serializer[Any]):  # Any: a form has no model
    """Query of ``GET /policy/chain``."""

    after = serializers.IntegerField(
        min_value=0, max_value=limits().governance.api_integer, required=False, default=0, help_text="The version held"
    )


class ConsistencyForm(serializers.Serializer[Any]):  # Any: a form has no model
    """Query of ``GET /audit/consistency``."""

    old = serializers.IntegerField(min_value=0, max_value=limits().governance.api_id, help_text="Entries of the older log")
    new = serializers.IntegerField(min_value=0, max_value=limits().governance.api_id, help_text="Entries of the newer log")

"""Why the playground could not pass a question on. What the gateway itself refuses is passed through in its own words."""

from __future__ import annotations

from http import HTTPStatus

from core.errors import ContractError
from wire.contract import ErrorCode


class PlaygroundError(ContractError):
    """Base of the tree. ``param`` names the field of the form."""


class AskRefused(PlaygroundError):
    """A field of the form cannot be used."""


class TenantRefused(AskRefused):
    """No key can be made for the tenant that was chosen."""

    def __init__(self) -> None:
        super().__init__("Choose a tenant that is enabled.", param="tenant")


class AskTooLarge(PlaygroundError):
    """The form is larger than the page may send."""

    code = ErrorCode.BODY_TOO_LARGE
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE.value


class SignedOut(PlaygroundError):
    """Nobody is signed in any more."""

    code = ErrorCode.NOT_PERMITTED
    status = HTTPStatus.UNAUTHORIZED.value

    def __init__(self) -> None:
        super().__init__("You are no longer signed in. Sign in again in another tab, then repeat this.")


class NotAllowed(PlaygroundError):
    """The person may not do this."""

    code = ErrorCode.NOT_PERMITTED
    status = HTTPStatus.FORBIDDEN.value


class TooManyAnswers(PlaygroundError):
    """As many answers are on their way as one process passes on."""

    code = ErrorCode.TOO_MANY_OPEN
    status = HTTPStatus.SERVICE_UNAVAILABLE.value


class GatewayUnreachable(PlaygroundError):
    """Nothing answers at the gateway's address, or what answers breaks off before it says anything."""

    code = ErrorCode.INTERNAL_ERROR
    status = HTTPStatus.BAD_GATEWAY.value


class GatewaySilent(PlaygroundError):
    """The gateway took the request and said nothing in time."""

    code = ErrorCode.REQUEST_TIMEOUT
    status = HTTPStatus.GATEWAY_TIMEOUT.value
    retry_after_s = 5

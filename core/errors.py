"""Base of the server's errors. A class carries its wire form; what renders it knows no status codes of its own."""

from __future__ import annotations

from wire.contract import ErrorCode


class ContractError(Exception):
    """Base of the trees of all packages of the server. ``message`` is shown to the caller and says what to do.

    ``param`` names the field at fault. A class carries its wire form: code, HTTP status, whether a retry may help, and
    after how many seconds (None: it does not say). What it does not name is as in its base.
    """

    code: ErrorCode = ErrorCode.BAD_REQUEST
    status: int = 400
    retryable: bool = False
    retry_after_s: float | None = None
    default_message: str = ""

    def __init_subclass__(
        cls,
        *,
        code: ErrorCode | None = None,
        status: int | None = None,
        retryable: bool | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        named = {"code": code, "status": status and int(status), "retryable": retryable, "retry_after_s": retry_after_s}
        for name, value in named.items():
            if value is not None:
                setattr(cls, name, value)

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        self.message = message or self.default_message
        super().__init__(self.message)
        self.param = param

"""Every error that Pillion raises on purpose: a subclass of PillionError for each google.rpc.Code, and ConfigError.

Servicers raise these errors; one interceptor (:mod:`pillion.net.rpc`) turns them into rich gRPC statuses, and the
client turns statuses back into them. Nothing else maps errors.
"""

from __future__ import annotations

from dataclasses import dataclass

# Numbers of google.rpc.Code, spelled out so that this module needs no gRPC.
_CANCELLED, _INVALID, _DEADLINE, _NOT_FOUND, _DENIED = 1, 3, 4, 5, 7
_EXHAUSTED, _PRECONDITION, _INTERNAL, _UNAVAILABLE, _UNAUTHENTICATED = 8, 9, 13, 14, 16


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request: its path as the client spelled it, and what is wrong with it."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """One bound that was met: whose bound it is or its name, and by how much, in words."""

    subject: str
    description: str


class PillionError(Exception):
    """The base of all errors. ``code`` is a google.rpc.Code."""

    code: int = _INTERNAL

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(PillionError):  # noqa: N818  (named as the field names it)
    """The request itself is wrong; sending it again cannot help."""

    code = _INVALID

    def __init__(self, message: str, violations: tuple[FieldViolation, ...] = ()) -> None:
        super().__init__(message)
        self.violations = violations

    @classmethod
    def of(cls, *violations: FieldViolation) -> InvalidRequest:
        """The error whose message reads its violations out."""
        return cls("; ".join(f"{v.field}: {v.description}" for v in violations), violations)


class NotFound(PillionError):  # noqa: N818
    """What the call names is not there (any more)."""

    code = _NOT_FOUND


class Conflict(PillionError):  # noqa: N818
    """The state of the called component forbids the call, for instance a fenced epoch."""

    code = _PRECONDITION


class Overloaded(PillionError):  # noqa: N818
    """A named bound was met: ``quotas`` say which. ``retry_after_ms`` is the server's guess, 0 where it has none."""

    code = _EXHAUSTED

    def __init__(self, message: str, retry_after_ms: int = 0, quotas: tuple[QuotaViolation, ...] = ()) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.quotas = quotas


class Unavailable(PillionError):  # noqa: N818
    """A component that the call needs does not answer; the message names it.

    ``retry_after_ms``: when to send the call again, 0 where the server has tried all it could itself.
    """

    code = _UNAVAILABLE

    def __init__(self, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class DeadlineExceeded(PillionError):  # noqa: N818
    """The caller's time is over."""

    code = _DEADLINE


class Cancelled(PillionError):  # noqa: N818
    """The caller went away, or cancelled the call."""

    code = _CANCELLED


class PermissionDenied(PillionError):  # noqa: N818
    """The caller may not do this."""

    code = _DENIED


class Unauthenticated(PillionError):  # noqa: N818
    """The call carries no API key, or none that is known."""

    code = _UNAUTHENTICATED


class Internal(PillionError):  # noqa: N818
    """A defect of Pillion; the log of the component that raised it says more."""

    code = _INTERNAL


class BrokenModel(Internal):
    """The model computed no numbers for this request, which would be so again: nobody tries it once more."""


class LethalRequest(Internal):
    """Workers were lost in a step with this request, and others would be: nobody tries it once more."""


class ConfigError(PillionError):
    """A flag, model or machine that cannot work. Raised at start only, printed as one line."""


# ConfigError is not in here: it never leaves its process.
BY_CODE = {cls.code: cls for cls in PillionError.__subclasses__() if cls is not ConfigError}

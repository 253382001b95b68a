"""Every error that Pillion raises on purpose: a subclass of PillionError for each google.rpc.Code, and ConfigError.

Servicers raise these errors; one interceptor (:mod:`pillion.net.rpc`) converts them to rich gRPC statuses, and the
client converts statuses back. Nothing else maps errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Code(IntEnum):
    """Numbers of google.rpc.Code, so that this module needs no gRPC."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request: its path as the client spelled it, and what is wrong with it."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class LengthViolation(FieldViolation):
    """A prompt that is too long. Clients recognize the text, and then shorten the conversation: OpenAI's clients that
    of ``description``, Anthropic's that of ``brief``."""

    brief: str


@dataclass(frozen=True, slots=True)
class SchemaViolation(FieldViolation):
    """A field whose JSON schema cannot be enforced, and the offending part of the schema: ``place``, a JSON pointer."""

    place: str


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """One limit that was exceeded: its owner or name, and a text that states the excess."""

    subject: str
    description: str


class PillionError(Exception):
    """Any error that Pillion raises on purpose. ``code`` is a google.rpc.Code."""

    code: int = Code.INTERNAL

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(PillionError):  # noqa: N818  (named as the field names it)
    """The request itself is wrong; sending it again cannot help."""

    code = Code.INVALID_ARGUMENT

    def __init__(self, message: str, violations: tuple[FieldViolation, ...] = ()) -> None:
        super().__init__(message)
        self.violations = violations

    @classmethod
    def of(cls, *violations: FieldViolation) -> InvalidRequest:
        """Create the error whose message lists its violations."""
        return cls("; ".join(f"{v.field}: {v.description}" for v in violations), violations)


class NotFound(PillionError):  # noqa: N818
    """Something that the call names does not exist, or no longer."""

    code = Code.NOT_FOUND


class Conflict(PillionError):  # noqa: N818
    """The state of the called component forbids the call, for instance a fenced epoch."""

    code = Code.FAILED_PRECONDITION


class Overloaded(PillionError):  # noqa: N818
    """A limit was exceeded; ``quotas`` say which one. ``retry_after_ms`` is the server's estimate, 0 if it has none."""

    code = Code.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_ms: int = 0, quotas: tuple[QuotaViolation, ...] = ()) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.quotas = quotas


class Unavailable(PillionError):  # noqa: N818
    """A component that the call needs does not answer; the message names it.

    ``retry_after_ms``: delay after which to send the call again; 0 if the server has used up its own retries.
    """

    code = Code.UNAVAILABLE

    def __init__(self, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class DeadlineExceeded(PillionError):  # noqa: N818
    """The call took longer than its caller allowed."""

    code = Code.DEADLINE_EXCEEDED


class Cancelled(PillionError):  # noqa: N818
    """The caller disconnected, or cancelled the call."""

    code = Code.CANCELLED


class PermissionDenied(PillionError):  # noqa: N818
    """This caller may not make the call."""

    code = Code.PERMISSION_DENIED


class Unauthenticated(PillionError):  # noqa: N818
    """The call has no API key, or an unknown one."""

    code = Code.UNAUTHENTICATED


class Internal(PillionError):  # noqa: N818
    """Pillion has a defect; the log of the component that raised the error has details."""

    code = Code.INTERNAL


class BrokenModel(Internal):
    """The model's outputs for this request are not finite, and would not be in a retry, so the request is not
    retried."""


class BrokenGrammar(Internal):
    """An answer cannot continue in its grammar, and could not in a retry, so the request is not retried."""


class LethalRequest(Internal):
    """Workers died in a step with this request, and a retry would kill more of them, so the request is not retried."""


class ConfigError(PillionError):
    """A flag, model or machine cannot work. Raised only at start, and printed as one line."""


BY_CODE = {cls.code: cls for cls in PillionError.__subclasses__() if cls is not ConfigError}

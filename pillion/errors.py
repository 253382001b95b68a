"""Defines every error that Pillion raises on purpose: a subclass of PillionError for each google.rpc.Code, and
ConfigError.

Servicers raise these errors; one interceptor (:mod:`pillion.net.rpc`) turns them into rich gRPC statuses, and the
client turns statuses back into them. Nothing else maps errors.
"""

from __future__ import annotations

from dataclasses import dataclass

# These are numbers of google.rpc.Code, written here so that this module needs no gRPC.
_CANCELLED, _INVALID, _DEADLINE, _NOT_FOUND, _DENIED = 1, 3, 4, 5, 7
_EXHAUSTED, _PRECONDITION, _INTERNAL, _UNAVAILABLE, _UNAUTHENTICATED = 8, 9, 13, 14, 16


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """Names one wrong field of a request: its path as the client spelled it, and what is wrong with it."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class LengthViolation(FieldViolation):
    """Names a prompt that is too long. Its description is what OpenAI's clients know, and ``brief`` what Anthropic's
    do: both look for these words, and then make the conversation shorter."""

    brief: str


@dataclass(frozen=True, slots=True)
class SchemaViolation(FieldViolation):
    """Names a field whose JSON schema no answer can be held to, and by a JSON pointer the ``place`` in it."""

    place: str


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """Names one bound that was met: whose bound it is, or its name, and by how much it was exceeded, in words."""

    subject: str
    description: str


class PillionError(Exception):
    """Represents any error that Pillion raises on purpose. ``code`` is a google.rpc.Code."""

    code: int = _INTERNAL

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(PillionError):  # noqa: N818  (named as the field names it)
    """Says that the request itself is wrong; sending it again cannot help."""

    code = _INVALID

    def __init__(self, message: str, violations: tuple[FieldViolation, ...] = ()) -> None:
        super().__init__(message)
        self.violations = violations

    @classmethod
    def of(cls, *violations: FieldViolation) -> InvalidRequest:
        """Make the error whose message lists its violations."""
        return cls("; ".join(f"{v.field}: {v.description}" for v in violations), violations)


class NotFound(PillionError):  # noqa: N818
    """Says that something which the call names does not exist, or not any more."""

    code = _NOT_FOUND


class Conflict(PillionError):  # noqa: N818
    """The state of the called component forbids the call, for instance a fenced epoch."""

    code = _PRECONDITION


class Overloaded(PillionError):  # noqa: N818
    """Says that a named bound was met; ``quotas`` say which one. ``retry_after_ms`` is the server's guess, 0 if it has
    none."""

    code = _EXHAUSTED

    def __init__(self, message: str, retry_after_ms: int = 0, quotas: tuple[QuotaViolation, ...] = ()) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.quotas = quotas


class Unavailable(PillionError):  # noqa: N818
    """Says that a component which the call needs does not answer; the message names it.

    ``retry_after_ms``: when to send the call again, 0 where the server has tried all it could itself.
    """

    code = _UNAVAILABLE

    def __init__(self, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class DeadlineExceeded(PillionError):  # noqa: N818
    """Says that the time is over that the caller gave the call."""

    code = _DEADLINE


class Cancelled(PillionError):  # noqa: N818
    """The caller went away, or cancelled the call."""

    code = _CANCELLED


class PermissionDenied(PillionError):  # noqa: N818
    """Says that this caller may not make the call."""

    code = _DENIED


class Unauthenticated(PillionError):  # noqa: N818
    """The call carries no API key, or an unknown one."""

    code = _UNAUTHENTICATED


class Internal(PillionError):  # noqa: N818
    """Says that Pillion has a defect; the log of the component that raised the error says more."""

    code = _INTERNAL


class BrokenModel(Internal):
    """Says that the model's numbers for this request are not finite, and would not be finite the next time: the request
    is not tried again."""


class BrokenGrammar(Internal):
    """Says that an answer cannot go on in the grammar that it was admitted with, and could not the next time: the
    request is not tried again."""


class LethalRequest(Internal):
    """Workers were lost in a step with this request, and other workers would be lost as well: the request is not tried
    again."""


class ConfigError(PillionError):
    """Says that a flag, model or machine cannot work. The error is raised at start only, and is printed as one line."""


# ConfigError has no code and is left out, because it never leaves its process.
BY_CODE = {cls.code: cls for cls in PillionError.__subclasses__() if cls is not ConfigError}

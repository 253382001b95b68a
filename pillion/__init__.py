"""Pillion's SDK: clients, the values they take and give, and the errors they raise; and :class:`LLM`, the engine in the
caller's process, which imports the servers when it is made. Importing this imports no torch and no numpy."""

from pillion._version import VERSION
from pillion.client import AsyncClient, Client
from pillion.errors import (
    Cancelled,
    ConfigError,
    Conflict,
    DeadlineExceeded,
    FieldViolation,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    PillionError,
    QuotaViolation,
    Unauthenticated,
    Unavailable,
)
from pillion.offline import LLM
from pillion.outputs import CompletionOutput, Logprob, RequestOutput
from pillion.types import (
    ChatMessage,
    ClusterStatus,
    Delta,
    FinishReason,
    ModelInfo,
    PartStatus,
    SamplingParams,
    Timings,
    Usage,
)

__version__ = VERSION

__all__ = [
    "LLM",
    "AsyncClient",
    "Cancelled",
    "ChatMessage",
    "Client",
    "ClusterStatus",
    "CompletionOutput",
    "ConfigError",
    "Conflict",
    "DeadlineExceeded",
    "Delta",
    "FieldViolation",
    "FinishReason",
    "Internal",
    "InvalidRequest",
    "Logprob",
    "ModelInfo",
    "NotFound",
    "Overloaded",
    "PartStatus",
    "PermissionDenied",
    "PillionError",
    "QuotaViolation",
    "RequestOutput",
    "SamplingParams",
    "Timings",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "__version__",
]

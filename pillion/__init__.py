"""Pillion's SDK: clients, the values they take and give, and the errors they raise. Imports no torch and no numpy."""

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
    Unavailable,
)
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
    "AsyncClient",
    "Cancelled",
    "ChatMessage",
    "Client",
    "ClusterStatus",
    "ConfigError",
    "Conflict",
    "DeadlineExceeded",
    "Delta",
    "FieldViolation",
    "FinishReason",
    "Internal",
    "InvalidRequest",
    "ModelInfo",
    "NotFound",
    "Overloaded",
    "PartStatus",
    "PermissionDenied",
    "PillionError",
    "SamplingParams",
    "Timings",
    "Unavailable",
    "Usage",
    "__version__",
]

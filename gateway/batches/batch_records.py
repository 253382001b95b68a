"""Stored records of files and batches, and their form for clients. Sans-IO (I9)."""

from __future__ import annotations

from typing import Any

import msgspec

# Final statuses.
FINAL = ("completed", "failed", "expired", "cancelled")
COMPLETION_WINDOW = "24h"
COMPLETION_WINDOW_S = 24 * 3600


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's file. ``created_at`` and ``expires_at`` are Unix seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def public(self) -> dict[str, Any]:
        """Return the file in OpenAI's format."""
        fields = msgspec.structs.asdict(self)
        del fields["tenant"]
        return {"object": "file", "status": "processed", **fields}


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """An error of the whole batch; ``line`` is the input's line number, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's batch. Times are Unix seconds, None for events that have not happened.

    Attributes:
        output_seconds: lifetime of its output files; None for the folder's.
        total, completed, failed: number of lines in total, answered, and failed.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: str = COMPLETION_WINDOW
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    status: str = "validating"
    errors: tuple[BatchError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def over(self) -> bool:
        """True if the batch has ended."""
        return self.status in FINAL

    @property
    def ended_at(self) -> int:
        """Time of the batch's end, or of its creation if it has not ended."""
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at or self.created_at

    def with_status(self, status: str, now_s: float, **more: Any) -> BatchRecord:
        """Return the batch with a status, whose time is set to ``now_s`` unless it is set, and with further fields."""
        stamp = f"{status}_at"
        since = {} if getattr(self, stamp) is not None else {stamp: int(now_s)}
        return msgspec.structs.replace(self, status=status, **since, **more)

    def public(self) -> dict[str, Any]:
        """Return the batch in OpenAI's format."""
        fields = msgspec.structs.asdict(self)
        for name in ("tenant", "output_seconds", "total", "completed", "failed"):
            del fields[name]
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {"object": "batch", **fields, "errors": errors, "request_counts": counts}

"""Endpoints of files and batches: /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Raw
from starlette.routing import Route

from pillion.errors import NotFound
from pillion.gateway.batches.batch_calls import LineCalls
from pillion.gateway.batches.batch_folder import (
    INPUT_PURPOSE,
    PIECE_BYTES,
    BatchFolder,
    FileTooLarge,
    FolderFull,
    Upload,
)
from pillion.gateway.batches.batch_records import COMPLETION_WINDOW, BatchRecord, FileRecord
from pillion.gateway.batches.batch_runner import BatchRunner
from pillion.gateway.batches.multipart import FORM_TYPE, FormReader, UploadForm
from pillion.gateway.http_api.body_reading import UNKNOWN, current_reading, note_ignored, parse
from pillion.gateway.http_api.http_call import Endpoint, HttpCall, Methods
from pillion.gateway.http_api.http_errors import ApiError, from_pillion, refused
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.http_api.openai_requests import read_metadata

# Max size of an upload's form without its file.
MAX_FORM_BYTES = 2**20
MAX_BATCH_BODY_BYTES = 64 * 2**10
# Deadline of an upload: UPLOAD_GRACE_S plus its bytes at MIN_BYTES_PER_S.
UPLOAD_GRACE_S, MIN_BYTES_PER_S = 60.0, 16 * 2**10

_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


def batch_routes(
    calls: ModelCalls, runner: BatchRunner | None, lines: LineCalls, others: Sequence[Route]
) -> list[Route]:
    """Return the routes of files and batches; without a ``runner`` they answer 404.

    Registers those of ``others`` that allow batches with ``lines``.
    """
    lines.register(others)
    api, tenant_of = BatchesApi(calls, runner, lines.urls), calls.gateway.tenant_of
    form = {"purpose": "batch", "file": "@requests.jsonl"}
    upload = Endpoint("POST", api.create_file, tenant_of, UploadForm, body_type=FORM_TYPE, example=form)
    body = {"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    create = Endpoint("POST", api.create_batch, tenant_of, BatchBody, example=body)
    file, delete = Endpoint("GET", api.file, tenant_of), Endpoint("DELETE", api.delete_file, tenant_of)
    return [
        Route("/v1/files", Methods(upload, Endpoint("GET", api.files, tenant_of))),
        Route("/v1/files/{id}", Methods(file, delete)),
        Route("/v1/files/{id}/content", Endpoint("GET", api.content, tenant_of)),
        Route("/v1/batches", Methods(create, Endpoint("GET", api.batches, tenant_of))),
        Route("/v1/batches/{id}", Endpoint("GET", api.batch, tenant_of)),
        Route("/v1/batches/{id}/cancel", Endpoint("POST", api.cancel_batch, tenant_of)),
    ]


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """When a file is removed.

    Attributes:
        anchor: "created_at".
        seconds: seconds after that.
    """

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=1, le=2**32)]


class BatchBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/batches.

    Attributes:
        input_file_id: the file with the requests.
        endpoint: the url of all lines: /v1/chat/completions, /v1/completions, /v1/messages or /v1/responses.
        completion_window: "24h".
        metadata: at most 16 labels of 64 and 512 characters, returned unchanged.
        output_expires_after: lifetime of the output files, at most 30 days.
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Raw = Raw()
    output_expires_after: ExpiresAfter | None = None


@dataclass(eq=False)
class BatchesApi:
    """Handlers of files and batches. ``_urls``: those that a batch's lines may call."""

    _calls: ModelCalls
    _optional_runner: BatchRunner | None
    _urls: Sequence[str]

    async def create_file(self, call: HttpCall) -> None:
        """Store an uploaded file of requests."""
        form, folder = FormReader(call.header(b"content-type")), self._folder
        limit = asyncio.timeout(UPLOAD_GRACE_S)
        try:
            async with limit:
                record = await self._store_upload(call, form, folder, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ApiError(408, f"the file is sent at less than {MIN_BYTES_PER_S} bytes/s") from None
        await _answer(call, record.public())

    async def _store_upload(
        self, call: HttpCall, form: FormReader, folder: BatchFolder, limit: asyncio.Timeout
    ) -> FileRecord:
        """Read an upload's form into a file of the folder; ``limit`` is extended with the bytes received."""
        grace_ends_s, size_bytes = asyncio.get_running_loop().time() + UPLOAD_GRACE_S, 0
        length, on_disk = call.header(b"content-length"), self._runner.on_disk
        expected = int(length) if length.isdigit() and len(length) < 16 else 0
        max_bytes = folder.file_bytes + MAX_FORM_BYTES
        with _http_errors(), contextlib.ExitStack() as opened:
            if expected > max_bytes:
                raise folder.too_large()

            def begin() -> Upload:
                # On the thread, so that the file is closed even if this call is cancelled meanwhile.
                reserved_bytes = min(expected, folder.file_bytes)
                return opened.enter_context(contextlib.closing(folder.upload(call.tenant.name, reserved_bytes)))

            upload = await on_disk(begin)
            buffer = bytearray()
            async for chunk in call.chunks():
                size_bytes += len(chunk)
                limit.reschedule(grace_ends_s + size_bytes / MIN_BYTES_PER_S)
                if size_bytes > max_bytes:
                    raise folder.too_large()
                buffer += form.feed(chunk)
                if len(buffer) >= PIECE_BYTES:
                    await on_disk(upload.write, buffer)
                    buffer = bytearray()
            form.end()
            seconds = await self._calls.read(call, _read_fields, b"", form.fields)
            await on_disk(upload.write, buffer)
            return await on_disk(upload.finish, form.filename or "", INPUT_PURPOSE, seconds)

    async def files(self, call: HttpCall) -> None:
        """List files, newest first."""
        query = call.query("after", "limit", "order", "purpose")
        files = await self._runner.on_disk(self._folder.files, call.tenant.name, query.get("purpose", ""))
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise refused("order", "asc or desc")
        files = files[::-1] if order == "asc" else files
        await _answer(call, _page(files, query, default_limit=10_000, max_limit=10_000))

    async def file(self, call: HttpCall) -> None:
        """Describe a file."""
        record = await self._runner.on_disk(self._folder.file, call.tenant.name, call.parameters["id"])
        await _answer(call, record.public())

    async def content(self, call: HttpCall) -> None:
        """Send a file's content."""
        folder, on_disk = self._folder, self._runner.on_disk
        record, file = await on_disk(folder.open_file, call.tenant.name, call.parameters["id"])

        async def send() -> None:
            await call.start(200, [(b"content-type", b"application/jsonl"), (b"content-length", b"%d" % record.bytes)])
            remaining = record.bytes if call.method != "HEAD" else 0
            while remaining:
                data = await on_disk(file.read, min(remaining, PIECE_BYTES))
                if not data:
                    raise EOFError(f"{record.id} is shorter than its record says")
                remaining -= len(data)
                await call.write(data, last=not remaining)
            if not record.bytes or call.method == "HEAD":
                await call.write(b"", last=True)

        with file:
            await call.while_connected(send())

    async def delete_file(self, call: HttpCall) -> None:
        """Remove a file that no batch reads."""
        name = call.parameters["id"]
        await self._runner.on_disk(self._folder.delete_file, call.tenant.name, name)
        await _answer(call, {"id": name, "object": "file", "deleted": True})

    async def create_batch(self, call: HttpCall) -> None:
        """Create a batch from a file."""
        folder = self._folder
        raw = await call.body()
        if len(raw) > MAX_BATCH_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BATCH_BODY_BYTES} bytes", code="request_too_large")
        body = await self._calls.read(call, parse, raw, BatchBody)
        metadata = read_metadata(body.metadata) or None
        if body.endpoint not in self._urls:
            raise refused("endpoint", f"{' or '.join(self._urls)}", "unsupported_value")
        if body.completion_window != COMPLETION_WINDOW:
            raise refused("completion_window", f"only {COMPLETION_WINDOW!r} is supported", "unsupported_value")
        with _http_errors():
            record = await self._runner.on_disk(
                folder.create,
                call.tenant.name,
                body.input_file_id,
                body.endpoint,
                metadata,
                None if body.output_expires_after is None else body.output_expires_after.seconds,
            )
        await _answer(call, record.public())

    async def batches(self, call: HttpCall) -> None:
        """List the tenant's batches, newest first."""
        query = call.query("after", "limit")
        batches = await self._runner.on_disk(self._folder.batches, call.tenant.name)
        await _answer(call, _page(batches, query, default_limit=20, max_limit=100))

    async def batch(self, call: HttpCall) -> None:
        """Return a batch's progress."""
        record = await self._runner.on_disk(self._folder.batch, call.tenant.name, call.parameters["id"])
        await _answer(call, record.public())

    async def cancel_batch(self, call: HttpCall) -> None:
        """Cancel a batch; finished lines keep their results."""
        with _http_errors():
            record = await self._runner.on_disk(self._folder.cancel, call.tenant.name, call.parameters["id"])
        await _answer(call, record.public())

    @property
    def _runner(self) -> BatchRunner:
        """The runner. Raises ApiError without one."""
        if self._optional_runner is None:
            text = "files and batches are not stored here: start the gateway with --batch-path FOLDER"
            raise ApiError(404, text, code="not_configured")
        return self._optional_runner

    @property
    def _folder(self) -> BatchFolder:
        return self._runner.folder


@contextlib.contextmanager
def _http_errors() -> Iterator[None]:
    """Convert the folder's errors to ApiErrors."""
    try:
        yield
    except FolderFull as error:
        full = from_pillion(error, {})
        raise ApiError(
            507, full.message, kind="server_error", code="insufficient_storage", retry_after_ms=full.retry_after_ms
        ) from None
    except FileTooLarge as error:
        raise ApiError(413, error.message, param="file", code="request_too_large") from None


def _read_fields(_: bytes, fields: dict[str, str]) -> int | None:
    """Parse the fields of an upload's form except the file; return the file's lifetime in seconds, None if not given.
    Raises ApiError."""
    if "purpose" not in fields:
        raise refused("purpose", "this field is required", "missing_required_parameter")
    if fields["purpose"] != INPUT_PURPOSE:
        raise refused("purpose", f"only {INPUT_PURPOSE!r} is supported", "unsupported_value")
    anchor, seconds = fields.get(_ANCHOR, "created_at"), fields.get(_SECONDS, "")
    if anchor != "created_at":
        raise refused(_ANCHOR, "only 'created_at' is supported", "unsupported_value")
    if seconds and not (seconds.isdecimal() and 0 < len(seconds) < 10 and int(seconds)):
        raise refused(_SECONDS, "a positive number of seconds is needed")
    for name in fields.keys() - {"purpose", _ANCHOR, _SECONDS}:
        if current_reading().strict:
            raise refused(name[:100], UNKNOWN, "unknown_parameter")
        note_ignored(name)
    return int(seconds) if seconds else None


def _page(
    records: Sequence[FileRecord | BatchRecord], query: dict[str, str], *, default_limit: int, max_limit: int
) -> dict[str, Any]:
    """Return the files or batches that a query's ``after`` and ``limit`` select, in OpenAI's format. Raises ApiError,
    and NotFound for an unknown ``after``."""
    limit = query.get("limit", str(default_limit))
    if not limit.isdigit() or len(limit) > 9 or not 1 <= int(limit) <= max_limit:
        raise refused("limit", f"a number from 1 to {max_limit} is needed")
    ids, after, begin = [one.id for one in records], query.get("after", ""), 0
    if after:
        if after not in ids:
            raise NotFound(f"after: there is no {after[:100]!r}")
        begin = ids.index(after) + 1
    page, more = records[begin : begin + int(limit)], len(records) > begin + int(limit)
    ends = {"first_id": page[0].id, "last_id": page[-1].id} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": [one.public() for one in page], **ends, "has_more": more}


async def _answer(call: HttpCall, body: dict[str, Any]) -> None:
    await call.answer(200, msgspec.json.encode(body))

"""/v1/files and /v1/batches."""

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
from pillion.gateway.batches.batch_folder import INPUT_PURPOSE, BatchFolder, FileTooLarge, FolderFull, Upload
from pillion.gateway.batches.batch_records import COMPLETION_WINDOW, BatchRecord, FileRecord
from pillion.gateway.batches.batch_runner import BatchRunner
from pillion.gateway.batches.multipart import FORM_TYPE, FormReader, UploadForm
from pillion.gateway.http_api.body_reading import UNKNOWN, current_reading, note_ignored, parse
from pillion.gateway.http_api.http_call import Endpoint, HttpCall, Methods
from pillion.gateway.http_api.http_errors import ApiError, from_pillion, refused
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.http_api.openai_requests import read_metadata

# Bytes read or written at once.
PIECE_BYTES = 256 * 2**10
# Size of a form besides its file.
MAX_FORM_BYTES = 2**20
MAX_BATCH_BODY_BYTES = 64 * 2**10
MAX_LISTED_FILES, LISTED_FILES = 10_000, 10_000
MAX_LISTED_BATCHES, LISTED_BATCHES = 100, 20
JSON_LINES = b"application/jsonl"
# Deadline of an upload: UPLOAD_GRACE_S plus its bytes at MIN_BYTES_PER_S.
UPLOAD_GRACE_S, MIN_BYTES_PER_S = 60.0, 16 * 2**10

_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"

_UPLOAD = {"purpose": "batch", "file": "@requests.jsonl"}
_BATCH = {"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


def batch_routes(
    calls: ModelCalls, runner: BatchRunner | None, lines: LineCalls, others: Sequence[Route]
) -> list[Route]:
    """Return the routes of files and batches. Lines may call those of ``others`` that allow it; without a runner all
    answer that there are no batches."""
    lines.take(others)
    api, tenant_of = BatchesApi(calls, runner, lines.urls), calls.gateway.tenant_of
    upload = Endpoint("POST", api.create_file, tenant_of, UploadForm, body_type=FORM_TYPE, example=_UPLOAD)
    create = Endpoint("POST", api.create_batch, tenant_of, BatchBody, example=_BATCH)
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
    """Handlers of files and batches; without a ``runner`` they refuse. Lines may call ``urls``."""

    _calls: ModelCalls
    _kept: BatchRunner | None
    _urls: Sequence[str]

    async def create_file(self, call: HttpCall) -> None:
        """Store an uploaded file of requests."""
        form, folder = FormReader(call.header(b"content-type")), self._folder
        limit = asyncio.timeout(UPLOAD_GRACE_S)
        try:
            async with limit:
                record = await self._uploaded(call, form, folder, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ApiError(408, f"the file comes at less than {MIN_BYTES_PER_S} bytes a second") from None
        await _answer(call, record.shown())

    async def _uploaded(
        self, call: HttpCall, form: FormReader, folder: BatchFolder, limit: asyncio.Timeout
    ) -> FileRecord:
        """Read an upload's form into a file of the folder; ``limit`` grows with the bytes received."""
        grace_ends_s, size_bytes = asyncio.get_running_loop().time() + UPLOAD_GRACE_S, 0
        length, on_disk = call.header(b"content-length"), self._runner.on_disk
        expected = int(length) if length.isdigit() and len(length) < 16 else 0
        most = folder.file_bytes + MAX_FORM_BYTES
        with _mapped(), contextlib.ExitStack() as opened:
            if expected > most:
                raise folder.too_large()

            def begin() -> Upload:
                # Registered with the folder even if this call ends while the thread works.
                most_bytes = min(expected, folder.file_bytes)
                return opened.enter_context(contextlib.closing(folder.upload(call.tenant.name, most_bytes)))

            upload = await on_disk(begin)
            waiting = bytearray()
            async for piece in call.chunks():
                size_bytes += len(piece)
                limit.reschedule(grace_ends_s + size_bytes / MIN_BYTES_PER_S)
                if size_bytes > most:
                    raise folder.too_large()
                waiting += form.feed(piece)
                if len(waiting) >= PIECE_BYTES:
                    await on_disk(upload.write, waiting)
                    waiting = bytearray()
            form.end()
            seconds = await self._calls.read(call, _read_fields, b"", form.fields)
            await on_disk(upload.write, waiting)
            return await on_disk(upload.finish, form.filename or "", INPUT_PURPOSE, seconds)

    async def files(self, call: HttpCall) -> None:
        """List files, newest first."""
        asked = call.query("after", "limit", "order", "purpose")
        found = await self._runner.on_disk(self._folder.files, call.tenant.name, asked.get("purpose", ""))
        order = asked.get("order", "desc")
        if order not in ("asc", "desc"):
            raise refused("order", "asc or desc")
        await _answer(call, _listed(found[::-1] if order == "asc" else found, asked, LISTED_FILES, MAX_LISTED_FILES))

    async def file(self, call: HttpCall) -> None:
        """Describe a file."""
        record = await self._runner.on_disk(self._folder.file, call.tenant.name, call.parameters["id"])
        await _answer(call, record.shown())

    async def content(self, call: HttpCall) -> None:
        """Send a file's content."""
        folder, on_disk = self._folder, self._runner.on_disk
        record, file = await on_disk(folder.open_file, call.tenant.name, call.parameters["id"])

        async def send() -> None:
            await call.start(200, [(b"content-type", JSON_LINES), (b"content-length", b"%d" % record.bytes)])
            left = record.bytes if call.method != "HEAD" else 0
            while left:
                piece = await on_disk(file.read, min(left, PIECE_BYTES))
                if not piece:
                    raise EOFError(f"{record.id} is shorter than its record says")
                left -= len(piece)
                await call.write(piece, last=not left)
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
        with _mapped():
            record = await self._runner.on_disk(
                folder.create,
                call.tenant.name,
                body.input_file_id,
                body.endpoint,
                metadata,
                None if body.output_expires_after is None else body.output_expires_after.seconds,
            )
        await _answer(call, record.shown())

    async def batches(self, call: HttpCall) -> None:
        """List the tenant's batches, newest first."""
        asked = call.query("after", "limit")
        found = await self._runner.on_disk(self._folder.batches, call.tenant.name)
        await _answer(call, _listed(found, asked, LISTED_BATCHES, MAX_LISTED_BATCHES))

    async def batch(self, call: HttpCall) -> None:
        """Return a batch's progress."""
        record = await self._runner.on_disk(self._folder.batch, call.tenant.name, call.parameters["id"])
        await _answer(call, record.shown())

    async def cancel_batch(self, call: HttpCall) -> None:
        """Cancel a batch; finished lines keep their results."""
        with _mapped():
            record = await self._runner.on_disk(self._folder.cancel, call.tenant.name, call.parameters["id"])
        await _answer(call, record.shown())

    @property
    def _runner(self) -> BatchRunner:
        if self._kept is None:
            text = "files and batches are not kept here: start the gateway with --batch-path FOLDER"
            raise ApiError(404, text, code="not_configured")
        return self._kept

    @property
    def _folder(self) -> BatchFolder:
        return self._runner.folder


@contextlib.contextmanager
def _mapped() -> Iterator[None]:
    """Map the folder's errors to HTTP statuses."""
    try:
        yield
    except FolderFull as error:
        said = from_pillion(error, {})
        raise ApiError(
            507, said.message, kind="server_error", code="insufficient_storage", retry_after_ms=said.retry_after_ms
        ) from None
    except FileTooLarge as error:
        raise ApiError(413, error.message, param="file", code="request_too_large") from None


def _read_fields(_: bytes, fields: dict[str, str]) -> int | None:
    """Parse the upload form's fields besides the file; return the file's lifetime in seconds, None if not given. Raises
    ApiError."""
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


def _listed(
    records: Sequence[FileRecord | BatchRecord], asked: dict[str, str], usual: int, most: int
) -> dict[str, Any]:
    """Return a page of files or batches. Raises ApiError, and NotFound for an unknown ``after``."""
    limit = asked.get("limit", str(usual))
    if not limit.isdigit() or len(limit) > 9 or not 1 <= int(limit) <= most:
        raise refused("limit", f"a number from 1 to {most}")
    ids, after, begin = [one.id for one in records], asked.get("after", ""), 0
    if after:
        if after not in ids:
            raise NotFound(f"after: there is no {after[:100]!r}")
        begin = ids.index(after) + 1
    page, more = records[begin : begin + int(limit)], len(records) > begin + int(limit)
    ends = {"first_id": page[0].id, "last_id": page[-1].id} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": [one.shown() for one in page], **ends, "has_more": more}


async def _answer(call: HttpCall, body: dict[str, Any]) -> None:
    await call.answer(200, msgspec.json.encode(body))

"""Adds batches to a gateway: the folder of --batch-path, the runner of its batches, and their pages."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import Route

from pillion.config import GatewayFlags
from pillion.gateway.batches.batch_calls import LineCalls
from pillion.gateway.batches.batch_folder import BatchFolder
from pillion.gateway.batches.batch_runner import BatchRunner
from pillion.gateway.batches.batches_api import BatchBody, BatchesApi
from pillion.gateway.batches.multipart import FORM_TYPE, UploadForm
from pillion.gateway.gateway import Gateway
from pillion.gateway.http_api.http_call import Endpoint, Methods
from pillion.gateway.http_api.model_calls import ModelCalls

DAY_S = 24 * 3600
_UPLOAD = {"purpose": "batch", "file": "@requests.jsonl"}
_BATCH = {"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


class Batches:
    """Runs batches where there is --batch-path; without the flag their pages say so. Raises ConfigError.

    routes, before the ports listen -> start -> stop, when the gateway begins to drain -> aclose
    """

    def __init__(self, gateway: Gateway, flags: GatewayFlags) -> None:
        self._lines = LineCalls()
        self._runner: BatchRunner | None = None
        if flags.batch_path:
            folder = BatchFolder(
                flags.batch_path,
                max_bytes=flags.batch_bytes,
                file_bytes=flags.batch_file_bytes,
                keep_s=flags.batch_keep_days * DAY_S,
                tenant_percent=flags.batch_tenant_percent,
            )
            self._runner = BatchRunner(
                folder, self._lines.serve, gateway.tenant_named, gateway.meters, flags.max_batch_requests
            )

    def routes(self, calls: ModelCalls, others: Sequence[Route]) -> list[Route]:
        """Gives the pages of files and batches. The lines of a batch may call those of ``others`` that allow it."""
        self._lines.take(others)
        files, tenant_of = BatchesApi(calls, self._runner, self._lines.urls), calls.gateway.tenant_of
        return [
            Route(
                "/v1/files",
                Methods(
                    Endpoint("POST", files.create_file, tenant_of, UploadForm, body_type=FORM_TYPE, example=_UPLOAD),
                    Endpoint("GET", files.files, tenant_of),
                ),
            ),
            Route(
                "/v1/files/{id}",
                Methods(Endpoint("GET", files.file, tenant_of), Endpoint("DELETE", files.delete_file, tenant_of)),
            ),
            Route("/v1/files/{id}/content", Endpoint("GET", files.content, tenant_of)),
            Route(
                "/v1/batches",
                Methods(
                    Endpoint("POST", files.create_batch, tenant_of, BatchBody, example=_BATCH),
                    Endpoint("GET", files.batches, tenant_of),
                ),
            ),
            Route("/v1/batches/{id}", Endpoint("GET", files.batch, tenant_of)),
            Route("/v1/batches/{id}/cancel", Endpoint("POST", files.cancel_batch, tenant_of)),
        ]

    def start(self) -> None:
        """Begins to run batches."""
        if self._runner is not None:
            self._runner.start()

    async def stop(self) -> None:
        """Gives up all batches at once: their lines run again at another gateway, and nothing waits for them."""
        if self._runner is not None:
            await self._runner.stop()

    async def aclose(self) -> None:
        """Ends the threads that serve files."""
        if self._runner is not None:
            self._runner.close()

"""vLLM's two endpoints for operators: load an adapter under a name, and unload it."""

from __future__ import annotations

import msgspec
from msgspec import Raw
from starlette.routing import Route

from pillion.gateway.http_api.body_reading import parse
from pillion.gateway.http_api.http_call import Endpoint, HttpCall
from pillion.gateway.http_api.json_objects import Ignored
from pillion.gateway.http_api.model_calls import ModelCalls

TEXT = b"text/plain; charset=utf-8"


def adapter_routes(calls: ModelCalls) -> list[Route]:
    """Return the HTTP routes that load and unload adapters."""
    api, tenant_of = AdaptersApi(calls), calls.gateway.tenant_of
    example = {"lora_name": "style", "lora_path": "/srv/adapters/style"}
    load = Endpoint("POST", api.load_lora_adapter, tenant_of, LoadAdapterBody, example=example)
    example = {"lora_name": "style"}
    unload = Endpoint("POST", api.unload_lora_adapter, tenant_of, UnloadAdapterBody, example=example)
    return [Route("/v1/load_lora_adapter", load), Route("/v1/unload_lora_adapter", unload)]


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/load_lora_adapter, as in vLLM.

    Attributes:
        lora_name: name by which requests select the adapter.
        lora_path: its folder on the gateway's machine, inside one of --lora-path.
        load_inplace: whether the name may be taken from another adapter.
        base_model_name: the adapter's model; default: that of --model.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/unload_lora_adapter, as in vLLM.

    Attributes:
        lora_name: the name to remove.
        lora_int_id: ignored; adapters have no numbers here.
    """

    lora_name: str
    lora_int_id: Ignored[Raw] = Raw()


class AdaptersApi:
    """Handlers of the HTTP calls about adapters; :class:`pillion.gateway.http_api.http_call.Endpoint` turns their
    exceptions into responses."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self._gateway = calls.gateway

    async def load_lora_adapter(self, call: HttpCall) -> None:
        """Load the LoRA adapter in a folder under a name, at all gateways. Needs an operator's key."""
        body = await self._calls.read(call, parse, await call.body(), LoadAdapterBody)
        await self._gateway.load_adapter(
            call.tenant,
            body.lora_name,
            body.lora_path,
            in_place=body.load_inplace,
            model=body.base_model_name or "",
        )
        text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        await call.answer(200, text.encode(), content_type=TEXT)

    async def unload_lora_adapter(self, call: HttpCall) -> None:
        """Remove the name of a LoRA adapter; running answers go on. Needs an operator's key."""
        body = await self._calls.read(call, parse, await call.body(), UnloadAdapterBody)
        await self._gateway.unload_adapter(call.tenant, body.lora_name)
        text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        await call.answer(200, text.encode(), content_type=TEXT)

"""Who calls the public gRPC service, judged by the call's headers: a stranger's message is not even read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc.aio

from pillion.gateway.admission.tenants import Tenant

# Health and reflection are open to everybody.
_NEEDS_KEY = "/pillion.v1.Gateway/"


class KeyCheck(grpc.aio.ServerInterceptor):
    """Raises Unauthenticated for a call that needs a key and has none. ``tenant_of`` judges an Authorization header."""

    def __init__(self, tenant_of: Callable[[str], Tenant]) -> None:
        self._tenant_of = tenant_of

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        if details.method.startswith(_NEEDS_KEY):
            self._tenant_of(authorization(details.invocation_metadata))
        return await continuation(details)


def authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The first ``authorization`` of a call's metadata, "" where there is none."""
    for name, value in metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else ""
    return ""

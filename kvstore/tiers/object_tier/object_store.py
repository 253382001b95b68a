"""Client of a bucket of an S3 service, by the library obstore: parses ``--object-url``, and makes the three requests of
the object tier.

    s3://BUCKET/PREFIX?endpoint=https://HOST&region=REGION&virtual_hosted_style=false

obstore is Rust's ``object_store`` (Apache Arrow) behind asyncio: requests run on its own threads, without the GIL, and
it signs, finds credentials and retries as its users expect. boto3 needs a thread per request, and aiobotocore computes
signatures and reads bodies on the event loop. Credentials come from the environment (``AWS_...`` variables, a web
identity, the instance's role): a URL with credentials is refused, because flags are visible to all.
"""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pillion.errors import ConfigError
from pillion.kvstore.tiers.tiers import CorruptBlock

FLAG = "--object-url"
REQUEST_TIMEOUT_MS = 10_000
CONNECT_TIMEOUT_MS = 2_000
MAX_LISTED_NAMES = 1000

_KEYS = ("endpoint", "region", "virtual_hosted_style")


class MissingObject(Exception):  # noqa: N818
    """The object does not exist, or was removed."""


class ObjectStoreFailure(Exception):  # noqa: N818
    """The service refused a request, failed or did not answer in time, as the short message explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLocation:
    """Parsed URL of a bucket. ``endpoint`` and ``region`` are "" if the environment or AWS's defaults apply."""

    bucket: str
    prefix: str
    endpoint: str = ""
    region: str = ""
    virtual_hosted_style: bool = False

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def parse_object_url(url: str) -> BucketLocation:
    """Parse ``--object-url``. Raises ConfigError, whose text repeats no potential secret."""
    try:
        parts = urlsplit(url)
        keys = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ConfigError(f"{FLAG} is not a URL") from None
    if parts.scheme != "s3" or not parts.netloc:
        raise ConfigError(f"{FLAG} does not begin with s3://BUCKET: only S3 and compatible services are supported")
    if "@" in parts.netloc or ":" in parts.netloc:
        raise ConfigError(
            f"{FLAG}: credentials and ports do not belong there; set AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY, and give the port in endpoint=URL"
        )
    for name, _ in keys:
        if name not in _KEYS:
            raise ConfigError(f"{FLAG}: {name} is not one of {', '.join(_KEYS)}")
    query = dict(keys)
    endpoint, style = query.get("endpoint", ""), query.get("virtual_hosted_style", "false")
    try:
        endpoint_parts = urlsplit(endpoint)
    except ValueError:
        raise ConfigError(f"{FLAG}: its endpoint is not a URL") from None
    if "endpoint" in query and endpoint_parts.scheme not in ("http", "https"):
        raise ConfigError(f"{FLAG}: its endpoint does not begin with http:// or https://")
    if "@" in endpoint_parts.netloc:
        raise ConfigError(f"{FLAG}: credentials do not belong in its endpoint")
    if style not in ("true", "false"):
        raise ConfigError(f"{FLAG}: virtual_hosted_style is true or false")
    return BucketLocation(
        bucket=parts.netloc,
        prefix=parts.path.strip("/"),
        endpoint=endpoint.rstrip("/"),
        region=query.get("region", ""),
        virtual_hosted_style=style == "true",
    )


class ObjectStore:
    """Client of one bucket; paths are relative to the URL's prefix. Calls may be cancelled at any time.

    Raises ConfigError if obstore is not installed or refuses the location.
    """

    def __init__(self, place: BucketLocation) -> None:
        self.place = place
        try:
            # Imported here, since a node without this tier needs no obstore.
            self._obstore = importlib.import_module("obstore")
            stores = importlib.import_module("obstore.store")
            self._failed: type[Exception] = importlib.import_module("obstore.exceptions").BaseError
        except ImportError as error:
            raise ConfigError(
                f"{FLAG}: obstore cannot be imported ({error}); it comes with the extra pillion[objects]"
            ) from None
        options: dict[str, Any] = {"endpoint": place.endpoint, "region": place.region}
        try:
            self._store = stores.S3Store(
                place.bucket,
                prefix=place.prefix or None,
                virtual_hosted_style_request=place.virtual_hosted_style,
                client_options={
                    "allow_http": place.endpoint.startswith("http://"),
                    "timeout": timedelta(milliseconds=REQUEST_TIMEOUT_MS),
                    "connect_timeout": timedelta(milliseconds=CONNECT_TIMEOUT_MS),
                },
                retry_config={
                    "max_retries": 2,
                    "retry_timeout": timedelta(milliseconds=REQUEST_TIMEOUT_MS),
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=100),
                        "max_backoff": timedelta(seconds=1),
                        "base": 2,
                    },
                },
                **{name: value for name, value in options.items() if value},
            )
        except (self._failed, TypeError, ValueError) as error:
            raise ConfigError(f"{FLAG}: {_first_line(error)}") from None

    async def put(self, path: str, data: bytearray) -> None:
        """Write an object, whole or not at all. Raises ObjectStoreFailure."""
        await self._within_timeout(self._obstore.put_async(self._store, path, data, use_multipart=False))

    async def get(self, path: str, size_bytes: int) -> memoryview:
        """Read an object of ``size_bytes``. Raises MissingObject, ObjectStoreFailure, and CorruptBlock for an object of
        another size, which is not read, since other writers may have stored anything in the bucket."""

        async def read() -> Any:
            try:
                result = await self._obstore.get_async(self._store, path)
            except FileNotFoundError:
                return None
            actual_bytes = result.meta["size"]
            if actual_bytes != size_bytes:
                raise CorruptBlock(f"it has {actual_bytes} bytes, not {size_bytes}")
            return await result.bytes_async()

        data = await self._within_timeout(read())
        if data is None:
            raise MissingObject
        return memoryview(data)

    async def names(self, folder: str, after: str = "") -> list[str]:
        """Return the last path components of up to MAX_LISTED_NAMES objects in ``folder``, sorted, from after ``after``
        on. Raises ObjectStoreFailure."""

        async def first_page() -> list[Any]:
            pages = self._obstore.list(
                self._store, folder, offset=f"{folder}/{after}" if after else None, chunk_size=MAX_LISTED_NAMES
            )
            async for page in pages:
                return list(page)
            return []

        return [entry["path"].rpartition("/")[2] for entry in await self._within_timeout(first_page())]

    async def _within_timeout(self, request: Any) -> Any:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_MS / 1000):
                return await request
        except TimeoutError:
            raise ObjectStoreFailure(f"no answer within {REQUEST_TIMEOUT_MS} ms") from None
        except (self._failed, OSError) as error:
            raise ObjectStoreFailure(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    """Return the first line of obstore's error, without the request and response that follow."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"

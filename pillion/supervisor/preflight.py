"""Checks the files, ports and folders in flags before any process starts, so that an error is printed once.

Each error names the flag; :class:`pillion.cli.flags.FlagCommand` appends the variable or the line of the file that set
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pillion.cli.console import Notices
from pillion.cli.flags import option_name
from pillion.config import GatewayFlags
from pillion.errors import ConfigError
from pillion.net import tls
from pillion.net.addresses import listening_host
from pillion.settings.served_models import other_models
from pillion.settings.speculative_config import NO_SPECULATION, SpeculativeConfig

REDIS_WAIT_MS = 5000
REDIS_ASK_MS = 1000
REDIS_POLL_MS = 250


def check_files(flags: Any) -> None:
    """Raise ConfigError for a file or folder that a component with these flags cannot use."""
    if getattr(flags, "model", ""):
        from pillion.engine.checkpoints.model_files import check_named

        with naming("model"):
            check_named(flags.model)
        for other in other_models(flags) if hasattr(flags, "also_model") else ():
            with naming("also_model"):
                check_named(other.model)
        for model_flags in (flags, *(other_models(flags) if hasattr(flags, "also_model") else ())):
            _check_answer_files(model_flags)
    _check_draft_model(getattr(flags, "speculative_config", NO_SPECULATION))
    if hasattr(flags, "lora_modules"):
        _check_adapters(flags)
    if getattr(flags, "api_keys", ""):
        from pillion.gateway.admission.api_keys import read_keys

        with naming("api_keys"):
            read_keys(flags.api_keys)
    if getattr(flags, "tls_cert", ""):
        with naming("tls_cert", "tls_key", *(["tls_ca"] if flags.tls_ca else [])):
            tls.identity_of(flags.tls_cert, flags.tls_key, flags.tls_ca)
    if flags.internal_tls_cert:
        with naming("internal_tls_cert", "internal_tls_key", "internal_tls_ca"):
            tls.identity_of(flags.internal_tls_cert, flags.internal_tls_key, flags.internal_tls_ca)
    if getattr(flags, "disk_path", ""):
        _check_folder("disk_path", flags.disk_path)
    if getattr(flags, "object_url", ""):
        from pillion.kvstore.tiers.object_tier.object_store import parse_object_url

        parse_object_url(flags.object_url)
    if getattr(flags, "batch_path", ""):
        _check_folder("batch_path", flags.batch_path)
    if getattr(flags, "record_path", ""):
        from pillion.gateway.recorder.recorder import own_key

        own_key(flags)


def _check_answer_files(flags: Any) -> None:
    """Raise ConfigError for a missing tokenizer, template or generation config, and for an unknown format of
    answers."""
    from pillion.engine.checkpoints.generation_config import check_folder
    from pillion.engine.checkpoints.model_files import check_folder_named

    if hasattr(flags, "tool_call_parser"):
        parser_names(flags)
    if getattr(flags, "chat_template", ""):
        from pillion.gateway.tokens.tokenizer import read_template

        read_template(flags.chat_template)
    check_folder(getattr(flags, "generation_config", "auto"))
    if getattr(flags, "tokenizer", ""):
        check_folder_named(flags.tokenizer, "--tokenizer")


def parser_names(flags: Any, template: str = "") -> tuple[str, str]:
    """Return the tool-call and reasoning parsers that the flags select for a chat template. Raises ConfigError for
    unknown names, and for two that cannot be combined."""
    from pillion.gateway.formats import model_formats

    return model_formats.parser_names(template, flags.tool_call_parser, flags.reasoning_parser)


def _check_draft_model(speculation: SpeculativeConfig) -> None:
    """Raise ConfigError for a missing draft model or EAGLE head."""
    from pillion.engine.checkpoints.model_files import check_folder_named, check_named

    with naming("speculative_config"):
        if speculation.method == "eagle3":
            check_folder_named(speculation.model)
        elif speculation.model:
            check_named(speculation.model)


def _check_adapters(flags: GatewayFlags) -> None:
    """Raise ConfigError for an unreadable adapter, and for a missing folder of --lora-path."""
    from pillion.engine.adapters.adapter_config import load_adapter_config
    from pillion.gateway.adapters.adapter_names import parse_lora_modules

    for module in parse_lora_modules(flags.lora_modules):
        folder = Path(module.path).expanduser()
        try:
            load_adapter_config(folder, folder)
        except ConfigError as error:
            raise ConfigError(f"--lora-modules {module.name}: {error.message}") from None
    for path in flags.lora_path:
        if not Path(path).expanduser().is_dir():
            raise ConfigError(f"--lora-path {path} is not a folder here")


@contextmanager
def naming(*fields: str) -> Iterator[None]:
    """Prefix the message of a ConfigError that the block raises with the names of these flags."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{', '.join(map(option_name, fields))}: {error.message}") from None


def _check_folder(field: str, path: str) -> None:
    """Raise ConfigError if the folder does not exist and cannot be created, or is not writable."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option_name(field)} {path}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option_name(field)} {path} is not writable by this user")


def bind_port(host: str, host_field: str, field: str, port: int) -> socket.socket:
    """Bind a socket to ``port``, or to a free port for 0. Raises ConfigError, which names the flag of the address or of
    the port.

    A component binds the port later. Since it is chosen here, it stays the same when the component restarts.
    """
    try:
        host = listening_host(host)
        family = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except OSError:
        raise ConfigError(f"{option_name(host_field)} {host} is not an address of this machine") from None
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        why = getattr(error, "strerror", None) or f"ports end at {2**16 - 1}"
        raise ConfigError(f"{option_name(field)} {port} on {host} cannot be used: {why}") from None
    return bound


async def wait_for_redis(url: str, notices: Notices) -> None:
    """Wait until the Redis at ``url`` answers. Raises ConfigError if it does not answer in time."""
    until_s = asyncio.get_running_loop().time() + REDIS_WAIT_MS / 1000
    warned = False
    while trouble := await ask_redis(url):
        if asyncio.get_running_loop().time() >= until_s:
            raise ConfigError(f"{trouble}; start it, or omit --redis-url for an embedded one")
        if not warned:
            notices.say(f"{trouble}; waiting for it up to {REDIS_WAIT_MS / 1000:g} s", "bold yellow")
            warned = True
        await asyncio.sleep(REDIS_POLL_MS / 1000)


async def ask_redis(url: str) -> str:
    """Return why the Redis at ``url`` is unusable now; "" if it answers.

    Raises ConfigError for an invalid URL.
    """
    from redis.exceptions import RedisError

    from pillion.kvstore.index.redis_url import connect, parse, without_password

    client, option = connect(parse(url)), f"--redis-url {without_password(url)}"
    try:
        async with asyncio.timeout(REDIS_ASK_MS / 1000):
            await client.ping()
    except (RedisError, OSError, TimeoutError) as error:
        return f"{option}: no Redis answers there ({str(error) or f'no answer within {REDIS_ASK_MS} ms'})"
    finally:
        with contextlib.suppress(RedisError, OSError):
            await client.aclose()
    return ""

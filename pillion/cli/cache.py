"""`pillion cache` over the SDK: precomputes the KV of the prompts in a file, and pins it.

``reach`` has the arguments of :class:`pillion.Client`. A file is the text of one prompt or, with suffix .jsonl,
an object per line: {"text" | "messages" | "tokens", "model", "adapter", "cache_salt", "tools", "name", "ttl_s"}.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from pillion.cli.console import table_console
from pillion.client.batch import OVERLOAD_RETRIES, wait_s
from pillion.client.client import Client
from pillion.client.client_requests import Item
from pillion.errors import ConfigError, Overloaded
from pillion.types import WarmedPrefix

MAX_PROMPTS = 10_000
_PROMPTS = ("text", "messages", "tokens")
_OPTIONS = {"model": str, "adapter": str, "cache_salt": str, "tools": list, "name": str, "ttl_s": int}
_TYPE_NAMES: dict[type, str] = {str: "a string", list: "a list", int: "an integer"}
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """A prompt read from a file: path and line for messages, and arguments of :meth:`pillion.Client.warm_prefix`."""

    where: str
    prompt: Item
    options: dict[str, Any]


def run_warm(reach: dict[str, Any], path: Path, common: dict[str, Any]) -> None:
    """Compute the KV of the prompts in a file, and print a line for each. ``common``: arguments of
    :meth:`pillion.Client.warm_prefix` for prompts without their own, e.g. to pin them. Raises PillionError."""
    prompts = read_prompts(path)
    if common.get("name") and len(prompts) > 1:
        raise ConfigError(f"--name is for one prompt, but {path} has {len(prompts)}: give each line a name")
    with Client(**reach) as client:
        for prompt in prompts:
            warmed = _warm(client, prompt, common)
            line = f"{prompt.where}: computed {warmed.computed_tokens} tokens, found {warmed.found_tokens}"
            if warmed.pin is not None:
                pin = warmed.pin
                line += f"; pinned as {pin.name}: {pin.blocks} blocks at {pin.node_id} for {duration(pin.expires_in_s)}"
            print(line, flush=True)


def run_list(reach: dict[str, Any]) -> None:
    """Print a row per prefix pin. Raises PillionError."""
    with Client(**reach) as client:
        pins = client.prefixes()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("name", "model", "tokens", "blocks", "node", "expires", "hits"):
        table.add_column(title, overflow="fold", justify="right" if title in ("tokens", "blocks", "hits") else "left")
    for pin in pins:
        blocks = str(pin.blocks) if pin.present_blocks == pin.blocks else f"{pin.present_blocks} of {pin.blocks}"
        expires = f"in {duration(pin.expires_in_s)}"
        table.add_row(pin.name, pin.model, str(pin.tokens), blocks, pin.node_id, expires, str(pin.hits))
    table_console(120).print(table)


def read_prompts(path: Path) -> list[FilePrompt]:
    """Read a file of prompts. Raises ConfigError, which names the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if path.suffix != ".jsonl":
        if not text:
            raise ConfigError(f"{path} is empty")
        return [FilePrompt(str(path), text, {})]
    # Not splitlines(), which also splits at characters such as U+2028, which JSON allows within a string.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not 0 < len(lines) <= MAX_PROMPTS:
        raise ConfigError(f"{path} has {len(lines)} prompts; 1 to {MAX_PROMPTS} are allowed")
    return [_read_line(f"{path}:{number}", line) for number, line in lines]


def parse_duration(text: str) -> int:
    """Parse a duration such as 90s, 5m, 1h or 7d, or a number of seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,9})([smhd]?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 90s, 5m, 1h or 7d")
    return int(match[1]) * _UNITS_S[match[2] or "s"]


def duration(seconds: int) -> str:
    """Format a duration, rounded, in the largest unit with a value of at least two."""
    for unit, length in reversed(_UNITS_S.items()):
        if seconds >= 2 * length:
            return f"{round(seconds / length)}{unit}"
    return f"{seconds}s"


def _warm(client: Client, prompt: FilePrompt, common: dict[str, Any]) -> WarmedPrefix:
    """Compute the KV of one prompt, with retries while the gateway is overloaded."""
    for attempt in range(OVERLOAD_RETRIES + 1):
        try:
            return client.warm_prefix(prompt.prompt, **{**common, **prompt.options})
        except Overloaded as error:
            # Without ``retry_after_ms`` a quota of pins is exhausted, and waiting is useless.
            if attempt == OVERLOAD_RETRIES or not error.retry_after_ms:
                raise
            time.sleep(wait_s(error))
    raise AssertionError("the last attempt returns or raises")


def _read_line(where: str, line: str) -> FilePrompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: invalid JSON: {error}") from None
    if not isinstance(fields, dict) or sum(name in fields for name in _PROMPTS) != 1:
        raise ConfigError(f"{where}: expected an object with exactly one of {', '.join(_PROMPTS)}")
    for name, value in fields.items():
        if name not in _PROMPTS and name not in _OPTIONS:
            raise ConfigError(f"{where}: unknown field {name!r}")
        kind = _OPTIONS.get(name, str if name == "text" else list)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{where}: {name} must be {_TYPE_NAMES[kind]}")
    options = {name: value for name, value in fields.items() if name in _OPTIONS}
    if adapter := options.pop("adapter", ""):
        options["model"] = adapter
    prompt = next(fields[name] for name in _PROMPTS if name in fields)
    if not prompt:
        raise ConfigError(f"{where}: the prompt is empty")
    return FilePrompt(where, prompt, options)

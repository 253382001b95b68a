"""Parses --also-model, which adds served models to that of --model.

Only flags determine where a gateway reads tokenizers from. A worker's record in Redis has a model's name and never a
path, so write access to Redis cannot make a gateway read a path or download anything.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pillion.config import GatewayFlags, ServedModelFlags
from pillion.errors import ConfigError

MAX_MODELS = 64
_SETTINGS = (
    *("dtype", "max_model_len", "quantization", "quantization_group_size", "revision", "tokenizer"),
    *("activation_quantization", "tool_call_parser", "generation_config", "chat_template", "reasoning_parser"),
)
_ABOUT = {field.name: field.metadata for field in fields(ServedModelFlags)}


def other_models(flags: GatewayFlags) -> tuple[ServedModelFlags, ...]:
    """Return the models of --also-model. A setting that an entry omits is that of --model, except for the length, the
    parsers, the sampling defaults, the chat template and the quantization, which default to the model's own. Raises
    ConfigError."""
    if len(flags.also_model) >= MAX_MODELS:
        raise ConfigError(f"--also-model: a gateway serves at most {MAX_MODELS} models")
    models = tuple(_read(text, flags) for text in flags.also_model)
    names = [name for model in (flags, *models) for name in model.served_model_name]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--also-model: two models are called {twice!r}")
    return models


def _read(text: str, flags: GatewayFlags) -> ServedModelFlags:
    """Parse one entry of --also-model. Raises ConfigError."""
    entry, *settings = text.split(",")
    name, equals, model = entry.partition("=")
    if not (name.strip() and equals and model.strip()):
        raise ConfigError(f"--also-model {text!r}: write NAME=MODEL, optionally followed by ,max-model-len=N")
    inherited = (
        *("dtype", "block_size", "enable_auto_tool_choice"),
        *("allow_special_tokens_in_messages", "default_chat_template_kwargs"),
    )
    values: dict[str, Any] = {name: getattr(flags, name) for name in inherited}
    for setting in settings:
        key, equals, value = setting.partition("=")
        field = key.strip().replace("-", "_")
        if field not in _SETTINGS or not equals:
            known = ", ".join(key.replace("_", "-") for key in _SETTINGS)
            raise ConfigError(f"--also-model {text!r}: {setting!r} is not one of {known} with a value")
        try:
            values[field] = _ABOUT[field]["kind"](value.strip())
        except ConfigError as error:
            raise ConfigError(f"--also-model {text!r}: {error.message}") from None
        choices = _ABOUT[field]["choices"]
        if choices and values[field] not in choices:
            raise ConfigError(f"--also-model {text!r}: {values[field]!r} is not one of {', '.join(choices)}")
    return ServedModelFlags(model=model.strip(), served_model_name=(name.strip(),), **values)

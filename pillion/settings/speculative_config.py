"""Parses ``--speculative-config``, vLLM's flag for how a decode worker drafts tokens.

    {"method": "ngram", "num_speculative_tokens": 5}

The value is a JSON object. Keys that are unknown, or that belong to another method, are rejected by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pillion.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 16
F = TypeVar("F")

FLAG = "--speculative-config"
METHODS = ("ngram", "suffix", "draft_model", "eagle3")


def _key(default: Any, *methods: str, minimum: float = 1, maximum: float = math.inf) -> Any:
    """Create the field of a key of the JSON object. ``methods``: those that have the key, all by default; ``minimum``
    and ``maximum``: inclusive limits of a number."""
    return field(default=default, metadata={"methods": methods or METHODS, "minimum": minimum, "maximum": maximum})


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted. Its text is the JSON object from which it was parsed, with all defaults.

    Attributes:
        method: one of METHODS; "" for no drafting.
        num_speculative_tokens: maximum number of tokens drafted for a sequence in one step.
        disable_by_batch_size: steps with more decodes draft nothing; 0: the measured costs alone decide.
        prompt_lookup_min, prompt_lookup_max: minimum and maximum length of the text's end to match, with "ngram".
        suffix_decoding_max_tree_depth: maximum number of tokens of a match and its draft together.
        suffix_decoding_max_cached_requests: number of earlier answers to draft from, besides the sequence's own text;
            0: none. Tenants that do not share cached prefixes do not share answers either; the number is per tenant.
        suffix_decoding_max_spec_factor: maximum number of drafted tokens per matching token.
        suffix_decoding_min_token_prob: minimum share of the matches that a draft token must follow.
        model, revision, quantization: the draft model, like ``--model``, ``--revision`` and ``--quantization``; with
            "eagle3" the head's folder or hub id.
        draft_tensor_parallel_size: ranks of the draft model: 1, next to the worker's first rank.
    """

    method: str = _key("")
    num_speculative_tokens: int = _key(0, maximum=MAX_SPECULATIVE_TOKENS)
    disable_by_batch_size: int = _key(0)
    prompt_lookup_min: int = _key(2, "ngram")
    prompt_lookup_max: int = _key(8, "ngram", maximum=64)
    suffix_decoding_max_tree_depth: int = _key(24, "suffix", minimum=2, maximum=256)
    suffix_decoding_max_cached_requests: int = _key(10_000, "suffix", minimum=0)
    suffix_decoding_max_spec_factor: float = _key(1.0, "suffix", minimum=0)
    suffix_decoding_min_token_prob: float = _key(0.1, "suffix", minimum=0, maximum=1)
    model: str = _key("", "draft_model", "eagle3")
    revision: str = _key("main", "draft_model", "eagle3")
    quantization: str = _key("none", "draft_model")
    draft_tensor_parallel_size: int = _key(1, "draft_model", "eagle3", maximum=1)

    def __str__(self) -> str:
        if not self.method:
            return ""
        names = (key.name for key in fields(self) if self.method in key.metadata["methods"])
        values = {name: getattr(self, name) for name in names}
        if not self.disable_by_batch_size:
            del values["disable_by_batch_size"]
        return json.dumps(values)

    def model_flags(self, flags: F) -> F:
        """Return the flags for loading the draft model: ``flags`` with everything that identifies a model replaced by
        the draft model's."""
        target: Any = flags
        result: F = replace(
            target,
            model=self.model,
            revision=self.revision,
            quantization=self.quantization,
            quantization_group_size="auto",
            activation_quantization="auto",
            served_model_name=(),
            ignore_config_key=(),
            max_model_len=0,
            tensor_parallel_size=self.draft_tensor_parallel_size,
            enable_lora=False,
        )
        return result


NO_SPECULATION = SpeculativeConfig()


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Parse the flag's text; "" is NO_SPECULATION. Raises ConfigError, which names the key, for invalid values."""
    if not text.strip():
        return NO_SPECULATION
    try:
        values = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise ConfigError(f"{FLAG} {text!r} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{FLAG} {text!r} is not a JSON object, such as {{'method': 'ngram'}} with double quotes")
    values = {name: value for name, value in values.items() if value is not None}
    if "method" not in values and "model" in values:
        values["method"] = "eagle3" if _is_head(str(values["model"])) else "draft_model"
    method = values.get("method")
    # Methods of vLLM that Pillion does not have.
    if method in ("eagle", "medusa", "mlp_speculator", "mtp", "ngram_gpu", "custom_class"):
        raise ConfigError(f"{FLAG}: method {method!r} is not supported; choose one of {', '.join(METHODS)}")
    if method not in METHODS:
        raise ConfigError(f"{FLAG}: method {method!r} is not one of {', '.join(METHODS)}")
    if method == "suffix":
        depth = values.get("suffix_decoding_max_tree_depth", 24)
        values.setdefault("num_speculative_tokens", min(depth if type(depth) is int else 1, MAX_SPECULATIVE_TOKENS))
    config = SpeculativeConfig(**{name: _checked(name, value, method) for name, value in values.items()})
    _check_together(config, values)
    return config


def _is_head(model: str) -> bool:
    """Return whether a model given without a method is an EAGLE-3 head: a folder whose config says so, or, as in vLLM,
    a hub id that contains "eagle3"."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return "eagle3" in model.lower()
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return "speculators_model_type" in config or any("eagle3" in str(name).lower() for name in names)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's keys and values. Raises ConfigError for a key that occurs twice."""
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise ConfigError(f"{FLAG}: a key occurs twice: {', '.join(name for name, _ in pairs)}")
    return keys


def _checked(name: str, value: Any, method: str) -> Any:
    """Return the checked value of one key. Raises ConfigError for a wrong type or a number out of range."""
    known = {key.name: key for key in fields(SpeculativeConfig)}
    if name not in known:
        names = (key.name for key in known.values() if method in key.metadata["methods"])
        raise ConfigError(f"{FLAG} has no key {name!r}; with method {method!r} it has {', '.join(names)}")
    about, wanted = known[name].metadata, type(known[name].default)
    if method not in about["methods"]:
        raise ConfigError(f"{FLAG}: {name} belongs to method {' and '.join(about['methods'])}, not to {method}")
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise ConfigError(f"{FLAG}: {name} {value!r} is no {'text' if wanted is str else wanted.__name__}")
    if wanted is not str and not about["minimum"] <= value <= about["maximum"]:
        end = f" to {about['maximum']}" if about["maximum"] < math.inf else " on"
        raise ConfigError(f"{FLAG}: {name} {value} is not from {about['minimum']}{end}")
    return value


def _check_together(config: SpeculativeConfig, values: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys that are missing or contradict each other."""
    if not config.num_speculative_tokens:
        raise ConfigError(f"{FLAG}: num_speculative_tokens is missing")
    if config.method in ("draft_model", "eagle3") and not config.model:
        raise ConfigError(f"{FLAG}: method {config.method!r} needs a model")
    if config.prompt_lookup_min > config.prompt_lookup_max:
        lookups = (f"{name} {getattr(config, name)}" for name in ("prompt_lookup_min", "prompt_lookup_max"))
        raise ConfigError(f"{FLAG}: {' is above '.join(lookups)}")

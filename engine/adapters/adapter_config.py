"""Parser of PEFT's ``adapter_config.json``. Imports no torch.

An ignored key might change the arithmetic. So a key that is neither read nor bookkeeping must be unset or false, or the
config is rejected with the key's name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pillion.engine.adapters.pattern_cost import MAX_WAYS, count_ways
from pillion.engine.models.config_json import above_zero, read_json, size
from pillion.engine.models.config_keys import words
from pillion.errors import ConfigError
from pillion.host.adapter_folders import MAX_CONFIG_BYTES

CONFIG_NAME = "adapter_config.json"
MAX_PATTERN_CHARS = 4096
MAX_PATTERNS = 1024
# A sanity check: no trained adapter comes close.
MAX_ALPHA = 1e6

# PEFT's name for all linear layers.
ALL_LINEAR = "all-linear"
MERGE = "PEFT's merge_and_unload merges it into a servable model"


_BOOKKEEPING = words(
    """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode lora_dropout
    megatron_core megatron_config eva_config corda_config lora_ga_config loftq_config runtime_config
    qalora_group_size ensure_weight_tying velora_config
    """
)
_READ = words(
    """
    r lora_alpha use_rslora rank_pattern alpha_pattern target_modules target_parameters exclude_modules
    layers_to_transform layers_pattern init_lora_weights bias fan_in_fan_out
    """
)
_PROMPTS = (
    *("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "CPT", "CARTRIDGE"),
    "TRAINABLE_TOKENS",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The options of an adapter's config that affect its arithmetic. Field names are hashed into the adapter's digest.

    Attributes:
        rank, alpha: defaults for modules that no pattern matches.
        rank_stabilized: True if alpha is divided by the square root of the rank instead of the rank (rsLoRA).
        rank_pattern, alpha_pattern: (regular expression for the end of a module's name, rank or alpha).
        targets: suffixes of the names of changed modules, or a regular expression for whole names, or ALL_LINEAR.
        parameters: suffixes of the names of changed parameters: the stacked matrices of a layer's experts
            ("experts.down_proj"), or the matrix of a module ("gate.weight"). ``excluded`` does not apply to them.
        as_they_lie: True for a PEFT release before 0.19.1, which assumed that 3-D parameters of every model are stored
            [experts, inputs, outputs].
        excluded: modules that are not changed, in the format of ``targets``.
        layers: indices of changed layers; None for all.
        layers_pattern: module names that may precede a layer's index; empty for any.
        turned: PEFT's fan_in_fan_out: the changed weights are stored [inputs, outputs]. No effect on the adapter.
    """

    rank: int
    alpha: float
    rank_stabilized: bool = False
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    targets: str | tuple[str, ...]
    parameters: tuple[str, ...] = ()
    as_they_lie: bool = False
    excluded: str | tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    turned: bool = False

    def is_target(self, module: str) -> bool:
        """Return whether the adapter changes the linear layer ``module``, a name in the model."""
        if self.excluded and _named(self.excluded, module):
            return False
        if self.targets == ALL_LINEAR:
            return True
        if isinstance(self.targets, str) or self.layers is None:
            return _named(self.targets, module)
        return _named(self.targets, module) and self._layer_of(module) in self.layers

    def is_parameter(self, name: str) -> bool:
        """Return whether the config lists the parameter ``name`` of transformers' class."""
        return _named(self.parameters, name)

    def _layer_of(self, module: str) -> int:
        patterns = [_LAYER.format(name) for name in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        match = next(filter(None, (_compiled(pattern).match(module) for pattern in patterns)), None)
        return -1 if match is None else int(match[1])

    def rank_of(self, module: str) -> int:
        """Return the rank of the matrices of a module; for a parameter of stacked experts, the rank per expert."""
        return next((rank for pattern, rank in self.rank_pattern if _ends(pattern, module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor by which a module's product B A is multiplied."""
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if _ends(pattern, module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def canonical(self) -> bytes:
        """Return the config's bytes for the adapter's digest; configs with the same meaning have the same bytes."""
        # Fields that were added later are omitted unless set, so that digests of older adapters stay the same.
        options = {
            key: value
            for key, value in asdict(self).items()
            if value or key not in ("turned", "parameters", "as_they_lie")
        }
        return json.dumps(options, sort_keys=True).encode()


# The regular expressions into which PEFT inserts layers_pattern, and rank_pattern and alpha_pattern.
_LAYER = r"(?:^|.*?\.){}\.(\d+)\."
_END = r"(.*\.)?({})$"


@lru_cache(4 * MAX_PATTERNS)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _named(names: str | tuple[str, ...], module: str) -> bool:
    if isinstance(names, str):
        return _compiled(names).fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _ends(pattern: str, module: str) -> bool:
    return _compiled(_END.format(pattern)).match(module) is not None


def load_adapter_config(folder: Path, called: Path) -> AdapterConfig:
    """Read the config in an adapter's folder. Raises ConfigError, with the key, for an unsupported config; messages
    name ``called`` instead of the folder."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(f"{called} is not an adapter: it has no {CONFIG_NAME}")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{called}: {CONFIG_NAME} is longer than {MAX_CONFIG_BYTES} bytes")
    try:
        return parse_adapter_config(read_json(path))
    except ConfigError as error:
        # Shared validators prefix their errors with the model's config.
        message = error.message.removeprefix("config.json: ").removeprefix(f"{CONFIG_NAME}: ")
        raise ConfigError(f"{called}: {CONFIG_NAME}: {message}") from None
    except RecursionError:
        raise ConfigError(f"{called}: {CONFIG_NAME} is nested too deeply") from None


def parse_adapter_config(raw: Mapping[str, Any]) -> AdapterConfig:
    """Parse an adapter's config. Raises ConfigError, with the key, for an unsupported one."""
    kind = raw.get("peft_type")
    if kind != "LORA":
        instead = "" if kind in _PROMPTS or not isinstance(kind, str) else f"; {MERGE}"
        raise _unsupported("peft_type", kind, f"only LORA is{instead}")
    _refuse_unknown(raw)
    layers = raw.get("layers_to_transform")
    parameters = tuple(sorted(set(_list_of(str, raw.get("target_parameters"), "target_parameters"))))
    return AdapterConfig(
        rank=size(raw, "r"),
        alpha=_alpha(raw, "lora_alpha", 8),
        rank_stabilized=_flag(raw, "use_rslora"),
        rank_pattern=tuple((key, size(part, key)) for key, part in _patterns(raw, "rank_pattern")),
        alpha_pattern=tuple((key, _alpha(part, key, 0)) for key, part in _patterns(raw, "alpha_pattern")),
        targets=_targets(raw, needed=not parameters),
        parameters=parameters,
        # Since 0.19.1, PEFT asks transformers' class for the orientation of expert parameters.
        as_they_lie=bool(parameters) and _is_before(raw.get("peft_version"), (0, 19, 1)),
        excluded=_modules(raw, "exclude_modules"),
        layers=None if layers in (None, []) else tuple(sorted(set(_list_of(int, layers, "layers_to_transform")))),
        layers_pattern=tuple(
            _expressions(_list_of(str, raw.get("layers_pattern"), "layers_pattern"), "layers_pattern", _LAYER)
        ),
        turned=_flag(raw, "fan_in_fan_out"),
    )


def _unsupported(key: str, value: Any, advice: str = "") -> ConfigError:
    return ConfigError(f"{CONFIG_NAME}: {key} = {repr(value)[:80]} is not supported{advice and '; '}{advice}")


def _refuse_unknown(raw: Mapping[str, Any]) -> None:
    if raw.get("bias") not in (None, "none"):
        raise _unsupported("bias", raw["bias"], MERGE)
    initialization = raw.get("init_lora_weights")
    # These initializations leave the base model's weights unchanged; others (PiSSA, OLoRA etc.) do not.
    if not any(
        initialization is value or (type(value) is str and initialization == value)
        for value in (True, False, None, "gaussian", "eva", "orthogonal")
    ):
        raise _unsupported(
            "init_lora_weights",
            initialization,
            "it changes the base model's weights; PEFT's path_initial_model_for_weight_conversion converts the adapter",
        )
    for key, value in raw.items():
        if key not in _READ | _BOOKKEEPING and value:
            raise _unsupported(
                key,
                value,
                MERGE if key in ("lora_bias", "use_dora", "modules_to_save", "trainable_token_indices") else "",
            )


def _alpha(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = above_zero(raw, key, default)
    if not value <= MAX_ALPHA:
        raise ConfigError(f"{CONFIG_NAME}: {key} must be at most {MAX_ALPHA:.0f}, not {value}")
    return value


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key) or False
    if not isinstance(value, bool):
        raise ConfigError(f"{CONFIG_NAME}: {key} must be true or false, not {value!r}")
    return value


def _is_before(version: Any, other: tuple[int, ...]) -> bool:
    """Return whether a version such as "0.18.1" is before ``other``; False if it is not a version."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", version) if isinstance(version, str) else None
    return match is not None and tuple(map(int, match.groups())) < other


def _patterns(raw: Mapping[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the entries of ``raw[key]``, an object with regular expressions as keys: each expression, and an object
    with only its entry."""
    patterns = raw.get(key) or {}
    if not isinstance(patterns, Mapping) or None in patterns.values():
        raise ConfigError(f"{CONFIG_NAME}: {key} must map expressions to numbers, not {repr(patterns)[:80]}")
    return [(name, {name: patterns[name]}) for name in _expressions(list(patterns), key, _END)]


def _targets(raw: Mapping[str, Any], *, needed: bool) -> str | tuple[str, ...]:
    targets = _modules(raw, "target_modules")
    if not targets and needed:
        raise ConfigError(f"{CONFIG_NAME}: target_modules is empty")
    return ALL_LINEAR if isinstance(targets, str) and targets.lower() == ALL_LINEAR else targets


def _modules(raw: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    """Return a key's regular expression or ALL_LINEAR as str, or its names as a sorted tuple."""
    modules = raw.get(key)
    if isinstance(modules, str):
        return modules if modules.lower() == ALL_LINEAR else _expressions([modules], key, "{}")[0]
    return tuple(sorted(set(_list_of(str, modules, key))))


def _list_of(kind: type, value: Any, key: str) -> list[Any]:
    """Return the value of ``key`` as a list of ``kind``: a single value becomes a list, null becomes []."""
    entries = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(entry) is not kind for entry in entries):
        raise ConfigError(f"{CONFIG_NAME}: {key} must be a list of {kind.__name__}, not {repr(value)[:80]}")
    return entries


def _expressions(patterns: Sequence[str], key: str, template: str) -> Sequence[str]:
    """Return a key's regular expressions. Raises ConfigError for one that is invalid when inserted into ``template``,
    or may backtrack too long."""
    if len(patterns) > MAX_PATTERNS:
        raise ConfigError(f"{CONFIG_NAME}: {key} has more than {MAX_PATTERNS} expressions")
    ways = 0
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise ConfigError(f"{CONFIG_NAME}: {key} has an expression of more than {MAX_PATTERN_CHARS} characters")
        try:
            # Inserted, since e.g. (?i) is only valid at the beginning.
            _compiled(template.format(pattern))
            ways += count_ways(template.format(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{CONFIG_NAME}: {key}: {pattern[:80]!r} is not a regular expression: {error}") from None
        if ways > MAX_WAYS:
            raise ConfigError(
                f"{CONFIG_NAME}: {key}: {pattern[:80]!r} may backtrack too long; use fewer repeats, and no nested ones"
            )
    return patterns

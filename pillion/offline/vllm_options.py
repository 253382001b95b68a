"""Compatibility with programs for vLLM: options of its ``LLM``, adapters of its requests, arguments of its scripts.

vLLM's options are mapped to Pillion's. An option without an equivalent is accepted if its value requests nothing, and
otherwise refused with an alternative in the message. No request is ignored silently.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from pillion.config import OfflineFlags
from pillion.errors import ConfigError, InvalidRequest

_ANY = None
_POOLING = (
    "Pillion returns vectors of texts (LLM.embed), labels (LLM.classify) and scores (LLM.score), no rows of tokens"
)


@dataclass(frozen=True, slots=True)
class _Absent:
    """An option of vLLM without an equivalent.

    Attributes:
        values: accepted values, which request nothing; None is always accepted. _ANY accepts all values.
        instead: alternative for the error message.
    """

    values: tuple[Any, ...] | None
    instead: str = ""


# Values of an option that only permits something (memory, a custom kernel), or concerns logs that LLM does not write,
# are all accepted.
_ABSENT: Mapping[str, _Absent] = {
    "trust_remote_code": _Absent(
        (False,),
        "Pillion runs no code of a checkpoint; leave the option out where the architecture is one that Pillion knows",
    ),
    "tokenizer_mode": _Absent(("auto", "fast", "hf"), "tokenizers are those of tokenizer.json"),
    "skip_tokenizer_init": _Absent((False,), "give prompts as token ids; the tokenizer is loaded all the same"),
    "pipeline_parallel_size": _Absent((1,), "set tensor_parallel_size; prefill workers of `pillion serve` have stages"),
    "data_parallel_size": _Absent((1,), "start `pillion serve` with several --decode-workers"),
    "distributed_executor_backend": _Absent(("mp", "uni"), "ranks are processes of this machine"),
    "cpu_offload_gb": _Absent((0, 0.0), "choose a quantization, such as int8"),
    "swap_space": _Absent(_ANY),
    "disable_custom_all_reduce": _Absent(_ANY),
    "disable_log_stats": _Absent(_ANY),
    "max_seq_len_to_capture": _Absent(_ANY),
    "hf_overrides": _Absent(({},), "change config.json in a copy of the folder"),
    "hf_token": _Absent((), "set HF_TOKEN in the environment"),
    "allowed_local_media_path": _Absent(("",), "Pillion takes text alone"),
    "limit_mm_per_prompt": _Absent(({},), "Pillion takes text alone"),
    "runner": _Absent(("auto", "generate", "pooling"), _POOLING),
    "task": _Absent(("auto", "generate", "embed", "classify", "score"), _POOLING),
    "convert": _Absent(("auto", "none", "embed", "classify"), _POOLING),
}
_RENAMED = {"kv_cache_memory_bytes": "kv_pool_bytes"}
# vLLM's spellings of producers of quantized checkpoints, and Pillion's.
_PRODUCERS = {
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "gptq_bitblas": "gptq",
    "compressed_tensors": "compressed-tensors",
    "auto_round": "auto-round",
    "inc": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_fp8": "modelopt",
}
# MLX's checkpoints are not supported; the reader of their config reports that.
PRODUCERS = (
    *("awq", "gptq", "auto-round", "fp8", "fbgemm_fp8", "compressed-tensors", "bitsandbytes", "modelopt", "mxfp4"),
    *("gguf", "mlx"),
)


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter's name and folder, as in vLLM. Loaded when a call first uses it.

    Attributes:
        lora_name: the adapter's name.
        lora_int_id: vLLM's number of the adapter; unused.
        lora_path: a folder as PEFT writes it.
        base_model_name: the adapter's model, for vLLM's listings; an LLM has one.
        load_inplace: allow a name to get another adapter, which is always allowed here.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.lora_name


def refused_method(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that raises InvalidRequest, for a method ``name`` of vLLM's LLM that Pillion's lacks. ``instead``
    is the alternative in its message."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise InvalidRequest(f"LLM.{name} is not supported: {instead}")

    refuse.__name__, refuse.__doc__ = name, f"Raises InvalidRequest: it is not supported; {instead}."
    return refuse


def no_pooling(name: str) -> Callable[..., NoReturn]:
    """Return :func:`refused_method` for a method of vLLM's LLM that returns rewards or token rows."""
    return refused_method(name, f"{_POOLING}; for token ids, use get_tokenizer")


def translate_options(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's options under Pillion's names, without those that are None (the default) or need no equivalent.
    Raises ConfigError for an unsupported value."""
    translated: dict[str, Any] = {}
    for name, value in options.items():
        absent = _ABSENT.get(name)
        if absent is None:
            if value is not None:
                translated[_RENAMED.get(name, name)] = value
        elif value is not None and absent.values is not _ANY and value not in absent.values:
            raise ConfigError(f"{name}={value!r} is not supported: {absent.instead}")
    if translated.get("load_format", "auto") not in ("auto", "dummy"):
        _check_format(model, translated.pop("load_format"))
    if producer_of(translated):
        del translated["quantization"]
    return translated


def producer_of(options: Mapping[str, Any]) -> str:
    """Return the producer that ``quantization`` names, such as "awq", in any case or vLLM's spelling; "" for none."""
    value = options.get("quantization")
    name = value.lower() if isinstance(value, str) else ""
    name = _PRODUCERS.get(name, name)
    return name if name in PRODUCERS else ""


def check_producer(wanted: str, model: str, folder: Path) -> None:
    """Raise ConfigError if the checkpoint in ``folder`` is not quantized by the method ``wanted``, e.g. "awq"; ""
    accepts any."""
    if not wanted:
        return
    from pillion.engine.models.config_parser import read_config
    from pillion.engine.quantized.quantization import quantization_method

    actual = "gguf" if _is_gguf(model) else quantization_method(read_config(folder))
    actual = _PRODUCERS.get(actual, actual)
    if actual == wanted:
        return
    what = f"is of {actual}" if actual else "has plain weights"
    instead = (
        "leave the option out"
        if actual
        else "leave the option out, or choose int8 or int4, which Pillion makes of them"
    )
    raise ConfigError(f"quantization={wanted!r}: {model} {what}; {instead}")


def _check_format(model: str, wanted: Any) -> None:
    """Raise ConfigError unless load format ``wanted`` fits: safetensors for a folder, "gguf" for a GGUF file."""
    # All but GGUF are vLLM's readers of safetensors.
    if wanted not in ("safetensors", "gguf", "fastsafetensors", "runai_streamer", "bitsandbytes"):
        raise ConfigError(
            f"load_format={wanted!r} is not supported: Pillion reads safetensors and GGUF, which contain no code; "
            "convert other weights with transformers' save_pretrained"
        )
    is_gguf = _is_gguf(model)
    if is_gguf != (wanted == "gguf"):
        raise ConfigError(
            f"load_format={wanted!r}: {model} is {'a GGUF file' if is_gguf else 'a folder of safetensors'}"
        )


def _is_gguf(model: str) -> bool:
    from pillion.engine.checkpoints.model_files import is_local, locate

    return is_local(model) and locate(model, "", lambda line: None).is_gguf


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse parser that treats ``--max_model_len`` as ``--max-model-len``, as vLLM's scripts expect."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        import sys

        argv = [_with_dashes(argument) for argument in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(argv, namespace)


class EngineArgs:
    """Options of :class:`pillion.LLM` as arguments for vLLM's scripts; ``vars(parser.parse_args())`` are keyword
    arguments of LLM."""

    @staticmethod
    def add_cli_args(parser: Any) -> Any:
        """Add one argument per option to a parser or argument group, and return it."""
        for field in fields(OfflineFlags):
            name, about = "--" + field.name.replace("_", "-"), field.metadata
            if about["kind"] is bool:
                parser.add_argument(name, action=argparse.BooleanOptionalAction, default=None)
            else:
                choices = None if field.name in ("quantization", "load_format") else about["choices"]
                parser.add_argument(name, default=None, choices=choices or None)
        parser.add_argument("--seed", type=int, default=None)
        for name in (*_ABSENT, *_RENAMED):
            parser.add_argument("--" + name.replace("_", "-"), nargs="?", const=True, default=None, type=_value)
        return parser


def _value(text: str) -> Any:
    """Parse an argument's value as JSON; return other texts as they are."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_dashes(argument: str) -> str:
    """Replace underscores in an option's name: ``--max_model_len=8`` -> ``--max-model-len=8``."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument

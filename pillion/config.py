"""All flags, each declared once as a field of a frozen dataclass; one class per kind of process.

A field ``max_num_seqs`` is ``--max-num-seqs``, ``PILLION_MAX_NUM_SEQS`` and the key ``max-num-seqs`` of the config file
(TOML); :mod:`pillion.cli.flags` fills the dataclass from these three. The command line wins over the environment, the
environment over the file, the file over the default. Flags that exist in vLLM have its names.

    CommonFlags                       every component: Redis, logs, heartbeats, metrics, TLS between components
    ModelFlags -> ComputeFlags        which model, and how it is computed
    PrepareFlags                      `pillion prepare`
    KVNodeFlags, PrefillFlags, DecodeFlags, GatewayFlags      the four components
    ServeFlags                        `pillion serve`: the flags of all four
    OfflineFlags                      `pillion.LLM`

The mixins declare flags that two components share. ``pillion serve`` passes every flag to the components that have it,
except those marked ``placement`` (names, addresses, sockets), which it chooses itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal

from pillion.errors import ConfigError
from pillion.host.cores import MAX_CPU_THREADS
from pillion.net.addresses import is_local
from pillion.settings.sampling_defaults import parse_override
from pillion.settings.speculative_config import NO_SPECULATION, SpeculativeConfig, parse_speculative_config

MAX_PORT = 65535
MAX_API_KEY_CHARS = 512
# Value of flags that are then chosen by measurement, or by machine and model.
AUTO = "auto"
MAX_WORKERS = 64
# Max adapters per worker: they are in memory, and listed in every heartbeat.
MAX_LORAS = 256
MAX_RANKS = 16
# Max waiting sequences per decode worker; max waiting and running prefill ranges per prefill worker.
MAX_WAITING_SEQS, MAX_WAITING_PREFILLS = 1024, 256
MAX_STEP_TOKENS = 65_536
# Max size of the chat template variables of a request or a gateway, as JSON; usually a few words and numbers.
MAX_TEMPLATE_KWARGS_BYTES = 16 * 2**10
CPU_KERNEL_CHOICES = (
    "auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "neon_dot", "neon", "torch",
)  # fmt: skip
QUANTIZATION_CHOICES = ("none", "int8", "int8-dynamic", "int4")
# A float16 model (alias half) is computed in float32, which represents its weights exactly.
DTYPE_CHOICES = ("auto", "bfloat16", "float16", "half", "float32", "float")
_ADVERTISE_HELP = (
    "Address that other components connect to. Default: the listen address; for 0.0.0.0 or ::, the local address used"
    " to reach Redis."
)

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@*]+")
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_size(text: str) -> int:
    """Parse "4096", "32K" (thousands), "1GiB" or "512 MB" (bytes). Raises ConfigError on anything else."""
    cleaned = text.strip().upper().removesuffix("B").replace(" ", "").replace("_", "")
    digits = cleaned.rstrip("KMGI")
    suffix = cleaned[len(digits) :]
    if suffix not in _SUFFIXES or not digits.replace(".", "", 1).isdigit():
        raise ConfigError(f"{text!r} is not a size; write 4096, 32K or 1GiB")
    # Fractions are exact; floats would lose the last bits of a size above 2**53.
    return int(Fraction(digits) * _SUFFIXES[suffix])


def parse_target_itl_ms(text: str) -> float | str:
    """Parse milliseconds or "auto". Raises ConfigError on anything else."""
    if text == AUTO:
        return text
    try:
        target = float(text)
    except ValueError:
        target = -1.0
    if not 0 <= target < math.inf:
        raise ConfigError(f"--target-itl-ms {text!r} is not auto or a number of milliseconds of at least 0")
    return target


def parse_template_kwargs(text: str) -> str:
    """Return the text of --default-chat-template-kwargs. Raises ConfigError unless it is a JSON object within the
    limit."""
    try:
        valid = isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        valid = False
    if not valid or len(text.encode()) > MAX_TEMPLATE_KWARGS_BYTES:
        raise ConfigError(
            f"--default-chat-template-kwargs: {text[:80]!r} is not a JSON object of at most "
            f"{MAX_TEMPLATE_KWARGS_BYTES} bytes, such as '{{\"enable_thinking\": false}}'"
        )
    return text


def parse_api_key(text: str) -> str:
    """Return a key of --api-key. Raises ConfigError, whose text omits the key, for a key that no client could send."""
    if not (0 < len(text) <= MAX_API_KEY_CHARS and text.isascii() and text.isprintable() and " " not in text):
        raise ConfigError(f"--api-key: a key is printable ASCII without spaces, of 1 to {MAX_API_KEY_CHARS} characters")
    return text


def parse_quantization(text: str) -> str:
    """Return the text of --quantization. Raises ConfigError unless it is one of the choices."""
    if text not in QUANTIZATION_CHOICES:
        raise ConfigError(
            f"{text!r} is not one of {', '.join(QUANTIZATION_CHOICES)}; a checkpoint that is stored quantized (AWQ,"
            " GPTQ, FP8, GGUF and others) needs no flag"
        )
    return text


def parse_root_path(text: str) -> str:
    """Return the text of --root-path without trailing slashes. Raises ConfigError unless it is a path."""
    path = text.rstrip("/")
    if path and not re.fullmatch(r"(/[\w.~-]+)+", path, re.ASCII):
        raise ConfigError(f"--root-path {text!r} is not a path such as /models/small")
    return path


def parse_split_policy(text: str) -> Fraction | None:
    """Return the fraction of a prompt's uncached blocks that prefill workers compute; None for "auto".

    "disaggregated" is 1, "colocated" is 0, and "fraction:x" is any x from 0 to 1, such as 0.5 or 1/3. Raises
    ConfigError on anything else.
    """
    presets = {"auto": None, "disaggregated": Fraction(1), "colocated": Fraction(0)}
    if text in presets:
        return presets[text]
    name, _, number = text.partition(":")
    if name != "fraction":
        raise ConfigError(f"--split-policy {text!r} is not auto, disaggregated, colocated or fraction:x")
    try:
        share = Fraction(number)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share <= 1:
        raise ConfigError(f"--split-policy {text!r}: write fraction:x with x from 0 to 1")
    return share


def check_public_access(flags: GatewayFlags) -> None:
    """Raise ConfigError for flags that a gateway without API keys may only use on a local address."""
    if flags.api_keys or flags.api_key or is_local(f"{flags.host}:0"):
        return
    if flags.ui:
        raise ConfigError(f"--ui at {flags.host} needs --api-keys: anyone could see the cluster")
    if flags.allow_runtime_lora_updating:
        raise ConfigError("--allow-runtime-lora-updating needs --api-keys: anyone could load adapters")


def check_conflicts(flags: Any) -> None:
    """Raise ConfigError for flags that contradict each other, or of which one needs another. Flags that the class of
    ``flags`` does not have count as not given."""

    def given(name: str) -> Any:
        return getattr(flags, name, None)

    for name in ("lora_modules", "lora_path", "allow_runtime_lora_updating", "lora_target_modules"):
        if given(name) and not flags.enable_lora:
            raise ConfigError(f"--{name.replace('_', '-')} needs --enable-lora")
    if bool(given("allow_runtime_lora_updating")) != bool(given("lora_path")):
        raise ConfigError("--allow-runtime-lora-updating and --lora-path need each other")
    if given("http_port") and flags.http_port == flags.grpc_port:
        raise ConfigError(f"--http-port and --grpc-port are both {flags.http_port}; they must differ")


def parse_origins(values: Sequence[str]) -> list[str]:
    """Return all origins of --allowed-origins. Raises ConfigError unless each is an origin or '*'."""
    origins: list[str] = []
    for value in values:
        try:
            entries = json.loads(value) if value.startswith("[") else [value]
        except ValueError:
            entries = [value]
        for origin in entries:
            if not isinstance(origin, str) or not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"--allowed-origins: {origin!r} is not '*' or like https://chat.example.org:8443")
            origins.append(origin)
    return origins


def flag(
    default: Any,
    help: str,  # noqa: A002
    *,
    kind: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] = (),
    placement: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
    also: str = "",
    secret: bool = False,
) -> Any:
    """Create the dataclass field of a flag. A flag whose default is a tuple may be repeated.

    Args:
        default: the value of a flag that is not given.
        help: text for ``--help``: purpose, unit, meaning of the default.
        kind: parser of the flag's text. Default: the type of ``default``.
        choices: the allowed values; (): any.
        placement: True for a name, address or socket of one process, which ``pillion serve`` sets for each component.
        minimum, maximum: inclusive limits of a number, enforced by :mod:`pillion.cli.checks`.
        also: a second name, on the command line and in the file, but not in the environment.
        secret: the value is never shown, and child processes get it through their environment.
    """
    about: dict[str, Any] = {"help": help, "kind": kind or type(default), "choices": choices, "placement": placement}
    about |= {"minimum": minimum, "maximum": maximum, "also": also, "secret": secret}
    return field(default=default, repr=not secret, metadata=about)


def size_flag(default: int, help: str, **bounds: Any) -> Any:  # noqa: A002
    """Create a flag that :func:`parse_size` parses."""
    return flag(default, help, kind=parse_size, **bounds)


def with_default(cls: type, name: str, default: Any) -> Any:
    """Return the field of flag ``name`` of ``cls`` with another default."""
    return field(default=default, metadata=next(one.metadata for one in fields(cls) if one.name == name))


@dataclass(frozen=True, kw_only=True)
class CommonFlags:
    """The flags of every component."""

    redis_url: str = flag(
        "",
        "URL of the Redis with index and registry: redis://, rediss://, unix://, redis+sentinel://, redis+cluster://.",
    )
    log_level: str = flag("info", "Minimum log level.", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "Log format: text, or a JSON object per line.", choices=("text", "json"))
    heartbeat_ms: int = flag(1000, "Heartbeat interval of a component.", minimum=10)
    heartbeat_timeout_ms: int = flag(5000, "Time without a heartbeat until a component counts as lost.", minimum=50)
    metrics_port: int = flag(0, "Port of this component's Prometheus metrics. 0: none.", minimum=0, maximum=MAX_PORT)
    metrics_host: str = flag("127.0.0.1", "Listen address of --metrics-port. No authentication: do not expose it.")
    internal_tls_cert: str = flag(
        "", "PEM file of this component's certificate for other components. Empty: no TLS between components."
    )
    internal_tls_key: str = flag("", "PEM file of that certificate's private key.")
    internal_tls_ca: str = flag("", "PEM file of the CA that signs the components' certificates, and nothing else.")


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The served model and the layout of its KV. All components of a model must agree on these flags."""

    model: str = flag("", "Hugging Face folder, GGUF file, hub id, or 'demo' (SmolLM2-135M-Instruct).")
    revision: str = flag("main", "Revision of a hub id.")
    served_model_name: tuple[str, ...] = flag(
        (),
        "Model name in the API. Repeat it for more names; responses have the first. Default: the folder's or file's"
        " name.",
        kind=str,
    )
    tokenizer: str = flag("", "Folder or hub id of the tokenizer and chat template. Default: the model's own.")
    dtype: str = flag(
        "auto",
        "Data type of unquantized weights, activations and KV; float16 runs in float32.",
        choices=DTYPE_CHOICES,
    )
    quantization: str = flag(
        "none",
        "Quantize linear layers of an unquantized checkpoint to 8 or 4 bits; int8-dynamic: also their inputs (CPU).",
        kind=parse_quantization,
        choices=QUANTIZATION_CHOICES,
    )
    quantization_group_size: str = flag(
        "auto",
        "Weights per scale; auto: 32 with int4, a whole output channel with int8.",
        choices=("auto", "32", "128"),
    )
    activation_quantization: str = flag(
        "auto",
        "Quantization of the inputs of quantized linear layers; int8: a scale per group (CPU). auto: as --quantization"
        " or the checkpoint specifies.",
        choices=("auto", "int8"),
    )
    max_model_len: int = size_flag(
        0,
        "Maximum length of prompt plus output, in tokens. 0: the model's own, limited to 8192, to its original length"
        " if longer ones need scaled rotary frequencies, and to the pool.",
        minimum=0,
    )
    block_size: int = flag(16, "Tokens per KV block.", minimum=1, maximum=1024)
    ignore_config_key: tuple[str, ...] = flag(
        (), "Key of config.json to ignore, if Pillion rejects it although the model is correct without it.", kind=str
    )
    load_format: str = flag("auto", "Source of the weights; dummy: random values, on a GPU.", choices=("auto", "dummy"))

    def __post_init__(self) -> None:
        given: object = self.served_model_name
        if isinstance(given, str):
            # Accept a single name as str.
            object.__setattr__(self, "served_model_name", (given,) if given else ())


@dataclass(frozen=True, kw_only=True)
class AnswerFlags:
    """Sampling defaults and the parsing of reasoning and tool calls in the output."""

    generation_config: str = flag(
        "auto",
        "Source of the model's sampling defaults. auto: its generation_config.json or GGUF metadata; vllm or none: no"
        " defaults; otherwise a folder with a generation_config.json.",
    )
    override_generation_config: str = flag(
        "",
        "Sampling defaults that override --generation-config, in JSON, such as '{\"temperature\": 0.6}'.",
        kind=parse_override,
    )

    chat_template: str = flag("", "Jinja file of a chat template that replaces the model's own.")
    allow_special_tokens_in_messages: bool = flag(
        False, "Tokenize special tokens that clients write in messages and tools as such, not as text."
    )
    default_chat_template_kwargs: str = flag(
        "",
        "Default variables of the chat template, in JSON, such as '{\"enable_thinking\": false}'.",
        kind=parse_template_kwargs,
    )
    tool_call_parser: str = flag(
        "auto",
        "Format of tool calls, one of docs/tools.md or none. auto: as the chat template suggests, generic if it has no"
        " tools.",
    )
    reasoning_parser: str = flag(
        "auto", "Format of reasoning, one of docs/tools.md or none. auto: as the chat template suggests."
    )
    enable_auto_tool_choice: bool = flag(True, "Let the model decide whether to call a tool (tool_choice auto).")


@dataclass(frozen=True, kw_only=True)
class ServedModelFlags(AnswerFlags, ModelFlags):
    """A model that a gateway serves."""


@dataclass(frozen=True, kw_only=True)
class ComputeFlags(ModelFlags):
    """How workers compute the model. All workers of a cluster must agree on these flags."""

    device: str = flag(
        "auto", "Device of workers and KV blocks. auto: a GPU if there is one.", choices=("auto", "cpu", "cuda")
    )
    kv_cache_dtype: str = flag(
        "auto", "Data type of KV. auto: that of --dtype; int8: on CPUs only.", choices=("auto", "fp8", "int8")
    )
    enforce_eager: bool = flag(False, "Launch kernels one by one instead of as CUDA graphs.")
    batch_invariant: bool = flag(
        False, "Make results on a GPU independent of the batch, bit for bit, which is slower. CPU kernels always do."
    )
    cpu_kernels: str = flag("auto", "CPU kernels. auto: the fastest; torch: PyTorch's.", choices=CPU_KERNEL_CHOICES)
    exact_weights: bool = flag(
        False,
        "Never round quantized weights on a CPU. Default: AMX tiles multiply them as bfloat16, which is faster.",
    )


@dataclass(frozen=True, kw_only=True)
class PoolFlags:
    """Memory of the KV pool."""

    kv_pool_bytes: int = size_flag(
        0, "Size of the KV pool in bytes. 0: 1 GiB; on a GPU, by --gpu-memory-utilization.", minimum=0
    )
    gpu_memory_utilization: float = flag(
        0.9,
        "Fraction of the GPU's memory for weights, workspaces and the KV pool together.",
        minimum=0,
        maximum=1,
    )
    host_bytes: int = size_flag(
        0, "Pinned host memory, in bytes, for blocks evicted from a GPU's pool, before the disk. 0: none.", minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """Number of processes that a model is split over."""

    tensor_parallel_size: int = flag(
        1, "Number of ranks (processes) that each worker splits the model over.", minimum=1, maximum=MAX_RANKS
    )


@dataclass(frozen=True, kw_only=True)
class EnableLoraFlags:
    """Whether LoRA adapters are served."""

    enable_lora: bool = flag(False, "Serve LoRA adapters.")


@dataclass(frozen=True, kw_only=True)
class PrepareFlags(EnableLoraFlags, RankFlags, ComputeFlags):
    """The flags of ``pillion prepare``, which prepares a model for one number of ranks."""


@dataclass(frozen=True, kw_only=True)
class ThreadFlags(RankFlags):
    """Threads and cores of a forward pass."""

    cpu_threads: int = flag(
        0,
        "Threads of a forward pass on a CPU. 0: this worker's share of the cores.",
        minimum=0,
        maximum=MAX_CPU_THREADS,
    )
    cpu_affinity: str = flag("", "CPU cores of --cpu-threads, in order, e.g. 0,1 or 4-7. Empty: no pinning.")


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """Limits of a decode worker's step."""

    max_num_batched_tokens: int = size_flag(
        0,
        "Maximum number of tokens per decode step (I5). 0: 256 on a CPU, 512 with matrix tiles; on a GPU 512"
        " to 8,192, by its speed, memory, the model and --target-itl-ms.",
        minimum=0,
        maximum=MAX_STEP_TOKENS,
    )
    max_num_seqs: int = flag(64, "Maximum number of running sequences per decode worker.", minimum=1)
    speculative_config: SpeculativeConfig = flag(  # noqa: RUF009  (flag() returns a field)
        NO_SPECULATION,
        "Speculative decoding, as vLLM's JSON, such as "
        '\'{"method": "ngram", "num_speculative_tokens": 5}\'. Empty: no drafts.',
        kind=parse_speculative_config,
    )


@dataclass(frozen=True, kw_only=True)
class PrefixCachingFlags:
    """Whether requests reuse KV of other requests."""

    enable_prefix_caching: bool = flag(True, "Reuse the KV of equal prefixes of prompts and answers.")


@dataclass(frozen=True, kw_only=True)
class ChunkedPrefillFlags:
    """Whether prompts are split into chunks."""

    enable_chunked_prefill: bool = flag(True, "Split prompts into chunks. Otherwise a whole prompt runs in one step.")


@dataclass(frozen=True, kw_only=True)
class LoraFlags(EnableLoraFlags):
    """Number and size of the LoRA adapters that workers allocate memory for."""

    max_loras: int = flag(
        8, "Maximum number of adapters loaded per worker, and so used in a step.", minimum=1, maximum=MAX_LORAS
    )
    max_lora_rank: int = flag(16, "Maximum rank of an adapter.", minimum=1, maximum=512)
    lora_target_modules: tuple[str, ...] = flag(
        (),
        "Linear layers that adapters may modify, by PEFT name: q_proj,v_proj... Repeat it for more. Default: all.",
        kind=str,
    )


@dataclass(frozen=True, kw_only=True)
class RequestServerFlags(ChunkedPrefillFlags, CommonFlags):
    """The flags of both workers and gateways."""

    component_id: str = flag("", "Unique name of this process. Default: its role and pid.", placement=True)
    drain_timeout_s: float = flag(2.0, "Time for running requests to finish on shutdown.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class InternalServerFlags(CommonFlags):
    """The flags of KV nodes and workers, whose ports only components use."""

    insecure_internal: bool = flag(
        False,
        "Listen beyond loopback without TLS: anyone who can reach the port can read all prompts.",
        placement=True,
    )
    attach_socket: str = flag(
        "/run/pillion/kvnode.sock", "Unix socket through which workers map the pool.", placement=True
    )


@dataclass(frozen=True, kw_only=True)
class KVNodeFlags(PoolFlags, InternalServerFlags):
    """The flags of ``pillion kvnode``, the owner of one memory domain's pool."""

    node_id: str = flag("kvnode-0", "Name of this node, unique in the cluster.", placement=True)
    node_listen: str = flag(
        "127.0.0.1:50061", "Listen address of the node's gRPC service (host:port or unix:path).", placement=True
    )
    node_advertise: str = flag("", _ADVERTISE_HELP, placement=True)
    kv_device: str = flag(
        "cpu",
        "Device of the KV pool: cpu, cuda, cuda:N, or several, e.g. cuda:0,cuda:1.",
        placement=True,
    )
    keeper_socket: str = flag(
        "",
        "Unix socket of `pillion keeper`, which preserves the pool if this node dies. Empty: the pool is lost with"
        " the node.",
        placement=True,
    )
    kv_transport: str = flag("auto", "Transport of blocks between nodes.", choices=("auto", "nixl", "grpc"))
    hand_over_timeout_s: float = flag(
        0.0, "Time for a stopping node to copy its most recently used blocks to other nodes or its disk.", minimum=0
    )
    disk_path: str = flag("", "Folder for KV blocks evicted from the pool. Empty: they are dropped.")
    disk_bytes: int = size_flag(10 * 2**30, "Maximum size of --disk-path, in bytes.", minimum=0)
    object_url: str = flag("", "Object store to copy KV blocks to: s3://BUCKET/PREFIX?endpoint=URL. Empty: none.")


@dataclass(frozen=True, kw_only=True)
class WorkerFlags(LoraFlags, ThreadFlags, RequestServerFlags, InternalServerFlags, ComputeFlags):
    """The flags of both kinds of workers."""

    listen: str = flag(
        "127.0.0.1:0", "Listen address of the worker's gRPC service (host:port or unix:path).", placement=True
    )
    advertise: str = flag("", _ADVERTISE_HELP, placement=True)
    core_lending_table: str = flag(
        "", "File through which the workers of a host lend each other cores. Empty: no lending.", placement=True
    )
    first_core: int = flag(0, "This worker's first core in --core-lending-table.", minimum=0, placement=True)
    enable_expert_parallel: bool = flag(
        False, "Assign whole experts of an MoE model to each GPU rank, instead of a part of each."
    )
    pipeline_parallel_size: int = flag(
        1,
        "Pipeline stages of each prefill worker; a stage has --tensor-parallel-size processes.",
        minimum=1,
        maximum=16,
    )

    @property
    def processes(self) -> int:
        """Number of processes per worker: the ranks of all its stages."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def step_budget_tokens(self) -> int:
        """Token budget of a step; each kind of worker has a flag for it. It is 0 until
        :func:`pillion.engine.backends.devices.with_budgets` has chosen one."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PrefillFlags(WorkerFlags):
    """The flags of ``pillion prefill``, which computes parts of prompts in chunks and commits their blocks."""

    max_num_batched_prefill_tokens: int = size_flag(
        0,
        "Maximum number of tokens per prefill step. 0: 512 on a CPU; on a GPU 512 to 8,192, by speed and model.",
        minimum=0,
        maximum=MAX_STEP_TOKENS,
    )

    @property
    def step_budget_tokens(self) -> int:
        return self.max_num_batched_prefill_tokens


@dataclass(frozen=True, kw_only=True)
class DecodeFlags(StepFlags, WorkerFlags):
    """The flags of ``pillion decode``, which runs prompt tails and decodes under one token budget."""

    target_itl_ms: float | str = flag(
        AUTO,
        "Target inter-token latency, within --max-num-batched-tokens. auto: 2.5 times that of steps without prompts,"
        " more if many wait; 0: off.",
        kind=parse_target_itl_ms,
    )

    @property
    def step_budget_tokens(self) -> int:
        return self.max_num_batched_tokens


@dataclass(frozen=True, kw_only=True)
class GatewayFlags(LoraFlags, PrefixCachingFlags, RequestServerFlags, ServedModelFlags):
    """The flags of ``pillion gateway``, the public edge."""

    also_model: tuple[str, ...] = flag(
        (),
        "Additional served model: NAME=MODEL[,dtype=D][,max-model-len=N][,revision=R][,tokenizer=T][,quantization=Q]"
        "[,quantization-group-size=G][,activation-quantization=A][,tool-call-parser=P][,reasoning-parser=P]"
        "[,generation-config=C][,chat-template=F]. Repeat it for more.",
        kind=str,
    )
    host: str = flag("127.0.0.1", "Listen address of the public ports.")
    http_port: int = flag(8000, "Port of the HTTP API. 0: any free port.", minimum=0, maximum=MAX_PORT, also="port")
    grpc_port: int = flag(50051, "Port of the public gRPC service. 0: any free port.", minimum=0, maximum=MAX_PORT)
    split_policy: str = flag(
        "auto", "Share of prompts that prefill workers compute: auto, disaggregated, colocated, fraction:x."
    )
    chunk_size: int = size_flag(512, "Tokens per prefill chunk; a multiple of the block size.", minimum=1)
    max_inflight_requests: int = flag(256, "Maximum number of requests in the gateway; more are rejected.", minimum=1)
    max_inflight_tokens: int = size_flag(2_000_000, "Maximum number of prompt tokens in the gateway.", minimum=1)
    allowed_origins: tuple[str, ...] = flag(
        (),
        "Origin of web pages that may use the HTTP API (CORS), e.g. https://chat.example.org; '*': any. Repeat it for"
        " more, or use a JSON list.",
        kind=str,
    )
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "Host header that the HTTP port accepts; *: any. Repeat it for more. Default: any with API keys or beyond"
        " loopback; otherwise localhost, IP addresses and --host.",
        kind=str,
    )
    strict_fields: bool = flag(
        False,
        "Reject undocumented fields of HTTP bodies, at any depth, instead of ignoring them and listing them in the"
        " header x-pillion-ignored.",
    )
    ui: bool = flag(False, "Serve a web page at /ui: chat, and a live view of the cluster for operators.")
    lora_modules: tuple[str, ...] = flag(
        (),
        'LoRA adapter in PEFT format: NAME=PATH, or {"name": NAME, "path": PATH, "base_model_name": MODEL}.'
        " Repeat it for more.",
        kind=str,
    )
    allow_runtime_lora_updating: bool = flag(
        False, "Let operators load and unload adapters of --lora-path while the gateway runs."
    )
    lora_path: tuple[str, ...] = flag((), "Folder of adapters that operators may load. Repeat it for more.", kind=str)
    api_keys: str = flag("", "TOML file of tenants and hashed API keys. Empty: everyone is served.")
    api_key: tuple[str, ...] = flag(
        (),
        "API key that clients must send. Repeat it for more. Visible to other users in the process list: prefer the"
        " variable PILLION_API_KEY (keys separated by spaces) or --api-keys.",
        kind=parse_api_key,
        secret=True,
    )
    root_path: str = flag(
        "", "Path under which a proxy exposes the HTTP port, such as /models/small.", kind=parse_root_path
    )
    tls_cert: str = flag("", "PEM file of the certificate chain of both public ports. Empty: no TLS.")
    tls_key: str = flag("", "PEM file of the private key of --tls-cert.")
    tls_ca: str = flag("", "PEM file of the CAs of client certificates. Empty: clients need none.")
    batch_path: str = flag("", "Folder for files and batches (/v1/batches). Empty: no batches.")
    record_path: str = flag(
        "",
        "Folder for recorded bundles of failed, slow and selected requests; redis: store them at --redis-url. Empty: no"
        " recording.",
    )
    record_share: float = flag(0.0, "Fraction of all other requests to record.", minimum=0, maximum=1)
    record_content: Literal["none", "hash", "full"] = flag(
        "hash",
        "Form of texts and token ids in bundles; replay needs full.",
        choices=("none", "hash", "full"),
    )
    record_key_file: str = flag(
        "",
        "File with the key that signs bundles, at least 16 bytes; required with redis. Empty: record.key in"
        " --record-path, created if missing.",
    )
    drain_timeout_s: float = with_default(RequestServerFlags, "drain_timeout_s", 30.0)
    gateway_workers: int = flag(
        1, "Gateway processes behind the same two public ports.", minimum=1, maximum=MAX_WORKERS
    )
    probe_listen: str = flag("", "Additional address of a gRPC health service that reports readiness.", placement=True)
    share_ports: bool = flag(False, "Let this user's other processes listen on the same public ports.", placement=True)


@dataclass(frozen=True, kw_only=True)
class ServeFlags(GatewayFlags, DecodeFlags, PrefillFlags, KVNodeFlags):
    """The flags of ``pillion serve``, which runs the whole cluster on this machine. Placement flags keep their
    defaults."""

    # The terminal of `pillion serve` stays quiet; components run alone log more.
    log_level: str = with_default(CommonFlags, "log_level", "warning")
    prefill_workers: int = flag(
        -1,
        "Number of prefill workers. -1: one on a CPU; on a GPU none, decode workers prefill.",
        minimum=-1,
        maximum=MAX_WORKERS,
    )
    decode_workers: int = flag(1, "Number of decode workers.", minimum=1, maximum=MAX_WORKERS)
    prefill_tensor_parallel_size: int = flag(
        0,
        "Number of ranks per prefill worker. 0: as --tensor-parallel-size.",
        minimum=0,
        maximum=MAX_RANKS,
    )


@dataclass(frozen=True, kw_only=True)
class OfflineFlags(
    LoraFlags, StepFlags, PoolFlags, ThreadFlags, PrefixCachingFlags, ChunkedPrefillFlags, AnswerFlags, ComputeFlags
):
    """The flags of ``pillion.LLM``, which runs a decode worker and its pool in the caller's process."""

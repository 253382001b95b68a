"""Declares every flag once, as a field of a frozen dataclass; each kind of process has one class.

A field ``max_num_seqs`` is ``--max-num-seqs``, ``PILLION_MAX_NUM_SEQS`` and the key ``max-num-seqs`` of the config file
(TOML); :mod:`pillion.cli.flags` fills the dataclass from these three. The command line wins over the environment, the
environment over the file, the file over the default. Where vLLM has the thing, the name is vLLM's.

    CommonFlags                       every component: Redis, logs, heartbeats, metrics, TLS between components
    ModelFlags -> ComputeFlags        which model, and how it is computed
    PrepareFlags                      `pillion prepare`
    KVNodeFlags, PrefillFlags, DecodeFlags, GatewayFlags      the four components
    ServeFlags                        `pillion serve`: the flags of all four
    OfflineFlags                      `pillion.LLM`

The mixins between them exist so that a flag of two components is declared once. ``pillion serve`` hands every flag on
to the components that have it, except those marked ``placement`` (names, addresses, sockets), which it chooses itself.
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
# An API key has at most so many characters.
MAX_API_KEY_CHARS = 512
# With this value a flag leaves a choice to what is measured or found.
AUTO = "auto"
MAX_WORKERS = 64
# A worker has no more adapters than this ready, because it holds them in memory and names them in every heartbeat.
MAX_LORAS = 256
MAX_RANKS = 16
# So many sequences may wait on a decode worker, and so many prefill ranges may wait or run on a prefill worker.
MAX_WAITING_SEQS, MAX_WAITING_PREFILLS = 1024, 256
# Most tokens of one step.
MAX_STEP_TOKENS = 65_536
# The variables that a request, or a gateway by default, gives to a chat template are a few words and numbers, so they
# have at most so many bytes of JSON.
MAX_TEMPLATE_KWARGS_BYTES = 16 * 2**10
CPU_KERNEL_CHOICES = (
    "auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "neon_dot", "neon", "torch",
)  # fmt: skip
QUANTIZATION_CHOICES = ("none", "int8", "int8-dynamic", "int4")
# With float16, alias half, a model is computed in float32, which holds its numbers exactly.
DTYPE_CHOICES = ("auto", "bfloat16", "float16", "half", "float32", "float")
ADVERTISE = "Address that others reach it at. Default: the one it listens on; of 0.0.0.0 or ::, the one towards Redis."

_ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@*]+")
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_size(text: str) -> int:
    """Reads "4096", "32K" (thousands), "1GiB" or "512 MB" (bytes). Raises ConfigError on anything else."""
    cleaned = text.strip().upper().removesuffix("B").replace(" ", "").replace("_", "")
    digits = cleaned.rstrip("KMGI")
    suffix = cleaned[len(digits) :]
    if suffix not in _SUFFIXES or not digits.replace(".", "", 1).isdigit():
        raise ConfigError(f"{text!r} is not a size; write 4096, 32K or 1GiB")
    # Fractions are exact, while floats would lose the last bits of a size above 2**53.
    return int(Fraction(digits) * _SUFFIXES[suffix])


def parse_target_itl_ms(text: str) -> float | str:
    """Reads milliseconds or "auto". Raises ConfigError on anything else."""
    if text == AUTO:
        return text
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise ConfigError(f"--target-itl-ms {text!r} is not auto or a number of milliseconds from 0 on")
    return found


def parse_template_kwargs(text: str) -> str:
    """Checks the text of --default-chat-template-kwargs, a JSON object, and returns it. Raises ConfigError."""
    try:
        known = isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        known = False
    if not known or len(text.encode()) > MAX_TEMPLATE_KWARGS_BYTES:
        raise ConfigError(
            f"--default-chat-template-kwargs: {text[:80]!r} is no JSON object of at most {MAX_TEMPLATE_KWARGS_BYTES} "
            "bytes, such as '{\"enable_thinking\": false}'"
        )
    return text


def parse_api_key(text: str) -> str:
    """Returns a key of --api-key. Raises ConfigError, without the key, for one that no client could send."""
    if not (0 < len(text) <= MAX_API_KEY_CHARS and text.isascii() and text.isprintable() and " " not in text):
        raise ConfigError(f"--api-key: a key is printable ASCII without spaces, of 1 to {MAX_API_KEY_CHARS} characters")
    return text


def parse_quantization(text: str) -> str:
    """Returns the text of --quantization. Raises ConfigError for another than its choices."""
    if text not in QUANTIZATION_CHOICES:
        raise ConfigError(
            f"{text!r} is not one of {', '.join(QUANTIZATION_CHOICES)}; a checkpoint that is stored quantized (AWQ,"
            " GPTQ, FP8, GGUF and others) needs no flag"
        )
    return text


def parse_root_path(text: str) -> str:
    """Returns the text of --root-path without slashes at its end. Raises ConfigError for what is no path."""
    path = text.rstrip("/")
    if path and not _ROOT_PATH.fullmatch(path):
        raise ConfigError(f"--root-path {text!r} is not a path such as /models/small")
    return path


def parse_split_policy(text: str) -> Fraction | None:
    """Gives the share of a prompt's uncached blocks that prefill workers compute; None for "auto", which predicts it.

    "disaggregated" is 1, "colocated" is 0, and "fraction:x" is any x from 0 to 1, such as 0.5 or 1/3. Raises
    ConfigError on anything else.
    """
    named = {"auto": None, "disaggregated": Fraction(1), "colocated": Fraction(0)}
    if text in named:
        return named[text]
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


def refuse_strangers(flags: GatewayFlags) -> None:
    """Raises ConfigError for flags that a gateway without API keys may only use on an address of this machine alone."""
    if flags.api_keys or flags.api_key or is_local(f"{flags.host}:0"):
        return
    if flags.ui:
        raise ConfigError(f"--ui at {flags.host} needs --api-keys: any stranger would see the cluster")
    if flags.allow_runtime_lora_updating:
        raise ConfigError("--allow-runtime-lora-updating needs --api-keys: anybody could load adapters")


def refuse_contradictions(flags: Any) -> None:
    """Raises ConfigError for the first pair of flags that contradict each other, or of which one is useless without the
    other. Flags that ``flags`` does not have count as not given."""

    def given(name: str) -> Any:
        return getattr(flags, name, None)

    for name in ("lora_modules", "lora_path", "allow_runtime_lora_updating", "lora_target_modules"):
        if given(name) and not flags.enable_lora:
            raise ConfigError(f"--{name.replace('_', '-')} needs --enable-lora")
    if bool(given("allow_runtime_lora_updating")) != bool(given("lora_path")):
        raise ConfigError(
            "--allow-runtime-lora-updating and --lora-path, whose adapters may be loaded, need each other"
        )
    if given("http_port") and flags.http_port == flags.grpc_port:
        raise ConfigError(f"--http-port and --grpc-port are both {flags.http_port}: each needs a port of its own")


def listed_origins(values: Sequence[str]) -> list[str]:
    """Returns all origins of --allowed-origins. Raises ConfigError for a text that no browser sends as an origin."""
    origins: list[str] = []
    for value in values:
        try:
            read = json.loads(value) if value.startswith("[") else [value]
        except ValueError:
            read = [value]
        for origin in read:
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
    least: float | None = None,
    most: float | None = None,
    also: str = "",
    secret: bool = False,
) -> Any:
    """Makes the dataclass field of a flag. A flag whose default is a tuple may be repeated.

    Args:
        default: the value where nothing is given.
        help: a sentence for ``--help``.
        kind: parses the flag's text; without it, the type of ``default`` does.
        choices: the only values that are allowed; empty: any.
        placement: the flag names or places one process, so ``pillion serve`` chooses it for each component.
        least, most: the bounds of a number, both allowed; :mod:`pillion.cli.checks` refuses others.
        also: another spelling, on the command line and in the file; it is no variable of the environment.
        secret: the value is shown nowhere, and child processes get it by their environment.
    """
    about: dict[str, Any] = {"help": help, "kind": kind or type(default), "choices": choices, "placement": placement}
    about |= {"least": least, "most": most, "also": also, "secret": secret}
    return field(default=default, repr=not secret, metadata=about)


def size_flag(default: int, help: str, **bounds: Any) -> Any:  # noqa: A002
    """Makes a flag that :func:`parse_size` reads."""
    return flag(default, help, kind=parse_size, **bounds)


def other_default(cls: type, name: str, default: Any) -> Any:
    """Makes the flag ``name`` of ``cls`` with another default; everything else about it is declared at ``cls``."""
    return field(default=default, metadata=next(one.metadata for one in fields(cls) if one.name == name))


@dataclass(frozen=True, kw_only=True)
class CommonFlags:
    """Holds the flags of every component."""

    redis_url: str = flag(
        "", "Redis of index and registry: redis://, rediss://, unix://, redis+sentinel://, redis+cluster://."
    )
    log_level: str = flag("info", "Least serious log line.", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "Log lines for people, or JSON objects.", choices=("text", "json"))
    heartbeat_ms: int = flag(1000, "Time between two heartbeats of a component.", least=10)
    heartbeat_timeout_ms: int = flag(5000, "Silence after which a component counts as lost.", least=50)
    metrics_port: int = flag(0, "Port of this component's metrics page. 0: none.", least=0, most=MAX_PORT)
    metrics_host: str = flag("127.0.0.1", "Address of the metrics page. It has no keys: keep clients away from it.")
    internal_tls_cert: str = flag(
        "", "PEM of this component's certificate towards other components. Empty: no TLS between components."
    )
    internal_tls_key: str = flag("", "PEM of that certificate's private key.")
    internal_tls_ca: str = flag("", "PEM of the authority that signs the components' certificates, and nothing else.")


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Says which model is served, and how its KV is cut. All components that serve the same model must agree on these
    flags."""

    model: str = flag("", "Hugging Face folder, GGUF file, hub id, or 'demo' (SmolLM2-135M-Instruct).")
    revision: str = flag("main", "Revision of a hub id.")
    served_model_name: tuple[str, ...] = flag(
        (),
        "Name that clients use. Repeat it for more names of the model; answers give the first. Default: the folder's or"
        " file's name.",
        kind=str,
    )
    tokenizer: str = flag("", "Folder or hub id whose tokenizer and chat template are used. Default: the model's own.")
    dtype: str = flag(
        "auto", "Type of plain weights, arithmetic and KV; float16 is run in float32.", choices=DTYPE_CHOICES
    )
    quantization: str = flag(
        "none",
        "Linear layers' weights of a plain checkpoint in 8 or 4 bits; int8-dynamic: their inputs in 8 bits, too (CPU).",
        kind=parse_quantization,
        choices=QUANTIZATION_CHOICES,
    )
    quantization_group_size: str = flag(
        "auto",
        "Weights that share a scale; auto: 32 in int4, all of an output in int8.",
        choices=("auto", "32", "128"),
    )
    activation_quantization: str = flag(
        "auto",
        "int8: inputs of linear layers with quantized weights in 8 bits, with a scale for each group (CPU). auto: as"
        " --quantization or the checkpoint says.",
        choices=("auto", "int8"),
    )
    max_model_len: int = size_flag(
        0,
        "Longest prompt plus answer, in tokens. 0: the model's own, at most 8192, its original one where"
        " longer texts need other rotary frequencies, and what the pool holds.",
        least=0,
    )
    block_size: int = flag(16, "Tokens per KV block.", least=1, most=1024)
    ignore_config_key: tuple[str, ...] = flag(
        (), "Key of config.json that is left out, where Pillion refuses it and the model is right without it.", kind=str
    )
    load_format: str = flag("auto", "Source of the weights; dummy: random ones, on a GPU.", choices=("auto", "dummy"))

    def __post_init__(self) -> None:
        given: object = self.served_model_name
        if isinstance(given, str):
            # A program may give one name as a text.
            object.__setattr__(self, "served_model_name", (given,) if given else ())


@dataclass(frozen=True, kw_only=True)
class AnswerFlags:
    """Says how answers are sampled where a client does not say it, and how they are read: which part is reasoning, and
    which calls a tool."""

    generation_config: str = flag(
        "auto",
        "Where the model's sampling defaults come from: auto: from its generation_config.json or GGUF metadata; vllm or"
        " none: from nowhere; else from a folder's generation_config.json.",
    )
    override_generation_config: str = flag(
        "", "Sampling defaults that go before those, in JSON, such as '{\"temperature\": 0.6}'.", kind=parse_override
    )

    chat_template: str = flag("", "File with a chat template (Jinja) that is used in place of the model's own.")
    allow_special_tokens_in_messages: bool = flag(
        False, "Let special tokens that clients spell in messages and tools be special tokens, not text."
    )
    default_chat_template_kwargs: str = flag(
        "",
        "Variables of the chat template where a request gives none, in JSON, such as '{\"enable_thinking\": false}'.",
        kind=parse_template_kwargs,
    )
    tool_call_parser: str = flag(
        "auto",
        "How the model calls tools, a format of docs/tools.md or none; auto: as its chat template says, generic where"
        " that knows no tools.",
    )
    reasoning_parser: str = flag(
        "auto", "How the model marks reasoning, a format of docs/tools.md or none; auto: as its chat template says."
    )
    enable_auto_tool_choice: bool = flag(True, "Let models choose to call a tool, as tool_choice auto asks.")


@dataclass(frozen=True, kw_only=True)
class ServedModelFlags(AnswerFlags, ModelFlags):
    """Names a model that a gateway serves, and how clients name it."""


@dataclass(frozen=True, kw_only=True)
class ComputeFlags(ModelFlags):
    """Says how the model is computed. All workers of a cluster must agree on these flags."""

    device: str = flag(
        "auto", "Computes and holds KV blocks; auto: a GPU where there is one.", choices=("auto", "cpu", "cuda")
    )
    kv_cache_dtype: str = flag(
        "auto", "Type of KV; fp8, int8 (CPU): 8 bits; auto: that of --dtype.", choices=("auto", "fp8", "int8")
    )
    enforce_eager: bool = flag(False, "Launch a GPU's steps kernel by kernel instead of as CUDA graphs.")
    batch_invariant: bool = flag(
        False, "Compute the same bits on a GPU whatever is in the batch, which is slower; CPU kernels always do."
    )
    cpu_kernels: str = flag("auto", "Kernels on a CPU; auto: the best, torch: torch's own.", choices=CPU_KERNEL_CHOICES)
    exact_weights: bool = flag(
        False, "Never round quantized weights on a CPU; matrix tiles else multiply them as bfloat16, which is quicker."
    )


@dataclass(frozen=True, kw_only=True)
class PoolFlags:
    """Describes the memory of the KV pool."""

    kv_pool_bytes: int = size_flag(0, "Memory for KV blocks. 0: 1 GiB; on a GPU, by --gpu-memory-utilization.", least=0)
    gpu_memory_utilization: float = flag(
        0.9,
        "Share of the GPU's memory for weights, workspaces and KV pool together.",
        least=0,
        most=1,
    )
    host_bytes: int = size_flag(
        0, "Pinned host memory for blocks that leave a GPU's pool, before the disk. 0: none.", least=0
    )


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """Says how many processes share a worker's model."""

    tensor_parallel_size: int = flag(
        1, "Processes (ranks) over which each worker splits the model.", least=1, most=MAX_RANKS
    )


@dataclass(frozen=True, kw_only=True)
class EnableLoraFlags:
    """Says whether requests may name adapters (LoRA)."""

    enable_lora: bool = flag(False, "Serve LoRA adapters.")


@dataclass(frozen=True, kw_only=True)
class PrepareFlags(EnableLoraFlags, RankFlags, ComputeFlags):
    """Holds the flags of ``pillion prepare``, which makes a model ready for one number of ranks."""


@dataclass(frozen=True, kw_only=True)
class ThreadFlags(RankFlags):
    """Says on how many threads, and on which cores, a forward pass runs."""

    cpu_threads: int = flag(
        0, "Threads of the forward pass on a CPU. 0: this worker's share of the cores.", least=0, most=MAX_CPU_THREADS
    )
    cpu_affinity: str = flag("", "Cores of those threads in order, such as 0,1 or 4-7. Empty: the system chooses.")


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """Sets the budgets of a decode worker's step."""

    max_num_batched_tokens: int = size_flag(
        0,
        "Token budget of a decode step (I5). 0: 256 on a CPU; on a GPU 512 to 8,192, by its speed and memory, the"
        " model and --target-itl-ms.",
        least=0,
        most=MAX_STEP_TOKENS,
    )
    max_num_seqs: int = flag(64, "Most sequences that run at once on a decode worker.", least=1)
    speculative_config: SpeculativeConfig = flag(  # noqa: RUF009  (a field, as all flags are)
        NO_SPECULATION,
        "How tokens are drafted, in vLLM's JSON, such as "
        '\'{"method": "ngram", "num_speculative_tokens": 5}\'. Empty: none are.',
        kind=parse_speculative_config,
    )


@dataclass(frozen=True, kw_only=True)
class PrefixCachingFlags:
    """Says whether KV is reused between requests."""

    enable_prefix_caching: bool = flag(True, "Reuse the KV of prompts and answers that begin alike.")


@dataclass(frozen=True, kw_only=True)
class ChunkedPrefillFlags:
    """Says whether prompts are cut into chunks."""

    enable_chunked_prefill: bool = flag(True, "Cut prompts into chunks. Without it a prompt runs whole, in one step.")


@dataclass(frozen=True, kw_only=True)
class LoraFlags(EnableLoraFlags):
    """Says for how many adapters (LoRA), and how large ones, workers have room."""

    max_loras: int = flag(
        8, "Most adapters that a worker keeps ready, and so that a step uses.", least=1, most=MAX_LORAS
    )
    max_lora_rank: int = flag(16, "Largest rank of an adapter.", least=1, most=512)
    lora_target_modules: tuple[str, ...] = flag(
        (),
        "Linear layers that adapters may change, as PEFT names them: q_proj,v_proj... Repeat for more. Default: all.",
        kind=str,
    )


@dataclass(frozen=True, kw_only=True)
class RequestServerFlags(ChunkedPrefillFlags, CommonFlags):
    """Holds the flags that both workers and gateways have."""

    component_id: str = flag("", "Unique name of this process. Default: one made of role and pid.", placement=True)
    drain_timeout_s: float = flag(2.0, "Time that requests have to finish when the process is told to stop.", least=0)


@dataclass(frozen=True, kw_only=True)
class InternalServerFlags(CommonFlags):
    """Holds the flags of KV nodes and workers, whose ports only components use."""

    insecure_internal: bool = flag(
        False, "Listen beyond loopback without TLS: all who reach it may read every prompt.", placement=True
    )
    attach_socket: str = flag(
        "/run/pillion/kvnode.sock", "Unix socket over which workers map the pool.", placement=True
    )


@dataclass(frozen=True, kw_only=True)
class KVNodeFlags(PoolFlags, InternalServerFlags):
    """Holds the flags of ``pillion kvnode``, the owner of one memory domain's pool."""

    node_id: str = flag("kvnode-0", "Name of this node, unique in the cluster.", placement=True)
    node_listen: str = flag(
        "127.0.0.1:50061", "Address of the node's gRPC service (host:port or unix:path).", placement=True
    )
    node_advertise: str = flag("", ADVERTISE, placement=True)
    kv_device: str = flag(
        "cpu", "Where the KV pool is: cpu, cuda, cuda:N, or divided, as in cuda:0,cuda:1.", placement=True
    )
    keeper_socket: str = flag(
        "",
        "Unix socket of the process that keeps this node's pool over its death (pillion keeper). Empty: the pool goes"
        " with the node.",
        placement=True,
    )
    kv_transport: str = flag("auto", "What moves blocks between nodes.", choices=("auto", "nixl", "grpc"))
    hand_over_timeout_s: float = flag(
        0.0, "Time that a stopping node may take to copy its warmest blocks to other nodes, or to its disk.", least=0
    )
    disk_path: str = flag("", "Folder for KV blocks that leave the pool. Empty: they are forgotten.")
    disk_bytes: int = size_flag(10 * 2**30, "Most bytes that this folder may hold.", least=0)
    object_url: str = flag("", "Bucket to which KV blocks are copied, s3://BUCKET/PREFIX?endpoint=URL. Empty: none.")


@dataclass(frozen=True, kw_only=True)
class WorkerFlags(LoraFlags, ThreadFlags, RequestServerFlags, InternalServerFlags, ComputeFlags):
    """Holds the flags of both kinds of workers."""

    listen: str = flag("127.0.0.1:0", "Address of the worker's gRPC service (host:port or unix:path).", placement=True)
    advertise: str = flag("", ADVERTISE, placement=True)
    core_lending_table: str = flag(
        "", "File by which the workers of a host lend each other cores. Empty: this worker lends none.", placement=True
    )
    first_core: int = flag(0, "This worker's first core in that lending table.", least=0, placement=True)
    enable_expert_parallel: bool = flag(
        False, "Give each rank on a GPU whole experts of a mixture, instead of a part of each."
    )
    pipeline_parallel_size: int = flag(
        1,
        "Stages over which each prefill worker splits the model's layers; a stage is --tensor-parallel-size processes.",
        least=1,
        most=16,
    )

    @property
    def processes(self) -> int:
        """Gives the number of processes that a worker is: the ranks of all of its stages."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def step_budget_tokens(self) -> int:
        """Gives the token budget of a step; each kind of worker has a flag for it. It is 0 until
        :func:`pillion.engine.backends.devices.with_budgets` has chosen one."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PrefillFlags(WorkerFlags):
    """Holds the flags of ``pillion prefill``, which computes parts of prompts in chunks and commits their blocks."""

    max_num_batched_prefill_tokens: int = size_flag(
        0,
        "Token budget of a prefill step. 0: 512 on a CPU; on a GPU 512 to 8,192, by its speed and the model.",
        least=0,
        most=MAX_STEP_TOKENS,
    )

    @property
    def step_budget_tokens(self) -> int:
        return self.max_num_batched_prefill_tokens


@dataclass(frozen=True, kw_only=True)
class DecodeFlags(StepFlags, WorkerFlags):
    """Holds the flags of ``pillion decode``, which runs prompt tails and decodes under one token budget."""

    target_itl_ms: float | str = flag(
        AUTO,
        "Inter-token latency to aim at, within --max-num-batched-tokens. auto: 2.5 times that without prompts, more"
        " where many wait; 0: off.",
        kind=parse_target_itl_ms,
    )

    @property
    def step_budget_tokens(self) -> int:
        return self.max_num_batched_tokens


@dataclass(frozen=True, kw_only=True)
class GatewayFlags(LoraFlags, PrefixCachingFlags, RequestServerFlags, ServedModelFlags):
    """Holds the flags of ``pillion gateway``, the public edge."""

    also_model: tuple[str, ...] = flag(
        (),
        "Another served model: NAME=MODEL[,dtype=D][,max-model-len=N][,revision=R][,tokenizer=T][,quantization=Q]"
        "[,quantization-group-size=G][,activation-quantization=A][,tool-call-parser=P][,reasoning-parser=P]"
        "[,generation-config=C][,chat-template=F]. Repeat it for more.",
        kind=str,
    )
    host: str = flag("127.0.0.1", "Address of the public ports.")
    http_port: int = flag(8000, "Port of the HTTP API. 0: any free one.", least=0, most=MAX_PORT, also="port")
    grpc_port: int = flag(50051, "Port of the public gRPC service. 0: any free one.", least=0, most=MAX_PORT)
    split_policy: str = flag("auto", "Where prefill ends: auto, disaggregated, colocated or fraction:x.")
    chunk_size: int = size_flag(512, "Tokens per prefill chunk; a multiple of the block size.", least=1)
    max_inflight_requests: int = flag(256, "Most requests in the gateway at once; more are refused.", least=1)
    max_inflight_tokens: int = size_flag(2_000_000, "Most prompt tokens in the gateway at once.", least=1)
    allowed_origins: tuple[str, ...] = flag(
        (),
        "Web pages of this origin, such as https://chat.example.org, may use the HTTP API; '*' is any. Repeat it for"
        " more, or give a JSON list.",
        kind=str,
    )
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "Name under which clients may ask the HTTP port, as their Host header has it; * for any. Repeat it for more."
        " Without API keys, on a loopback address, others than localhost, addresses and --host are refused.",
        kind=str,
    )
    strict_fields: bool = flag(
        False,
        "Refuse fields of HTTP bodies that no API documents, at any depth, instead of taking them without effect and"
        " naming them in the header x-pillion-ignored.",
    )
    ui: bool = flag(False, "Serve a page for people at /ui: chat, and a live picture of the cluster for operators.")
    lora_modules: tuple[str, ...] = flag(
        (),
        'A LoRA adapter, as PEFT writes it: NAME=PATH, or {"name": NAME, "path": PATH, "base_model_name": MODEL}.'
        " Repeat it for more.",
        kind=str,
    )
    allow_runtime_lora_updating: bool = flag(
        False, "Let operators load and unload adapters of --lora-path while the gateway runs."
    )
    lora_path: tuple[str, ...] = flag((), "Folder whose adapters operators may load. Repeat it for more.", kind=str)
    api_keys: str = flag("", "TOML file of tenants and hashed API keys. Empty: everybody is served.")
    api_key: tuple[str, ...] = flag(
        (),
        "A key that clients have to send; repeat it for more. Others on this machine may read it here: better is the"
        " variable PILLION_API_KEY, with spaces between keys, or --api-keys.",
        kind=parse_api_key,
        secret=True,
    )
    root_path: str = flag(
        "", "Path under which a proxy shows the HTTP port, such as /models/small.", kind=parse_root_path
    )
    tls_cert: str = flag("", "PEM of the certificate chain of both public ports. Empty: plain text.")
    tls_key: str = flag("", "PEM of the public certificate's private key.")
    tls_ca: str = flag("", "PEM of the authorities that sign clients' certificates. Empty: clients need none.")
    batch_path: str = flag("", "Folder for files and batches (/v1/batches). Empty: there are none.")
    record_path: str = flag(
        "",
        "Folder for bundles of requests that failed, were slow or are to be kept, or redis: the one of --redis-url."
        " Empty: none.",
    )
    record_share: float = flag(0.0, "Share of all other requests that are recorded.", least=0, most=1)
    record_content: Literal["none", "hash", "full"] = flag(
        "hash",
        "What bundles have of texts and token ids; a replay needs full.",
        choices=("none", "hash", "full"),
    )
    record_key_file: str = flag(
        "",
        "File with the key that signs bundles, of 16 bytes or more; Redis needs one. Empty: record.key in their folder,"
        " made anew.",
    )
    drain_timeout_s: float = other_default(RequestServerFlags, "drain_timeout_s", 30.0)
    gateway_workers: int = flag(1, "Gateway processes behind the same two public ports.", least=1, most=MAX_WORKERS)
    probe_listen: str = flag("", "Another address whose gRPC health says whether the gateway is ready.", placement=True)
    share_ports: bool = flag(False, "Let this user's other processes listen on the same public ports.", placement=True)


@dataclass(frozen=True, kw_only=True)
class ServeFlags(GatewayFlags, DecodeFlags, PrefillFlags, KVNodeFlags):
    """Holds the flags of ``pillion serve``, which runs the whole cluster on this machine. Placement flags stay at their
    defaults here."""

    # The terminal shows only what its user has to know; a component that runs alone writes more into its log.
    log_level: str = other_default(CommonFlags, "log_level", "warning")
    prefill_workers: int = flag(
        -1, "Prefill workers to start. -1: one on a CPU, none on a GPU, which does both.", least=-1, most=MAX_WORKERS
    )
    decode_workers: int = flag(1, "Decode workers to start.", least=1, most=MAX_WORKERS)
    prefill_tensor_parallel_size: int = flag(
        0,
        "Ranks of each prefill worker. 0: as many as --tensor-parallel-size says.",
        least=0,
        most=MAX_RANKS,
    )


@dataclass(frozen=True, kw_only=True)
class OfflineFlags(
    LoraFlags, StepFlags, PoolFlags, ThreadFlags, PrefixCachingFlags, ChunkedPrefillFlags, AnswerFlags, ComputeFlags
):
    """Holds the flags of ``pillion.LLM``, which runs a decode worker and its pool in the caller's process."""

"""Every flag's one home. A part's flags are one frozen dataclass; the command line, the environment and the config file
are three ways to fill it (:mod:`pillion.cli.flags`), and nothing changes it afterwards.

A flag is a dataclass field: ``max_num_seqs`` is ``--max-num-seqs``, ``PILLION_MAX_NUM_SEQS`` and the key
``max-num-seqs`` of the config file (TOML). Order of precedence: command line, environment, file, default.
Where vLLM has the thing, the name is vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from pillion.errors import ConfigError

# Flags that several parts take and pillion serve hands on.
CHUNKED_PREFILL = "Cut prompts into chunks. Without it a prompt runs whole, in one step."
TARGET_ITL = "Inter-token latency to aim at; --max-num-batched-tokens is then the most a step may take. 0: off."
CPU_THREADS = "Threads of the forward pass on a CPU. 0: this worker's share of the cores."
CPU_AFFINITY = "Cores of those threads, one after the other, such as 0,1 or 4-7. Empty: the system chooses."
CPU_KERNELS = "Kernels of the forward pass on a CPU, by instruction set; auto: the best it has, torch: torch's own."
QUANTIZATION = "int8 keeps the weights of linear layers in 8 bits, with a scale for each output."
CPU_KERNEL_CHOICES = ("auto", "avx512_bf16", "avx512", "avx2", "neon", "torch")
QUANTIZATION_CHOICES = ("none", "int8")
DEVICE = "What computes and where KV blocks lie: a GPU or the CPU; auto: a GPU where there is one."
DEVICE_CHOICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPE = "Type of KV on a GPU; fp8: 8 bits with a scale for each token and head. auto: the weights' type."
INSECURE_INTERNAL = "Listen on another address than loopback without TLS: whoever reaches it may read every prompt."
ALSO_MODEL = "Another model that is served: NAME=MODEL[,dtype=D][,max-model-len=N][,revision=R]. Again for more."
ADVERTISE = "Address that others reach it at. Default: the one it listens on; of 0.0.0.0 or ::, the one towards Redis."
KV_POOL_BYTES = "Memory for KV blocks. 0: 1 GiB of a host's memory, or by --gpu-memory-utilization on a GPU."
KV_DEVICE = "Where the KV pool is: cpu, cuda or cuda:N."
GPU_MEMORY_UTILIZATION = "Share of the GPU's memory that weights, workspaces and the KV pool may take together."
HOST_BYTES = "Pinned host memory for blocks that leave a pool on a GPU, before the disk. 0: none."
SPECULATIVE_TOKENS = "Most tokens that a step guesses for a stream, by looking back in its text. 0: none."

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_size(text: str) -> int:
    """Reads "4096", "32K" (thousands), "1GiB" or "512 MB" (bytes). Raises ConfigError on anything else."""
    cleaned = text.strip().upper().removesuffix("B").replace(" ", "").replace("_", "")
    digits = cleaned.rstrip("KMGI")
    suffix = cleaned[len(digits) :]
    if suffix not in _SUFFIXES or not digits.replace(".", "", 1).isdigit():
        raise ConfigError(f"{text!r} is not a size; write 4096, 32K or 1GiB")
    # Fractions, not floats: a size above 2**53 must not lose its last bits.
    return int(Fraction(digits) * _SUFFIXES[suffix])


def flag(default: Any, help: str, *, kind: Callable[[str], Any] | None = None, choices: tuple[str, ...] = ()) -> Any:  # noqa: A002
    """A dataclass field that is a flag. ``kind`` parses its text; default: the type of ``default``. One whose default
    is a tuple may be said several times."""
    return field(default=default, metadata={"help": help, "kind": kind or type(default), "choices": choices})


@dataclass(frozen=True, kw_only=True)
class CommonFlags:
    """What every part takes."""

    redis_url: str = flag(
        "", "Redis of index and registry: redis://, rediss://, unix://, redis+sentinel://, redis+cluster://."
    )
    log_level: str = flag("info", "Least serious log line.", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "Log lines for people, or JSON objects.", choices=("text", "json"))
    heartbeat_ms: int = flag(1000, "Time between two heartbeats of a part.")
    heartbeat_timeout_ms: int = flag(5000, "Silence after which a part counts as lost.")
    metrics_port: int = flag(0, "Port of this part's metrics page. 0: none.")
    metrics_host: str = flag("127.0.0.1", "Address of that page. It has no keys: keep clients away from it.")
    vllm_metric_names: bool = flag(True, "Show metrics under vLLM's names as well.")
    internal_tls_cert: str = flag(
        "", "PEM of this part's certificate towards other parts. Empty: no TLS between parts."
    )
    internal_tls_key: str = flag("", "PEM of its private key.")
    internal_tls_ca: str = flag("", "PEM of the authority that signs the parts' certificates, and nothing else.")


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Which model, and how its KV is cut. All parts that speak of the same model must agree on these."""

    model: str = flag("", "Hugging Face folder, GGUF file, hub id, or 'demo' (SmolLM2-135M-Instruct).")
    revision: str = flag("main", "Revision of a hub id.")
    served_model_name: str = flag("", "Name that clients use. Default: the folder's or file's name.")
    dtype: str = flag("auto", "Type of weights and KV.", choices=("auto", "bfloat16", "float32"))
    max_model_len: int = flag(
        0, "Longest prompt plus answer, in tokens. 0: what the model allows, at most 8192.", kind=parse_size
    )
    block_size: int = flag(16, "Tokens per KV block.")
    load_format: str = flag(
        "auto", "Where weights come from; dummy: random ones, on a GPU, to measure.", choices=("auto", "dummy")
    )


@dataclass(frozen=True, kw_only=True)
class ComputeFlags(ModelFlags):
    """How the model is computed: what is made ready beside it, and what all workers of a cluster must agree on."""

    device: str = flag("auto", DEVICE, choices=DEVICE_CHOICES)
    kv_cache_dtype: str = flag("auto", KV_CACHE_DTYPE, choices=("auto", "fp8"))
    enforce_eager: bool = flag(False, "Launch a GPU's steps kernel by kernel instead of as CUDA graphs.")
    cpu_kernels: str = flag("auto", CPU_KERNELS, choices=CPU_KERNEL_CHOICES)
    quantization: str = flag("none", QUANTIZATION, choices=QUANTIZATION_CHOICES)


@dataclass(frozen=True, kw_only=True)
class KVNodeFlags(CommonFlags):
    """``pillion kvnode``: the owner of one memory domain's pool."""

    node_id: str = flag("kvnode-0", "Name of this node, unique in the cluster.")
    node_listen: str = flag("127.0.0.1:50061", "Address of the node's gRPC service (host:port or unix:path).")
    node_advertise: str = flag("", ADVERTISE)
    insecure_internal: bool = flag(False, INSECURE_INTERNAL)
    attach_socket: str = flag("/run/pillion/kvnode.sock", "Unix socket over which workers map the pool.")
    kv_pool_bytes: int = flag(0, KV_POOL_BYTES, kind=parse_size)
    kv_device: str = flag("cpu", KV_DEVICE)
    gpu_memory_utilization: float = flag(0.9, GPU_MEMORY_UTILIZATION)
    host_bytes: int = flag(0, HOST_BYTES, kind=parse_size)
    decode_reserve_percent: int = flag(10, "Share of the pool that prompts leave to running decodes (I5).")
    max_waiting_tickets: int = flag(1024, "Most requests that wait for memory.")
    eviction_policy: str = flag("lru", "What leaves the pool first.", choices=("lru", "lfu", "arc"))
    low_watermark_percent: int = flag(2, "Free share of the pool below which blocks are evicted ahead of need.")
    high_watermark_percent: int = flag(5, "Free share of the pool at which that ends.")
    kv_transport: str = flag("auto", "What moves blocks between nodes.", choices=("auto", "nixl", "grpc"))
    verify_blocks: bool = flag(True, "Check the checksum of every block that comes from another node or from disk.")
    fetch_timeout_ms: int = flag(2000, "Longest time that blocks from another node or from disk are waited for.")
    max_fetch_bytes: int = flag(2**30, "Most bytes that one fetch may bring.", kind=parse_size)
    disk_path: str = flag("", "Folder for blocks that leave the pool. Empty: they are forgotten.")
    disk_bytes: int = flag(10 * 2**30, "Most that this folder may hold.", kind=parse_size)


@dataclass(frozen=True, kw_only=True)
class WorkerFlags(CommonFlags, ComputeFlags):
    """What prefill and decode workers share."""

    component_id: str = flag("", "Name of this worker, unique in the cluster. Default: role, host name and process id.")
    listen: str = flag("127.0.0.1:0", "Address of the worker's gRPC service (host:port or unix:path).")
    advertise: str = flag("", ADVERTISE)
    insecure_internal: bool = flag(False, INSECURE_INTERNAL)
    attach_socket: str = flag("/run/pillion/kvnode.sock", "The KV node's Unix socket.")
    cpu_threads: int = flag(0, CPU_THREADS)
    cpu_affinity: str = flag("", CPU_AFFINITY)
    enable_chunked_prefill: bool = flag(True, CHUNKED_PREFILL)
    drain_timeout_s: float = flag(2.0, "Time that what runs has to finish when the worker is told to stop.")


@dataclass(frozen=True, kw_only=True)
class PrefillFlags(WorkerFlags):
    """``pillion prefill``: turns spans of chunks into committed blocks."""

    max_num_batched_prefill_tokens: int = flag(512, "Token budget of a prefill step.", kind=parse_size)
    max_waiting_spans: int = flag(256, "Most spans that wait or run on a worker.")


@dataclass(frozen=True, kw_only=True)
class DecodeFlags(WorkerFlags):
    """``pillion decode``: prompt tails and decodes under one token budget."""

    max_num_batched_tokens: int = flag(256, "Token budget of a decode step (I5).", kind=parse_size)
    max_num_seqs: int = flag(64, "Most streams that run at once.")
    target_itl_ms: float = flag(0.0, TARGET_ITL)
    num_speculative_tokens: int = flag(0, SPECULATIVE_TOKENS)
    max_waiting_seqs: int = flag(1024, "Most streams that wait on a worker.")


@dataclass(frozen=True, kw_only=True)
class EdgeFlags(CommonFlags, ModelFlags):
    """What ``pillion gateway`` and ``pillion serve`` say about the public edge."""

    also_model: tuple[str, ...] = flag((), ALSO_MODEL, kind=str)

    host: str = flag("127.0.0.1", "Address of the public ports.")
    http_port: int = flag(8000, "Port of the HTTP API. 0: any free one.")
    grpc_port: int = flag(50051, "Port of the public gRPC service. 0: any free one.")
    split_policy: str = flag("auto", "Where prefill ends: auto, disaggregated, colocated or fraction:x.")
    chunk_size: int = flag(512, "Tokens per prefill chunk; a multiple of the block size.", kind=parse_size)
    enable_prefix_caching: bool = flag(True, "Reuse the KV of prompts and answers that begin alike.")
    enable_chunked_prefill: bool = flag(True, CHUNKED_PREFILL)
    max_inflight_requests: int = flag(256, "Most requests in the gateway at once; more are refused.")
    max_inflight_tokens: int = flag(2_000_000, "Most prompt tokens in the gateway at once.", kind=parse_size)
    max_running_requests: int = flag(0, "Most requests that a model's workers are given at once; 0: by their seats.")
    api_keys: str = flag("", "TOML file of tenants and hashed API keys. Empty: everybody is served.")
    tls_cert: str = flag("", "PEM of the certificate chain of both public ports. Empty: plain text.")
    tls_key: str = flag("", "PEM of its private key.")
    tls_ca: str = flag(
        "", "PEM of authorities; every client must show a certificate of theirs. Empty: none is asked for."
    )
    max_attempts: int = flag(4, "Times a request is tried over when parts are lost under it.")
    max_message_bytes: int = flag(16 * 2**20, "Largest gRPC message that is taken or sent.", kind=parse_size)
    drain_timeout_s: float = flag(30.0, "Time that streams have to finish when the gateway is told to stop.")
    gateway_workers: int = flag(1, "Gateway processes behind the same two public ports.")


@dataclass(frozen=True, kw_only=True)
class GatewayFlags(EdgeFlags):
    """``pillion gateway``: the public edge."""

    component_id: str = flag(
        "", "Name of this gateway, unique in the cluster. Default: role, process id and a random part."
    )
    probe_listen: str = flag("", "Another address (host:port or unix:path) whose gRPC health says whether it is ready.")
    share_ports: bool = flag(False, "Let other processes of this user listen on the same public ports.")


@dataclass(frozen=True, kw_only=True)
class ServeFlags(EdgeFlags, ComputeFlags):
    """``pillion serve``: the whole cluster on this machine; flags of the parts are handed on."""

    kv_pool_bytes: int = flag(0, KV_POOL_BYTES, kind=parse_size)
    gpu_memory_utilization: float = flag(0.9, GPU_MEMORY_UTILIZATION)
    host_bytes: int = flag(0, HOST_BYTES, kind=parse_size)
    decode_reserve_percent: int = flag(10, "Share of the pool that prompts leave to running decodes (I5).")
    disk_path: str = flag("", "Folder for KV blocks that leave the pool. Empty: they are forgotten.")
    disk_bytes: int = flag(10 * 2**30, "Most that this folder may hold.", kind=parse_size)
    fence_kill_after_s: float = flag(30.0, "A worker that stays fenced for longer is killed and started again.")
    prefill_workers: int = flag(
        -1, "Prefill workers to start. -1: one on a CPU; on a GPU none, there one process does both."
    )
    decode_workers: int = flag(1, "Decode workers to start.")
    max_num_batched_prefill_tokens: int = flag(512, "Token budget of a prefill step.", kind=parse_size)
    max_num_batched_tokens: int = flag(256, "Token budget of a decode step (I5).", kind=parse_size)
    max_num_seqs: int = flag(64, "Most streams that run at once on a decode worker.")
    target_itl_ms: float = flag(0.0, TARGET_ITL)
    num_speculative_tokens: int = flag(0, SPECULATIVE_TOKENS)
    cpu_threads: int = flag(0, CPU_THREADS)
    cpu_affinity: str = flag("", CPU_AFFINITY)


@dataclass(frozen=True, kw_only=True)
class OfflineFlags(ComputeFlags):
    """``pillion.LLM``: a decode worker and its pool in the caller's process."""

    kv_pool_bytes: int = flag(0, KV_POOL_BYTES, kind=parse_size)
    gpu_memory_utilization: float = flag(0.9, GPU_MEMORY_UTILIZATION)
    host_bytes: int = flag(0, HOST_BYTES, kind=parse_size)
    decode_reserve_percent: int = flag(10, "Share of the pool that prompts leave to running decodes (I5).")
    max_num_batched_tokens: int = flag(512, "Token budget of a step (I5).", kind=parse_size)
    max_num_seqs: int = flag(64, "Most answers that are generated at once.")
    num_speculative_tokens: int = flag(0, SPECULATIVE_TOKENS)
    enable_prefix_caching: bool = flag(True, "Reuse the KV of prompts and answers that begin alike.")
    enable_chunked_prefill: bool = flag(True, CHUNKED_PREFILL)
    cpu_threads: int = flag(0, CPU_THREADS)
    cpu_affinity: str = flag("", CPU_AFFINITY)

"""Resolves "auto" in the flags about devices, once when a process starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, TypeVar

from pillion.config import ComputeFlags, OfflineFlags, PrefillFlags, ServeFlags, StepFlags, WorkerFlags
from pillion.kvstore.memory.domain import CPU, DEFAULT_HOST_POOL_BYTES
from pillion.rooms import Seam, entered_one

F = TypeVar("F", bound=ComputeFlags)
W = TypeVar("W", bound=WorkerFlags)
# On a CPU a step has these tokens where no flag says otherwise: it computes so long for each token that larger steps
# gain nothing (docs/decisions/scheduling.md). In an LLM prompts come all at once, and nobody waits for single tokens.
CPU_DECODE_TOKENS = 256
CPU_PREFILL_TOKENS = CPU_LLM_TOKENS = 512


class Devices(Protocol):
    """Describes the devices beside the CPU that compute: GPUs. No method imports torch."""

    def resolve(self, flags: ComputeFlags) -> str:
        """Resolves flags as :func:`resolve_device` does."""

    def pool_device(self, processes: int) -> str:
        """Returns the ``--kv-device`` of workers of at most so many processes that compute on these devices."""

    def step_tokens(self, flags: WorkerFlags) -> int:
        """Returns the token budget of a worker's steps that suits the device and the model, which it prepares; 0 where
        that of the CPU does. Raises ConfigError for a model that cannot be prepared."""

    def check_ranks(self, ranks: int, stages: int = 1) -> None:
        """Raises ConfigError where a worker of so many stages of so many ranks cannot compute on these devices."""

    def words(self) -> str:
        """Names the kernels that run on these devices, and how many devices there are."""


DEVICES = Seam[Devices]("engine.backends.devices")


def devices_beside_cpu(device: str) -> Devices:
    """Returns the devices that ``--device`` names."""
    return entered_one(DEVICES)


def resolve_device(flags: ComputeFlags) -> str:
    """Returns "cpu" or "cuda". Raises ConfigError for a missing GPU, and for flags that the device does not support."""
    return entered_one(DEVICES).resolve(flags)


def pool_device(device: str, processes: int = 1) -> str:
    """Returns the devices on which the KV node of workers on ``device``, of at most so many processes (ranks of
    stages), keeps its pool: ``--kv-device``."""
    return CPU if device == CPU else devices_beside_cpu(device).pool_device(processes)


def resolved(flags: F) -> F:
    """Returns the flags of a cluster or an LLM without "auto". Raises ConfigError like :func:`resolve_device`.

    The budgets of steps on a GPU stay 0: each worker chooses its own when it has the model (:func:`with_budgets`)."""
    device = resolve_device(flags)
    flags = replace(flags, device=device)
    if device == CPU:
        flags = replace(flags, **cpu_budgets(flags))
    if isinstance(flags, ServeFlags | OfflineFlags) and not flags.kv_pool_bytes and pool_device(device) == CPU:
        flags = replace(flags, kv_pool_bytes=DEFAULT_HOST_POOL_BYTES)
    if isinstance(flags, ServeFlags) and flags.prefill_workers < 0:
        flags = replace(flags, prefill_workers=1 if device == CPU else 0)
    return flags


def with_budgets(flags: W) -> W:
    """Returns a worker's flags with a number for the token budget of its steps. Raises ConfigError like
    :func:`resolve_device`, and for a model that cannot be prepared."""
    if flags.step_budget_tokens:
        return flags
    budgets, device = cpu_budgets(flags), resolve_device(flags)
    tokens = 0 if device == CPU else devices_beside_cpu(device).step_tokens(flags)
    return replace(flags, **{name: max(tokens, least) if tokens else least for name, least in budgets.items()})


def cpu_budgets(flags: object) -> dict[str, Any]:
    """Returns the budgets that no flag sets, by the names of their flags: those of a CPU, but no less than each step
    must hold. ``flags`` are those of a worker, a cluster or an LLM."""
    budgets: dict[str, Any] = {}
    if isinstance(flags, StepFlags) and not flags.max_num_batched_tokens:
        usual = CPU_LLM_TOKENS if isinstance(flags, OfflineFlags) else CPU_DECODE_TOKENS
        budgets["max_num_batched_tokens"] = max(usual, flags.max_num_seqs)
    if isinstance(flags, PrefillFlags) and not flags.max_num_batched_prefill_tokens:
        budgets["max_num_batched_prefill_tokens"] = max(CPU_PREFILL_TOKENS, flags.block_size)
    return budgets

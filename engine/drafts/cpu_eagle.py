"""EAGLE-3 head on the CPU kernels: its operations, its packed weights, and its backend.

    first pass:      the model's states --fc--> hidden
    later passes:    rows of the last pass's hidden --copied by the host--> hidden
    both:            tokens --embedding--> embedded --norm--> normed token --its half of qkv--> qkv
                     hidden --norm--> normed --its half of qkv--> qkv --rotate, write, attend--> attended
                     hidden, attended --o, MLP--> hidden --norm, LM head--> logits

The two halves of the projection's inputs are never concatenated: each has its own matrix, and the second product is
added to the first. The weights are private to this process, since a head is only one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from pillion.engine.backends.backend import KVLayout
from pillion.engine.backends.cpu.cpu_backend import CpuBackend
from pillion.engine.backends.cpu.cpu_layer import LayerEmitter, projections
from pillion.engine.backends.cpu.cpu_model import CpuModel, ModelPlan, compile_operations
from pillion.engine.backends.cpu.cpu_operations import OperationBuilder
from pillion.engine.backends.cpu.cpu_weights import WIDE_KINDS, InMemoryMatrices, MatrixPacker
from pillion.engine.backends.host_backend import HostBackend
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.drafts.eagle_config import EagleConfig
from pillion.engine.drafts.eagle_head import EagleBackend
from pillion.engine.drafts.eagle_weights import EagleWeights
from pillion.engine.models.layer_weights import LayerWeights
from pillion.engine.models.model_shard import whole_model
from pillion.engine.models.rope import rope_tables
from pillion.host.core_lending_table import CoreShare
from pillion.kernels.cpu.rows.rows import Embed
from pillion.kernels.cpu.runtime.program import Buffer, Operation, Program
from pillion.kernels.step import Int32, States, StepBatch
from pillion.kernels.torch.torch_linear import Linear

_LAYER = "layers.0."
# The half of the qkv matrix that multiplies hidden states; the other half has the matrix's usual name.
_STATE_QKV = "state_qkv"


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """Operations and buffers of a head.

    Attributes:
        first: first pass, from the main model's hidden states in ``states``.
        following: later passes, from rows of ``outputs`` that the host copied to ``hidden``.
        outputs: the head's hidden states of the sampled rows.
    """

    first: ModelPlan
    following: tuple[Operation, ...]
    states: Buffer
    hidden: Buffer
    outputs: Buffer


def pack_head(weights: EagleWeights, config: EagleConfig, dtype: str) -> InMemoryMatrices:
    """Pack a head's weights, which are never quantized, for the CPU kernels."""
    packed, layer, hidden = InMemoryMatrices(), config.layer, config.layer.hidden_size
    packer = MatrixPacker(packed, layer, whole_model(layer), WIDE_KINDS[dtype])
    qkv = weights.layer["qkv"]
    assert isinstance(qkv, Linear)
    assert isinstance(qkv.weight, torch.Tensor)
    packed.tensor("embedding", weights.embedding)
    packer.linear("fuse", weights.fuse)
    packer.norm("embedding_norm", weights.embedding_norm)
    packer.norm("state_norm", weights.state_norm)
    token_qkv = Linear.plain(qkv.weight[:, :hidden].contiguous(), qkv.bias)
    packer.layer(_LAYER, config.operations, LayerWeights({**weights.layer, "qkv": token_qkv}))
    packer.linear(_STATE_QKV, Linear.plain(qkv.weight[:, hidden:].contiguous()))
    packer.norm("final_norm", weights.final_norm)
    packer.linear("lm_head", weights.lm_head)
    return packed


def plan_head(
    config: EagleConfig, weights: InMemoryMatrices, layout: KVLayout, dtype: str, max_model_len: int
) -> HeadPlan:
    """Return the operations of an EAGLE head for chains of up to ``max_model_len`` entries."""
    layer = config.layer
    ropes, shard = rope_tables(layer, max_model_len), whole_model(layer)
    builder = OperationBuilder(layer, weights, layout, dtype, ropes, shard, layer.num_heads)
    sampled = replace(builder, rows_of="samples")
    states = builder.buffer("states", len(config.aux_hidden_state_layers) * config.state_size, builder.row_dtype)
    head = weights.linear("lm_head")
    logits = replace(sampled.buffer("logits", head.pairs * 32, "float32"), dense=True)
    following = tuple(_operations(config, builder, sampled, logits))
    first = (*builder.gemm("fuse", states, builder.hidden, "store"), *following)
    return HeadPlan(ModelPlan(first, builder.hidden, logits, ropes), following, states, builder.hidden, sampled.hidden)


def _operations(
    config: EagleConfig, builder: OperationBuilder, sampled: OperationBuilder, logits: Buffer
) -> Iterator[Operation]:
    """Yield the operations of a pass from the buffer ``hidden`` and the token ids to ``logits``."""
    width = config.layer.hidden_size
    embedded = builder.buffer("embedded", width, "float32")
    token = builder.buffer("normed_token", width, builder.row_dtype)
    values = {
        "table": builder.weights.tensors["embedding"],
        "hidden": embedded,
        "width": width,
        "first": 0,
        "tokens": config.layer.vocab_size,
        "scale": 1.0,
    }
    qkv = projections(builder, 0)
    yield Operation(Embed(builder.bf16), values)
    yield builder.norm("embedding_norm", token, embedded)
    yield from builder.gemm(f"{_LAYER}qkv", token, qkv, "store")
    yield builder.norm("state_norm")
    yield from builder.gemm(_STATE_QKV, builder.normed, qkv, "add")
    if config.norm_before_residual:
        yield builder.norm("state_norm", builder.hidden)
    yield from LayerEmitter(builder, sampled, 0, last=True).emit(config.operations[1:], qkv)
    yield sampled.norm("final_norm")
    yield from sampled.gemm("lm_head", sampled.normed, logits, "store")


def head_model(
    config: EagleConfig, weights: EagleWeights, layout: KVLayout, main: CpuModel, progress: Progress
) -> tuple[CpuModel, HeadPlan]:
    """Pack an EAGLE head for the model ``main``, and compile its kernels unless the code cache has them."""
    packed = pack_head(weights, config, main.dtype)
    plan = plan_head(config, packed, layout, main.dtype, main.max_model_len)
    kernels = compile_operations(plan.first.operations, main, progress)
    model = replace(
        main,
        config=config.layer,
        shard=whole_model(config.layer),
        layout=layout,
        weights=packed,
        plan=plan.first,
        kernels=kernels,
    )
    return model, plan


class CpuEagle(EagleBackend, CpuBackend):
    """:class:`EagleBackend` on the CPU kernels, with its own threads.

    Args:
        main: the model that the head drafts for, or its rank 0.
        threads, affinity, share: those of :class:`CpuBackend`.
    """

    def __init__(
        self,
        config: EagleConfig,
        weights: EagleWeights,
        layout: KVLayout,
        main: CpuModel,
        progress: Progress,
        threads: int,
        affinity: Sequence[int] = (),
        share: CoreShare | None = None,
    ) -> None:
        model, self._head = head_model(config, weights, layout, main, progress)
        CpuBackend.__init__(self, model, threads, affinity, share)
        self._following = Program(self._head.following, model.kernels, self.workspace)
        self._target_ids, self._draft_vocab_size = weights.target_ids, config.draft_vocab_size
        self._width = len(config.aux_hidden_state_layers) * config.state_size
        # Hidden states for the next pass: the main model's, or rows of the last pass's _num_outputs outputs.
        self._inputs: npt.NDArray[np.generic] = np.empty((0, self._width), self._head.states.dtype)
        self._reads_model = True
        self._num_outputs = 0

    def read(self, states: States) -> None:
        """Set the next pass's hidden states to the main model's ``states``, one per row."""
        self._inputs, self._reads_model = states, True

    def follow(self, rows: Sequence[int]) -> None:
        """Set the next pass's hidden states to the head's of the last pass; ``rows`` indexes its sampled rows."""
        outputs = self._rows(self._head.outputs, self._num_outputs, self.model.config.hidden_size)
        self._inputs, self._reads_model = outputs[list(rows)], False

    def warm_up(self, max_tokens: int) -> None:
        """Run the head once over zero hidden states."""
        tokens = min(max_tokens, self.model.max_model_len)
        self.read(np.zeros((tokens, self._width), self._head.states.dtype))
        HostBackend.warm_up(self, tokens)

    def _programs(self) -> tuple[Program, ...]:
        return (*super()._programs(), self._following)

    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Run a pass and return the logits [sampled rows, draft vocab]."""
        return super()._run(pool, batch)[:, : self._draft_vocab_size]

    def _fill(self, pool: torch.Tensor, batch: StepBatch, rows: Int32) -> None:
        super()._fill(pool, batch, rows)
        head, count = self._head, batch.num_tokens
        target = head.states if self._reads_model else head.hidden
        self._rows(target, count, self._inputs.shape[1])[:] = self._inputs[:count]
        self._num_outputs = len(rows)

    def _run_kernels(self, program: Program) -> None:
        super()._run_kernels(program if self._reads_model else self._following)

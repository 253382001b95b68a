"""EAGLE-3 head: the common base of its backends, its backend on torch, and its passes over the main model's pool.

A head's entry p is made of the model's hidden state at position p and of token p + 1; it drafts token p + 2:

    state --fc--> norm --.                                           .--> norm --lm head--> draft token, by d2t
    token --embedding--> norm --> [both] --qkv--> attention, MLP ----'--> state of the next entry, while drafting

This is EAGLE-3 (Li et al. 2025) as in ``speculators`` and vLLM. The head also runs on the CPU kernels
(:mod:`pillion.engine.drafts.cpu_eagle`) and on the GPU kernels (:mod:`pillion.engine.drafts.gpu_eagle`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch

from pillion.engine.backends.backend import LAYOUT_VERSION, Backend, KVLayout
from pillion.engine.backends.host_backend import FinishedStep, HostBackend, rows_of_states
from pillion.engine.drafts.draft_chains import DraftPlan
from pillion.engine.drafts.draft_model import DraftModel
from pillion.engine.drafts.eagle_chains import EagleChain
from pillion.engine.drafts.eagle_config import EagleConfig
from pillion.engine.drafts.eagle_weights import EagleWeights
from pillion.engine.models.decoder import LayerRun
from pillion.engine.models.rope import make_ropes
from pillion.engine.sampling.sampler import sample
from pillion.kernels.step import Sampled, SamplingRows, States, StepBatch
from pillion.kernels.torch.torch_attention import StepAttention


def eagle_layout(config: EagleConfig, block_size: int, dtype: str) -> KVLayout:
    """Return the layout of a head's KV, with ``block_size`` entries per slot."""
    layer = config.layer
    return KVLayout(LAYOUT_VERSION, 1, layer.num_kv_heads, layer.head_dim, block_size, dtype)


class EagleBackend(HostBackend):
    """Backend of an EAGLE head. :meth:`read` or :meth:`follow` sets the hidden states of the next step's rows; each
    step keeps the head's hidden states of its sampled rows. Logits are those of the draft vocabulary."""

    # The main model's id of each draft id, int64 [draft vocab]; None if ids are equal.
    _target_ids: torch.Tensor | None = None
    # Logits by the main model's ids; minus infinity outside of the draft vocabulary.
    _model_logits = torch.empty(0, 0)

    @abstractmethod
    def read(self, states: States) -> None:
        """Set the next step's hidden states to the main model's ``states``, one per row."""

    @abstractmethod
    def follow(self, rows: Seq[int]) -> None:
        """Set the next step's hidden states to the head's of the last step; ``rows`` indexes its ``sample_rows``."""

    def launch(self, batch: StepBatch, copies: Seq[tuple[int, int]], rows: SamplingRows | None) -> FinishedStep:
        """Run the pass synchronously; a head has no blocks to copy."""
        assert rows is not None
        logits, ids = self.forward(batch), self._target_ids
        if rows.plain:
            draft_ids = logits.argmax(-1)
            return FinishedStep(Sampled(tuple((draft_ids if ids is None else ids[draft_ids]).tolist())))
        if ids is None:
            return FinishedStep(sample(logits, rows))
        if len(self._model_logits) < len(logits):
            self._model_logits = torch.full((len(logits), self.vocab_size), -torch.inf)
        model_logits = self._model_logits[: len(logits)]
        model_logits[:, ids] = logits
        return FinishedStep(sample(model_logits, rows))


class TorchEagle(EagleBackend):
    """:class:`EagleBackend` on torch's operators. ``max_model_len``: max entries of a chain."""

    def __init__(self, config: EagleConfig, weights: EagleWeights, layout: KVLayout, max_model_len: int) -> None:
        super().__init__(layout, config.layer.vocab_size)
        self._config, self._weights, self._target_ids = config, weights, weights.target_ids
        self._dtype, self._operations = weights.embedding.dtype, config.operations
        (self._rope,) = make_ropes(config.layer, max_model_len)
        self._inputs = self._outputs = torch.empty(0, config.layer.hidden_size, dtype=self._dtype)

    def read(self, states: States) -> None:
        with torch.inference_mode():
            self._inputs = self._weights.fuse(rows_of_states(states))

    def follow(self, rows: Seq[int]) -> None:
        self._inputs = self._outputs[list(rows)]

    def warm_up(self, max_tokens: int) -> None:
        """Run the head once over zero hidden states."""
        width = len(self._config.aux_hidden_state_layers) * self._config.state_size
        zeros = torch.zeros(max_tokens, width, dtype=self._dtype)
        with torch.inference_mode():
            self._inputs = self._weights.fuse(zeros)
        super().warm_up(max_tokens)

    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Run a pass and return the logits [sampled rows, draft vocab]."""
        layer, weights, layout = self._config.layer, self._weights, self.layout
        states = self._inputs[: batch.num_tokens]
        shape = (len(pool), 1, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        with torch.inference_mode():
            attention = StepAttention(
                pool.view(self._dtype).view(shape),
                batch,
                num_heads=layer.num_heads,
                scale=layer.attention_scale,
                windows=layer.sliding_windows,
            )
            tokens = torch.from_numpy(batch.token_ids.astype(np.int64))
            normed = weights.state_norm(states)
            rows = torch.cat((weights.embedding_norm(weights.embedding[tokens]), normed), -1)
            table = self._rope.tables(torch.from_numpy(batch.table_rows.astype(np.int64)), self._dtype)
            run = LayerRun(
                layer,
                0,
                weights.layer,
                attention,
                [table],
                normed if self._config.norm_before_residual else states,
                sample_rows=torch.from_numpy(batch.sample_rows.astype(np.int64)),
                rows=rows,
            )
            outputs = run.run(self._operations)
            if run.ended:
                return torch.empty(0, self._config.draft_vocab_size)
            self._outputs = outputs
            return weights.lm_head(weights.final_norm(self._outputs)).float()


class HeadBackend(Backend, Protocol):
    """Backend of an EAGLE head on any device: an :class:`EagleBackend`, or a
    :class:`pillion.engine.drafts.gpu_eagle.GpuEagle`."""

    def read(self, states: States) -> None:
        """Set the next step's hidden states to the main model's ``states``, one per row."""

    def follow(self, rows: Seq[int]) -> None:
        """Set the next step's hidden states to the head's of the last step; ``rows`` indexes its ``sample_rows``."""


class EagleModel(DraftModel):
    """Passes of an EAGLE-3 head, on the step thread. The first pass reads the main model's hidden states, later ones
    the head's own."""

    backend: HeadBackend

    def _first_pass(self, plan: DraftPlan) -> StepBatch:
        states = []
        for chunk in plan.scheduled:
            assert isinstance(chunk.chain, EagleChain)
            states.append(chunk.chain.states(chunk.count))
        self.backend.read(np.concatenate(states))
        return super()._first_pass(plan)

    def _next_pass(self, batch: StepBatch, seqs: Seq[int], kept: Seq[int], tokens: Seq[int]) -> StepBatch:
        self.backend.follow(kept)
        return super()._next_pass(batch, seqs, kept, tokens)

"""EAGLE-3 head: the common part of its backends, its passes over its model's pool, and its backend on torch.

Entry p of a head's text is the model's state at position p and the token after it, p + 1; it drafts token p + 2:

    state --fc--> norm --.                                           .--> norm --lm head--> draft token, by d2t
    token --embedding--> norm --> [both] --qkv--> attention, MLP ----'--> state of the next entry, if drafted

(EAGLE-3, Li et al. 2025, in the form of ``speculators`` and vLLM.) The head also runs on the CPU kernels
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
    """Backend of an EAGLE head. :meth:`read` or :meth:`follow` sets the states of the next step; each step keeps the
    states of its sampled rows. Logits are those of the draft vocabulary.

    ``_target_ids``: the model's id of each draft id, int64; None if ids are equal.
    """

    _target_ids: torch.Tensor | None = None
    # Last step's logits by the model's ids; minus infinity outside of the draft vocabulary.
    _wide = torch.empty(0, 0)

    @abstractmethod
    def read(self, states: States) -> None:
        """Set the model's states of the next step's rows."""

    @abstractmethod
    def follow(self, rows: Seq[int]) -> None:
        """Make the next step's rows follow these of the last step's ``sample_rows``."""

    def launch(self, batch: StepBatch, copies: Seq[tuple[int, int]], rows: SamplingRows | None) -> FinishedStep:
        """Run the pass synchronously; a head has no blocks to copy."""
        assert rows is not None
        logits, ids = self.forward(batch), self._target_ids
        if rows.plain:
            found = logits.argmax(-1)
            return FinishedStep(Sampled(tuple((found if ids is None else ids[found]).tolist())))
        if ids is None:
            return FinishedStep(sample(logits, rows))
        if len(self._wide) < len(logits):
            self._wide = torch.full((len(logits), self.vocab_size), -torch.inf)
        wide = self._wide[: len(logits)]
        wide[:, ids] = logits
        return FinishedStep(sample(wide, rows))


class TorchEagle(EagleBackend):
    """:class:`EagleBackend` with torch's operators."""

    def __init__(self, config: EagleConfig, weights: EagleWeights, layout: KVLayout, max_model_len: int) -> None:
        """``max_model_len`` is in entries of a text."""
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
        """Run the head once over zero states."""
        width = len(self._config.state_layers) * self._config.state_size
        whole = torch.zeros(max_tokens, width, dtype=self._dtype)
        with torch.inference_mode():
            self._inputs = self._weights.fuse(whole)
        super().warm_up(max_tokens)

    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Run a pass and return the logits of the draft vocabulary."""
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
    """Backend of a head: an :class:`EagleBackend`, or a GPU's."""

    def read(self, states: States) -> None:
        """Set the model's states of the next step's rows."""

    def follow(self, rows: Seq[int]) -> None:
        """Make the next step's rows follow these of the last step's ``sample_rows``."""


class EagleModel(DraftModel):
    """Passes of an EAGLE-3 head, on the step thread. The first one reads states of the model, the others the head's."""

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

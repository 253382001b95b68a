"""Backend in plain torch, for any CPU and model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pillion.engine.adapters.step_adapters import TorchAdapters
from pillion.engine.backends.backend import bound_adapters, distinct_rows, kv_layout
from pillion.engine.backends.host_backend import HostBackend, states_of_rows
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.checkpoints.weights import DTYPES, load_weights
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.decoder import run_decoder
from pillion.engine.models.layer_states import states_of
from pillion.engine.models.model_config import LayerHeads
from pillion.engine.models.rope import make_ropes
from pillion.kernels.step import Float32, States, StepBatch
from pillion.kernels.torch.step_states import StepStates
from pillion.kernels.torch.torch_attention import MixedAttention, StepAttention


class TorchBackend(HostBackend):
    """The backend of torch's operators on the CPU."""

    adapters: TorchAdapters | None = None
    gives_vectors = True

    def __init__(self, prepared: PreparedModel, block_size: int, threads: int) -> None:
        """Load the weights. ``threads``: torch's threads in the whole process; 0 for torch's default. Raises
        ConfigError if the weights do not fit the config."""
        if threads:
            torch.set_num_threads(threads)
        self.config = load_config(prepared.folder)
        super().__init__(kv_layout(prepared, block_size), self.config.vocab_size)
        self._dtype = DTYPES[prepared.dtype]
        self._ropes = make_ropes(self.config, prepared.max_model_len)
        self._weights = load_weights(prepared.folder, self.config, self._dtype)
        shapes = states_of(self._weights.operations)
        self._state_shapes = shapes if any(shapes) else ()
        # By layer: its inputs in the last step, for an EAGLE head.
        self._states: dict[int, torch.Tensor] = {}
        # Sampled rows of the last step after the last norm.
        self._normed = torch.empty(0)

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Store the inputs of these layers in each step, by reference."""
        super().set_aux_hidden_state_layers(layers)
        self._states = dict.fromkeys(layers, torch.empty(0))

    def _read_states(self, num_tokens: int) -> States:
        return states_of_rows(torch.cat([self._states[layer] for layer in self.aux_hidden_state_layers], 1))

    def _read_vectors(self, batch: StepBatch) -> Float32:
        vectors: Float32 = self._normed[-batch.pooled :].float().numpy()
        return vectors

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        """Allocate the adapter slots."""
        self.adapters = TorchAdapters(self.config, max_adapters, max_rank, targets)

    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        config = self.config
        with torch.inference_mode():
            attention = self._attention(pool.view(self._dtype), batch)
            states = self._read_recurrent(pool, batch)
            rows, indices = distinct_rows(batch)
            logits, self._normed = run_decoder(
                config,
                self._weights,
                self._ropes,
                attention,
                _indices(batch.token_ids),
                _indices(batch.table_rows),
                _indices(rows),
                adapters=None if batch.adapters is None else bound_adapters(self.adapters).of_step(batch),
                states=self._states,
                carried=states,
                pooled=batch.pooled,
            )
            if states is not None and batch.states is not None:
                states.write(pool, batch.states.writes)
            return logits if indices is None else logits[_indices(indices)]

    def _attention(self, pool: torch.Tensor, batch: StepBatch) -> StepAttention | MixedAttention:
        """Return the attention of a step over a pool [slots, values]."""
        config, layout = self.config, self.layout
        make = partial(
            StepAttention,
            num_heads=config.num_heads,
            scale=config.attention_scale,
            chunked=config.chunked,
            softcap=config.attention_softcap,
        )
        if layout.even:
            inside = layout.num_layers, layout.planes, layout.num_kv_heads, layout.block_size, layout.head_dim
            return make(pool.view(len(pool), *inside), batch, windows=config.sliding_windows)
        by_layer: dict[int, StepAttention] = {}
        for kind, (firsts, windows) in self._kinds.items():
            inside = 1, layout.planes, kind.kv_heads, layout.block_size, kind.head_dim
            strides = [math.prod(inside[dimension + 1 :]) for dimension in range(len(inside))]
            of_kind = pool.as_strided((len(pool), *inside), (pool.stride(0), *strides))
            by_layer |= dict.fromkeys(firsts, make(of_kind, batch, windows=windows, firsts=firsts))
        return MixedAttention(by_layer)

    @cached_property
    def _kinds(self) -> dict[LayerHeads, tuple[dict[int, int], tuple[int, ...]]]:
        """By kind of KV heads: the offset in values of each layer with such heads in a block, and the windows of the
        layers that read these."""
        config, layout, kinds = self.config, self.layout, {}
        for kind in config.all_heads:
            own = [layer for layer in range(config.num_layers) if layout.heads(layer) == kind]
            firsts = {layer: layout.place(layer).offset // self._dtype.itemsize for layer in own}
            windows = (
                window for layer, window in enumerate(config.sliding_windows) if config.kv_source(layer) in firsts
            )
            kinds[kind] = firsts, tuple(windows)
        return kinds

    def _read_recurrent(self, pool: torch.Tensor, batch: StepBatch) -> StepStates | None:
        """Return the recurrent states before the step's tokens, read from ``pool``: zeros if the batch has no state
        slots, None for a model without states."""
        if not self._state_shapes:
            return None
        states = StepStates(self._state_shapes, batch.query_starts)
        if batch.states is not None:
            states.read(pool, batch.states.reads)
        return states


def _indices(values: npt.NDArray[np.integer[Any]]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))

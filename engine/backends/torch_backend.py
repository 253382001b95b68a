"""The backend that runs on any processor: plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pillion.engine.adapters.step_adapters import StepAdapters, step_adapters
from pillion.engine.backends.backend import adapter_shapes, distinct_rows, kv_layout
from pillion.engine.backends.batch import StepBatch
from pillion.engine.backends.host_backend import HostBackend, PlainAdapter
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.checkpoints.weights import DTYPES, load_weights
from pillion.engine.models.decoder import run_decoder
from pillion.engine.models.model_config import load_config
from pillion.engine.models.rope import make_ropes
from pillion.engine.sampling.sampling_rows import States
from pillion.kernels.torch.torch_attention import StepAttention


class TorchBackend(HostBackend):
    """A :class:`HostBackend` over torch's operators."""

    def __init__(self, prepared: PreparedModel, block_size: int, threads: int) -> None:
        """Loads the weights. Raises ConfigError where they do not fit the config. ``threads`` sets torch's threads for
        the whole process; 0 leaves torch's default."""
        if threads:
            torch.set_num_threads(threads)
        self._config = load_config(prepared.folder)
        super().__init__(kv_layout(prepared, block_size), self._config.vocab_size)
        self._dtype = DTYPES[prepared.dtype]
        self._ropes = make_ropes(self._config, prepared.max_model_len)
        self._weights = load_weights(prepared.folder, self._config, self._dtype)
        # Inputs of layers in the last step, where they are kept.
        self._states: dict[int, torch.Tensor] = {}

    def keep_states(self, layers: Sequence[int]) -> None:
        """Keeps references; nothing is computed for them."""
        super().keep_states(layers)
        self._states = dict.fromkeys(layers, torch.empty(0))

    def _read_states(self, num_tokens: int) -> States:
        return rows_to_numpy(torch.cat([self._states[layer] for layer in self.state_layers], 1))

    def _adapter_shapes(self) -> Mapping[str, tuple[int, int]]:
        return adapter_shapes(self._config)

    def _step_adapters(self, batch: StepBatch) -> StepAdapters | None:
        if batch.adapters is None:
            return None
        placed = {at: one.weights for at, one in enumerate(self._adapters) if isinstance(one, PlainAdapter)}
        return step_adapters(batch.adapters, batch.query_starts, placed)

    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        config, layout = self._config, self.layout
        shape = (len(pool), layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        with torch.inference_mode():
            attention = StepAttention(
                pool.view(self._dtype).view(shape),
                batch,
                num_heads=config.num_heads,
                scale=config.attention_scale,
                windows=config.sliding_windows,
                softcap=config.attention_softcap,
            )
            rows, places = distinct_rows(batch)
            logits = run_decoder(
                config,
                self._weights,
                self._ropes,
                attention,
                _indices(batch.token_ids),
                _indices(batch.table_rows),
                _indices(rows),
                adapters=self._step_adapters(batch),
                states=self._states,
            )
            return logits if places is None else logits[_indices(places)]


def rows_to_numpy(rows: torch.Tensor) -> States:
    """float32 stays; bfloat16 becomes uint16 with the same bits."""
    return rows.view(torch.uint16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()


def _indices(values: npt.NDArray[np.integer[Any]]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))

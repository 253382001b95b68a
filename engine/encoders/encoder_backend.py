"""Backend of encoders on torch: each text of a step is computed whole and alone."""

from __future__ import annotations

import numpy as np
import torch

from pillion.engine.backends.backend import kv_layout
from pillion.engine.backends.host_backend import HostBackend
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.checkpoints.weights import DTYPES
from pillion.engine.encoders.encoder import Encoder
from pillion.engine.encoders.encoder_weights import read_tensors
from pillion.engine.models.config_parser import load_config
from pillion.errors import Internal
from pillion.kernels.step import Float32, StepBatch


class EncoderBackend(HostBackend):
    """:class:`HostBackend` over an :class:`Encoder`. Does not use the pool. Each text is computed alone, because the
    last bits of a matrix product depend on its number of rows, and a vector should have the same bits in any batch."""

    gives_vectors = True

    def __init__(self, prepared: PreparedModel, block_size: int, threads: int) -> None:
        """Load the weights. ``threads``: torch's threads in this process; 0 keeps the default. Raises ConfigError if
        the weights do not fit the config."""
        if threads:
            torch.set_num_threads(threads)
        config = load_config(prepared.folder)
        assert config.encoder is not None
        super().__init__(kv_layout(prepared, block_size), config.vocab_size)
        self.encoder = Encoder(config.encoder, read_tensors(prepared.folder, config, DTYPES[prepared.dtype]))
        self._hidden = torch.empty(0)

    def check_step(self, pool: torch.Tensor, batch: StepBatch) -> None:
        if (batch.context_lens != np.diff(batch.query_starts)).any():
            raise Internal("an encoder's text was split into steps")

    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        self.check_step(pool, batch)
        ids = torch.from_numpy(batch.token_ids.astype(np.int64))
        seconds = [0] * batch.num_seqs if batch.second_starts is None else batch.second_starts.tolist()
        starts = batch.query_starts.tolist()
        with torch.inference_mode():
            texts = zip(starts, starts[1:], seconds, strict=False)
            self._hidden = torch.cat([self.encoder.rows(ids[start:end], second) for start, end, second in texts])
        return torch.empty((0, self.vocab_size), dtype=torch.float32)

    def _read_vectors(self, batch: StepBatch) -> Float32:
        rows = torch.from_numpy(batch.sample_rows[-batch.pooled :].astype(np.int64))
        vectors: Float32 = self._hidden[rows].float().numpy()
        return vectors


def load_encoder(prepared: PreparedModel, block_size: int, threads: int) -> LoadedModel:
    """Load an encoder; arguments as of :class:`EncoderBackend`."""
    backend = EncoderBackend(prepared, block_size, threads)
    head = backend.encoder if load_config(prepared.folder).labels else None
    return LoadedModel(prepared, backend, "torch", chooses_tokens=False, head=head, whole_texts=True)

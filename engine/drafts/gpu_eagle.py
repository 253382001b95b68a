"""EAGLE-3 head on a GPU: its weights, buffers and forward pass, which is that of a one-layer model.

    read     states of the model --copied to the device, fc--> residual                 outside of CUDA graphs
    follow   rows of the last pass's outputs --> residual                               outside of CUDA graphs
    pass     tokens --embedding--> norm --> [both]      residual --norm--> [both]
             [both] --qkv--> the layer's other operations, as a model's --> residual --> outputs
             residual --norm--> LM head --> logits of draft ids --> logits of the model's ids --> tokens

The host queues everything in order on one CUDA stream, so the hidden states that :meth:`GpuEagle.read` writes to the
residual belong to the next pass, and a pass may be launched before the tokens of the last one are known. Logits are
scattered to the main model's ids, minus infinity outside of the draft vocabulary, so the main model's sampler is used.
The weights are private to this process, since a head is only one layer; the embedding is the main model's if the head
has none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from pillion.config import WorkerFlags
from pillion.engine.backends.backend import KVLayout
from pillion.engine.backends.gpu.device_memory import to_device
from pillion.engine.backends.gpu.gpu_backend import GpuBackend, GpuLimits
from pillion.engine.backends.gpu.gpu_decoder import GpuDecoder
from pillion.engine.backends.gpu.gpu_loading import check_limits, fit_in_memory
from pillion.engine.backends.gpu.gpu_model import GpuModel
from pillion.engine.backends.gpu.gpu_step import StepShape
from pillion.engine.backends.gpu.gpu_weights import GpuWeights, layer_tensors, own_weights
from pillion.engine.backends.step_memory import head_bytes
from pillion.engine.drafts.eagle_config import EagleConfig
from pillion.engine.drafts.eagle_weights import EagleWeights, load_eagle_weights
from pillion.engine.models.model_shard import whole_model
from pillion.kernels.gpu.rows.embedding import embed
from pillion.kernels.gpu.rows.norms import rms_norm
from pillion.kernels.step import States
from pillion.kernels.torch.torch_linear import Linear

log = logging.getLogger("pillion.worker")


def head_weights(config: EagleConfig, weights: EagleWeights, main: GpuWeights) -> GpuWeights:
    """Copy a head's weights to the GPU of the main model's weights, ``main``. The main model's embedding is shared if
    the head has none."""
    named = dict(layer_tensors(config.operations, weights.layer, main.dtype, whole_model(config.layer), in_fp8=False))
    tensors = {f"layers.0.{name}": tensor for name, tensor in named.items()}
    tensors |= {"fuse.weight": _plain(weights.fuse), "lm_head.weight": _plain(weights.lm_head)}
    for name, norm in (
        ("embedding_norm", weights.embedding_norm),
        ("state_norm", weights.state_norm),
        ("final_norm", weights.final_norm),
    ):
        tensors[name] = norm.weight
    shared = weights.embedding is main["embedding"]
    if not shared:
        tensors["embedding"] = weights.embedding
    plain = [(name, tensor) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)]
    gpu_weights = own_weights(config.layer, plain, main.dtype, main.device)
    if shared:
        gpu_weights["embedding"] = main["embedding"]
    return gpu_weights


def _plain(linear: Linear) -> torch.Tensor:
    assert isinstance(linear.weight, torch.Tensor)
    return linear.weight


class GpuEagleModel(GpuModel):
    """Weights and buffers of a head on a GPU, for passes within ``limits``; ``weights`` are those of
    :func:`head_weights`.

    Attributes:
        both: [max_tokens, 2 * hidden], concatenated normed embeddings and normed hidden states of a pass.
        outputs: [max_samples, hidden], the head's hidden states of sampled rows, for the next pass.
        target_ids: int64 [draft vocab], the main model's id of each draft id; None if ids are equal.
        draft_logits: [max_samples, draft vocab]; empty if ids are equal.
    """

    def __init__(
        self,
        head: EagleConfig,
        weights: GpuWeights,
        target_ids: torch.Tensor | None,
        limits: GpuLimits,
        *,
        invariant: bool = False,
    ) -> None:
        samples, hidden = limits.max_samples, head.layer.hidden_size
        super().__init__(
            weights,
            limits.max_model_len,
            limits.max_tokens,
            samples,
            max_samples=samples,
            operations=(head.operations,),
            invariant=invariant,
        )
        self.norm_before_residual = head.norm_before_residual
        self.both, self.outputs = self._rows(2 * hidden), self.residual.new_zeros(samples, hidden)
        self.target_ids = None if target_ids is None else target_ids.to(self.device)
        self.draft_logits = self.outputs.new_zeros(samples if target_ids is not None else 0, head.draft_vocab_size)
        if target_ids is not None:
            self.logits.fill_(-torch.inf)

    def _plain_matrices(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        yield from super()._plain_matrices()
        yield self.weights["fuse.weight"], None


class EagleDecoder(GpuDecoder):
    """Forward pass of a head over hidden states in the model's residual."""

    _model: GpuEagleModel

    def _begin(self, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        model, weights, count = self._model, self._model.weights, shape.tokens
        states, both, embedded = (rows[:count] for rows in (model.residual, model.both, model.projected))
        embed(self._record.token_ids[:count], model.sampled, weights["embedding"], embedded)
        token, normed = both.chunk(2, 1)
        for values, name, out in ((embedded, "embedding_norm", token), (states, "state_norm", normed)):
            rms_norm(values, weights[name], out, model.config.rms_norm_eps, weights.norm_is_wide)
        if model.norm_before_residual:
            states.copy_(normed)
        return states, both

    def _keep_outputs(self, residual: torch.Tensor) -> None:
        self._model.outputs[: len(residual)].copy_(residual)

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        model, count = self._model, len(normed)
        if model.target_ids is None:
            return super()._logits(normed)
        draft_logits = model.product(normed, model.weights.head, None, model.draft_logits[:count])
        return model.logits[:count].index_copy_(1, model.target_ids, draft_logits.float())


class GpuEagle(GpuBackend):
    """:class:`pillion.engine.drafts.eagle_head.HeadBackend` on a GPU."""

    decoder = EagleDecoder
    _model: GpuEagleModel

    def read(self, states: States) -> None:
        """Queue the fusion of the main model's hidden states [rows, layers * hidden] to the next step's inputs."""
        model = self._model
        with torch.inference_mode():
            rows = to_device(states.view(np.int16) if states.dtype == np.uint16 else states, model.device)
            rows = rows.view(model.dtype)
            model.product(rows, model.weights["fuse.weight"], None, model.residual[: len(rows)])

    def follow(self, rows: Sequence[int]) -> None:
        """Queue a copy of hidden states that the last step output, those at indices ``rows`` of its ``sample_rows``, to
        the next step's inputs."""
        model = self._model
        with torch.inference_mode():
            indices = to_device(np.array(rows, np.int64), model.device)
            torch.index_select(model.outputs, 0, indices, out=model.residual[: len(rows)])


def load_gpu_eagle(
    flags: WorkerFlags, folder: Path, head: EagleConfig, layout: KVLayout, main: GpuBackend, limits: GpuLimits
) -> GpuEagle:
    """Load the head in ``folder`` for the model of ``main``, whose steps return hidden states from now on. Raises
    ConfigError for a head that the GPU cannot run, or that does not fit into its memory."""
    model, dtype = main.model, layout.dtype
    check_limits(model.device, layout)
    weights = load_eagle_weights(folder, head, model.weights["embedding"], Linear.plain)
    width = len(head.aux_hidden_state_layers) * head.state_size
    needed = head_bytes(head.layer, width, dtype, limits.max_tokens, limits.max_samples)
    with fit_in_memory(limits.max_tokens, needed, model.device) as size:
        main.set_aux_hidden_state_layers(head.aux_hidden_state_layers)
        gpu_weights = head_weights(head, weights, model.weights)
        head_model = GpuEagleModel(head, gpu_weights, weights.target_ids, limits, invariant=flags.batch_invariant)
        backend = GpuEagle(head_model, layout, limits, enforce_eager=flags.enforce_eager)
        backend.allocate_workspace()
    log.info("the head's passes of up to %d tokens take up to %s, besides its weights", limits.max_tokens, size)
    return backend

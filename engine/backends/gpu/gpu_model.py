"""The forward pass on a GPU: that of :mod:`pillion.engine.models.decoder`, with fused kernels and fixed buffers.

    embed -> residual
    each layer   norm -> qkv product -> [qk-norm, rope, KV into the pool] -> attention -> o product
                 [residual += , norm] -> gate and up product -> [act(gate) * up] -> down product -> [residual += , norm]
    last layer   ends with its KV if no row is sampled; else only sampled rows continue after its attention
    logits       head product, in float32

Brackets enclose what one kernel does. The products are cuBLAS's, through torch. Nothing here synchronises, and nothing
but the logits is allocated, so that a step can be captured as a CUDA graph. The exception is a mixture of experts,
whose group sizes only the device knows (``capturable``).
"""

from __future__ import annotations

import torch

from pillion.engine.backends.gpu.gpu_step import GpuStepRecord, StepShape
from pillion.engine.backends.gpu.gpu_weights import GpuWeights
from pillion.engine.models.layers import GATED, GatedMLP, MoeWeights, soft_cap
from pillion.engine.models.rope import rope_tables
from pillion.kernels.gpu.attention.kv_write import HeadNorm, Rotary, kv_write
from pillion.kernels.gpu.attention.paged_attention import PagedAttention
from pillion.kernels.gpu.rows.embedding import embed
from pillion.kernels.gpu.rows.gated import gated
from pillion.kernels.gpu.rows.norms import add_rms_norm, rms_norm
from pillion.kernels.torch.torch_linear import Linear


class _Layer:
    """One layer's tensors; those that the model does not have are None."""

    def __init__(self, weights: GpuWeights, index: int) -> None:
        def get(name: str) -> torch.Tensor | None:
            return weights.get(f"layers.{index}.{name}")

        self.attention_norm, self.attention_post_norm = get("attention_norm"), get("attention_post_norm")
        self.qkv, self.qkv_bias = weights[f"layers.{index}.qkv.weight"], get("qkv.bias")
        self.qk_norm, self.q_norm, self.k_norm = get("qk_norm"), get("q_norm"), get("k_norm")
        self.o, self.o_bias = weights[f"layers.{index}.o.weight"], get("o.bias")
        self.mlp_norm, self.mlp_post_norm = get("mlp_norm"), get("mlp_post_norm")
        self.gate_up, self.gate_up_bias = get("mlp.gate_up.weight"), get("mlp.gate_up.bias")
        self.down, self.down_bias = get("mlp.down.weight"), get("mlp.down.bias")
        self.experts = _experts(weights, get("router"), get("experts.gate_up"), get("experts.down"))


class GpuModel:
    """A model's weights, rotary tables and activation buffers on one device, for steps of ``max_tokens`` at most."""

    def __init__(
        self, weights: GpuWeights, max_model_len: int, max_tokens: int, max_sampled: int, *, max_samples: int = 0
    ) -> None:
        """``max_sampled``: most tokens that one step chooses, from where the next step may embed them.

        ``max_samples``: rows of the logits' buffer that all steps share; a step with more rows allocates its own.
        """
        config = weights.config
        table = weights["embedding"]
        device, dtype = table.device, table.dtype
        self.config, self.device, self.dtype = config, device, dtype
        self.max_tokens = max_tokens
        self.capturable = config.moe is None
        self.weights = weights
        self.layers = [_Layer(weights, index) for index in range(config.num_layers)]
        # Rounded as in transformers.
        tables = rope_tables(config, max_model_len)
        self.ropes = [(cos.to(dtype).to(device), sin.to(dtype).to(device)) for cos, sin in tables]
        self.sampled = torch.zeros(max_sampled, dtype=torch.int32, device=device)
        # Shared by all graphs, since logits of their own would need gigabytes. Made before the pool takes the rest.
        self.logits = torch.zeros(max_samples, config.vocab_size, dtype=torch.float32, device=device)
        self.head = self.logits if dtype == torch.float32 else torch.zeros_like(self.logits, dtype=dtype)
        heads = config.num_heads + 2 * config.num_kv_heads

        def rows(width: int) -> torch.Tensor:
            return torch.zeros(max_tokens, width, dtype=dtype, device=device)

        self.residual, self.normed = rows(config.hidden_size), rows(config.hidden_size)
        self.found = rows(config.hidden_size)
        self.qkv, self.attended = rows(heads * config.head_dim), rows(config.num_heads * config.head_dim)
        inner = max(config.intermediate_size, config.hidden_size)
        self.gate_up, self.inner = rows(2 * inner), rows(inner)


class GpuDecoder:
    """Runs a model's forward pass over one pool."""

    def __init__(self, model: GpuModel, pool: torch.Tensor, attention: PagedAttention, record: GpuStepRecord) -> None:
        """``pool``: as in :class:`pillion.kernels.gpu.attention.paged_attention.PagedAttention`."""
        self._model = model
        self._pool = pool
        self._attention = attention
        self._record = record

    def run(self, shape: StepShape) -> torch.Tensor:
        """Runs the step in the record, padded to ``shape``; returns float32 logits [shape.samples, vocab_size]."""
        model, record, config = self._model, self._record, self._model.config
        tokens = shape.tokens
        residual = model.residual[:tokens]
        embed(
            record.token_ids[:tokens],
            model.sampled,
            model.weights["embedding"],
            residual,
            model.weights.embedding_scale,
        )
        first = model.layers[0]
        normed = self._normed(residual, first.attention_norm)
        for index, layer in enumerate(model.layers):
            last = index + 1 == len(model.layers)
            qkv = self._write_kv(index, layer, normed)
            if last and not shape.samples:
                return torch.empty((0, config.vocab_size), dtype=torch.float32, device=model.device)
            attended = self._attend(index, qkv, shape)
            if last:
                wanted = record.sample_rows[: shape.samples]
                attended, residual = attended.index_select(0, wanted), residual.index_select(0, wanted)
            found = _product(attended, layer.o, layer.o_bias, model.found[: len(attended)])
            normed = self._add(residual, found, layer.attention_post_norm, layer.mlp_norm)
            found = self._mlp(layer, normed)
            following = model.weights["final_norm"] if last else model.layers[index + 1].attention_norm
            normed = self._add(residual, found, layer.mlp_post_norm, following)
        return self._logits(normed)

    def _write_kv(self, index: int, layer: _Layer, normed: torch.Tensor) -> torch.Tensor:
        """normed [T, hidden] -> projections [T, ...] with queries normed and rotated; writes the layer's KV."""
        model, record, config = self._model, self._record, self._model.config
        tokens = len(normed)
        qkv = _product(normed, layer.qkv, layer.qkv_bias, model.qkv[:tokens])
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        eps, wide = config.rms_norm_eps, model.weights.norm_is_wide
        if layer.q_norm is not None and layer.k_norm is not None:
            for part, weight in ((slice(0, queries), layer.q_norm), (slice(queries, queries + keys), layer.k_norm)):
                rms_norm(qkv[:, part], weight, qkv[:, part], eps, wide)
        rope = config.layer_ropes[index]
        kv_write(
            qkv,
            self._pool,
            record.rows[:tokens],
            index,
            heads=config.num_heads,
            norm=None if layer.qk_norm is None else HeadNorm(layer.qk_norm, eps),
            rotary=None if rope is None else Rotary(*model.ropes[rope], record.rope_rows[:tokens]),
        )
        return qkv

    def _attend(self, index: int, qkv: torch.Tensor, shape: StepShape) -> torch.Tensor:
        """Attention of projections [T, ...] -> [T, heads * head_dim]."""
        model, record, config = self._model, self._record, self._model.config
        tokens, queries = shape.tokens, config.num_heads * config.head_dim
        out = model.attended[:tokens]
        self._attention.attend(
            index,
            qkv[:, :queries].view(tokens, config.num_heads, config.head_dim),
            out,
            record.attention,
            window=config.sliding_windows[index],
            with_chunks=shape.chunks,
        )
        return out

    def _mlp(self, layer: _Layer, normed: torch.Tensor) -> torch.Tensor:
        """The MLP or the mixture of experts: [T, hidden] -> [T, hidden]."""
        model, count = self._model, len(normed)
        if layer.experts is not None:
            return layer.experts(normed)
        assert layer.gate_up is not None
        assert layer.down is not None
        inner = len(layer.gate_up) // 2
        both = model.gate_up.view(-1)[: count * 2 * inner].view(count, 2 * inner)
        _product(normed, layer.gate_up, layer.gate_up_bias, both)
        out = model.inner.view(-1)[: count * inner].view(count, inner)
        gated(both, out, model.config.activation)
        return _product(out, layer.down, layer.down_bias, model.found[:count])

    def _normed(self, residual: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Norms the residual stream; models without a norm there use the stream itself."""
        if weight is None:
            return residual
        model = self._model
        out = model.normed[: len(residual)]
        rms_norm(residual, weight, out, model.config.rms_norm_eps, model.weights.norm_is_wide)
        return out

    def _add(
        self, residual: torch.Tensor, found: torch.Tensor, post: torch.Tensor | None, following: torch.Tensor | None
    ) -> torch.Tensor:
        """residual += scale * post_norm(found), in place; returns the next product's input, normed by ``following``."""
        model = self._model
        out = None if following is None else model.normed[: len(residual)]
        add_rms_norm(
            residual,
            found,
            out,
            weight=following,
            post_weight=post,
            scale=model.config.residual_scale,
            eps=model.config.rms_norm_eps,
            wide=model.weights.norm_is_wide,
        )
        return residual if out is None else out

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        model, config, rows = self._model, self._model.config, len(normed)
        if rows <= len(model.logits):
            found, logits = model.head[:rows], model.logits[:rows]
            torch.mm(normed, model.weights.head.T, out=found)
            if model.dtype != torch.float32:
                logits.copy_(found)
        else:
            logits = (normed @ model.weights.head.T).float()
        if config.logit_divisor != 1.0:
            logits = logits.div_(config.logit_divisor)
        return soft_cap(logits, config.logit_softcap) if config.logit_softcap else logits


def _product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Multiplies rows [T, in] by weight [out, in] into ``out`` [T, out]."""
    if bias is None:
        return torch.mm(rows, weight.T, out=out)
    return torch.addmm(bias, rows, weight.T, out=out)


def _experts(
    weights: GpuWeights, router: torch.Tensor | None, gate_up: torch.Tensor | None, down: torch.Tensor | None
) -> MoeWeights | None:
    moe = weights.config.moe
    if moe is None or router is None or gate_up is None or down is None:
        return None
    act = GATED[weights.config.activation]
    return MoeWeights(
        router=router,
        experts=tuple(
            GatedMLP(Linear.plain(up), Linear.plain(back), act) for up, back in zip(gate_up, down, strict=True)
        ),
        experts_per_token=moe.experts_per_token,
        normalize=moe.normalize,
    )

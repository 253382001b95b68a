"""The forward pass on a GPU: that of :mod:`pillion.engine.models.decoder`, with fused kernels and fixed buffers.

    embed -> residual
    each layer   norm -> qkv product -> [qk-norm, rope, KV into the pool] -> attention -> o product
                 [residual += , norm] -> gate and up product -> [act(gate) * up] -> down product -> [residual += , norm]
    last layer   ends with its KV if no row is sampled; else only sampled rows continue after its attention
    logits       head product, in float32

One rank of several (:mod:`pillion.engine.models.rank_split`) does the same over its share of heads, inner values and
tokens. What embedding, o product and down product find is then summed up over the ranks, and rank 0 gathers the logits.

Brackets enclose what one kernel does. The products by plain matrices are cuBLAS's, through torch; those by matrices in
few bits are our kernels'. Nothing here synchronises, and nothing but the logits is allocated, so that a step can be
captured as a CUDA graph. The exceptions (``capturable``) are a mixture of experts, whose group sizes only the device
knows, and ranks that share a GPU, whose sums go through the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pillion.engine.backends.gpu.gpu_adapters import GpuAdapters
from pillion.engine.backends.gpu.gpu_step import GpuStepRecord, StepShape
from pillion.engine.backends.gpu.gpu_weights import INNER_VALUES, GpuWeights
from pillion.engine.backends.gpu.pool_parts import PartRows
from pillion.engine.backends.gpu.rank_group import GpuRankGroup
from pillion.engine.backends.gpu.rank_logits import RankLogits
from pillion.engine.models.layers import GATED, GatedMLP, MoeWeights, soft_cap
from pillion.engine.models.rope import rope_tables
from pillion.kernels.gpu.attention.kv_write import HeadNorm, Rotary
from pillion.kernels.gpu.products.gpu_packing import PackedMatrix
from pillion.kernels.gpu.products.quantized_product import QuantizedProduct
from pillion.kernels.gpu.rows.embedding import embed
from pillion.kernels.gpu.rows.gated import gated
from pillion.kernels.gpu.rows.norms import add_rms_norm, rms_norm
from pillion.kernels.torch.torch_linear import Linear

GpuMatrix = torch.Tensor | PackedMatrix


class _Layer:
    """One layer's tensors; those that the model does not have are None."""

    def __init__(self, weights: GpuWeights, index: int) -> None:
        def get(name: str) -> torch.Tensor | None:
            return weights.get(f"layers.{index}.{name}")

        def matrix(name: str) -> GpuMatrix | None:
            return weights.matrix(f"layers.{index}.{name}")

        self.attention_norm, self.attention_post_norm = get("attention_norm"), get("attention_post_norm")
        self.qkv, self.qkv_bias = matrix("qkv"), get("qkv.bias")
        self.qk_norm, self.q_norm, self.k_norm = get("qk_norm"), get("q_norm"), get("k_norm")
        self.o, self.o_bias = matrix("o"), get("o.bias")
        self.mlp_norm, self.mlp_post_norm = get("mlp_norm"), get("mlp_post_norm")
        self.gate_up, self.gate_up_bias = matrix("mlp.gate_up"), get("mlp.gate_up.bias")
        self.down, self.down_bias = matrix("mlp.down"), get("mlp.down.bias")
        self.router = get("router")
        self.experts_up, self.experts_down = _each(matrix("experts.gate_up")), _each(matrix("experts.down"))
        # Made when the products' workspace is there.
        self.experts: MoeWeights | None = None

    def packed(self) -> Iterator[tuple[PackedMatrix, torch.Tensor | None]]:
        """Yields the matrices in few bits, and their biases."""
        linears = [
            (self.qkv, self.qkv_bias),
            (self.o, self.o_bias),
            (self.gate_up, self.gate_up_bias),
            (self.down, self.down_bias),
            *((each, None) for each in (*self.experts_up, *self.experts_down)),
        ]
        for matrix, bias in linears:
            if isinstance(matrix, PackedMatrix):
                yield matrix, bias


class GpuModel:
    """A model's weights, rotary tables and activation buffers on one device, for steps of ``max_tokens`` at most.

    Attributes:
        config: the shape of the model, or of the rank's share of it.
        ranks: the worker's other ranks, None where it has none.
    """

    def __init__(
        self,
        weights: GpuWeights,
        max_model_len: int,
        max_tokens: int,
        max_sampled: int,
        *,
        max_samples: int = 0,
        ranks: GpuRankGroup | None = None,
    ) -> None:
        """``max_sampled``: most tokens that one step chooses, from where the next step may embed them.

        ``max_samples``: rows of the logits' buffer that all steps share; a step with more rows allocates its own.
        """
        config = weights.config if ranks is None else ranks.split.local(weights.config)
        table = weights["embedding"]
        device, dtype = table.device, table.dtype
        self.config, self.device, self.dtype = config, device, dtype
        self.max_tokens = max_tokens
        self.ranks = ranks
        self.capturable = config.moe is None and (ranks is None or ranks.capturable)
        self.weights = weights
        self.tokens = None if ranks is None else ranks.split.vocabulary(config.vocab_size)
        # The model's KV heads that are written and attended.
        self.kv_heads = range(config.num_kv_heads) if ranks is None else ranks.split.kv_heads
        self.adapters: GpuAdapters | None = None
        names = (f"layers.{index}" for index in range(config.num_layers))
        # The inner values that the rank has, where they are not in order.
        self.inner_values = {
            name: weights[f"{name}.{INNER_VALUES}"].long().cpu()
            for name in names
            if f"{name}.{INNER_VALUES}" in weights
        }
        self.layers = [_Layer(weights, index) for index in range(config.num_layers)]
        # Matrices in few bits, their biases, and the type of their products.
        self._packed = [(*each, dtype) for layer in self.layers for each in layer.packed()]
        if isinstance(weights.head, PackedMatrix):
            self._packed.append((weights.head, None, torch.float32))
        self._quantized = QuantizedProduct((each[0] for each in self._packed), max_tokens, dtype, device)
        for layer in self.layers:
            layer.experts = self._experts(layer)
        # Rounded as in transformers.
        tables = rope_tables(config, max_model_len)
        self.ropes = [(cos.to(dtype).to(device), sin.to(dtype).to(device)) for cos, sin in tables]
        self.sampled = torch.zeros(max_sampled, dtype=torch.int32, device=device)
        # Shared by all graphs, since logits of their own would need gigabytes. Made before the pool takes the rest.
        leads = ranks is None or ranks.split.leads
        self.logits = torch.zeros(max_samples if leads else 0, config.vocab_size, dtype=torch.float32, device=device)
        # Where a plain head writes, before its logits are widened.
        narrow = dtype != torch.float32 and not isinstance(weights.head, PackedMatrix)
        kind = dtype if narrow else torch.float32
        self.shares = None if ranks is None else RankLogits(ranks, config.vocab_size, max_samples, kind, device)
        self.head = torch.zeros_like(self.logits, dtype=dtype) if narrow and ranks is None else self.logits
        heads = config.num_heads + 2 * config.num_kv_heads

        def rows(width: int) -> torch.Tensor:
            return torch.zeros(max_tokens, width, dtype=dtype, device=device)

        self.residual, self.normed = rows(config.hidden_size), rows(config.hidden_size)
        self.found = rows(config.hidden_size)
        self.qkv, self.attended = rows(heads * config.head_dim), rows(config.num_heads * config.head_dim)
        inner = max(config.intermediate_size, config.hidden_size)
        self.gate_up, self.inner = rows(2 * inner), rows(inner)

    def product(
        self, rows: torch.Tensor, weight: GpuMatrix | None, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiplies rows [T, in] by weight [out, in] into ``out`` [T, out]."""
        assert weight is not None
        if isinstance(weight, PackedMatrix):
            return self._quantized(rows, weight, bias, out)
        if bias is None:
            return torch.mm(rows, weight.T, out=out)
        return torch.addmm(bias, rows, weight.T, out=out)

    def compile_products(self) -> None:
        """Compiles the kernels of products by matrices in few bits for every number of rows."""
        compiled = set()
        for matrix, bias, dtype in self._packed:
            key = (matrix.kind, *matrix.parts, bias is None, dtype)
            if key not in compiled:
                compiled.add(key)
                self._quantized.compile(matrix, bias, dtype)

    def _experts(self, layer: _Layer) -> MoeWeights | None:
        """The mixture of experts of a layer, None where it has one MLP."""
        config, router = self.config, layer.router
        if config.moe is None or router is None:
            return None
        act = GATED[config.activation]
        ups, downs = (
            [_ExpertLinear(self, matrix) for matrix in matrices] for matrices in (layer.experts_up, layer.experts_down)
        )
        return MoeWeights(
            router=router,
            experts=tuple(GatedMLP(up, down, act) for up, down in zip(ups, downs, strict=True)),
            experts_per_token=config.moe.experts_per_token,
            normalize=config.moe.normalize,
        )


class GpuDecoder:
    """Runs a model's forward pass over one pool."""

    def __init__(self, model: GpuModel, parts: Sequence[PartRows], record: GpuStepRecord) -> None:
        """``parts``: of the process's KV heads, as many as ``record`` has plans."""
        self._model = model
        self._parts = parts
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
            model.tokens,
        )
        self._sum(residual)
        first = model.layers[0]
        normed = self._normed(residual, first.attention_norm)
        for index, layer in enumerate(model.layers):
            last = index + 1 == len(model.layers)
            qkv = self._write_kv(index, layer, normed, shape)
            if last and not shape.samples:
                if model.ranks is not None:
                    # With logits, gathering them is what shows that all ranks have written their KV.
                    model.ranks.meet()
                return torch.empty((0, config.vocab_size), dtype=torch.float32, device=model.device)
            attended = self._attend(index, qkv, shape)
            if last:
                wanted = record.sample_rows[: shape.samples]
                attended, residual = attended.index_select(0, wanted), residual.index_select(0, wanted)
            found = model.product(attended, layer.o, layer.o_bias, model.found[: len(attended)])
            self._adapt(index, "o", attended, found, shape)
            self._sum(found)
            normed = self._add(residual, found, layer.attention_post_norm, layer.mlp_norm)
            found = self._mlp(index, layer, normed, shape)
            self._sum(found)
            following = model.weights["final_norm"] if last else model.layers[index + 1].attention_norm
            normed = self._add(residual, found, layer.mlp_post_norm, following)
        return self._logits(normed)

    def _sum(self, values: torch.Tensor) -> None:
        """Adds up what the ranks found, in place."""
        if self._model.ranks is not None:
            self._model.ranks.sum(values)

    def _adapt(self, index: int, name: str, x: torch.Tensor, out: torch.Tensor, shape: StepShape) -> None:
        """Adds what adapters make of a fused layer's inputs ``x`` to its outputs, in steps that have any."""
        if shape.adapters:
            adapters = self._model.adapters
            assert adapters is not None
            # Behind its attention, the last layer computes the sampled rows alone.
            sampled = index + 1 == len(self._model.layers) and name != "qkv"
            adapters.add(f"layers.{index}.{name}", x, out, sampled=sampled)

    def _write_kv(self, index: int, layer: _Layer, normed: torch.Tensor, shape: StepShape) -> torch.Tensor:
        """normed [T, hidden] -> projections [T, ...], with queries normed and rotated there or in a part's own rows;
        writes the layer's KV."""
        model, record, config = self._model, self._record, self._model.config
        tokens = len(normed)
        qkv = model.product(normed, layer.qkv, layer.qkv_bias, model.qkv[:tokens])
        self._adapt(index, "qkv", normed, qkv, shape)
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        eps, wide = config.rms_norm_eps, model.weights.norm_is_wide
        if layer.q_norm is not None and layer.k_norm is not None and model.ranks is not None:
            self._norm_shares(qkv, layer.q_norm, layer.k_norm)
        elif layer.q_norm is not None and layer.k_norm is not None:
            for part, weight in ((slice(0, queries), layer.q_norm), (slice(queries, queries + keys), layer.k_norm)):
                rms_norm(qkv[:, part], weight, qkv[:, part], eps, wide)
        rope = config.layer_ropes[index]
        norm = None if layer.qk_norm is None else HeadNorm(layer.qk_norm, eps)
        rotary = None if rope is None else Rotary(*model.ropes[rope], record.rope_rows[:tokens])
        for rows in self._parts:
            rows.write(index, qkv, record.rows[:tokens], norm, rotary)
        return qkv

    def _norm_shares(self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> None:
        """Norms queries and keys over their whole projections, in place; the rank has some of their heads."""
        model, ranks = self._model, self._model.ranks
        assert ranks is not None
        config, whole, split = model.config, model.weights.config, ranks.split
        ends = config.num_heads * config.head_dim, (config.num_heads + config.num_kv_heads) * config.head_dim
        parts = qkv[:, : ends[0]], qkv[:, ends[0] : ends[1]]
        sums = torch.stack([part.float().square().sum(1) for part in parts])
        # Each of the ranks that have a KV head in common gives a part of its sum.
        sums[1] /= max(1, split.size // whole.num_kv_heads)
        ranks.sum(sums)
        widths = (heads * config.head_dim for heads in (whole.num_heads, whole.num_kv_heads))
        for part, total, width, weight in zip(parts, sums, widths, (q_norm, k_norm), strict=True):
            normed = part.float() * torch.rsqrt(total / width + config.rms_norm_eps)[:, None]
            part.copy_((normed if model.weights.norm_is_wide else normed.to(part.dtype)) * weight)

    def _attend(self, index: int, qkv: torch.Tensor, shape: StepShape) -> torch.Tensor:
        """Attention of projections [T, ...] -> [T, heads * head_dim]."""
        out, window = self._model.attended[: shape.tokens], self._model.config.sliding_windows[index]
        for rows, record in zip(self._parts, self._record.attention, strict=True):
            rows.attend(index, qkv, out, record, window=window, chunks=shape.chunks)
        return out

    def _mlp(self, index: int, layer: _Layer, normed: torch.Tensor, shape: StepShape) -> torch.Tensor:
        """The MLP or the mixture of experts: [T, hidden] -> [T, hidden]."""
        model, count = self._model, len(normed)
        if layer.experts is not None:
            return layer.experts(normed)
        inner = self._model.config.intermediate_size
        both = model.gate_up.view(-1)[: count * 2 * inner].view(count, 2 * inner)
        model.product(normed, layer.gate_up, layer.gate_up_bias, both)
        self._adapt(index, "gate_up", normed, both, shape)
        out = model.inner.view(-1)[: count * inner].view(count, inner)
        gated(both, out, model.config.activation)
        found = model.product(out, layer.down, layer.down_bias, model.found[:count])
        self._adapt(index, "down", out, found, shape)
        return found

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
        head, fits = model.weights.head, rows <= len(model.logits)
        if model.shares is not None:
            logits = self._gathered_logits(model.shares, normed)
        elif isinstance(head, PackedMatrix):
            logits = model.logits[:rows] if fits else torch.empty(rows, config.vocab_size, device=model.device)
            model.product(normed, head, None, logits)
        elif fits:
            logits, found = model.logits[:rows], model.head[:rows]
            torch.mm(normed, head.T, out=found)
            if model.dtype != torch.float32:
                logits.copy_(found)
        else:
            logits = (normed @ head.T).float()
        if config.logit_divisor != 1.0:
            logits = logits.div_(config.logit_divisor)
        return soft_cap(logits, config.logit_softcap) if config.logit_softcap else logits

    def _gathered_logits(self, shares: RankLogits, normed: torch.Tensor) -> torch.Tensor:
        """The logits of all ranks' tokens; at other ranks than the first, none."""
        model, rows = self._model, len(normed)
        head, found = model.weights.head, shares.room(rows)
        if isinstance(head, PackedMatrix):
            model.product(normed, head, None, found)
        else:
            torch.mm(normed, head.T, out=found)
        every = shares.gather(rows)
        if not every:
            return model.logits[:0]
        logits = (
            model.logits[:rows] if rows <= len(model.logits) else model.logits.new_empty(rows, model.logits.shape[1])
        )
        for tokens, part in every:
            logits[:, tokens.start : tokens.stop].copy_(part)
        return logits


class _ExpertLinear(Linear):
    """A matrix of one expert, whose products allocate their results."""

    def __init__(self, model: GpuModel, matrix: GpuMatrix) -> None:
        self._model, self._matrix = model, matrix

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        matrix = self._matrix
        outputs = matrix.kind.outputs if isinstance(matrix, PackedMatrix) else len(matrix)
        return self._model.product(rows, matrix, None, rows.new_empty(len(rows), outputs))


def _each(stacked: GpuMatrix | None) -> list[GpuMatrix]:
    """The matrices of a layer's experts."""
    if stacked is None:
        return []
    if isinstance(stacked, torch.Tensor):
        return list(stacked)
    every = [dict(zip(stacked.parts, each, strict=True)) for each in zip(*stacked.parts.values(), strict=True)]
    return [PackedMatrix(stacked.kind, **parts) for parts in every]

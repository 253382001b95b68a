"""Writes models.md, the page about model families: ``python -m docs.models_page``, or ``make dashboards``.

The families come from the engine's table, what is tested from the tests' table, and the list of all models of text from
the installed transformers.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections import defaultdict
from functools import partial

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from pillion.engine.models.config_keys import known_keys
from pillion.engine.models.families import FAMILIES, TEXT_OF
from pillion.engine.models.family_rows import SAME_AS, TEXT_AS
from pillion.engine.models.llama_layer import PRE_NORMS, ExpertNames, Projections, QkNorm
from pillion.engine.models.model_family import ModelFamily

PAGE = pathlib.Path(__file__).resolve().parent / "models.md"
LEFT_OUT_PAGE = PAGE.parents[1] / "lab" / "docs" / "models-left-out.md"

# Models of transformers' mapping that have no row, by what they would need.
LEFT_OUT = {
    "states of other kinds (linear attention with other decays, xLSTM, RWKV)": """
        bailing_hybrid inkling2_text inkling_text minimax recurrent_gemma rwkv xlstm zaya""",
    "a pool without keys and values, which no layer has": "falcon_mamba mamba mamba2",
    "attention whose weights several layers share, beside state spaces": "zamba zamba2",
    "two attentions (over latents, MLA) in each layer, experts whose results pass by the second one, and experts that "
    "return their rows": "longcat_flash",
    "compressed keys that an indexer selects, residual streams mixed by doubly stochastic matrices (mHC), experts "
    "chosen by token id": "deepseek_v4",
    "residual streams mixed by low-rank gates, embeddings of n-grams (some 45 billion parameters), blocks of tokens "
    "that an indexer selects": "qwen4_exp qwen4_exp_text",
    "sparse attention of another kind than DeepSeek-V3.2's, which selects the tokens that a query sees": """
        axk2 doge dots3_note dots3_note_text hy_v4 minimax_m3_vl_text""",
    "several residual streams that layers predict and correct (AltUp), where the kernels have one; low-rank residuals "
    "(LAuReL); activations of which a share is cut off": "gemma3n gemma3n_text",
    "keys and values of another model, to draft its tokens": "gemma4_assistant gemma4_unified_assistant",
    "attention whose results pass a gate, are subtracted from each other, or mix experts": """
        diffllama jetmoe laguna""",
    "norms between activation and down projection": "bitnet",
    "a router with other arithmetic (experts that share a norm, several experts for each place)": """
        aria_text dbrx""",
    "experts chosen by the router's product and a bias, not by its score": "kolibri1",
    "residuals whose weights depend on the layer, and attention whose results pass a gate": "beam",
    "layers that run several times for each token": "hrm_text",
    "a bias of attention's results that only the last of its layers has": "gpt_neox_japanese",
    "fixed positions, ALiBi, or a rule of its own for scores": """
        biogpt bloom cpmant ctrl mpt openai-gpt xglm""",
    "nothing: its checkpoints are of `gpt2`": "gpt-sw3",
    "what went with release 0.3, because nobody was known to serve it, and may come back with a user who does": """
        codegen falcon fuyu gpt_bigcode gpt_neo gpt_neox gptj nanochat nemotron olmo persimmon phi phimoe stablelm""",
    "an encoder, or attention to another text": """
        bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text electra
        ernie marian mbart megatron-bert modernbert-decoder mvp pegasus plbart prophetnet rembert roberta
        roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod""",
    "hashed or bytewise attention": "blt reformer",
    "sounds or pictures, whose text model has no row, or is not a model of its own": """
        cohere_compass_text emu3 git mllama moshi moss_transcribe_diarize musicgen musicgen_melody
        phi4_multimodal""",
}

# Models of text and pictures whose text model is not served, by the reason.
LEFT_OUT_OF_PICTURES = {
    "its text model has no row above": """
        aria cohere_compass cosmos3_edge deepseek_ocr2 diffusion_gemma dots3_note emu3 ernie4_5_vl_moe fuyu gemma3n
        glm5_next glm_ocr granite4_vision granite_docling hunyuan_vl inkling2 inkling_mm_model minimax_m3_vl
        mistral_large4 molmo2 muse_glimmer muse_spark paddleocr_vl qwen2_5_omni_thinker qwen3_omni_moe_thinker
        qwen4_exp step3p7 unlimited_ocr""",
    "some of its layers attend to pictures alone": "mllama",
    "the tokens of its prompts see each other": "paligemma",
    "it has an encoder, or its text model attends to pictures": """
        blip blip-2 evolla florence2 git idefics instructblip instructblipvideo kosmos-2 kosmos-2.5 pix2struct
        pp_chart2table pp_formulanet t5gemma2 udop vision-encoder-decoder""",
    "it answers with something else than text": "pi0 shieldgemma2",
    "queries and keys are normed by LayerNorms with weights and biases of each head's own, and tokens of pictures are "
    "never answered": "chameleon",
    "its tensors of attention have the names of Diffusers (`to_q`, `norm_q`), and no `model.` before them": """
        cosmos3_omni""",
    "what sees in it needs the package timm, so its names of tensors have not been compared": "perception_lm",
}

# What layers with a state have, by the function that reads their shapes.
STATES = {
    "lfm2_layers": "short convolutions",
    "lfm3_layers": "short convolutions",
    "delta_layers": "gated delta nets",
    "kimi_layers": "gated delta nets (KDA), no rotation",
    "olmo_hybrid_layers": "gated delta nets",
    "bamba_layers": "state spaces (Mamba-2)",
    "jamba_layers": "state spaces (Mamba-1), no rotation",
    "mamba_layers": "state spaces (Mamba-2)",
    "falcon_h1_layers": "state spaces (Mamba-2) beside attention",
    "nemotron_h_layers": "layers of a state space (Mamba-2), attention, MLP or experts",
}

INTRO = """# Models

<!-- written by docs/models_page.py; run `make dashboards` -->

{families} decoder-only text families of transformers are served
([why](decisions/models.md#one-decoder-a-row-for-each-family)), each tested against transformers in float32
(`tests/engine/models/test_families.py`), and one of each kind over a `kill -9` of a decode worker. Config keys that a
family does not know are refused by name, unless they are off, labels or bookkeeping (`--ignore-config-key NAME`); the
table names such keys of transformers. Models whose values are keys (Gemma 4 with `attention_k_eq_v`) or
narrower than keys (MiMo-V2-Flash) have no adapters yet.

Encoders (`bert`, `roberta`, `xlm-roberta`, `modernbert`), all families below and their classifiers
(`ForSequenceClassification`) give [vectors, labels and scores](decisions/pooling.md). Every form in which transformers
5 saves a model is read: published or transformers' names, shards, without head (vectors only, unless tied), and the
text model of a multimodal one.

Hybrid models ([states](decisions/states.md)) run on CPU kernels, torch and GPUs under every split policy, with
[ranks](tensor-parallelism.md) and [stages](pipeline-parallelism.md); single-process workers also support their
adapters, 8-bit KV, draft models and EAGLE-3.

Below: QK norms normalize queries and keys; post-norms follow attention and MLP; the choice bias counts for choosing
experts, not in their sum; "with/without a window" are layers with or without a sliding window.

| model_type | layers, beside Llama's |
|---|---|"""
AFTER = """
Of these multimodal models the text model is served: {text}.
Saved alone, these give vectors: {alone}.
Aliases: {same}.

[Not served, and why](../lab/docs/models-left-out.md). Models with code in their repository (`trust_remote_code`) are
refused."""
WITHOUT_A_ROW = """# Models that are not served

<!-- written by docs/models_page.py; run `make dashboards` -->

[Models](../../docs/models.md) has what is served. These are the other names of transformers'
`MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`, by what they would need.

| needs | model_type |
|---|---|"""
OF_PICTURES = """
Of `MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES`, the models of text and pictures, these are left out.

| why | model_type |
|---|---|"""


def left_out(said: dict[str, str] = LEFT_OUT) -> dict[str, list[str]]:
    """Returns the names of a table such as LEFT_OUT by their reason."""
    return {reason: names.split() for reason, names in said.items()}


def _layer_of(family: ModelFamily) -> dict[str, object]:
    return dict(family.layer.keywords) if isinstance(family.layer, partial) else {}


def options(family: ModelFamily) -> str:
    """Returns what a family's layers do otherwise than those of Llama."""
    layer, said = _layer_of(family), []
    if family.norm == "layer":
        said.append(
            "LayerNorm" + (" with biases" if family.biases.norm else "") + (", or RMS" if family.rms_eps else "")
        )
    if family.norm == "offset":
        said.append("norms by 1 + w")
    norms = layer.get("norms", PRE_NORMS)
    assert isinstance(norms, tuple)
    if not norms[0]:
        said.append("post-norms alone")
    elif norms[1]:
        said.append("pre- and post-norms")
    qk_norm = layer.get("qk_norm")
    if isinstance(qk_norm, QkNorm):
        after = ", after the rotation" if qk_norm.after_rotation else ""
        after += "" if qk_norm.names else ", without weights"
        how = {"layer_by_head": "head (LayerNorm)"}
        said.append(f"QK norms by {how.get(qk_norm.kind, qk_norm.kind)}{after}")
    texts = {
        "QKV biases": family.biases.qkv is True,
        "interleaved rotation": family.rope.interleaved,
        "partial rotation": family.rope.partial,
        "own rotation with a window": family.rope.local,
        "no rotation without a window": family.rope.nope_if_full,
        "scaled embeddings": family.scaled_embedding,
        "sigmoid router": family.sigmoid_router,
        "queries scaled by position": family.rope.query_growth,
        "scores scale experts' inputs": family.scaled_experts,
    }
    said += [text for text, holds in texts.items() if holds]
    if "attention_chunk_size" in family.defaults:
        said.append("attention in chunks of positions")
    if "kv_lora_rank" in family.defaults:
        said.append("MLA")
    if "index_topk" in family.defaults:
        said.append("tokens selected by an indexer (DSA)")
    experts, projections = layer.get("experts", ExpertNames()), layer.get("projections", Projections())
    assert isinstance(experts, ExpertNames)
    assert isinstance(projections, Projections)
    if experts.choice_bias:
        said.append("choice bias")
    if "n_group" in family.defaults:
        said.append("group-limited routing")
    if experts.shared_gate:
        said.append("a gated shared expert")
    if experts.sum_norm:
        said.append("norm of the experts' sum")
    if experts.biased:
        said.append("biases of router and experts; clamped SwiGLU")
    if layer.get("sinks"):
        said.append("attention sinks")
    if "expert_selection_fn" in family.defaults:
        said.append("sigmoid router, average of routed and shared experts")
    if family.linear is not None:
        said.append(STATES[family.linear.__name__])
    if projections.gated or projections.gate:
        said.append("attention gated by head" if projections.by_head else "gated attention")
    if "attention_value_scale" in family.defaults:
        said.append("attention sinks and twice the KV heads with a window; narrower heads of values")
    if family.parallel:
        said.append("attention beside the MLP")
    if not family.gated:
        bends = family.defaults.get("hidden_act") == "xielu"
        said.append("ungated MLP" + (", by xIELU" if bends else ""))
    if family.first_position is not None:
        said.append("learned positions")
    if "global_head_dim" in family.defaults:
        said.append("pre- and post-norms")
        said.append("QKV norms by head")
        said.append("without a window other heads, whose values are keys; layers that share")
        said[-1] += " an earlier one's keys and values"
    if "hidden_size_per_layer_input" in family.defaults:
        said.append("embeddings per layer; experts beside the MLP")
    return "; ".join(said) or "as Llama's"


def _words(keys: object) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys)) if keys else ""  # type: ignore[call-overload]


def refused(name: str, family: ModelFamily) -> set[str]:
    """Returns the fields of transformers' config that are refused where they are not off."""
    fields = {field.name for field in dataclasses.fields(type(AutoConfig.for_model(name)))}
    return fields - known_keys(family.own, family.ignored) - family.fixed.keys()


def render() -> str:
    """Returns the whole page."""
    rows: dict[str, list[str]] = defaultdict(list)
    for name, family in sorted(FAMILIES.items()):
        keys = _words(refused(name, family))
        rows[options(family) + f"; refused: {keys}" * bool(keys)].append(name)
    lines = [INTRO.format(families=len(FAMILIES)), *(f"| {', '.join(names)} | {row} |" for row, names in rows.items())]
    same = ", ".join(f"`{name}` (`{row}`)" for name, row in sorted(SAME_AS.items()))
    lines.append(AFTER.format(text=_words(TEXT_OF), alone=_words(TEXT_AS), same=same))
    return "\n".join(lines) + "\n"


def render_left_out() -> str:
    """Returns the page of models that are not served."""
    lines = [WITHOUT_A_ROW]
    lines += [f"| {reason} | {', '.join(names)} |" for reason, names in left_out().items()]
    lines.append(OF_PICTURES)
    lines += [f"| {reason} | {', '.join(names)} |" for reason, names in left_out(LEFT_OUT_OF_PICTURES).items()]
    return "\n".join(lines) + "\n"


def unsorted() -> set[str]:
    """Returns the names that are neither served nor left out, those that are both, and those that transformers
    lacks."""
    served, found = {*FAMILIES, *TEXT_OF}, set()
    for mapping, said in (
        (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, LEFT_OUT),
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, LEFT_OUT_OF_PICTURES),
    ):
        every, out = set(mapping), [name for names in left_out(said).values() for name in names]
        twice = {name for name in out if out.count(name) > 1} | (set(out) & served)
        found |= (every - served - set(out)) | twice | (set(out) - every)
    return found


if __name__ == "__main__":
    PAGE.write_text(render())
    LEFT_OUT_PAGE.write_text(render_left_out())

"""Every family on the CPU kernels with Pillion's own int8 and int4, 8-bit KV, three answers to one prompt over a prefix
hit, and a restart after a kill."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pillion.config import ModelFlags
from pillion.engine.checkpoints.checkpoint import decoder_tensors, open_checkpoint
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.families import FAMILIES as ROWS
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import Role, tensors_of
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix
from pillion.kernels.torch.torch_attention import StepAttention
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.eight_bit_kv import quantize_rows
from tests.support.families import BY_ROWS, FAMILIES, FIRST, PROMPT_TOKENS, make_model, tokens_of
from tests.support.torch_model import BackendDriver

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.long, needs_kernels]

# Flag and type of 8-bit KV, in turns.
KV = (("int8", "int8"), ("fp8", "fp8_e4m3"))
TOLERANCE = 1e-4
# KV rows between two codes may get either; their share of all rounding differences is below this.
MAX_TURNED = 0.2
# Tokens of a prompt and of its cached prefix; neither ends with a block.
PROMPT, PREFIX = 50, 37


@pytest.fixture(params=[name for name in FIRST.values() if name not in BY_ROWS])
def family(request, tmp_path):
    return request.param, *make_model(tmp_path / "plain", FAMILIES[request.param])


def quantized(folder: pathlib.Path, flags: ModelFlags, kind: str) -> tuple[PreparedModel, torch.nn.Module]:
    """Return the quantized model, and transformers' model of the dequantized values."""
    prepared = prepare(dataclasses.replace(flags, quantization=kind))
    check_roles(prepared.folder)
    names, values = load_file(folder / "model.safetensors"), load_file(prepared.folder / "model.safetensors")
    for module in [name.removesuffix(".codes") for name in values if name.endswith(".codes")]:
        codes, scales, offsets = (values.pop(f"{module}.{part}", None) for part in ("codes", "scales", "offsets"))
        if codes.dtype == torch.uint8:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        groups = codes.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
        groups = groups if offsets is None else groups + offsets[..., None]
        name, weight = module if module in names else f"{module}.weight", groups.flatten(-2)
        # gpt-oss has transposed expert matrices, and GPT-2 all but the head; some are square.
        square = name in names and ROWS[load_config(folder).family].turned
        turned = square or (name in names and weight.shape != names[name].shape)
        values[name] = weight.mT.contiguous() if turned else weight
    wide, config = folder.parent / kind, json.loads((folder / "config.json").read_text())
    wide.mkdir()
    # The prepared folder lacks unused tensors, such as the constants of Apertus' activation.
    values = names | values
    # The head is 8-bit, the embedding is not.
    (wide / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    save_file(values, wide / "model.safetensors", metadata={"format": "pt"})
    return prepared, AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()


def close(got, wanted):
    assert wanted.std() > 0.5
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def logits_of(model, texts):
    with torch.inference_mode():
        return model(torch.tensor(texts)).logits.float()


def run(driver, text):
    return driver.run_all(driver.sequences.add()[0], text, [33, 1, 2, 20])


def check_roles(folder):
    """Assert which tensors of a folder are quantized, and that the head has a scale per output."""
    config = load_config(folder)
    others = {
        f"layers.{index}.{tensor.name}"
        for index, layer in enumerate(layers_of(config))
        for tensor in tensors_of(layer)
        if tensor.role is not Role.MATRIX
    }
    with open_checkpoint(folder, config) as checkpoint:
        for key in decoder_tensors(config):
            found = checkpoint.load_matrix(key, torch.float32)
            plain = key in (*others, "embedding", "positions", "final_norm") or key.endswith(".bias")
            plain = plain or key.startswith("token_inputs.")
            assert isinstance(found, torch.Tensor if plain else QuantizedMatrix), key
        head = checkpoint.load_matrix("lm_head", torch.float32)
        assert isinstance(head, QuantizedMatrix)
        assert head.coding == "int8"
        assert head.group == config.hidden_size


def test_matrices_in_8_bits_and_kv_in_8_bits(family, monkeypatch):
    """Only linear layers' matrices are quantized. The KV reference is torch, which rounds rows, latents and rotated
    keys separately, before writing."""
    name, folder, flags = family
    (prepared, model), text = quantized(folder, flags, "int8"), tokens_of(PROMPT_TOKENS, 2)
    wanted = logits_of(model, [text])[0]
    close(run(CpuDriver(prepared), text), wanted)
    flag, kind = KV[list(FIRST.values()).index(name) % 2]
    found = run(CpuDriver(prepared, backend=cpu_backend(prepared, kv_cache_dtype=flag)), text)
    write, latents = StepAttention.write, load_config(prepared.folder).latents

    def rounded(self, layer, *rows):
        parts = rows if latents is None else rows[0].tensor_split([latents.kv_lora_rank], -1)
        pairs = [quantize_rows(part, kind) for part in parts]
        values = [codes.float() * scales[..., None] for codes, scales in pairs]
        write(self, layer, *(values if latents is None else [torch.cat(values, -1)]))

    monkeypatch.setattr(StepAttention, "write", rounded)
    reference = run(BackendDriver(prepared), text)
    assert (found - reference).abs().mean() < MAX_TURNED * (reference - wanted).abs().mean()


def test_three_answers_over_a_prefix_hit_and_a_new_start(family):
    """In 4 bits. Another request has computed whole blocks of the prompt and part of one; the answers copy the prompt's
    last block and grow side by side. After a kill, the tokens so far are a prompt, computed in other steps."""
    _, folder, flags = family
    prepared, model = quantized(folder, flags, "int4")
    tails = [tokens_of(PROMPT_TOKENS - PROMPT, seed) for seed in (5, 6, 7)]
    texts = [tokens_of(PROMPT, 2) + tail for tail in tails]
    wanted, driver = logits_of(model, texts), CpuDriver(prepared)
    (other,) = driver.sequences.add()
    driver.step((other, texts[0][:20]), sample=())
    driver.step((other, texts[0][20:PREFIX]), sample=())
    first = parallel_sample(driver, other)
    driver.step((other, tails[1][:5]), sample=())
    rows = range(PROMPT - PREFIX)
    close(driver.step((first, texts[0][PREFIX:PROMPT]), sample=rows), wanted[0, PREFIX:PROMPT])
    numbers = [first, parallel_sample(driver, first), parallel_sample(driver, first)]
    for begin, end in ((0, 1), (1, 2), (2, len(tails[0]))):
        parts = [(number, tail[begin:end]) for number, tail in zip(numbers, tails, strict=True)]
        found = driver.step(*parts, sample=range(3 * (end - begin))).unflatten(0, (3, -1))
        close(found, wanted[:, PROMPT + begin : PROMPT + end])
    driver.step((first, tails[2][:1]))
    again = CpuDriver(prepared, seed=1)
    (number,) = again.sequences.add()
    again.step((number, texts[0][:13]), sample=())
    again.step((number, texts[0][13 : PROMPT + 2]), sample=())
    replayed = again.step((number, tails[0][2:]), sample=range(len(tails[0]) - 2))
    close(replayed, found[0])
    assert torch.equal(replayed, found[0])


def parallel_sample(driver, number):
    """Return a sequence that continues another one, with its full blocks and copies of the rest."""
    other, sources, targets = driver.sequences.parallel_sample(number)
    driver.backend.copy_blocks(sources, targets)
    return other

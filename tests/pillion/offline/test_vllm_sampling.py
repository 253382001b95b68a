"""vLLM's sampling fields in LLM, with a real model: which tokens are chosen, also with drafts and in grammars."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from lab.testbed.tiny_model import save_model
from pillion import LLM, InvalidRequest, SamplingParams
from pillion.types import StructuredOutputs

pytestmark = pytest.mark.usefixtures("prepared_here")
PROMPT = "Once upon a time, in a land far away, in a land far away, "
ALLOWED = tuple(range(60, 100))
HOT = SamplingParams(temperature=1.5, seed=7, max_tokens=24, ignore_eos=True, n=3)
GREEDY = replace(HOT, temperature=0.0, n=1)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def codec(folder: pathlib.Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=[None, DRAFTS], ids=["plain", "drafts"])
def llm(request: pytest.FixtureRequest, folder: pathlib.Path) -> Iterator[LLM]:
    options: dict[str, Any] = {} if request.param is None else {"speculative_config": request.param}
    with LLM(str(folder), dtype="float32", max_model_len="256", kv_pool_bytes="16MiB", cpu_threads=1, **options) as one:
        yield one


# The tokens of each case without drafts, which those with drafts are compared with.
_PLAIN: dict[str, list[list[int]]] = {}


def answers(llm: LLM, sampling: SamplingParams, name: str) -> list[list[int]]:
    (output,) = llm.generate(PROMPT, sampling, use_tqdm=False, priority=None)
    found = [list(one.token_ids) for one in output.outputs]
    assert _PLAIN.setdefault(name, found) == found, "drafts change no answer"
    return found


@pytest.mark.parametrize("sampling", [HOT, GREEDY, replace(HOT, top_k=5, logprobs=2), replace(HOT, min_tokens=3)])
def test_only_allowed_tokens_are_chosen(llm: LLM, sampling: SamplingParams) -> None:
    for tokens in answers(llm, replace(sampling, allowed_token_ids=ALLOWED), f"allowed {sampling}"):
        assert set(tokens) <= set(ALLOWED)
        assert len(tokens) == 24


def test_bad_words_are_never_completed(llm: LLM, codec: Tokenizer) -> None:
    """Return words of one token and of several, taken from what the model would write."""
    free = answers(llm, GREEDY, "free")[0]
    words = [text for end in (1, 2, 3) if (text := codec.decode(free[end : 2 * end]).strip())]
    assert words
    sequences = [codec.encode(form, add_special_tokens=False).ids for word in words for form in (word, f" {word}")]
    for sampling in (GREEDY, HOT, replace(HOT, presence_penalty=1.0)):
        for tokens in answers(llm, replace(sampling, bad_words=tuple(words)), f"bad {sampling}"):
            for bad in sequences:
                assert not any(tokens[at : at + len(bad)] == bad for at in range(len(tokens))), (words, tokens)
    # A word that is never about to be completed changes nothing.
    assert answers(llm, replace(GREEDY, bad_words=("zq9" * 5,)), "harmless")[0] == free


def test_token_restrictions_apply_within_a_grammar(llm: LLM, codec: Tokenizer) -> None:
    """The allowed tokens and bad words apply within a grammar; if they leave no token, the grammar decides."""
    shape = StructuredOutputs(regex="[abc]{4,8}")
    ids = {letter: codec.encode(letter, add_special_tokens=False).ids[0] for letter in "abc"}
    narrow = replace(HOT, ignore_eos=False, structured_outputs=shape)
    for name, sampling, letters in (
        ("allowed in a grammar", replace(narrow, allowed_token_ids=(ids["a"], ids["b"])), "ab"),
        ("bad words in a grammar", replace(narrow, bad_words=("b", "c"), allowed_token_ids=tuple(ids.values())), "a"),
        ("nothing is left", replace(narrow, allowed_token_ids=(codec.encode("z").ids[0],)), "abc"),
    ):
        for tokens in answers(llm, sampling, name):
            text = codec.decode(tokens)
            assert 4 <= len(text) <= 8, name
            assert set(text) <= set(letters), (name, text)


def test_detokenize_truncation_and_stop_options_are_applied(llm: LLM, codec: Tokenizer) -> None:
    (output,) = llm.generate(PROMPT, replace(GREEDY, detokenize=False), use_tqdm=False, priority=None)
    assert (output.outputs[0].text, list(output.outputs[0].token_ids)) == ("", answers(llm, GREEDY, "free")[0])
    (cut,) = llm.generate(PROMPT, replace(GREEDY, truncate_prompt_tokens=5), use_tqdm=False)
    assert cut.usage.prompt_tokens == 5
    assert [one.usage.prompt_tokens for one in llm.generate(["x" * 600], replace(GREEDY, truncate_prompt_tokens=-1))]
    ended: Any = replace(GREEDY, stop="a", include_stop_str_in_output=True, max_tokens=200)
    (stopped,) = llm.generate(PROMPT, ended, use_tqdm=False)
    if stopped.outputs[0].finish_reason == "stop":
        assert stopped.outputs[0].text.index("a") == len(stopped.outputs[0].text) - 1
    nothing: Any = dict.fromkeys(
        ("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids", "detokenize", "truncation_side")
    )
    (plain,) = llm.generate(PROMPT, replace(GREEDY, **nothing), use_tqdm=False)
    assert list(plain.outputs[0].token_ids) == answers(llm, GREEDY, "free")[0]
    with pytest.raises(InvalidRequest, match="allowed_token_ids"):
        llm.generate(PROMPT, replace(GREEDY, allowed_token_ids=(10**6,)), use_tqdm=False)

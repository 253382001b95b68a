"""LLM in this process: transformers' greedy tokens, vLLM's interface, and the service's guarantees."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from lab.testbed.tiny_model import BOS, EOS, save_model
from pillion import LLM, ConfigError, InvalidRequest, RequestOutput, SamplingParams
from pillion.offline.llm import read_options
from tests.support.oracle import Oracle, first_difference

GREEDY = SamplingParams(temperature=0, max_tokens=16)
TEXTS = ["Once upon a time, in a land far away, ", "The sea", "x", "Once upon a time, in a land not so far"]
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
TALK_TEXT = f"{BOS}system\nBe brief.{EOS}\n{BOS}user\nHello?{EOS}\n{BOS}assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: pathlib.Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", max_model_len="512", kv_pool_bytes="32MiB", cpu_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(folder: pathlib.Path) -> Oracle:
    return Oracle(AutoModelForCausalLM.from_pretrained(folder), stop=[1])


@pytest.fixture(scope="module")
def codec(folder: pathlib.Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def tokens(outputs) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def test_generate_returns_the_oracles_tokens(llm: LLM, oracle: Oracle, codec: Tokenizer) -> None:
    outputs = llm.generate(TEXTS, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == TEXTS
    for output in outputs:
        (answer,) = output.outputs
        assert output.prompt_token_ids == codec.encode(output.prompt).ids
        assert not first_difference(oracle.greedy(output.prompt_token_ids, 16), answer.token_ids, 1e-3)
        assert (answer.index, output.finished, answer.logprobs, answer.cumulative_logprob) == (0, True, None, None)
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] == 1 else "length")
        assert answer.text == codec.decode(answer.token_ids, skip_special_tokens=True)
        assert output.usage.completion_tokens == len(answer.token_ids)
    assert outputs[0].timings.decode_worker == "decode-0"


def test_chat_returns_the_oracles_tokens(llm: LLM, oracle: Oracle, codec: Tokenizer) -> None:
    (alone,) = llm.chat(TALK, GREEDY, use_tqdm=False)
    assert (alone.prompt, alone.prompt_token_ids) == (TALK_TEXT, codec.encode(TALK_TEXT, add_special_tokens=False).ids)
    assert not first_difference(oracle.greedy(alone.prompt_token_ids, 16), alone.outputs[0].token_ids, 1e-3)
    both = llm.chat([TALK, TALK[1:]], GREEDY, use_tqdm=False)
    assert len(both) == 2
    assert tokens(both)[0] == tokens([alone])[0]
    (continued,) = llm.chat(TALK, GREEDY, use_tqdm=False, continue_final_message=True)
    (open_end,) = llm.chat(TALK, GREEDY, use_tqdm=False, add_generation_prompt=False, chat_template_kwargs={"a": 1})
    assert continued.prompt == TALK_TEXT[: TALK_TEXT.index("Hello?") + len("Hello?")]
    assert open_end.prompt == TALK_TEXT.removesuffix(f"{BOS}assistant\n")


@pytest.mark.parametrize(
    "prompt",
    [[5, 6, 7], [[5, 6, 7]], {"prompt_token_ids": [5, 6, 7]}, [{"prompt_token_ids": [5, 6, 7], "cache_salt": "mine"}]],
    ids=["ids", "list of ids", "dict", "list of dicts"],
)
def test_every_shape_of_a_prompt(llm: LLM, oracle: Oracle, prompt: object) -> None:
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == (None, [5, 6, 7])
    assert not first_difference(oracle.greedy([5, 6, 7], 16), output.outputs[0].token_ids, 1e-3)


def test_text_dicts_and_per_prompt_sampling_are_accepted(llm: LLM) -> None:
    asked = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 5)]
    outputs = llm.generate([{"prompt": "The sea"}, "The sea"], asked, use_tqdm=False, priority=[5, -5])
    assert [(output.prompt, len(output.outputs[0].token_ids)) for output in outputs] == [("The sea", 3), ("The sea", 5)]
    assert tokens(outputs)[1][:3] == tokens(outputs)[0]


def test_prefixes_are_cached_across_calls_but_not_across_salts(llm: LLM) -> None:
    prompt = "a prompt that nobody has sent before, longer than a few blocks"
    first, again = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, (len(prompt) - 1) // 16 * 16)
    assert tokens([first]) == tokens([again])
    (salted,) = llm.generate({"prompt": prompt, "cache_salt": "x"}, GREEDY, use_tqdm=False)
    assert salted.num_cached_tokens == 0


def test_several_answers_equal_single_ones_with_their_seeds(llm: LLM) -> None:
    asked = {"temperature": 0.9, "max_tokens": 12, "ignore_eos": True}
    (several,) = llm.generate("The sea", SamplingParams(n=3, seed=7, **asked), use_tqdm=False)
    assert [answer.index for answer in several.outputs] == [0, 1, 2]
    alone = llm.generate(["The sea"] * 3, [SamplingParams(seed=7 + n, **asked) for n in range(3)], use_tqdm=False)
    assert tokens([several]) == tokens(alone)
    assert len({tuple(ids) for ids in tokens(alone)}) == 3


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    asked = {"temperature": 0.9, "seed": 3, "max_tokens": 64, "ignore_eos": True}
    (whole,) = llm.generate("The sea", SamplingParams(**asked), use_tqdm=False)
    text = whole.outputs[0].text
    stop = next(text[n] for n in range(8, len(text)) if text[n].isascii() and text[n] not in text[:n])
    for form in (stop, [stop], (stop,)):
        (output,) = llm.generate("The sea", SamplingParams(stop=form, **asked), use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text.partition(stop)[0], "stop")


def test_logprobs_have_vllms_shape(llm: LLM) -> None:
    asked = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
    (answer,) = llm.generate("The sea", asked, use_tqdm=False)[0].outputs
    assert len(answer.logprobs) == len(answer.token_ids) == 6
    for token_id, position in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(position)) == token_id
        assert (len(position), position[token_id].rank) == (2, 1)
        assert all(
            one.logprob <= position[token_id].logprob and isinstance(one.decoded_token, str)
            for one in position.values()
        )
    first = [position[token_id].logprob for token_id, position in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(first))


def test_more_answers_than_slots_are_queued(llm: LLM) -> None:
    asked = SamplingParams(n=16, temperature=0.9, max_tokens=2, ignore_eos=True)
    outputs = llm.generate([[n % 200 + 2] for n in range(60)], asked, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[n % 200 + 2] for n in range(60)]
    assert all(len(output.outputs) == 16 for output in outputs)


def test_the_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[object] = []

    class FakeBar:
        def __init__(self, **bar_options: object) -> None:
            seen.append((bar_options["total"], bar_options["desc"]))

        def __enter__(self) -> FakeBar:
            return self

        def __exit__(self, *_: object) -> None:
            seen.append("closed")

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            assert "toks/s" in text

        def update(self, count: int) -> None:
            seen.append(count)

    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=FakeBar)
    assert seen == [(3, "Processed prompts"), 1, 1, 1, "closed"]
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b", "c"], GREEDY)
    assert "Processed prompts: 100%" in capsys.readouterr().err
    llm.generate("a", GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_one_bad_prompt_ends_the_call_and_is_named(llm: LLM) -> None:
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["x", "y" * 600, "z"], long, use_tqdm=False)
    assert [violation.field for violation in caught.value.violations] == ["prompts[1]"]
    assert caught.value.__notes__ == ["prompt 1 of 3"]
    assert llm.status().active_requests == 0


@pytest.mark.parametrize(
    ("call", "error", "complaint"),
    [
        (lambda llm: llm.generate({"prompt": "x", "multi_modal_data": 1}), InvalidRequest, "multi_modal_data"),
        (lambda llm: llm.generate({"prompt": "x", "prompt_token_ids": [1]}), InvalidRequest, "give one of"),
        (lambda llm: llm.generate({}), InvalidRequest, "give one of"),
        (lambda llm: llm.generate(["x", ""]), InvalidRequest, "the prompt is empty"),
        (lambda llm: llm.generate(["x"], [GREEDY, GREEDY]), ValueError, "1 prompts and 2 sampling"),
        (lambda llm: llm.generate(["x"], priority=[1, 2]), ValueError, "1 prompts and 2 priorities"),
        (lambda llm: llm.generate("x", SamplingParams(top_p=7)), InvalidRequest, "top_p"),
        (lambda llm: llm.generate("x", SamplingParams(max_tokens="many")), InvalidRequest, "integer"),
        (lambda llm: llm.generate([[3, 2**40]]), InvalidRequest, r"prompts\[0\]\[1\]: 1099511627776 is not in"),
        (lambda llm: llm.chat([{"role": "user"}]), InvalidRequest, r"messages\[0\].content: this field is needed"),
        (lambda llm: llm.chat([{"role": "user", "content": [{"type": "text"}]}]), InvalidRequest, "a part is"),
        (lambda llm: llm.chat([{"role": "user", "content": [{"type": "image"}]}]), InvalidRequest, "only text is"),
        (lambda llm: llm.chat([]), InvalidRequest, "the prompt is empty"),
    ],
)
def test_wrong_requests_are_rejected_with_a_reason(llm: LLM, call, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        call(llm)


def test_an_empty_prompt_list_returns_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


async def test_generate_works_inside_a_running_event_loop(llm: LLM) -> None:
    assert len(llm.generate("here", GREEDY, use_tqdm=False)) == 1
    both = await asyncio.gather(*(asyncio.to_thread(llm.generate, TEXTS, GREEDY, use_tqdm=False) for _ in range(2)))
    assert tokens(both[0]) == tokens(both[1])


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"prefill_workers": 2}, TypeError, "no option 'prefill_workers'; it has: .*block_size"),
        ({"max_num_seqs": "many"}, ConfigError, "max_num_seqs 'many' is not of type int"),
        ({"max_num_seqs": 2.5}, ConfigError, "is not of type int"),
        ({"enable_prefix_caching": "no"}, ConfigError, "is not of type bool"),
        ({"kv_pool_bytes": "much"}, ConfigError, "'much' is not a size"),
        ({"dtype": "float8"}, ConfigError, "not one of auto, bfloat16, float16"),
    ],
)
def test_invalid_option_combinations_are_rejected(options: dict, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        LLM("demo", **options)


def test_template_names_and_variables_match_vllm() -> None:
    for given, names in (("one", ("one",)), (["one", "two"], ("one", "two"))):
        flags = read_options(
            "m", {"served_model_name": given, "default_chat_template_kwargs": {"enable_thinking": False}}
        )
        assert flags.served_model_name == names
        assert flags.default_chat_template_kwargs == '{"enable_thinking": false}'
    with pytest.raises(ConfigError, match="served_model_name 5 is not of type tuple"):
        read_options("m", {"served_model_name": 5})


def test_options_are_flags() -> None:
    flags = read_options("m", {"kv_pool_bytes": "2GiB", "max_model_len": 4096, "enable_chunked_prefill": False})
    assert (flags.model, flags.kv_pool_bytes, flags.max_model_len) == ("m", 2**31, 4096)
    assert not flags.enable_chunked_prefill


def test_a_start_that_fails_leaves_nothing(folder: pathlib.Path) -> None:
    for options, complaint in [
        ({"kv_pool_bytes": "64KiB"}, "one request of"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "--max-num-batched-tokens must be"),
        ({"block_size": 0}, "--block-size 0 is less than 1"),
    ]:
        with pytest.raises(ConfigError, match=complaint):
            LLM(str(folder), dtype="float32", **options)
    with pytest.raises(ConfigError, match="nowhere"):
        LLM(str(folder / "nowhere"))


def test_dynamic_ntk_leaves_requests_within_the_original_length_unscaled(tmp_path: pathlib.Path) -> None:
    """Dynamic NTK, served beyond its original length: longer limits have other KV, and share none (I2)."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    folder = save_model(tmp_path / "ntk", max_position_embeddings=64, rope_parameters=rope)
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(folder))
    ids = [7 * i % 250 + 2 for i in range(42)]
    options = {"dtype": "float32", "max_model_len": 200, "kv_pool_bytes": "16MiB", "cpu_threads": 1}
    with LLM(str(folder), **options) as llm:

        def ask(most: int) -> RequestOutput:
            params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
            return llm.generate([ids], params, use_tqdm=False)[0]

        within, beyond, again = ask(22), ask(23), ask(20)
    assert not first_difference(oracle.greedy(ids, 22), tokens([within])[0], 1e-3)
    assert tokens([again])[0] == tokens([within])[0][:20]
    assert (within.num_cached_tokens, beyond.num_cached_tokens, again.num_cached_tokens) == (0, 0, 32)
    assert tokens([beyond]) != tokens([within])


def test_without_prefix_caching_nothing_is_found(folder: pathlib.Path) -> None:
    # The model has 4,096 tokens, more than this pool holds; nobody asked for so many.
    options = {"dtype": "float32", "kv_pool_bytes": "1MiB", "cpu_threads": 1}
    draft_tokens = {"method": "ngram", "num_speculative_tokens": 2}
    with LLM(str(folder), enable_prefix_caching=False, speculative_config=draft_tokens, **options) as llm:
        first, again = (llm.generate("x" * 50, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (again.num_cached_tokens, tokens([first])) == (0, tokens([again]))

"""LLM accepts what programs for vLLM write, or says what to do instead."""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
from collections.abc import Iterator

import pytest

from lab.testbed.tiny_model import save_model
from pillion import LLM, ConfigError, EngineArgs, InvalidRequest, LoRARequest, PermissionDenied, SamplingParams
from pillion.engine.quantized.quantization import OWN_METHOD
from pillion.engine.quantized.quantization_methods import METHODS
from pillion.offline.llm import read_options
from pillion.offline.vllm_options import (
    PRODUCERS,
    FlexibleArgumentParser,
    check_producer,
    producer_of,
    translate_options,
)

pytestmark = pytest.mark.usefixtures("prepared_here")
SMALL = {"dtype": "float32", "max_model_len": 256, "kv_pool_bytes": "32MiB", "cpu_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: pathlib.Path) -> Iterator[LLM]:
    with LLM(str(folder), tokenizer=str(folder), trust_remote_code=False, load_format="safetensors", **SMALL) as made:
        yield made


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"trust_remote_code": True}, "trust_remote_code=.* is not supported: Pillion runs no code of a checkpoint"),
        ({"load_format": "pt"}, "load_format='pt' is not supported: Pillion reads safetensors and GGUF"),
        ({"load_format": "gguf"}, "load_format='gguf': .* is a folder of safetensors"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not supported: set tensor_parallel_size"),
        ({"runner": "draft"}, "LLM.embed"),
        ({"seed": "7"}, "seed '7' is not an int"),
        ({"tokenizer": "/nowhere/at all"}, "--tokenizer /nowhere/at all is neither a local folder nor a hub id"),
        ({"quantization": "AWQ"}, "quantization='awq': .* has plain weights; leave the option out, or choose int8"),
    ],
)
def test_rejections_suggest_an_alternative(options: dict, complaint: str, folder: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LLM(str(folder), **SMALL, **options)


def test_no_op_options_are_accepted(folder: pathlib.Path) -> None:
    plain = {"trust_remote_code": False, "swap_space": 4, "pipeline_parallel_size": 1, "cpu_offload_gb": 0}
    given = {
        **plain,
        "max_num_seqs": None,
        "quantization": None,
        "load_format": "safetensors",
        "tokenizer_mode": "auto",
    }
    assert translate_options(str(folder), given) == {}
    assert read_options("demo", {"load_format": "gguf", "kv_cache_memory_bytes": "1GiB"}).kv_pool_bytes == 2**30


@pytest.mark.parametrize(
    ("named", "config", "files", "right"),
    [
        ("AWQ", {"quantization_config": {"quant_method": "awq"}}, {}, True),
        ("awq_marlin", {"quantization_config": {"quant_method": "awq"}}, {}, True),
        ("gptq", {}, {"quantize_config.json": {"bits": 4}}, True),
        ("mlx", {"quantization": {"bits": 4, "group_size": 64}}, {}, True),
        ("mlx", {"quantization": {"bits": 4}, "quantization_config": {"bits": 4}}, {}, True),
        ("mxfp4", {"quantization_config": {"quant_method": "mxfp4"}}, {}, True),
        ("modelopt", {"quantization_config": {"quant_method": "modelopt_fp8"}}, {}, True),
        ("bitsandbytes", {"quantization_config": {"load_in_4bit": True}}, {}, True),
        ("auto-round", {"quantization_config": {"quant_method": "auto-round"}}, {}, True),
        ("gptq", {"quantization_config": {"quant_method": "awq"}}, {}, False),
        ("fp8", {}, {}, False),
    ],
)
def test_a_checkpoints_producer_may_be_named(named, config, files, right, tmp_path) -> None:
    for name, content in {"config.json": config, **files}.items():
        (tmp_path / name).write_text(json.dumps(content))
    producer = producer_of({"quantization": named})
    assert producer == named.lower().removesuffix("_marlin")
    if right:
        check_producer(producer, str(tmp_path), tmp_path)
    else:
        with pytest.raises(ConfigError, match="leave the option out"):
            check_producer(producer, str(tmp_path), tmp_path)


def test_vllm_kernel_names_map_to_producers() -> None:
    names = ("gptq_bitblas", "compressed_tensors", "auto_round", "inc", "modelopt_fp4")
    found = ["gptq", "compressed-tensors", "auto-round", "auto-round", "modelopt"]
    assert [producer_of({"quantization": name}) for name in names] == found


def test_every_producer_whose_checkpoints_are_read_may_be_named() -> None:
    named = {producer_of({"quantization": method}) for method in METHODS if method != OWN_METHOD}
    assert named == set(PRODUCERS) - {"gguf", "mlx"}


@pytest.mark.parametrize("reader", ["bitsandbytes", "fastsafetensors", "runai_streamer"])
def test_vllm_load_formats_mean_safetensors(reader: str, folder: pathlib.Path) -> None:
    assert translate_options(str(folder), {"load_format": reader}) == {}
    with pytest.raises(ConfigError, match="demo is a GGUF file"):
        translate_options("demo", {"load_format": reader})


def test_our_own_weight_formats_are_not_producers() -> None:
    assert [producer_of({"quantization": kind}) for kind in ("int8", "none", None, 4)] == [""] * 4


def test_prompts_may_be_token_ids_by_keyword(llm: LLM) -> None:
    one = llm.generate(prompt_token_ids=[5, 6, 7], sampling_params=GREEDY, use_tqdm=False)
    many = llm.generate(None, GREEDY, False, prompt_token_ids=[[5, 6, 7], [5, 6]])
    assert [output.prompt_token_ids for output in [*one, *many]] == [[5, 6, 7], [5, 6, 7], [5, 6]]
    assert one[0].outputs[0].token_ids == many[0].outputs[0].token_ids
    for wrong in ({}, {"prompts": ["x"], "prompt_token_ids": [5]}):
        with pytest.raises(ValueError, match="give one of prompts and prompt_token_ids"):
            llm.generate(**wrong)


def test_recommended_sampling_can_be_edited(llm: LLM) -> None:
    sampling = llm.get_default_sampling_params()
    sampling.max_tokens = 3
    sampling.temperature = 0.0
    (output,) = llm.generate("x", sampling, use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 3
    with pytest.raises(AttributeError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]


def test_the_tokenizer_is_transformers(llm: LLM) -> None:
    assert llm.get_tokenizer()("The sea").input_ids == llm.generate("The sea", GREEDY, False)[0].prompt_token_ids


@pytest.mark.parametrize("name", ["encode", "reward"])
def test_encode_and_reward_are_rejected_by_name(name: str, llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=f"LLM.{name} is not .*, no rows.*; for token ids, use get_tokenizer"):
        getattr(llm, name)(["x"], use_tqdm=False)


def test_beam_search_is_rejected(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"beam_search is not supported: .* SamplingParams\(n="):
        llm.beam_search(["x"], object())


def test_a_seed_makes_a_programs_answers_reproducible(folder: pathlib.Path) -> None:
    """Two equal prompts of one call also get different answers, like different draws."""
    hot = SamplingParams(temperature=5.0, max_tokens=8, ignore_eos=True)

    def answers(seed: int) -> list[list[int]]:
        with LLM(str(folder), seed=seed, **SMALL) as llm:
            outputs = [*llm.generate(["x", "x"], hot, False), *llm.generate("x", hot, False)]
        return [output.outputs[0].token_ids for output in outputs]

    first = answers(1)
    assert len({tuple(answer) for answer in first}) == 3
    assert answers(1) == first
    assert answers(2) != first


def test_another_folders_tokenizer_and_template_are_used(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = [word for word in vocab if len(word) == 1 and word.isalpha()][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(folder / "tokenizer_config.json", other)
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    with LLM(str(folder), tokenizer=str(other), **SMALL) as llm:
        (output,) = llm.generate(first, GREEDY, False)
        assert output.prompt_token_ids[-1] == vocab[first]
        (talk,) = llm.chat([{"role": "user", "content": "Hm"}], GREEDY, False)
        assert talk.prompt == "Hm!"


def test_a_message_may_come_in_parts_of_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "Look."}, {"type": "text", "text": "Who is it?"}]
    found = [
        llm.chat([{"role": "user", "content": content}], GREEDY, False)[0].prompt
        for content in (parts, "Look.\nWho is it?")
    ]
    assert found[0] == found[1]


def test_adapter_errors_name_the_python_arguments(llm: LLM) -> None:
    for call in (
        lambda: llm.generate("x", GREEDY, False, lora_request=LoRARequest("a", 1, "/nowhere")),
        lambda: llm.load_adapter("a", "/nowhere"),
        lambda: llm.unload_adapter("a"),
    ):
        with pytest.raises(PermissionDenied, match=r"LLM\(\.\.\., enable_lora=True\)"):
            call()


def test_a_call_may_have_its_own_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hm"}]
    own = "{{ messages[0].content }}?{{ word }}"
    outputs = llm.chat([talk, talk], GREEDY, False, chat_template=own, chat_template_kwargs={"word": "so"})
    assert [output.prompt for output in outputs] == ["Hm?so", "Hm?so"]
    assert outputs[0].outputs[0].token_ids == llm.generate("Hm?so", GREEDY, False)[0].outputs[0].token_ids
    assert llm.chat(talk, GREEDY, False)[0].prompt == llm.chat(talk, GREEDY, False, chat_template=None)[0].prompt
    assert "Hm?" not in llm.chat(talk, GREEDY, False)[0].prompt
    with pytest.raises(InvalidRequest, match="template failed"):
        llm.chat(talk, GREEDY, False, chat_template="{{ messages[0")


def test_a_tokenizer_of_a_larger_vocabulary_is_rejected(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 10**6, "content": "<far>"})
    tokenizer["model"]["vocab"]["<far>"] = 10**6
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="--tokenizer has the token id 1000000, but the model has"):
        LLM(str(folder), tokenizer=str(tmp_path), **SMALL)


def test_arguments_of_a_script_become_options(folder: pathlib.Path) -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser.add_argument_group("engine"))
    words = ["--model", str(folder), "--max_model_len", "128", "--enable-chunked-prefill", "--seed=5"]
    options = vars(parser.parse_args(words))
    assert options.pop("seed") == 5
    flags = read_options(options.pop("model"), options)
    assert (flags.model, flags.max_model_len, flags.enable_chunked_prefill) == (str(folder), 128, True)
    assert flags.max_num_seqs == read_options("m", {}).max_num_seqs
    with pytest.raises(SystemExit):
        parser.parse_args(["--dtype", "float8"])
    words = ["--quantization", "AWQ", "--load-format=safetensors", "--kv-cache-memory-bytes", "33554432"]
    options = vars(parser.parse_args([*words, "--trust-remote-code", "false", "--pipeline-parallel-size", "1"]))
    assert producer_of(options) == "awq"
    assert read_options(str(folder), {**options, "model": None}).kv_pool_bytes == 2**25
    for word, complaint in (
        ("--trust-remote-code", "no code of a checkpoint"),
        ("--cpu-offload-gb=10", "quantization"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            read_options(str(folder), {**vars(parser.parse_args([word])), "model": None})
    assert isinstance(parser, argparse.ArgumentParser)

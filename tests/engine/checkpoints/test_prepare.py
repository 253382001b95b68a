"""Finding, converting and fingerprinting a model, and one-line errors for unsupported ones."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import textwrap

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers
from transformers import AutoModelForCausalLM

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.backends.backend import kv_layout
from pillion.engine.backends.torch_backend import TorchBackend
from pillion.engine.checkpoints import convert, model_cache
from pillion.engine.checkpoints import fingerprint as fingerprint_module
from pillion.engine.checkpoints.fingerprint import fingerprint
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.model_files import locate, weight_files
from pillion.engine.checkpoints.prepare import check_counts, choose_dtype, is_prepared, prepare
from pillion.engine.checkpoints.weights import load_weights
from pillion.engine.load_model import precision_notes
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_config import MoeConfig
from pillion.errors import ConfigError
from tests.support.published_configs import SERVED
from tests.support.torch_model import BackendDriver


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """Let no hub be asked for a repository's files."""
    import huggingface_hub

    def fail(*_, **__):
        raise OSError("no hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    return save_model(tmp_path / "a-model")


def flags(folder, **more):
    return ModelFlags(model=str(folder), dtype=more.pop("dtype", "float32"), **more)


def refused(given):
    with pytest.raises(ConfigError) as caught:
        prepare(given)
    assert "\n" not in caught.value.message
    return caught.value.message


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_complete_folder_is_used_as_it_is(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    progress = []
    prepared = prepare(flags(folder), progress.append)
    assert prepared.folder == folder
    assert prepared.name == "a-model"
    assert (prepared.dtype, prepared.max_model_len, prepared.vocab_size) == ("float32", 4096, 258)
    assert (prepared.eos_token_ids, prepared.bos_token_id) == ((1, 7), 0)
    assert progress
    layout = kv_layout(prepared, 16)
    assert layout.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
    assert layout == TorchBackend(prepared, 16, 0).layout
    named = prepare(flags(folder, served_model_name="me"))
    assert (prepared.aliases, named.name, named.aliases) == ((str(folder),), "me", ())
    named = prepare(flags(folder, served_model_name=("me", "gpt-4o", "me")))
    assert (named.name, named.aliases) == ("me", ("gpt-4o",))


def test_the_second_start_reads_a_record_and_imports_no_torch(folder, monkeypatch):
    first = prepare(flags(folder))
    monkeypatch.setattr(fingerprint_module, "digest_file", lambda *_: pytest.fail("fingerprinted again"))
    progress = []
    assert prepare(flags(folder), progress.append) == first
    assert not progress
    program = f"""
        import sys
        from pillion.engine.backends.backend import kv_layout
        from pillion.engine.checkpoints.prepare import prepare
        from pillion.config import ModelFlags
        prepared = prepare(ModelFlags(model={str(folder)!r}, dtype="float32"))
        assert kv_layout(prepared, 16).block_bytes
        assert prepared.fingerprint == {first.fingerprint!r}
        assert not {{"torch", "transformers", "huggingface_hub"}} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=200)


def test_the_fingerprint_covers_only_weights_config_and_dtype(folder):
    first = prepare(flags(folder)).fingerprint
    assert prepare(flags(folder, dtype="bfloat16")).fingerprint != first
    copy = folder.rename(folder.with_name("elsewhere"))
    assert prepare(flags(copy)).fingerprint == first
    edit_json(copy / "config.json", rms_norm_eps=0.5)
    changed = prepare(flags(copy)).fingerprint
    assert changed != first
    edit_tensors(copy / "model.safetensors", lambda tensors: tensors["model.norm.weight"].add_(1))
    assert prepare(flags(copy)).fingerprint not in (first, changed)


RELEASED = json.loads(pathlib.Path(__file__).with_name("released_fingerprints.json").read_text())


@pytest.mark.parametrize("name", RELEASED)
def test_fingerprints_match_the_last_release(name, tmp_path):
    """Version 0.2.0 recorded them, from configs without weights. A difference invalidates users' caches on upgrade."""
    (tmp_path / "config.json").write_text(json.dumps(SERVED[name]))
    assert fingerprint((), load_config(tmp_path), "bfloat16") == RELEASED[name]


def test_a_models_later_fields_change_its_fingerprint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SERVED["Llama-3.1-8B-Instruct"]))
    config = load_config(tmp_path)
    first = fingerprint((), config, "bfloat16")
    assert fingerprint((), dataclasses.replace(config, chunked=True), "bfloat16") != first
    assert fingerprint((), dataclasses.replace(config, layer_widths=(1, 2)), "bfloat16") != first


def test_norms_of_queries_that_0_2_0_did_not_have_change_the_fingerprint(tmp_path):
    name = "c4ai-command-r-v01"
    (tmp_path / "config.json").write_text(json.dumps(SERVED[name]))
    config = load_config(tmp_path)
    assert not config.qk_norm
    assert fingerprint((), dataclasses.replace(config, qk_norm=True), "bfloat16") != RELEASED[name]


def test_norms_that_0_2_0_rounded_are_in_the_fingerprint(folder):
    """Their weights have another type than the model, and norms are applied in float32."""
    config, files = load_config(folder), (folder / "model.safetensors",)
    wide = dataclasses.replace(config, norm="wide")

    def same(kind, other):
        as_now = fingerprint(files, kind, other)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fingerprint_module, "_has_wider_vectors", lambda path: False)
            return fingerprint(files, kind, other) == as_now

    assert [same(config, "bfloat16"), same(wide, "float32"), same(wide, "bfloat16")] == [True, True, False]
    edit_tensors(files[0], lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    assert same(wide, "bfloat16")


def test_max_model_len_is_checked_and_has_a_default(folder):
    assert prepare(flags(folder, max_model_len=100)).max_model_len == 100
    assert "4096" in refused(flags(folder, max_model_len=4097))
    assert "-1" in refused(flags(folder, max_model_len=-1))
    edit_json(folder / "config.json", max_position_embeddings=100_000)
    assert prepare(flags(folder)).max_model_len == 8192
    assert prepare(flags(folder, max_model_len=100_000)).max_model_len == 100_000


@pytest.mark.parametrize(("kind", "length"), [("dynamic", 4096), ("longrope", 64), ("one set", 8192), ("yarn", 8192)])
def test_a_model_whose_frequencies_depend_on_the_length_is_served_at_its_original_one(folder, kind, length):
    """Longer texts would change answers to short ones, so they are opt-in, and the start warns."""
    rope = {"rope_type": "yarn" if kind == "yarn" else "dynamic" if kind == "dynamic" else "longrope", "factor": 4.0}
    sets = {"short_factor": [1.0] * 8, "long_factor": [1.0 if kind == "one set" else 2.0] * 8}
    rope |= {} if kind == "dynamic" else {"original_max_position_embeddings": 64}
    rope |= sets if rope["rope_type"] == "longrope" else {}
    edit_json(folder / "config.json", rope_parameters={"rope_theta": 1e4, **rope})
    edit_json(folder / "config.json", max_position_embeddings=4096 if kind == "dynamic" else 20_000)
    prepared = prepare(flags(folder))
    assert prepared.max_model_len == length
    assert not list(precision_notes(prepared))
    longer = flags(folder, max_model_len=length + 1)
    notes = list(precision_notes(prepare(longer)))
    assert len(notes) == (kind in ("dynamic", "longrope"))
    assert not notes or f"above {length} tokens get other rotary frequencies" in notes[0]


def test_float16_weights_run_exactly_in_float32_and_losses_are_reported(folder):
    edit_tensors(
        folder / "model.safetensors", lambda tensors: tensors.update({k: t.half() for k, t in tensors.items()})
    )
    edit_json(folder / "config.json", dtype="float16")
    for dtype in ("float16", "half", "float32"):
        half = flags(folder, dtype=dtype)
        prepared = prepare(half)
        assert prepared.dtype == "float32"
        assert not list(precision_notes(prepared))
        assert ("exactly" in choose_dtype(dtype)[1]) == (dtype != "float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = model(torch.tensor([[5, 6, 7]])).logits[0]
    driver = BackendDriver(prepared)
    torch.testing.assert_close(driver.run_all(driver.sequences.add()[0], [5, 6, 7], []), wanted, atol=1e-4, rtol=1e-4)
    narrow = flags(folder, dtype="bfloat16")
    assert "bfloat16 keeps 8" in next(precision_notes(prepare(narrow)))


def test_dtype_auto_is_bfloat16_or_float32():
    assert choose_dtype("auto")[0] in ("bfloat16", "float32")
    with pytest.raises(ConfigError, match="int8"):
        choose_dtype("int8")


def test_bad_paths_are_refused_in_one_line(folder, tmp_path):
    assert "no model given" in refused(flags(""))
    assert "nor a hub id" in refused(flags("no-such-model"))
    assert "nor a hub id" in refused(flags(tmp_path / "nothing"))
    plain = tmp_path / "notes.txt"
    plain.write_text("hello")
    assert "not a GGUF" in refused(flags(plain))
    assert "config.json" in refused(flags(tmp_path))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\1" * 64)
    assert "it may be damaged or truncated" in refused(flags(broken))
    edit_json(folder / "config.json", model_type="mamba")
    assert "'mamba' is not supported" in refused(flags(folder))


def test_a_hub_id_that_cannot_be_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path))
    import huggingface_hub

    request = {}

    def fail(model, **options):
        request.update(options, model=model)
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = refused(ModelFlags(model="owner/name", revision="v2"))
    assert "owner/name (v2)" in message
    assert "no route to host" in message
    assert request["revision"] == "v2"
    assert not [pattern for pattern in request["allow_patterns"] if pattern.endswith((".bin", ".pt", ".py"))]


def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_fetched(monkeypatch, folder):
    """Only its config is fetched."""
    edit_json(folder / "config.json", quantization_config={"quant_method": "awq", "bits": 3})
    fetched = []

    def fetch(model, **options):
        listing, allowed = ["config.json", "a.safetensors"], options["allow_patterns"]
        fetched.append(set(filter_repo_objects(listing, allow_patterns=allowed)))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert "quantized by awq, 3 bits" in refused(ModelFlags(model="owner/quantized"))
    assert fetched == [{"config.json"}]


def test_a_hub_folder_is_served_under_its_id(monkeypatch, folder):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    assert prepare(ModelFlags(model="owner/name", dtype="float32")).name == "owner/name"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks model.norm.weight"),
        (lambda tensors: tensors.update(strange=torch.ones(1)), "holds strange"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight is \[3\]"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), "is I8"),
        (lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[77].fill_(torch.nan), r"1.mlp.up.*NaN"),
        (
            lambda tensors: tensors["model.norm.weight"][3:5].copy_(torch.tensor([1, -1]) / 0),
            r"model.norm.* infinities",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.full((64,), 1e300, dtype=torch.float64)}),
            "NaN or infinities in float32",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder, change, words):
    edit_tensors(folder / "model.safetensors", change)
    with pytest.raises(ConfigError, match=words):
        TorchBackend(prepare(flags(folder)), 16, 0)


def test_huge_weights_are_finite(folder):
    """Their sum is not."""
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors["model.norm.weight"].fill_(3e38))
    TorchBackend(prepare(flags(folder)), 16, 0)


def test_a_damaged_weight_file_is_refused(folder):
    path = folder / "model.safetensors"
    for content in (b"\1" * 100, path.read_bytes()[:20_000], b""):
        path.write_bytes(content)
        words = rf"model.safetensors \({len(content):,} bytes\) is truncated, or not a safetensors file: "
        with pytest.raises(ConfigError, match=words):
            TorchBackend(prepare(flags(folder)), 16, 0)
    path.unlink()
    assert refused(flags(folder)).endswith("only safetensors and GGUF weights are supported")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    said = refused(flags(folder))
    assert "and pytorch_model.bin is a pickle, which may run arbitrary code. If you trust it, convert it once" in said


def test_sharded_weights(folder):
    whole = BackendDriver(prepare(flags(folder))).greedy([5, 6, 7], 8)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"one.safetensors": names[:9], "two.safetensors": names[9:]}
    for file, mine in parts.items():
        save_file({name: tensors[name] for name in mine}, folder / file)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, mine in parts.items() for name in mine}}))
    assert BackendDriver(prepare(flags(folder))).greedy([5, 6, 7], 8) == whole
    index.write_text(json.dumps({"weight_map": {names[0]: "../a-model/one.safetensors"}}))
    assert "not in the folder" in refused(flags(folder))


def test_unfused_weights_are_views_of_the_mapped_file(folder):
    config = load_config(folder)
    weights = load_weights(folder, config, torch.float32)
    for tensor in (weights.embedding, weights.layers[0]["o"].weight, weights.layers[1]["down"].weight):
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[0] for line in maps if "a-model/model.safetensors" in line]
        bounds = [tuple(int(end, 16) for end in addresses.split("-")) for addresses in ranges]
        assert any(low <= tensor.data_ptr() < high for low, high in bounds)


def test_a_folder_without_tokenizer_json_gets_one(folder, monkeypatch):
    class Converted:
        def save_pretrained(self, into):
            Tokenizer.from_file(str(folder / "tokenizer.keep")).save(str(into / "tokenizer.json"))

    (folder / "tokenizer.json").rename(folder / "tokenizer.keep")
    assert "no tokenizer" in refused(flags(folder))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: Converted())
    prepared = prepare(flags(folder))
    assert prepared.folder != folder
    assert (prepared.folder / "tokenizer.json").is_file()
    assert (prepared.folder / "model.safetensors").resolve() == folder / "model.safetensors"
    assert len(BackendDriver(prepared).greedy([5, 6], 4)) == 4


def test_a_pool_that_does_not_fit_is_refused(folder):
    backend = TorchBackend(prepare(flags(folder)), 16, 0)
    size = backend.layout.block_bytes
    with pytest.raises(ConfigError, match="2 blocks"):
        backend.bind_pool(memoryview(bytearray(2 * size - 1)), 2)
    with pytest.raises(ConfigError, match="writable"):
        backend.bind_pool(memoryview(bytes(2 * size)), 2)
    memory = bytearray(2 * size)
    backend.bind_pool(memoryview(memory), 2)
    backend.warm_up(40)
    assert not any(memory)
    backend.close()
    memory.clear()  # BufferError if the memory is still referenced.


def test_a_failed_conversion_leaves_nothing_behind(tmp_path):
    cache = ModelCache(tmp_path)

    def die(into):
        (into / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left"):
        cache.folder("digest", die, print)
    assert not list((tmp_path / "models").iterdir())
    (tmp_path / "models" / "other.tmp").mkdir()
    made = cache.folder("digest", lambda into: (into / "whole").write_text("x"), print)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["digest"]
    assert (made / "whole").is_file()


def test_conversions_of_different_models_run_concurrently(tmp_path, monkeypatch):
    monkeypatch.setattr(model_cache, "LOCK_TIMEOUT_S", 0.3)
    cache, lines = ModelCache(tmp_path), []
    slow, half_made = tmp_path / "models" / "slow", tmp_path / "models" / "slow.tmp"
    with cache.lock(slow, lines.append):
        half_made.mkdir(parents=True)
        made = cache.folder("quick", lambda into: (into / "whole").write_text("x"), lines.append)
        assert (made / "whole").is_file()
        assert half_made.is_dir(), "a draft was removed under its maker"
        assert not lines
        # A second process waits for the same model, says so once, and finally gives up.
        with pytest.raises(ConfigError, match="still writing"):
            cache.folder("slow", lambda into: None, lines.append)
        assert lines == ["waiting for another process that prepares the same model"]
    cache.folder("slow", lambda into: (into / "whole").write_text("y"), lines.append)
    assert {path.name for path in slow.parent.iterdir()} == {"quick", "slow"}
    assert [path.name for path in slow.iterdir()] == ["whole"]


def test_weights_saved_in_bfloat16_run_in_float32_and_back(folder):
    """The file's type and the arithmetic's are independent."""
    exact = BackendDriver(prepare(flags(folder)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    narrow = save_model(folder.with_name("narrow"))
    model.save_pretrained(narrow)
    wide, whole = (
        load_weights(path, load_config(path), torch.float32).layers[0]["qkv"].weight for path in (narrow, folder)
    )
    assert wide.dtype is torch.float32
    assert torch.equal(wide, whole.bfloat16().float())
    assert len(BackendDriver(prepare(flags(narrow))).greedy([5, 6], 4)) == 4
    assert dataclasses.replace(exact.backend.layout, dtype="bfloat16") == kv_layout(
        prepare(flags(narrow, dtype="bfloat16")), 16
    )


def test_weights_in_a_second_format_are_not_fetched(monkeypatch, tmp_path):
    """Mistral's repositories have all weights twice, in two formats."""
    listing = ["config.json", "model.safetensors.index.json", "tokenizer.json", "consolidated.safetensors"]
    listing += [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    listing += ["additional_chat_templates/tool_use.jinja", "onnx/model.safetensors", "1_Pooling/config.json"]
    request = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda model, **options: request.update(options) or str(tmp_path)
    )
    locate("mistralai/Mistral-7B-Instruct-v0.3", "main", lambda line: None)
    allowed = {key: request[key] for key in ("allow_patterns", "ignore_patterns")}
    fetched = set(filter_repo_objects(listing, **allowed))
    assert fetched == set(listing) - {"consolidated.safetensors", "onnx/model.safetensors", "1_Pooling/config.json"}


INDEX = "model.safetensors.index.json"


def split_in_two(folder, stem: str) -> None:
    """Split a folder's weights into two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"{stem}-{at % 2 + 1:05}-of-00002.safetensors" for at, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, place in places.items() if place == file}, folder / file)
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("stem", ["consolidated", "gptq_model-4bit-128g", "model"])
def test_any_complete_set_of_files_that_one_index_names_is_read(folder, stem):
    whole = BackendDriver(prepare(flags(folder))).greedy([5, 6, 7], 8)
    (folder / "model.safetensors").rename(folder / f"{stem}.safetensors")
    assert BackendDriver(prepare(flags(folder))).greedy([5, 6, 7], 8) == whole, "the only file needs no index"
    (folder / f"{stem}.safetensors").rename(folder / "model.safetensors")
    split_in_two(folder, stem)
    save_file({"other": torch.zeros(1)}, folder / "other.safetensors")
    assert BackendDriver(prepare(flags(folder))).greedy([5, 6, 7], 8) == whole
    # A complete index wins over an incomplete one.
    (folder / "a.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "nowhere.safetensors"}}))
    assert BackendDriver(prepare(flags(folder))).greedy([5, 6, 7], 8) == whole
    (folder / f"{stem}.safetensors.index.json").unlink()
    assert "a.safetensors.index.json names 'nowhere.safetensors', which is not in the folder" in refused(flags(folder))
    (folder / "a.safetensors.index.json").unlink()
    assert "3 safetensors files and no index: which of them are the model's?" in refused(flags(folder))


def test_shards_of_a_variant(folder):
    whole = BackendDriver(prepare(flags(folder))).greedy([5, 6, 7], 8)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, variant="fp16", max_shard_size="50KB")
    names = {path.name for path in folder.iterdir()}
    assert "model.safetensors.index.fp16.json" in names
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    assert BackendDriver(prepare(flags(folder))).greedy([5, 6, 7], 8) == whole


def test_each_start_names_the_ignored_keys(folder):
    edit_json(folder / "config.json", maker="a", new_option=False)
    for _ in range(2):
        lines = []
        prepare(flags(folder), lines.append)
        assert "ignored keys of config.json: maker, new_option" in lines


def test_a_key_of_the_config_may_be_ignored(folder, monkeypatch):
    plain = prepare(flags(folder))
    answer = BackendDriver(plain).greedy([5, 6, 7], 8)
    edit_json(folder / "config.json", new_option=True, rope_scaling={"rope_type": "default", "own": 2.0})
    assert "new_option = True" in refused(flags(folder))
    assert "the rope parameter own = 2.0" in refused(flags(folder, ignore_config_key=("new_option",)))
    given = flags(folder, ignore_config_key=("new_option", "own"))
    assert not is_prepared(given)
    found = prepare(given)
    assert is_prepared(given)
    assert (found.fingerprint, found.name, found.eos_token_ids) == (plain.fingerprint, plain.name, plain.eos_token_ids)
    assert BackendDriver(found).greedy([5, 6, 7], 8) == answer
    edit_json(folder / "config.json", rms_norm_eps=0.1)
    assert prepare(given).fingerprint != found.fingerprint
    assert "config.json has no such key" in refused(flags(folder, ignore_config_key=("near",)))
    (folder / "a.gguf").write_bytes(b"GGUF")
    file = ModelFlags(model=str(folder / "a.gguf"), ignore_config_key=("new_option",))
    assert "--ignore-config-key new_option: a is a GGUF file, which has no config.json" in refused(file)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    assert "new_option = True" in refused(ModelFlags(model="owner/name"))
    assert "the rope parameter own" in refused(ModelFlags(model="owner/name", ignore_config_key=("new_option",)))


def test_the_single_file_wins_over_an_index_as_in_transformers(folder, caplog):
    whole = BackendDriver(prepare(flags(folder))).greedy([5, 6, 7], 8)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "nowhere.safetensors"}}))
    assert BackendDriver(prepare(flags(folder))).greedy([5, 6, 7], 8) == whole
    assert f"using model.safetensors like transformers, and not the files of {INDEX}" in caplog.text


def test_the_end_of_the_tokenizers_config_ends_a_text_too(folder):
    before = prepare(flags(folder)).eos_token_ids
    added = tokenizer_of(folder).get_added_tokens_decoder()
    name, number = next((token.content, number) for number, token in added.items() if number not in before)
    for end in (name, {"content": name}):
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": end}))
        assert prepare(flags(folder)).eos_token_ids == tuple(sorted({*before, number}))
    other = shutil.copytree(folder, folder.parent / "other")
    (folder / "tokenizer_config.json").write_text("{}")
    assert prepare(flags(folder)).eos_token_ids == before
    assert prepare(flags(folder, tokenizer=str(other))).eos_token_ids == tuple(sorted({*before, number}))


def tokenizer_of(folder) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("file", "key", "value", "said"),
    [
        ("config.json", "eos_token_id", -5, "eos_token_id must be token ids of the vocabulary, from 0 on, not"),
        ("config.json", "eos_token_id", [1, 10**9], "eos_token_id must be token ids of the vocabulary, from 0 on, not"),
        ("config.json", "eos_token_id", "x", "eos_token_id must be token ids of the vocabulary, from 0 on, not"),
        ("config.json", "bos_token_id", 10**9, "bos_token_id must be token ids of the vocabulary, from 0 on, not"),
        ("config.json", "eos_token_id", [1] * 10**6, "eos_token_id has 1000000 ids; the limit is 1024"),
        (
            "generation_config.json",
            "eos_token_id",
            -5,
            "config.json: eos_token_id must be token ids of the vocabulary, from 0 on, not",
        ),
        ("generation_config.json", "eos_token_id", [1] * 10**6, "eos_token_id has 1000000 ids; the limit is 1024"),
        ("config.json", "num_hidden_layers", 10**9, "num_hidden_layers must be at most 4096, not 1000000000"),
    ],
)
def test_values_that_would_fail_later_are_refused_at_the_start(folder, file, key, value, said):
    path = folder / file
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**config, key: value}))
    assert said in refused(flags(folder))


def test_more_experts_than_the_files_can_hold_are_refused_early(folder):
    config = load_config(folder)
    moe = MoeConfig(num_experts=16_384, experts_per_token=1, intermediate_size=8, normalize=True, layers=(True, True))
    with pytest.raises(ConfigError, match=r"has 2 layers of 16384 experts, but the weights have only"):
        check_counts(dataclasses.replace(config, moe=moe, hidden_size=4096), weight_files(folder))


def test_a_tokenizer_that_grows_texts_is_refused(folder):
    codec = tokenizer_of(folder)
    codec.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 1000)] * 4)
    codec.save(str(folder / "tokenizer.json"))
    said = refused(flags(folder))
    assert "tokenizer.json cannot be read: its normalizer makes texts 1,000,000,000,000 times longer" in said


def test_a_tokenizer_that_is_too_large_is_refused(folder, monkeypatch):
    monkeypatch.setattr(convert, "TRIAL_WALL_S", 0.0)
    assert "tokenizer.json cannot be read: it took more than 60 s of computing or" in refused(flags(folder))


def test_a_tokenizer_model_alone_gives_advice(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\n\x0c\n\x05<unk>\x15\0\0\0\0\x18\2")
    assert "put the model's tokenizer.json and tokenizer_config.json beside it" in refused(flags(folder))

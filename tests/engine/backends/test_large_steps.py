"""Steps of up to --max-num-batched-tokens 65,536 tokens: results and memory."""

from __future__ import annotations

import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from lab.testbed.tiny_model import save_model
from pillion.config import MAX_STEP_TOKENS, DecodeFlags, ModelFlags, PrefillFlags
from pillion.engine.backends import step_memory
from pillion.engine.backends.step_memory import check_host_steps, step_bytes
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.models import layers
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from tests.support.cpu_model import CpuDriver, needs_kernels
from tests.support.torch_model import BackendDriver

LONGEST = 2 * MAX_STEP_TOKENS
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 96, "intermediate_size": 320, "num_attention_heads": 6, "head_dim": 32},
    "windows and soft caps": {
        "model_type": "gemma2",
        "query_pre_attn_scalar": 24,
        "sliding_window": 64,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "experts": {
        "model_type": "qwen3_moe",
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
    },
}
MOST = (32_768, *(4096,) * 8)


@pytest.fixture(autouse=True)
def own_models(own_cache: pathlib.Path) -> None:
    """Cache prepared models in a folder of the tests."""


def prepared_model(folder: pathlib.Path, dtype: str, shape: dict[str, Any], longest: int = 4096) -> PreparedModel:
    save_model(folder, max_position_embeddings=longest, **shape)
    return prepare(ModelFlags(model=str(folder), dtype=dtype, max_model_len=longest))


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Return the storages of tensors; packed weights have none visible to Python."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]


class LiveBytes(TorchDispatchMode):
    """Tracks the bytes of live storages returned by torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages(args)}
        for storage in _storages(found):
            key = storage._cdata
            if key not in given and key not in self._known:
                self._known.add(key)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        return found

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "make",
    [
        # Tracing torch's operators imports torch's compiler, which is slow.
        pytest.param(BackendDriver, marks=pytest.mark.long, id="torch"),
        pytest.param(CpuDriver, marks=needs_kernels, id="cpu"),
    ],
)
def test_a_step_takes_no_more_memory_than_estimated(
    make: Any, shape: dict[str, Any], dtype: str, tmp_path: pathlib.Path
) -> None:
    """The start reports the estimate, rejects by it, and reserves it beside the KV pool."""
    prepared, tokens = prepared_model(tmp_path / "model", dtype, shape), 2048
    driver = make(prepared, num_slots=200)
    numbers = driver.sequences.add(4)
    driver.step((numbers[0], [3] * 16))
    kept = getattr(driver.backend, "workspace", None)
    before, counted = kept.nbytes if kept is not None else 0, LiveBytes()
    with counted:
        driver.step(*[(number, [3] * (tokens // 4)) for number in numbers])
    taken = counted.peak + (kept.nbytes - before if kept is not None else 0)
    told = step_bytes(load_config(prepared.folder), dtype, tokens, 4)
    assert taken <= told
    assert taken > told / 4, "the estimate is far from what a step takes"


def texts_of(lengths: tuple[int, ...], vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def sampled_rows(length: int) -> list[int]:
    return sorted({0, 1, length // 3, length // 2, length - 2, length - 1})


def by_transformers(folder: pathlib.Path, texts: list[list[int]], follows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return transformers' logits of some positions of each text, and those of the token ``follows`` after the
    first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for text in texts:
            rows = torch.tensor([*sampled_rows(len(text)), len(text)])
            found.append(model(torch.tensor([[*text, follows]]), logits_to_keep=rows).logits[0].float())
    return torch.cat([logits[:-1] for logits in found]), found[0][-1:]


@pytest.mark.parametrize(
    ("make", "shape", "lengths"),
    [
        *(
            pytest.param(make, shape, (1500, 700, 60), marks=marks, id=f"{kernels}-{name}-three texts of 2260 together")
            for name, shape in {"llama": {}, "experts": MODELS["experts"]}.items()
            for kernels, make, marks in (("torch", BackendDriver, ()), ("cpu", CpuDriver, needs_kernels))
        ),
        # One layer only: attention over 32,768 tokens is slow.
        pytest.param(
            CpuDriver,
            {"num_hidden_layers": 1},
            MOST,
            marks=[pytest.mark.long, needs_kernels],
            id="cpu-llama-nine texts",
        ),
    ],
)
def test_a_large_step_computes_what_transformers_computes(
    make: Any, shape: dict[str, Any], lengths: tuple[int, ...], tmp_path: pathlib.Path
) -> None:
    longest = LONGEST if sum(lengths) == MAX_STEP_TOKENS else 4096
    prepared = prepared_model(tmp_path / "model", "float32", shape, longest)
    texts = texts_of(lengths, prepared.vocab_size)
    wanted, wanted_after = by_transformers(prepared.folder, texts, follows=7)
    driver = make(prepared, num_slots=sum(lengths) // 16 + len(lengths) + 8)
    numbers, starts, begin = driver.sequences.add(len(texts)), [], 0
    for text in texts:
        starts += [begin + row for row in sampled_rows(len(text))]
        begin += len(text)
    found = driver.step(*zip(numbers, texts, strict=True), sample=starts)
    assert (found - wanted).abs().max() < 2e-3 * wanted.std()
    assert (driver.step((numbers[0], [7])) - wanted_after).abs().max() < 2e-3 * wanted.std()


def test_many_rows_of_a_mixture_of_experts_are_computed_in_parts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepared_model(tmp_path / "model", "float32", MODELS["experts"])
    text, found = texts_of((100,), prepared.vocab_size)[0], []
    for most in (layers.MAX_MIXED_ROWS, 33):
        monkeypatch.setattr(layers, "MAX_MIXED_ROWS", most)
        driver = BackendDriver(prepared)
        found.append(driver.step((driver.sequences.add()[0], text), sample=range(100)))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


@pytest.fixture
def memory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], None]:
    """Set the system's free MiB and the process's limit."""

    def says(free_mib: int, limit: str) -> None:
        (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:  {free_mib * 1024} kB\n")
        (tmp_path / "memory.max").write_text(f"{limit}\n")

    monkeypatch.setattr(step_memory, "FREE_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(step_memory, "CGROUP_LIMIT", tmp_path / "memory.max")
    return says


def test_a_budget_beyond_memory_is_refused(
    memory: Callable[[int, str], None], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = prepared_model(tmp_path / "model", "float32", MODELS["llama"])
    small, large = DecodeFlags(max_num_batched_tokens=256), DecodeFlags(max_num_batched_tokens=MAX_STEP_TOKENS)
    memory(100, "max")
    with caplog.at_level("INFO"):
        check_host_steps(small, prepared)
    assert "steps of up to 256 tokens take up to" in caplog.text
    refused = r"a step of 65536 tokens of this model takes up to \d+ MiB .*, and 100 MiB are free: lower --max-num-batc"
    with pytest.raises(ConfigError, match=refused):
        check_host_steps(large, prepared)
    with pytest.raises(ConfigError, match="lower --max-num-batched-prefill-tokens"):
        check_host_steps(PrefillFlags(max_num_batched_prefill_tokens=MAX_STEP_TOKENS), prepared)
    memory(100_000, "max")
    check_host_steps(large, prepared)
    memory(100_000, str(50 * 2**20))
    with pytest.raises(ConfigError, match="and 50 MiB are free"):
        check_host_steps(large, prepared)

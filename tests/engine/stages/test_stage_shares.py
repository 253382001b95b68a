"""Which layers stages have, and what workers of several stages are refused for."""

from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.testbed.tiny_model import save_model
from pillion.config import DecodeFlags, PrefillFlags
from pillion.engine.backends.gpu import gpu_devices
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.load_model import load_model
from pillion.engine.stages.stage_loading import check_stages
from pillion.engine.stages.stage_rows import StageRows
from pillion.engine.stages.stage_shares import StagePlace, layers_of_stage
from pillion.errors import ConfigError


@given(st.integers(1, 200), st.data())
def test_each_layer_has_one_stage_and_the_last_stage_has_no_fewer(layers, data):
    stages = data.draw(st.integers(1, layers))
    shares = [layers_of_stage(layers, stage, stages) for stage in range(stages)]
    assert [layer for share in shares for layer in share] == [*range(layers)]
    sizes = [len(share) for share in shares]
    assert sizes[-1] == max(sizes) <= min(sizes) + 1


def test_the_processes_of_a_stage_follow_one_another():
    places = [StagePlace.of(process, 3, 2) for process in range(6)]
    assert [(place.stage, place.rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [place.process for place in places] == [*range(6)]
    assert places[3].name == "stage 1 rank 1"
    assert StagePlace.of(1, 2, 1).name == "stage 1"


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        (PrefillFlags, {"pipeline_parallel_size": 3}, "3 is too large for 2 layers"),
        (PrefillFlags, {"cpu_kernels": "torch"}, "2 needs the CPU kernels: --cpu-kernels torch"),
        (DecodeFlags, {}, "2 needs a prefill worker: a decode step would wait"),
    ],
)
def test_impossible_stages_are_refused_by_name(tmp_path, kind, flags, words):
    shape = {"model": str(save_model(tmp_path / "model")), "dtype": "float32", "pipeline_parallel_size": 2}
    named = kind(**{**shape, **flags})
    with pytest.raises(ConfigError, match=f"--pipeline-parallel-size {words}"):
        check_stages(named, "cpu", prepare(named))
    with pytest.raises(ConfigError, match=f"--pipeline-parallel-size {words}"):
        load_model(named, 1)


def test_the_ranks_of_a_stage_are_refused_as_ranks_are(tmp_path):
    flags = PrefillFlags(
        model=str(save_model(tmp_path / "model")), dtype="float32", pipeline_parallel_size=2, tensor_parallel_size=3
    )
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 does not fit 4 heads over 2 KV heads"):
        check_stages(flags, "cpu", prepare(flags))


def test_stages_need_linux(tmp_path, monkeypatch):
    flags = PrefillFlags(model=str(save_model(tmp_path / "model")), dtype="float32", pipeline_parallel_size=2)
    monkeypatch.setattr("pillion.engine.stages.stage_loading.sys.platform", "win32")
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 2 needs Linux"):
        check_stages(flags, "cpu", prepare(flags))


def test_memory_of_another_size_is_refused():
    rows = StageRows.create(3, 2, 8, 64)
    assert rows.slot(1, 1, 4).size == 8 * 64
    with pytest.raises(ConfigError, match="not the memory of these stages"):
        StageRows(os.dup(rows.fd), 3, 2, 9, 64)
    rows.close()


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("stages", "ranks", "gpus", "words"),
    [
        (2, 2, 3, "2 needs a GPU for each rank of each stage, and there are 3; choose one .* all ranks compute"),
        (3, 1, 2, "3 needs a GPU for each stage, and there are 2; choose one .* on which all stages compute"),
        (3, 1, 3, "3 on 3 GPUs: 2 KV heads cannot be divided into 3 parts: at most 2, or a multiple of it"),
        (3, 1, 1, ""),
        (2, 2, 4, ""),
    ],
)
def test_too_few_gpus_or_gpus_that_cannot_share_a_pool_are_refused(tmp_path, monkeypatch, stages, ranks, gpus, words):
    flags = PrefillFlags(
        model=str(save_model(tmp_path / "model", num_hidden_layers=3)),
        dtype="float32",
        pipeline_parallel_size=stages,
        tensor_parallel_size=ranks,
    )
    monkeypatch.setattr(gpu_devices, "device_count", lambda: gpus)
    refused = pytest.raises(ConfigError, match=f"--pipeline-parallel-size {words}")
    with refused if words else contextlib.nullcontext():
        check_stages(flags, "cuda", prepare(flags))

"""The choice of an instruction set for a processor."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from pillion.errors import ConfigError
from pillion.kernels.cpu.language import isa
from pillion.kernels.cpu.language.isa import BY_NAME, CHOICES, TABLE, choose_isa, host_features
from tests.support.kernel_runner import ISAS, isa_or_skip, isa_runs

HASWELL = {"sse4.2", "avx", "avx2", "fma", "f16c", "bmi2"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
COOPER_LAKE = SKYLAKE | {"avx512bf16", "avx512vnni"}
ZEN4 = COOPER_LAKE | {"avx512vbmi"}
ZEN5 = ZEN4 | {"avx512vp2intersect", "avxvnni"}
SAPPHIRE_RAPIDS = ZEN4 | {"amx-tile", "amx-bf16", "amx-int8"}
GRAVITON = {"neon", "fp-armv8", "sve", "dotprod"}
ALDER_LAKE = HASWELL | {"avxvnni"}
SANDY_BRIDGE = {"sse4.2", "avx"}
KNIGHTS_LANDING = HASWELL | {"avx512f", "avx512cd"}


@pytest.mark.parametrize(
    ("features", "name"),
    [
        (SAPPHIRE_RAPIDS, "amx"),
        (SAPPHIRE_RAPIDS - {"amx-int8"}, "avx512_bf16"),
        (ZEN4, "avx512_bf16"),
        (COOPER_LAKE, "avx512_vnni"),
        (SKYLAKE, "avx512"),
        (ALDER_LAKE, "avx2_vnni"),
        (HASWELL, "avx2"),
        (KNIGHTS_LANDING, "avx2"),
        (HASWELL - {"fma"}, None),
        (SANDY_BRIDGE, None),
        (GRAVITON, "neon_dot"),
        (GRAVITON - {"dotprod"}, "neon"),
        (set(), None),
    ],
)
def test_auto_chooses_the_best_row(features, name):
    assert choose_isa("auto", features) == (BY_NAME[name] if name else None)


@pytest.mark.parametrize("name", ["avx512_bf16", "avx512", "avx2"])
def test_products_do_not_load_if_two_start_per_cycle(name):
    """The choice affects only products of bfloat16 pairs; the rest of the row does not change."""
    expected = replace(BY_NAME[name], products_load=name != "avx512_bf16")
    assert choose_isa(name, ZEN5) == expected
    assert choose_isa("auto", ZEN5).name == "avx512_bf16"


@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_requested_row_is_chosen_if_supported(name):
    row = BY_NAME[name]
    assert choose_isa(name, set(row.needs)) is row
    for missing in row.needs:
        with pytest.raises(ConfigError, match=f"--cpu-kernels {name}: this processor lacks {missing};"):
            choose_isa(name, set(row.needs) - {missing})


@pytest.mark.parametrize("name", [name for name in ISAS if not isa_runs(name)])
def test_kernels_run_in_each_instruction_set(name):
    """The tests of kernels skip unsupported instruction sets; this one reports it once."""
    isa_or_skip(name)


def test_a_lesser_row_can_be_chosen():
    assert choose_isa("avx2", ZEN4) is BY_NAME["avx2"]


def test_torch_can_be_chosen_anywhere():
    assert choose_isa("torch", ZEN4) is None
    assert choose_isa("torch", set()) is None


def test_an_unknown_choice_is_an_error_of_one_line():
    with pytest.raises(ConfigError) as raised:
        choose_isa("avx1024", ZEN4)
    assert "\n" not in raised.value.message
    assert all(choice in raised.value.message for choice in CHOICES)


def test_this_machine_gets_a_supported_row():
    found = choose_isa("auto", host_features())
    if found is None:
        pytest.skip("no row of the table fits this processor")
    assert set(found.needs) <= host_features()


def test_exact_codes_change_the_label_of_rounding_rows():
    """Only if products would otherwise round quantized weights."""
    for row in TABLE:
        found = choose_isa(row.name, row.needs, exact_codes=True)
        assert found is not None
        assert not found.rounds_codes
        assert (found.label != row.label) == row.rounds_codes
    assert {row.name for row in TABLE if row.rounds_codes} == {"amx"}


@pytest.mark.parametrize("granted", [True, False])
def test_matrix_tiles_are_a_feature_where_the_system_grants_them(monkeypatch, granted):
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: dict.fromkeys(SAPPHIRE_RAPIDS, True))
    monkeypatch.setattr(isa, "_request_tiles", lambda: granted)
    assert host_features() & {"amx-tile", "amx-bf16", "amx-int8"} == (SAPPHIRE_RAPIDS - ZEN4 if granted else set())
    assert choose_isa("auto", host_features()) is BY_NAME["amx" if granted else "avx512_bf16"]


def test_no_features_off_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert host_features() == frozenset()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_rows_are_complete(row):
    assert min(row.bf16_tiles.wide, row.fp32_tiles.wide, row.int8_tiles.wide) >= 1
    assert not set(row.needs) & set(row.without)


def test_the_table_needs_no_llvm():
    code = f"import sys, {isa.__name__}; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

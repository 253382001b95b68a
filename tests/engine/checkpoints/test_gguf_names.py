"""Selection of a model's GGUF files by name."""

from __future__ import annotations

import pathlib

import pytest

from pillion.engine.checkpoints.gguf_names import gguf_parts, model_name, only_model, part_names
from pillion.engine.checkpoints.model_files import locate
from pillion.errors import ConfigError

PARTS = ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]


def located(path: pathlib.Path) -> pathlib.Path:
    return locate(str(path), "main", lambda line: None).path


def test_any_part_of_a_gguf_model_locates_all_parts(tmp_path: pathlib.Path) -> None:
    for name in PARTS:
        (tmp_path / name).write_bytes(b"GGUF")
    for name in PARTS:
        assert located(tmp_path / name) == tmp_path / PARTS[0]
        assert [path.name for path in gguf_parts(tmp_path / name)] == PARTS
    assert locate(str(tmp_path / PARTS[1]), "main", lambda line: None).name == model_name(PARTS[1]) == "m"
    assert located(tmp_path) == tmp_path / PARTS[0]
    (tmp_path / PARTS[2]).unlink()
    for path in (tmp_path / PARTS[0], tmp_path):
        with pytest.raises(ConfigError, match="one of 3 parts, and 1 of them, such as m-00003-"):
            located(path)


def test_parts_are_found_beside_a_link(tmp_path: pathlib.Path) -> None:
    """The hub's cache links to files named by digest."""
    (tmp_path / "blobs").mkdir()
    for name in PARTS:
        (tmp_path / "blobs" / name[:7]).write_bytes(b"GGUF")
        (tmp_path / name).symlink_to(tmp_path / "blobs" / name[:7])
    assert located(tmp_path / PARTS[1]) == tmp_path / PARTS[0]


def test_a_folder_of_one_model_is_that_model(tmp_path: pathlib.Path) -> None:
    for name in ("a.gguf", "mmproj-a.gguf", "a.imatrix.gguf", "config.json"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert located(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"has 2 GGUF models: a.gguf, b.gguf; which one\? name its file"):
        located(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert located(tmp_path) == tmp_path


def test_many_models_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"has 12 GGUF models: 00.gguf, .*, 09.gguf and 2 more; which"):
        only_model([f"{number:02}.gguf" for number in range(12)], "it", "")
    assert only_model(["a.txt", "mmproj.gguf"], "it", "") == []
    assert part_names("a-1-of-2.gguf") == ["a-1-of-2.gguf"]

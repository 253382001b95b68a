"""The store of adapters: complete copies by digest, in bounded space."""

from __future__ import annotations

import os
import shutil

import pytest

from pillion.engine.adapters import adapter_store
from pillion.engine.adapters.adapter_files import AdapterFiles
from pillion.engine.adapters.adapter_store import AdapterStore
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError, NotFound, Overloaded, PermissionDenied
from pillion.host.adapter_folders import ADAPTER_FILES
from tests.support.adapters import edit_tensors, make_adapter
from tests.support.families import FAMILIES, make_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), FAMILIES["llama-gqa-tied"])[0]


@pytest.fixture(scope="module")
def model(model_folder):
    return load_config(model_folder)


@pytest.fixture(scope="module")
def sources(model_folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return [make_adapter(model_folder, root / str(n), seed=n, r=4, target_modules=["q_proj"]) for n in range(3)]


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "cache")


def folders(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache" / "adapters").iterdir())


def test_a_copy_outlives_its_source(store, sources, model, tmp_path):
    source = shutil.copytree(sources[0], tmp_path / "source")
    kept = store.add(source, model)
    assert (kept.rank, kept.digest) == (4, AdapterFiles(sources[0]).digest())
    shutil.rmtree(source)
    shutil.copytree(sources[1], source)
    other = store.add(source, model)
    assert AdapterFiles(store.find(kept.digest)).digest() == kept.digest != other.digest
    assert store.add(sources[0], model) == kept
    assert folders(tmp_path) == sorted([kept.digest, other.digest])


def test_rejected_adapters_leave_nothing(store, sources, model, tmp_path):
    bad = edit_tensors(
        shutil.copytree(sources[0], tmp_path / "bad"), lambda t: {n: x * float("nan") for n, x in t.items()}
    )
    with pytest.raises(ConfigError, match=r"bad: .* contains NaN"):
        store.add(bad, model)
    with pytest.raises(ConfigError, match="has rank 4, and --max-lora-rank is 2"):
        store.add(sources[0], model, max_rank=2)
    assert folders(tmp_path) == []


def test_a_source_that_changes_while_it_is_copied(store, sources, model, tmp_path, monkeypatch):
    """The checked bytes are the copied ones, whenever the source changes."""
    source = shutil.copytree(sources[0], tmp_path / "source")
    copy = adapter_store._copy

    def swapped(found, into):
        shutil.copyfile(sources[1] / found.name, source / found.name)
        copy(found, into)

    monkeypatch.setattr(adapter_store, "_copy", swapped)
    assert store.add(source, model).digest == AdapterFiles(sources[1]).digest()


@pytest.mark.parametrize("name", ADAPTER_FILES)
def test_links_must_resolve_inside_the_allowed_folder(store, sources, model, tmp_path, name):
    inside = (tmp_path / "allowed").resolve()
    source = shutil.copytree(sources[0], inside / "source")
    (source / name).rename(inside / "blob")
    (source / name).symlink_to(inside / "blob")
    assert store.add(source, model, inside=inside).digest == AdapterFiles(sources[0]).digest()
    (source / name).unlink()
    (source / name).symlink_to(sources[0] / name)
    with pytest.raises(PermissionDenied, match="is a link to somewhere else"):
        store.add(source, model, inside=inside)
    assert store.add(source, model).digest == AdapterFiles(sources[0]).digest()


def test_a_link_or_pipe_that_replaces_a_file_is_not_read(store, sources, model, tmp_path, monkeypatch):
    source = shutil.copytree(sources[0], tmp_path / "source")
    copy, swaps = adapter_store._copy, [lambda file: file.symlink_to(sources[1] / file.name), os.mkfifo]

    def swapped(found, into):
        found.unlink()
        swaps[0](found)
        copy(found, into)

    monkeypatch.setattr(adapter_store, "_copy", swapped)
    for _ in range(2):
        with pytest.raises(ConfigError):
            store.add(source, model)
        shutil.rmtree(source)
        shutil.copytree(sources[0], source)
        swaps.reverse()
    assert folders(tmp_path) == []


def test_a_damaged_copy_is_made_again(store, sources, model):
    kept = store.add(sources[0], model)
    tensors = kept.folder / ADAPTER_FILES[1]
    tensors.write_bytes(tensors.read_bytes()[:-4] + b"\0\0\0\0")
    assert AdapterFiles(store.add(sources[0], model).folder).digest() == kept.digest
    (kept.folder / ADAPTER_FILES[0]).unlink()
    assert AdapterFiles(store.add(sources[0], model).folder).digest() == kept.digest


def test_unknown_digests(store):
    for digest in ("a" * 64, "", "..", "a" * 63 + "/", "A" * 64):
        with pytest.raises(NotFound):
            store.find(digest)


def test_received_files_must_match_their_digest(store, sources, tmp_path):
    digest = AdapterFiles(sources[0]).digest()

    def receive(source):
        with store.receive(digest, 1000) as draft:
            for name in ADAPTER_FILES:
                shutil.copyfile(source / name, draft / name)

    with pytest.raises(ConfigError, match="do not match its digest"):
        receive(sources[1])
    assert folders(tmp_path) == []
    receive(sources[0])
    assert folders(tmp_path) == [digest]


def test_an_adapter_that_is_too_large_is_refused(store, sources, model, monkeypatch):
    monkeypatch.setattr(adapter_store, "MAX_ADAPTER_BYTES", 100)
    with pytest.raises(ConfigError, match="the limit is 100"):
        store.add(sources[0], model)


def test_least_recently_used_adapters_are_evicted(sources, model, tmp_path):
    size = sum((sources[0] / name).stat().st_size for name in ADAPTER_FILES)
    store = AdapterStore(tmp_path / "cache", 2 * size + size // 2)
    first, second = (store.add(source, model) for source in sources[:2])
    with pytest.raises(Overloaded, match=r"would have .* bytes, at most"):
        store.add(sources[2], model)
    for kept in (first, second):
        os.utime(kept.folder, (0, 0))
    store.find(first.digest)
    third = store.add(sources[2], model)
    assert folders(tmp_path) == sorted([first.digest, third.digest])


def test_temporary_folders_of_dead_writers_are_removed(store, sources, model, tmp_path):
    draft = tmp_path / "cache" / "adapters" / "dead.tmp"
    fresh = draft.with_name("fresh.tmp")
    for folder in (draft, fresh):
        folder.mkdir(parents=True)
    os.utime(draft, (0, 0))
    kept = store.add(sources[0], model)
    assert folders(tmp_path) == sorted([kept.digest, "fresh.tmp"])

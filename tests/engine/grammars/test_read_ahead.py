"""Preloading of grammar data by a cluster's fork server."""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

import pytest

from lab.testbed.tiny_model import save_model
from pillion.config import PrepareFlags, ServeFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.grammars.compiler import GrammarCompiler
from pillion.supervisor import local_cluster as cluster
from tests.support.own_cache import model_cache


def test_the_fork_server_reads_the_tokenizer_that_workers_ask_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILLION_CACHE", model_cache(tmp_path / "cache"))
    model = str(save_model(tmp_path / "tiny"))
    prepared = prepare(PrepareFlags(model=model, device="cpu", dtype="float32"))
    flags = ServeFlags(model=model, device="cpu", dtype="float32")
    line = cluster.line_of_tokenizer(flags)
    name, _, call = line.partition(":")
    function, _, text = call.partition("=")
    module: Any = importlib.import_module(name)
    read: list[Any] = []
    monkeypatch.setattr(module, "_read_tokenizer", lambda *key: read.append(key))
    getattr(module, function)(text)
    GrammarCompiler.load(prepared.folder, prepared.vocab_size, prepared.eos_token_ids).close()
    assert len(read) == 2
    assert read[0] == read[1]

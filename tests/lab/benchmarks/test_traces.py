"""Conversion of other traces to Mooncake's form."""

from __future__ import annotations

import pathlib

import pytest

from lab.benchmarks.traces import from_csv, write_trace
from pillion.loadgen.traces import TraceRequest, read_trace

BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,API log
5.5,GPT-4,1,2,3,API log
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def test_csv_tables_are_converted_to_traces(tmp_path: pathlib.Path) -> None:
    def written(text: str) -> list[TraceRequest]:
        (tmp_path / "table.csv").write_text(text)
        write_trace(tmp_path / "trace.jsonl", from_csv(tmp_path / "table.csv"))
        return read_trace(tmp_path / "trace.jsonl")

    # The second request failed when it was recorded.
    assert written(BURST) == [TraceRequest(5000, 472, 18), TraceRequest(5500, 1, 2)]
    first, second = written(AZURE)
    assert second.timestamp - first.timestamp == pytest.approx(4314.579, abs=0.01)
    with pytest.raises(ValueError, match="neither of BurstGPT nor of Azure"):
        written("a,b\n1,2\n")

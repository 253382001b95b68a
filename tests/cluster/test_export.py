"""Real processes export one connected trace by OTLP when the standard variables say where to."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator

import pytest

from pillion import Client
from tests.support.cluster import served, wait_for
from tests.support.otlp import Receiver, collecting
from tests.support.tiny_model import save_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with collecting() as made:
        for name, value in made.environ().items():
            monkeypatch.setenv(name, value)
        yield made


def test_processes_export_one_trace(receiver: Receiver, tmp_path: pathlib.Path) -> None:
    model = str(save_model(tmp_path / "tiny"))
    flags = ("--dtype", "float32", "--max-model-len", "512", "--kv-pool-bytes", "16MiB", "--chunk-size", "32")
    with tempfile.TemporaryDirectory(prefix="pil-") as folder, served(pathlib.Path(folder), model, *flags) as cluster:
        with Client(cluster.target) as client:
            list(client.generate(list(range(2, 102)), temperature=0.0, max_tokens=3, ignore_eos=True))
        wanted = {
            ("pillion-gateway", "plan"),
            ("pillion-gateway", "kv.pin"),
            ("pillion-prefill", "prefill.chunk"),
            ("pillion-decode", "decode.remnant"),
            ("pillion-decode", "decode"),
        }

        def connected() -> bool:
            traces = receiver.traces().values()
            return any(wanted <= {(service, span.name) for service, span in trace} for trace in traces)

        wait_for("one trace with spans of all services", connected)

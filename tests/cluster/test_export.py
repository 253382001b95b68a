"""Real processes export one connected trace by OTLP when the standard variables say where to, and show their metrics to
Prometheus."""

from __future__ import annotations

import pathlib
import tempfile
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lab.testbed.cluster import served
from lab.testbed.conditions import WITHIN_S, wait_for
from lab.testbed.otlp import Receiver, collecting
from lab.testbed.ports import free_ports
from lab.testbed.tiny_model import save_model
from pillion import Client
from pillion.observability import telemetry

pytestmark = pytest.mark.cluster


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with collecting() as made:
        for name, value in made.environ().items():
            monkeypatch.setenv(name, value)
        yield made
        telemetry.shutdown_client()


# The spans of a streamed prompt with three chunks and a prompt tail.
EDGE = ("generate tiny", "tokenize", "admission", "plan", "lookup", "kv.pin")
WANTED = {
    "pillion-client": {"text_completion"},
    "pillion-gateway": set(EDGE),
    "pillion-prefill": {"prefill.chunk", "kv.commit"},
    "pillion-decode": {"decode.queue", "decode.prompt_tail", "decode"},
}


@pytest.mark.long
def test_processes_export_spans(receiver: Receiver, tmp_path: pathlib.Path) -> None:
    model, page = str(save_model(tmp_path / "tiny")), free_ports(4)
    flags = ("--dtype", "float32", "--max-model-len", "512", "--kv-pool-bytes", "16MiB", "--chunk-size", "32")
    flags += ("--split-policy", "disaggregated", "--metrics-port", str(page))
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), model, *flags, faults=True) as cluster,
    ):
        with Client(cluster.target) as client:
            list(client.generate(list(range(2, 102)), temperature=0.0, max_tokens=3, ignore_eos=True))
        wait_for("one trace with the spans of all services", lambda: any(_whole(t) for t in receiver.traces().values()))
        wait_for("a step that names the request", lambda: _linked(receiver))
        # A worker may count its last step after the answer.
        wait_for("the decode worker's last step", lambda: _scrape(page + 3).get(DECODED) == 2)
        gateway, _, prefill, decode = (_scrape(page + number) for number in range(4))
    model_name = (("gen_ai_request_model", "tiny"),)
    assert gateway["gen_ai_server_time_to_first_token_seconds_count", (OPERATION, *model_name)] == 1
    assert gateway["pillion_inter_token_latency_seconds_count", model_name] == 2
    assert gateway["pillion_prompt_tokens_total", (*model_name, ("source", "prefill"))] == 96
    assert gateway["pillion_prompt_tokens_total", (*model_name, ("source", "tail"))] == 4
    assert gateway["vllm:generation_tokens_total", (("model_name", "tiny"),)] == 3
    assert prefill["pillion_step_budget_tokens_total", (("use", "prefill"),)] == 96
    assert decode["pillion_step_budget_tokens_total", (("use", "tail"),)] == 4
    assert all(part["pillion_event_loop_longest_callback_seconds", ()] >= 0 for part in (gateway, prefill, decode))
    spent = sum(value for (name, _), value in decode.items() if name == "pillion_step_budget_tokens_total")
    assert spent == 256 * decode["pillion_steps_total", (("outcome", "ok"),)]


OPERATION = ("gen_ai_operation_name", "text_completion")
DECODED = "pillion_step_budget_tokens_total", (("use", "decode"),)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WITHIN_S) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        samples = (sample for family in families for sample in family.samples)
        return {(each.name, tuple(sorted(each.labels.items()))): each.value for each in samples}


def _whole(trace: list[tuple[str, Any]]) -> bool:
    """Return whether all spans are there and have one common root."""
    found = {service: {span.name for name, span in trace if name == service} for service, _ in trace}
    ids = {span.span_id for _, span in trace}
    roots = [span.name for _, span in trace if span.parent_span_id not in ids]
    chunks = [span for _, span in trace if span.name == "prefill.chunk"]
    whole = all(names <= found.get(service, set()) for service, names in WANTED.items())
    return whole and roots == ["text_completion"] and len(chunks) == 3


def _linked(receiver: Receiver) -> bool:
    requests = {span.span_id for trace in receiver.traces().values() for _, span in trace if span.name == EDGE[0]}
    steps = [span for trace in receiver.traces().values() for _, span in trace if span.name == "step"]
    return bool(requests & {link.span_id for step in steps for link in step.links})

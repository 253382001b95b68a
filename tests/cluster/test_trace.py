"""One request is one connected trace through all components, seen by an in-memory exporter."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lab.testbed.tiny_model import save_model
from pillion import FinishReason
from pillion.observability import telemetry
from tests.support.components import running_components


@pytest.fixture(scope="module")
def exporter() -> Iterator[InMemorySpanExporter]:
    """What all parts of the line in this process record. The provider is no global one: that could not be taken back,
    and spans of later tests, also of simulated time, would be recorded too."""
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry, "tracer", lambda: provider.get_tracer("pillion"))
        patch.setattr(telemetry, "recording", lambda: True)
        yield memory


def by_name(spans: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_time or 0)


async def test_spans_of_all_processes_form_one_trace(exporter: InMemorySpanExporter, tmp_path: pathlib.Path) -> None:
    model = {"model": str(save_model(tmp_path / "tiny")), "dtype": "float32", "max_model_len": 1024}
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        async with running_components(pathlib.Path(folder), model=model, gateway={"chunk_size": 32}) as components:
            exporter.clear()
            with telemetry.tracer().start_as_current_span("the client's own span") as own:
                stream = components.client.generate(list(range(2, 102)), temperature=0.0, max_tokens=4, ignore_eos=True)
                deltas = [delta async for delta in stream]
            assert deltas[-1].timings is not None
            assert deltas[-1].timings.prefill_chunks == 3
            text = "".join(delta.text for delta in deltas)
            with telemetry.tracer().start_as_current_span("stopped") as stopped:
                stream = components.client.generate(
                    list(range(2, 102)), temperature=0.0, max_tokens=400, ignore_eos=True, stop=[text[-1]]
                )
                ends = [delta async for delta in stream]
            assert ends[-1].finish_reason is FinishReason.STOP
            assert ends[-1].timings is not None
            assert ends[-1].timings.tail_steps == 1
    spans = [span for span in exporter.get_finished_spans() if span.context is not None]
    decoded = [s.name for s in spans if s.context.trace_id == stopped.get_span_context().trace_id]
    assert {"decode.queue", "decode.prompt_tail", "decode"} <= set(decoded), (
        "a stop string ends a stream like any other"
    )
    mine = [s for s in spans if s.context.trace_id == own.get_span_context().trace_id]
    ids = {span.context.span_id for span in mine}
    orphans = [s.name for s in mine if s.parent is not None and s.parent.span_id not in ids]
    assert orphans == []
    assert [s.name for s in mine if s.parent is None] == ["the client's own span"]
    (asked,) = by_name(mine, "text_completion")
    assert asked.kind is trace.SpanKind.CLIENT
    assert asked.parent is not None
    assert asked.parent.span_id == own.get_span_context().span_id

    roots = [span for span in mine if span.name.startswith("generate ")]
    assert len(roots) == 1
    assert roots[0].attributes is not None
    assert roots[0].attributes["gen_ai.usage.input_tokens"] == 100
    assert len(by_name(mine, "prefill.chunk")) == 3
    for name in (
        "tokenize",
        "admission",
        "lookup",
        "plan",
        "kv.pin",
        "kv.commit",
        "decode.queue",
        "decode.prompt_tail",
        "decode",
    ):
        assert by_name(mine, name), f"no span {name}; there are {sorted({s.name for s in mine})}"
    decode = by_name(mine, "decode")[0]
    assert "first token" in [event.name for event in decode.events]
    assert decode.attributes is not None
    assert decode.attributes["pillion.decode.steps"] == 4
    steps = by_name(spans, "step")
    carried = {link.context.span_id for step in steps for link in step.links}
    assert roots[0].context.span_id in carried, "a step that computed the prompt names the request"
    assert all(step.parent is None for step in steps)
    computed = [step.attributes["pillion.step.prefill_tokens"] for step in steps if step.attributes]
    assert sum(computed) >= 96  # type: ignore[arg-type]
    order = [
        by_name(mine, name)[0].start_time or 0 for name in ("plan", "kv.pin", "prefill.chunk", "decode.prompt_tail")
    ]
    assert order == sorted(order)

"""`pillion top`: pages read back as they were counted, changes against numpy, frames as text."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from rich.console import Console

from pillion.errors import ConfigError
from pillion.observability import metric_catalog as names
from pillion.observability import metrics_export
from pillion.observability.metrics import Distribution, Meters, Snapshot
from pillion.top.top_figures import ClusterReading, flow, quantile, steps
from pillion.top.top_pages import MAX_PAGES, ComponentPage, locate, parse
from pillion.top.top_view import GLYPHS, FrameStyle, SegmentedBar, frame
from pillion.types import ClusterStatus, ComponentStatus
from pillion.v1 import gateway_pb2
from pillion.wire.public import status_from_pb, status_to_pb
from pillion.wire.registry import ComponentRecord

GATEWAY = ComponentStatus(component_id="gateway-0", role="gateway", running_requests=4, heartbeat_age_ms=200)
PREFILL = ComponentStatus(
    component_id="prefill-0", role="prefill", node_id="kvnode-0", queued_tokens=2048, free_seqs=253
)
DECODE = ComponentStatus(component_id="decode-0", role="decode", node_id="kvnode-0", running_requests=4, free_seqs=60)
NODE = ComponentStatus(
    component_id="kvnode-0",
    role="kvnode",
    total_blocks=100,
    free_blocks=60,
    leased_blocks=10,
    committed_blocks=25,
    quarantined_blocks=5,
)


def status(*components: ComponentStatus, **others: Any) -> ClusterStatus:
    known = {"active_requests": 4, "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
    return ClusterStatus(**{"version": "1", "components": components, "index_available": True} | known | others)


def page_of(meters: Meters, component_id: str, role: str) -> ComponentPage:
    """Return the page as it is after its way over the wire."""
    meters.watch(lambda: [(names.BUILD, ("1", role, component_id), 1.0)])
    return parse(generate_latest(metrics_export.MetricsPage(meters.collect, vllm_names=True).registry()).decode())


def gateway_page(component_id: str, times: int) -> ComponentPage:
    """Return the page of a gateway that did the same things ``times`` times."""
    meters = Meters()
    meters.counter(names.GENERATED_TOKENS, "demo").add(100 * times)
    for source, tokens in (("pool", 60), ("fetched", 10), ("prefill", 20), ("tail", 10)):
        meters.counter(names.PROMPT_TOKENS, "demo", source).add(tokens * times)
    for outcome, count in (("stop", 1), ("length", 1), ("cancelled", 1), ("Unavailable", 3)):
        meters.counter(names.REQUESTS, "demo", outcome).add(count * times)
    meters.counter(names.REJECTED, "Overloaded: requests").add(5 * times)
    for operation in ("chat", "text_completion"):
        meters.distribution(names.TTFT, operation, "demo").observe(0.2, times)
    meters.distribution(names.ITL, "demo").observe(0.018, 99 * times)
    meters.distribution(names.ITL, "demo").observe(60.0, 5 * times)
    return page_of(meters, component_id, "gateway")


def worker_page(component_id: str, role: str, times: int) -> ComponentPage:
    meters = Meters()
    for use, tokens in (("decode", 10), ("tail", 40), ("prefill", 0), ("speculative", 0), ("idle", 50)):
        meters.counter(names.STEP_BUDGET, use).add(tokens * times)
    meters.distribution(names.STEP_DURATION).observe(0.04, 20 * times)
    meters.watch(lambda: [(names.FREE_SEQUENCES, (), 59), (names.QUEUED_TOKENS, (), 321)])
    return page_of(meters, component_id, role)


def node_page() -> ComponentPage:
    meters = Meters()
    meters.watch(lambda: [(names.KV_HELD, ("pinned",), 15), (names.KV_DISK_BLOCKS, (), 7777)])
    return page_of(meters, "kvnode-0", "kvnode")


def reading(
    at_s: float, *pages: ComponentPage, cluster: ClusterStatus | None = None, troubles: tuple[str, ...] = ()
) -> ClusterReading:
    return ClusterReading(
        at_s,
        cluster or status(GATEWAY, PREFILL, DECODE, NODE),
        {page.component_id: page for page in pages},
        troubles,
    )


def text(
    before: ClusterReading | None,
    now: ClusterReading,
    *,
    width: int = 80,
    style: FrameStyle = FrameStyle(),  # noqa: B008
) -> str:
    """A frame as it stands on a screen without colours."""
    console = Console(width=width, file=io.StringIO(), legacy_windows=False)
    with console.capture() as capture:
        console.print(frame(before, now, "127.0.0.1:50051", "12:34:56", style))
    return capture.get()


def row(shown: str, first: str) -> str:
    """The last line that begins with a word, its spaces made one."""
    return " ".join([line for line in shown.splitlines() if line.startswith(first)][-1].split())


@pytest.mark.parametrize(
    ("places", "target", "found"),
    [
        ((), "127.0.0.1:50051", ["http://127.0.0.1:8000/metrics"]),
        ((), "grpcs://edge.example:50051", ["https://edge.example:8000/metrics"]),
        ((), "grpc://[::1]:50051", ["http://[::1]:8000/metrics"]),
        ((), "unix:/run/gateway.sock", []),
        # Port 8000 of this host may be another cluster's.
        ((), "127.0.0.1:50052", []),
        (("h:9500",), "x:1", ["http://h:9500/metrics"]),
        (("h:9500-9502", "h:9501"), "x:1", [f"http://h:{port}/metrics" for port in (9500, 9501, 9502)]),
        (("http://h:9/", "https://h/m?x=1"), "x:1", ["http://h:9/metrics", "https://h/m?x=1"]),
    ],
)
def test_where_pages_are(places: tuple[str, ...], target: str, found: list[str]) -> None:
    assert list(locate(places, target)) == found


@pytest.mark.parametrize("place", ["h", "h:0", "h:70000", "h:9-8", f"h:1-{MAX_PAGES + 1}", "ftp://h/x", "http://h:x/"])
def test_what_is_no_place_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match="--pages"):
        locate((place,), "x:1")
    with pytest.raises(ConfigError, match=f"{MAX_PAGES} are the most"):
        locate((f"h:1-{MAX_PAGES}", "h:9999"), "x:1")


def test_a_page_reads_back_as_it_was_counted() -> None:
    meters = Meters()
    meters.counter(names.PROMPT_TOKENS, 'a "model"\n', "pool").add(7)
    for value in (0.004, 0.03, 0.03, 99.0):
        meters.distribution(names.TTFT, "chat", "demo").observe(value)
    meters.watch(lambda: [(names.KV_USAGE, (), 0.25), (names.KV_BLOCK_BYTES, (), 4096)])
    page = page_of(meters, "kvnode-0", "kvnode")
    assert (page.component_id, page.role) == ("kvnode-0", "kvnode")
    for metric, cells in meters.collect().items():
        for labels, value in cells.items():
            read = page.values[metric][labels]
            if isinstance(value, Snapshot):
                assert isinstance(read, Snapshot)
                assert (read.bounds, read.counts) == (value.bounds, value.counts)
                assert read.total == pytest.approx(value.total)
            else:
                assert read == value
    assert {metric.name for metric in page.values} == {metric.name for metric in meters.collect()}


@given(st.lists(st.floats(0, 9), min_size=1, max_size=60), st.sampled_from([0.01, 0.5, 0.99, 1.0]))
def test_a_quantile_is_in_the_bucket_of_the_true_one(observed: list[float], share: float) -> None:
    cell = Distribution(names.ITL_BOUNDS, [0] * (len(names.ITL_BOUNDS) + 1))
    for value in observed:
        cell.observe(value)
    found = quantile(Snapshot(cell.bounds, tuple(cell.counts), cell.total, 0, 0), share)
    true = float(np.quantile(observed, share, method="inverted_cdf"))
    above = min((bound for bound in cell.bounds if bound >= true), default=math.inf)
    below = max((bound for bound in cell.bounds if bound < true), default=0.0)
    assert below <= found <= above
    assert math.isinf(found) == math.isinf(above)


def test_changes_are_those_of_the_window() -> None:
    one = flow(reading(0, gateway_page("gateway-0", 7)), reading(2, gateway_page("gateway-0", 9)))
    assert (one.from_pages, one.gateways, one.generated, one.prompt, one.cached) == (True, 1, 100, 100, 70)
    assert one.sources == {"pool": 60, "fetched": 10, "restored": 0, "bucket": 0, "prefill": 20, "tail": 10}
    assert one.requests == {"answered": 2, "cancelled": 1, "failed": 3}
    assert one.refused == {"Overloaded: requests": 5}
    assert one.first_token is not None
    assert (one.first_token.count, 0.1 < one.first_token.p50 <= 0.25) == (4, True)
    assert one.between_tokens is not None
    assert 0.015 < one.between_tokens.p50 <= 0.02
    assert math.isinf(one.between_tokens.p99)
    both = [gateway_page("gateway-0", 3), gateway_page("gateway-1", 5)]
    two = flow(reading(0, gateway_page("gateway-0", 1), gateway_page("gateway-1", 4)), reading(1, *both))
    assert (two.gateways, two.generated) == (2, 300)


def test_nothing_found_is_zero_not_a_little_less() -> None:
    def page(times: int) -> ComponentPage:
        meters = Meters()
        for source, tokens in (("pool", 0), ("prefill", 100), ("tail", 10)):
            meters.counter(names.PROMPT_TOKENS, "demo", source).add(tokens * times)
        return page_of(meters, "gateway-0", "gateway")

    for tenths in range(1, 100):
        assert flow(reading(0, page(0)), reading(tenths / 10, page(1))).cached == 0


def test_what_began_anew_counts_from_nothing_and_what_is_new_not_at_all() -> None:
    again = flow(reading(0, gateway_page("gateway-0", 50)), reading(1, gateway_page("gateway-0", 2)))
    assert (again.generated, again.first_token and again.first_token.count) == (200, 4)
    before, now = reading(0, gateway_page("gateway-0", 1)), reading(1, gateway_page("gateway-1", 100))
    assert not flow(before, now).from_pages
    assert steps(before, reading(1, worker_page("decode-0", "decode", 5)), "decode-0") is None


def test_shares_of_the_step_budget() -> None:
    found = steps(reading(0, worker_page("d", "decode", 1)), reading(4, worker_page("d", "decode", 3)), "d")
    assert found is not None
    assert found.shares == {"decode": 0.1, "tail": 0.4, "prefill": 0, "speculative": 0, "idle": 0.5}
    assert (found.per_second, found.busy) == (10, pytest.approx(0.4))
    still = steps(reading(0, worker_page("d", "decode", 1)), reading(4, worker_page("d", "decode", 1)), "d")
    assert still is not None
    assert (still.per_second, still.shares) == (0, {})


def test_a_frame_with_every_page() -> None:
    before, now = (
        reading(at_s, gateway_page("gateway-0", n), worker_page("decode-0", "decode", n), node_page())
        for at_s, n in ((0, 1), (2, 3))
    )
    shown = text(before, now)
    assert row(shown, "pillion") == "pillion 1 127.0.0.1:50051, 4 active, rates over 2 s 12:34:56"
    assert [line.split()[0] for line in shown.splitlines()[2:6]] == ["gateway-0", "kvnode-0", "prefill-0", "decode-0"]
    assert "prefill-0 prefill kvnode-0 0 0 2,048 253 0.0 s" in " ".join(shown.split())
    assert "decode-0 decode kvnode-0 4 0 321 59 0.0 s" in " ".join(shown.split())
    assert row(shown, "prefill-0").endswith("prefill-0 – – – – – – – –")
    assert row(shown, "decode-0").endswith(" 10% 40% 0% 0% 50% 20 40 ms 80%")
    bar = row(shown, "decode-0").split()[1]
    assert set(bar) == {GLYPHS[0], GLYPHS[1], GLYPHS[4]}
    assert abs(bar.count(GLYPHS[4]) - len(bar) / 2) <= 1
    assert row(shown, "kvnode-0").endswith(" 25 15 10 5 60 100 7,777")
    # Ten cached ones that are not pinned, 15 that are, and so on: each glyph is there.
    assert set(row(shown, "kvnode-0").split()[1]) == set(GLYPHS)
    assert row(shown, "hits") == "hits 70%: pool 60, fetched 10, restored 0, bucket 0; prefill 20, tail 10"
    assert row(shown, "latency") == "latency first token p50 175 ms p99 248 ms next tokens p50 18 ms p99 >5.0 s"
    assert row(shown, "flow") == "flow tokens/s generated 100, prompts 100"
    refused = "refused 5.0 (Overloaded: requests 5.0)"
    assert row(shown, "requests/s").startswith("requests/s answered 2.0, cancelled 1.0, failed 3.0, refused 5.0")
    assert refused in text(before, now, width=120)
    assert "page" not in shown


def test_wanted_workers_are_the_most_of_all_gateways() -> None:
    wishes = {
        "gateway-0": {("a", "decode"): 3, ("b", "decode"): 1},
        "gateway-1": {("a", "decode"): 2, ("a", "prefill"): 1},
    }
    pages = []
    for component_id, cells in wishes.items():
        meters = Meters()
        meters.watch(lambda cells=cells: [(names.WANTED_WORKERS, labels, count) for labels, count in cells.items()])
        pages.append(page_of(meters, component_id, "gateway"))
    shown = row(text(None, reading(0, *pages)), "pillion")
    assert shown == "pillion 1 127.0.0.1:50051, 4 active, 4 decode + 1 prefill wanted 12:34:56"


def test_a_frame_of_the_status_alone_has_dashes_not_zeros() -> None:
    components = (GATEWAY, PREFILL, DECODE, NODE)
    cluster = status(*components, prompt_tokens=100, cached_tokens=40, completion_tokens=50)
    now = reading(2, cluster=cluster, troubles=("http://h/metrics: Connection refused",))
    shown = text(reading(0), now)
    assert row(shown, "hits") == "hits 40%: pool –, fetched –, restored –, bucket –; prefill –, tail –"
    assert row(shown, "latency") == "latency first token p50 – p99 – next tokens p50 – p99 –"
    assert row(shown, "flow") == "flow tokens/s generated 25, prompts 50"
    assert row(shown, "requests/s") == "requests/s answered –, cancelled –, failed –, refused –"
    assert row(shown, "decode-0") == "decode-0 – – – – – – – –"
    assert row(shown, "kvnode-0").split()[2:] == ["25", "0", "10", "5", "60", "100", "0"]
    assert "http://h/metrics: Connection refused" in shown
    assert "no gateway's page" in shown
    first = text(None, now)
    assert row(first, "flow") == "flow tokens/s generated –, prompts –"
    assert "rates over" not in first
    assert row(text(reading(0, cluster=cluster), now), "hits") == "hits no prompt ended"


def test_ready_adapters_are_counted_where_there_are_any() -> None:
    ready = replace(DECODE, adapters=("ab" * 32, "cd" * 32))
    shown = " ".join(text(reading(0), reading(2, cluster=status(GATEWAY, PREFILL, ready, NODE))).split())
    assert "slots adapters heartbeat" in shown
    assert "decode-0 decode kvnode-0 4 0 0 60 2 0.0 s" in shown
    assert "prefill-0 prefill kvnode-0 0 0 2,048 253 0 0.0 s" in shown
    assert "adapters" not in text(reading(0), reading(2))


def test_what_is_wrong_comes_first() -> None:
    node = ComponentStatus(component_id="kvnode-0", role="kvnode", fenced_components=("decode-1", "decode-2"))
    silent = ComponentStatus(component_id="prefill-9", role="prefill", heartbeat_age_ms=7000)
    fenced = ComponentStatus(component_id="decode-1", role="decode", node_id="kvnode-0")
    gateways = [ComponentStatus(component_id=f"gateway-{number}", role="gateway") for number in range(3)]
    cluster = status(*gateways, DECODE, node, silent, fenced, index_available=False)
    before, now = (reading(at_s, gateway_page("gateway-1", 1), cluster=cluster) for at_s in (0, 1))
    lines = [" ".join(line.split()) for line in text(before, now).splitlines()]
    assert lines[2:5] == [
        "prefill-9 prefill 0 0 0 0 7.0 s late",
        "decode-1 decode kvnode-0 0 0 0 0 0.0 s FENCED",
        # Its own record has run out; its node still knows it.
        "decode-2 – kvnode-0 – FENCED",
    ]
    assert lines[-2:] == [
        "Redis does not answer: no prefix hits",
        "hits, latency and flow are those of 1 of 3 gateways",
    ]


@pytest.mark.parametrize("size", [(80, 24), (60, 16), (200, 60)])
def test_a_frame_fits_the_terminal(size: tuple[int, int]) -> None:
    width, height = size
    workers = [
        ComponentStatus(component_id=f"decode-{n}-of-a-long-name", role="decode", node_id="n") for n in range(90)
    ]
    now = reading(0, cluster=status(GATEWAY, NODE, *workers), troubles=("a " * 300, "b", "c", "d", "e"))
    for style in (FrameStyle(height), FrameStyle(height, ascii_only=True)):
        shown = text(None, now, width=width, style=style)
        lines = shown.splitlines()
        assert len(lines) == height
        assert max(map(len, lines)) <= width
        assert "more" in shown
        assert "notes more" in shown
    assert shown.isascii()
    assert len(text(None, now, style=FrameStyle()).splitlines()) > 180


def test_nobody_steers_the_terminal() -> None:
    cluster = status(ComponentStatus(component_id="\x1b[2Jgone", role="de\ncode", node_id="\u202eabc"))
    shown = text(None, reading(0, cluster=cluster, troubles=("\x1b]0;title\x07",)))
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "?[2Jgone" in shown


@given(st.lists(st.integers(0, 9), min_size=5, max_size=5).filter(any), st.integers(6, 60))
def test_a_bar_is_as_long_as_its_place(components: list[int], width: int) -> None:
    shares = [component / sum(components) for component in components]
    cells = SegmentedBar(shares, GLYPHS).cells(width)
    assert sum(cells) == width
    for share, count in zip(shares, cells, strict=True):
        assert (count > 0) == (share > 0)
        assert abs(count - share * width) <= 5
    assert SegmentedBar((), GLYPHS).cells(width) == []


def test_the_status_tells_who_is_fenced() -> None:
    record = ComponentRecord(
        component_id="kvnode-0", role="kvnode", address="x", fenced_components=("decode-0", "prefill-1")
    )
    worker = ComponentRecord(component_id="d", role="decode", address="x", queued_tokens=17, free_seqs=3)
    cluster = status(record.status(), worker.status())
    sent = gateway_pb2.GetStatusResponse.FromString(status_to_pb(cluster).SerializeToString())
    assert status_from_pb(sent) == cluster
    assert cluster.components[0].fenced_components == ("decode-0", "prefill-1")
    assert (cluster.components[1].queued_tokens, cluster.components[1].free_seqs) == (17, 3)

"""Declares the command `pillion top`. The command imports what it needs when it runs."""

from __future__ import annotations

from typing import Any

import click

from pillion.cli.flags import FlagCommand, option
from pillion.cli.reach import pop_reach, talks_to_gateway


@click.command(cls=FlagCommand)
@option(
    "--pages",
    "Pages of metrics: a URL, HOST:PORT, or HOST:FIRST-LAST for a page on each port. Repeat it for more. `pillion "
    "serve --metrics-port 9500` has its pages from 9500 on: the gateways', the KV node's, the workers'. Default: "
    "http://HOST:8000/metrics where the target is HOST:50051, for another gateway none.",
    (),
    metavar="PLACE",
    multiple=True,
)
@option(
    "--interval interval_s",
    "Seconds between frames. Rates are those of the last 10 s.",
    1.0,
    type=click.FloatRange(0.2, 60),
)
@option("--once", "Print one frame, with the rates of one interval, and exit.", False, is_flag=True)
@talks_to_gateway
def top(pages: tuple[str, ...], interval_s: float, once: bool, **values: Any) -> int:
    """Watch components, queues, steps, pool, hits and latencies.

    Without pages of metrics it shows what `pillion status` knows, and a dash for the rest. "q" or Ctrl-C ends it.
    """
    from pillion.top.top import run_top

    return run_top(pop_reach(values), pages, interval_s, once)

"""One run, or a sweep of runs, against one server: target -> warm-up -> sessions -> driver -> result."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from pillion.errors import ConfigError, Unavailable
from pillion.loadgen.drive import LoadDriver
from pillion.loadgen.figures import Run
from pillion.loadgen.load import LoadConfig, LoadSession, make_sessions
from pillion.loadgen.openai_target import OpenAITarget
from pillion.loadgen.report import SCHEMA, summarize_run
from pillion.loadgen.slo import Objective
from pillion.loadgen.sweep import Tried, best_rate, next_rate
from pillion.loadgen.target import LoadTarget, PillionTarget, TargetError

MAX_WARM_UP_REQUESTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server under load and how to call it. ``api_key_variable``: the environment variable with the API key."""

    backend: str = "pillion"
    target: str = ""
    model: str = ""
    endpoint: str = "completions"
    temperature: float = 0.0
    ignore_eos: bool = True
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    api_key_variable: str = "PILLION_API_KEY"
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """One run of the load generator: the load, the server, and the objectives."""

    server: Server
    load: LoadConfig
    objectives: tuple[Objective, ...] = ()
    max_concurrency: int | None = None
    warm_up_requests: int = 0

    def described(self) -> dict[str, Any]:
        """Return the plan as shown in the report."""
        return {name: value for name, value in asdict(self).items() if name != "objectives"}


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[tuple[LoadTarget, dict[str, Any]]]:
    """Yield the open target and the server's self-description.

    Raises ConfigError for an impossible server, Unavailable if it does not answer.
    """
    where = server.target or {"pillion": "127.0.0.1:50051", "openai": "http://127.0.0.1:8000"}[server.backend]
    reach: dict[str, Any] = {"target": where, "ca": server.ca, "cert": server.cert, "key": server.key}
    reach["api_key"] = os.environ.get(server.api_key_variable, "")
    kind = PillionTarget if server.backend == "pillion" else OpenAITarget
    target: LoadTarget = kind(server.model, server.ignore_eos, server.temperature, **reach)
    try:
        try:
            description = await target.describe()
        except TargetError as error:
            if server.backend == "pillion" or not server.model:
                raise Unavailable(f"{where}: {error}") from None
            description = {}
        yield target, description
    finally:
        await target.aclose()


def sessions_of(plan: BenchPlan) -> list[LoadSession]:
    """Return the sessions of a run. Raises ConfigError for an impossible plan."""
    if not 0 <= plan.warm_up_requests <= MAX_WARM_UP_REQUESTS:
        raise ConfigError(f"--warm-up {plan.warm_up_requests} is not within 0 and {MAX_WARM_UP_REQUESTS}")
    if plan.max_concurrency is not None and plan.max_concurrency < 1:
        raise ConfigError("--max-concurrency is at least 1")
    if plan.server.timeout_s <= 0:
        raise ConfigError("--timeout-s is above 0")
    return make_sessions(plan.load)


async def run_plan(
    target: LoadTarget,
    plan: BenchPlan,
    on_done: Callable[[], None] = lambda: None,
    sessions: Sequence[LoadSession] | None = None,
) -> tuple[Run, dict[str, Any]]:
    """Run the plan; return the run and its result. ``sessions``: those of the plan if they exist already. Raises
    ConfigError."""
    sessions = sessions_of(plan) if sessions is None else sessions
    common: dict[str, Any] = {"timeout_s": plan.server.timeout_s, "as_chat": plan.server.endpoint == "chat"}
    if plan.warm_up_requests:
        # With different prompts, so that the run hits none of their blocks in a cache.
        seed = plan.load.seed + 7_919_000
        warm = replace(plan.load, requests=plan.warm_up_requests, seed=seed, concurrency=None, duration_s=None)
        closed = replace(warm, rate=None, concurrency=1)
        await LoadDriver(target, make_sessions(closed), concurrency=1, **common).run()
    driver = LoadDriver(
        target,
        sessions,
        concurrency=plan.load.concurrency,
        max_concurrency=plan.max_concurrency,
        on_done=lambda record: on_done(),
        **common,
    )
    run = await driver.run()
    return run, {"kind": "run", **summarize_run(run, plan.objectives, plan.described())}


def check_sweep(plan: BenchPlan) -> float:
    """Return the first rate of a sweep. Raises ConfigError for a plan without valid rate or objectives."""
    if plan.load.rate is None or not plan.objectives:
        raise ConfigError("a sweep needs --rate, where it begins, and --slo")
    sessions_of(replace(plan, load=replace(plan.load, requests=1)))
    return plan.load.rate


async def run_sweep(
    target: LoadTarget,
    plan: BenchPlan,
    *,
    attainment: float,
    run_s: float,
    max_runs: int,
    tolerance: float,
    bar: Callable[[float, int], AbstractContextManager[Callable[[], None]]],
    on_result: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Search for the highest rate at which ``attainment`` of the requests meet all objectives.

    Args:
        plan: its rate is the first one to try; each run has at least its number of requests.
        run_s: min duration of arrivals in each run, in seconds.
        bar: called with a run's rate and number of requests; returns a context manager around the run, which yields
            the function to call after each request.
        on_result: called with each run's row.

    Raises ConfigError like :func:`check_sweep`.
    """
    start = check_sweep(plan)
    tried: list[Tried] = []
    rows: list[dict[str, Any]] = []
    while (rate := next_rate(tried, start, tolerance, max_runs)) is not None:
        count = max(plan.load.requests, round(rate * run_s))
        # Runs, and sweeps with neighbouring seeds, must not share prompts, which would be cached.
        load = replace(plan.load, rate=rate, requests=count, seed=plan.load.seed + 100_003 * (len(tried) + 1))
        warm_up = 0 if tried else plan.warm_up_requests
        with bar(rate, count) as advance:
            _, result = await run_plan(target, replace(plan, load=load, warm_up_requests=warm_up), advance)
        tried.append(Tried(rate, result["goodput"]["attainment"] >= attainment))
        rows.append({"rate": rate, "passed": tried[-1].passed, **result})
        on_result(rows[-1])
    return {
        "schema": SCHEMA,
        "kind": "sweep",
        "config": plan.described() | {"attainment": attainment, "run_s": run_s, "tolerance": tolerance},
        "best_rate": best_rate(tried),
        "runs": rows,
    }

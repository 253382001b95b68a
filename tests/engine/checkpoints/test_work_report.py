"""Progress lines of long preparation stages."""

from __future__ import annotations

from pillion.engine.checkpoints.work_report import LINE_EVERY_S, WorkReport


def test_a_stage_is_reported_at_its_start_and_periodically() -> None:
    lines: list[str] = []
    times = iter([0.0, 1.0, LINE_EVERY_S, LINE_EVERY_S + 1, 3 * LINE_EVERY_S, 4 * LINE_EVERY_S])
    report = WorkReport(lines.append, "converting weights", 200, lambda: next(times))
    assert lines == ["converting weights"]
    for amount in (10, 15, 50, 25, 100):
        report.add(amount)
    # The end is not reported; the next stage follows it.
    assert lines == ["converting weights", "converting weights: 12 %", "converting weights: 50 %"]


def test_a_stage_without_work_reports_its_start() -> None:
    lines: list[str] = []
    times = iter([0.0, 100.0])
    WorkReport(lines.append, "reading", 0, lambda: next(times)).add(0)
    assert lines == ["reading"]

"""Charts of the benchmarks: points at their coordinates, names in the picture."""

from __future__ import annotations

import pathlib
import xml.etree.ElementTree as ElementTree

import pytest

from lab.benchmarks.plot import Chart, Points, figure_of, line_charts

SVG = "{http://www.w3.org/2000/svg}"


def places(charts: list[Chart]) -> list[list[tuple[float, float]]]:
    """Return the points of each chart on the page, in pixels from below left."""
    figure = figure_of(charts)
    figure.canvas.draw()
    return [
        [tuple(axes.transData.transform(point)) for line in axes.lines for point in line.get_xydata()]
        for axes in figure.axes
    ]


def texts(path: pathlib.Path) -> set[str | None]:
    return {text.text for text in ElementTree.parse(path).getroot().iter(f"{SVG}text")}


def test_points_are_drawn_at_their_coordinates() -> None:
    [[(x0, y0), (x1, y1), (x2, y2)]] = places([Chart("T", "x", "y", {"a": [(0, 0), (5, 50), (10, 100)]})])
    assert x0 < x1 < x2
    assert y0 < y1 < y2
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)


def test_log_axis_spaces_doublings_evenly_and_labels_them_like_flags(tmp_path: pathlib.Path) -> None:
    chart = Chart("T", "x", "y", {"a": [(512, 1), (1024, 1), (2048, 1)]}, log_x=True)
    [[(x0, _), (x1, _), (x2, _)]] = places([chart])
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    line_charts(tmp_path / "chart.svg", [chart])
    assert {"512", "1K", "2K"} <= texts(tmp_path / "chart.svg")


def test_charts_are_side_by_side_and_names_are_escaped(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "charts.svg"
    one = Chart("A <b> & c", "x", "y", {"p<1": [(1, 1)], "q": [(2, 0)]})
    two = Chart("second", "x", "y", {"r": [(3, 3), (4, 4)]})
    line_charts(path, [one, two])
    assert {"A <b> & c", "p<1", "q", "second", "r"} <= texts(path)
    left, right = places([one, two])
    assert (len(left), len(right)) == (2, 2)
    assert max(x for x, _ in left) < min(x for x, _ in right)


def test_the_same_charts_make_the_same_file(tmp_path: pathlib.Path) -> None:
    for name in ("a.svg", "b.svg"):
        line_charts(tmp_path / name, [Chart("T", "x", "y", {"a": [(1, 1), (2, 3)]})])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("values", [[(1, 0.0)], [(1, 0.0), (2, 0.0)], [(7, 1e-9)], [(3, 12345678.0), (4, 1.0)]])
def test_odd_ranges_are_drawn(values: Points) -> None:
    (found,) = places([Chart("T", "x", "y", {"a": values})])
    height = figure_of([Chart("T", "x", "y", {"a": values})]).bbox.height
    assert all(0 < y < height for _, y in found)


def test_an_empty_chart_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="no point"):
        line_charts(tmp_path / "chart.svg", [Chart("T", "x", "y", {"a": []})])

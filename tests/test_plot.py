"""The charts of the benchmarks: well-formed, and every point where its numbers say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.plot import Chart, line_charts

SVG = "{http://www.w3.org/2000/svg}"


def dots(root):
    return [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter(f"{SVG}circle")]


def texts(root):
    return [text.text for text in root.iter(f"{SVG}text")]


def test_points_stand_where_their_numbers_say(tmp_path):
    path = tmp_path / "new" / "chart.svg"
    line_charts(path, [Chart("T", "x", "y", {"a": [(0, 0), (5, 50), (10, 100)]})])
    (x0, y0), (x1, y1), (x2, y2) = dots(ElementTree.parse(path).getroot())
    assert x0 < x1 < x2
    assert y0 > y1 > y2
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)


def test_log_axis_spaces_doublings_evenly_and_names_them_as_flags_do(tmp_path):
    path = tmp_path / "chart.svg"
    line_charts(path, [Chart("T", "x", "y", {"a": [(512, 1), (1024, 1), (2048, 1)]}, log_x=True)])
    root = ElementTree.parse(path).getroot()
    (x0, _), (x1, _), (x2, _) = dots(root)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert {"512", "1K", "2K"} <= set(texts(root))


def test_charts_stand_side_by_side_and_names_are_escaped(tmp_path):
    path = tmp_path / "charts.svg"
    one = Chart("A <b> & c", "x", "y", {"p<1": [(1, 1)], "q": [(2, 0)]})
    line_charts(path, [one, Chart("second", "x", "y", {"r": [(3, 3), (4, 4)]})])
    root = ElementTree.parse(path).getroot()
    assert {"A <b> & c", "p<1", "q", "second", "r"} <= set(texts(root))
    assert [group.get("transform") for group in root.iter(f"{SVG}g")] == ["translate(0 0)", "translate(460 0)"]
    assert len(dots(root)) == 4


@pytest.mark.parametrize("values", [[(1, 0.0)], [(1, 0.0), (2, 0.0)], [(7, 1e-9)], [(3, 12345678.0), (4, 1.0)]])
def test_odd_ranges_are_drawn(tmp_path, values):
    path = tmp_path / "chart.svg"
    line_charts(path, [Chart("T", "x", "y", {"a": values})])
    root = ElementTree.parse(path).getroot()
    height = float(root.get("height"))
    assert all(0 < y < height for _, y in dots(root))


def test_an_empty_chart_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no point"):
        line_charts(tmp_path / "chart.svg", [Chart("T", "x", "y", {"a": []})])

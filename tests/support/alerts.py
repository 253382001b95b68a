"""Alert rules evaluated by Prometheus' promtool, over series that a test writes or reads from a metrics page.

series per minute --promtool test rules--> number of firing alerts by name and minute
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tests.support.compose import ROOT

RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
PROMTOOL = shutil.which("promtool")
MISSING = "promtool is not installed (Debian: prometheus)"
TIMEOUT_S = 120


def check_alerts(series: Mapping[str, str], wanted: Sequence[tuple[str, int, int]]) -> None:
    """Assert the number of firing alerts by name after some minutes.

    ``series`` are values by selectors with all labels, in promtool's notation: "1+0x60" is 1, and 60 times 1 more.
    ``wanted`` are triples of an alert's name, the minutes, and the number firing. Raises AssertionError with promtool's
    output.
    """
    assert PROMTOOL is not None, MISSING
    expected = []
    for name, minutes, count in wanted:
        expr = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
        samples = [{"labels": "{}", "value": count}]
        expected.append({"expr": expr, "eval_time": f"{minutes}m", "exp_samples": samples})
    written = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "1m", "input_series": written, "promql_expr_test": expected}
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "test.yml"
        path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
        command = [PROMTOOL, "test", "rules", str(path)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert found.returncode == 0, f"{wanted} over {dict(series)}: {found.stdout}{found.stderr}"

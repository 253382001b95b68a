"""Mutants of the decisions, one change each, run against the quick tests of their own folder: ``make mutants``.

``python -m tests.mutants [FILE...]`` makes a working folder in ``build/mutants`` for each file, to which mutmut copies
the packages, with real folders for the links in ``pillion/``. A run continues where an earlier one ended, and prints
the survivors. ``lab/docs/mutants.md`` lists those that are known.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import shutil
import sys
import traceback
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
WORK = ROOT / "build" / "mutants"
# What tests import or read.
COPIED = ("pillion", "lab", "tests", "protos", "docs", "deploy", "README.md", "CONTRIBUTING.md")
FILES = (
    "engine/scheduling/queues.py",
    "engine/scheduling/scheduler.py",
    "gateway/admission/answer_times.py",
    "gateway/admission/giving_way.py",
    "gateway/admission/turns.py",
    "gateway/request/request_machine.py",
    "kvstore/ledger/eviction.py",
    "kvstore/ledger/ledger.py",
    "kvstore/ledger/pin_table.py",
    "kvstore/ledger/state_eviction.py",
    "kvstore/ledger/tree.py",
    "kvstore/ledger/waiting_queue.py",
    "kvstore/tiers/tier_breaker.py",
    "pillion/client/resume.py",
    "pillion/supervisor/restarts.py",
)
# Quick sans-IO tests of folders in which others are slow or start servers; elsewhere all tests of the folder run.
TESTS = {
    "engine/scheduling": (
        "test_adapter_slots.py",
        "test_ahead.py",
        "test_free_slots.py",
        "test_order.py",
        "test_parallel_samples.py",
        "test_partial_blocks.py",
        "test_properties.py",
        "test_queue_rules.py",
        "test_scheduler.py",
        "test_scheduler_rules.py",
        "test_scores.py",
        "test_slots.py",
        "test_states.py",
    ),
    "gateway/admission": (
        "test_answer_times.py",
        "test_fairness.py",
        "test_giving_way.py",
        "test_prediction_bounds.py",
        "test_prediction_rules.py",
        "test_turn_records.py",
        "test_turn_rules.py",
    ),
    "gateway/request": (
        "test_accounts.py",
        "test_failure_rules.py",
        "test_parallel_samples.py",
        "test_receipts.py",
        "test_request.py",
        "test_request_orders.py",
    ),
    "kvstore/tiers": ("test_tier_breaker.py",),
    "pillion/client": ("test_resume_rules.py",),
    "pillion/supervisor": ("test_restarts.py",),
}
# What mutmut calls a mutant that made a test fail, or run for too long.
KILLED = ("killed", "timeout")
# Seconds that one test may run: a mutant that loops for ever is killed by it.
TEST_TIMEOUT_S = 30


def imported(path: str) -> str:
    """Return where Python finds a file or folder, which may be linked into ``pillion/``."""
    return path if path.startswith("pillion/") else f"pillion/{path}"


def settings(file: str, tests: Sequence[str]) -> str:
    """Return mutmut's settings for one file."""
    # tests.support.limits starts a thread of faulthandler, for which a fork would wait.
    plugins = ("tests.mutants.fast_failures", "no:cacheprovider", "no:tests.support.limits")
    options = [
        "-m",
        "not long",
        f"--timeout={TEST_TIMEOUT_S}",
        *(word for plugin in plugins for word in ("-p", plugin)),
    ]
    return (
        "\n[tool.mutmut]\n"
        f"source_paths = {[imported(file)]}\n"
        f"also_copy = {list(COPIED)}\n"
        f"pytest_add_cli_args = {options}\n"
        f"pytest_add_cli_args_test_selection = {list(tests)}\n"
        "timeout_multiplier = 4.0\n"
        "timeout_constant = 15.0\n"
        "use_git_change_detection = false\n"
    )


def prepare(file: str, tests: Sequence[str]) -> None:
    """Fill the working folder of a file, which is the current one: links to the packages, and mutmut's settings."""
    for name in COPIED:
        link = pathlib.Path(name)
        if not link.is_symlink():
            link.symlink_to(ROOT / name)
    # Tests also read files of the packages at the root.
    copy = pathlib.Path("mutants")
    copy.mkdir(exist_ok=True)
    for link in (ROOT / "pillion").iterdir():
        if link.is_symlink() and not (copy / link.name).is_symlink():
            (copy / link.name).symlink_to(pathlib.Path("pillion", link.name))
    pathlib.Path("pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + settings(file, tests))


def run(file: str, processes: int, again: bool) -> None:
    """Run the mutants of a file that no earlier run has tested, or those that the last one did not kill."""
    folder = pathlib.Path(file).parent
    prepare(file, [f"tests/{folder}/{name}" for name in TESTS.get(str(folder), ("",))])
    from mutmut import __main__ as mutmut

    from tests.mutants import operators

    operators.install()
    sys.path[:] = [path for path in sys.path if pathlib.Path(path or ".").resolve() != ROOT]
    mutmut._run(survivors(file) if again else [], processes)


def statuses(file: str) -> dict[str, str]:
    """Return what became of each mutant of a file, by its name."""
    from mutmut.mutation.data import SourceFileMutationData
    from mutmut.stats import status_by_exit_code

    data = SourceFileMutationData(path=pathlib.Path(imported(file)))
    data.load()
    return {name: status_by_exit_code[code] for name, code in data.exit_code_by_key.items()}


def survivors(file: str) -> list[str]:
    return [name for name, status in statuses(file).items() if status not in KILLED]


def report(file: str) -> None:
    """Print the survivors as differences, and the score."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    found = statuses(file)
    for name in survivors(file):
        function = name.rpartition(".")[2].removeprefix("x").replace("ǁ", ".").strip("._")
        print(f"\n{file}: {function}: {found[name]}")
        difference = get_diff_for_mutant(name, path=pathlib.Path(imported(file))).splitlines()[3:]
        print("\n".join(line for line in difference if line.startswith(("-", "+"))))
    counts = collections.Counter(found.values())
    print(f"{file}: {sum(counts[status] for status in KILLED)} of {len(found)} killed {dict(counts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", default=FILES, help="files to mutate, e.g. kvstore/ledger/ledger.py")
    parser.add_argument("--processes", type=int, default=2, help="mutants that run side by side")
    parser.add_argument("--report", action="store_true", help="print what an earlier run found")
    parser.add_argument("--survivors", action="store_true", help="run again what an earlier run did not kill")
    parser.add_argument("--fresh", action="store_true", help="run again what an earlier run found")
    asked = parser.parse_args()
    for file in asked.files:
        work = WORK / file.removesuffix(".py")
        if asked.fresh:
            shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(work)
        # mutmut keeps its state in modules, so each file has a process.
        child = 0 if asked.report else os.fork()
        if child:
            if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                sys.exit(f"mutants of {file} could not be run")
            continue
        try:
            if not asked.report:
                run(file, asked.processes, asked.survivors)
            report(file)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        if not asked.report:
            os._exit(0)


if __name__ == "__main__":
    main()

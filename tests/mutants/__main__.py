"""Mutants of the decisions, one change each, run against the quick tests of their own folder: ``make mutants``.

``python -m tests.mutants [FILE...]`` makes a working folder ``build/mutants/...`` for each folder of the files: mutmut
copies the packages there, with real folders for the links in ``pillion/``, and mutates the files. A run continues
where one of the same files and tests has ended. What survives is printed as a difference; those that are known stand in
``survivors.md``.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import shutil
import sys
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
    "gateway/links/outage.py",
    "gateway/request/request_machine.py",
    "kvstore/ledger/eviction.py",
    "kvstore/ledger/ledger.py",
    "kvstore/ledger/pin_table.py",
    "kvstore/ledger/state_eviction.py",
    "kvstore/ledger/tree.py",
    "kvstore/ledger/waiting_queue.py",
)
# Sans-IO tests of folders in which others start servers; elsewhere all tests of the folder run.
TESTS = {
    "gateway/request": (
        "test_accounts.py",
        "test_failure_rules.py",
        "test_parallel_samples.py",
        "test_receipts.py",
        "test_request.py",
        "test_request_orders.py",
    ),
}
# Seconds that one test may run: a mutant that loops for ever is killed by it.
TEST_TIMEOUT_S = 30


def settings(folder: str, files: Sequence[str], tests: Sequence[str]) -> str:
    # The thread of faulthandler that tests.support.limits starts is not in a fork, which would wait for it.
    plugins = ("tests.mutants.fast_failures", "no:cacheprovider", "no:tests.support.limits")
    options = [
        "-m",
        "not long",
        f"--timeout={TEST_TIMEOUT_S}",
        *(word for plugin in plugins for word in ("-p", plugin)),
    ]
    return (
        "\n[tool.mutmut]\n"
        f"source_paths = {[f'pillion/{folder}']}\n"
        f"only_mutate = {[f'pillion/{file}' for file in files]}\n"
        f"also_copy = {list(COPIED)}\n"
        f"pytest_add_cli_args = {options}\n"
        f"pytest_add_cli_args_test_selection = {list(tests)}\n"
        "timeout_multiplier = 4.0\n"
        "timeout_constant = 15.0\n"
        "use_git_change_detection = false\n"
    )


def prepare(folder: str, files: Sequence[str], tests: Sequence[str]) -> pathlib.Path:
    """Return the working folder of a folder's files: links to the packages, and mutmut's settings."""
    work = WORK / folder
    work.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        link = work / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name)
    # Tests read files of the packages at the root too.
    copy = work / "mutants"
    copy.mkdir(exist_ok=True)
    for link in (ROOT / "pillion").iterdir():
        if link.is_symlink() and not (copy / link.name).is_symlink():
            (copy / link.name).symlink_to(pathlib.Path("pillion", link.name))
    (work / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + settings(folder, files, tests))
    return work


def run(folder: str, files: Sequence[str], tests: Sequence[str], processes: int) -> None:
    os.chdir(prepare(folder, files, tests))
    from mutmut import __main__ as mutmut

    from tests.mutants import operators

    operators.install()
    sys.path[:] = [path for path in sys.path if pathlib.Path(path or ".").resolve() != ROOT]
    mutmut._run((), processes)


def report(folder: str, files: Sequence[str]) -> None:
    os.chdir(WORK / folder)
    from mutmut.mutation.data import SourceFileMutationData
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code

    for file in files:
        data = SourceFileMutationData(path=pathlib.Path("pillion", file))
        data.load()
        found = collections.Counter(status_by_exit_code[code] for code in data.exit_code_by_key.values())
        killed = found["killed"] + found["timeout"]
        for name, code in data.exit_code_by_key.items():
            if status_by_exit_code[code] not in ("killed", "timeout"):
                function = name.rpartition(".")[2].removeprefix("x").replace("ǁ", ".").strip("._")
                print(f"\n{file}: {function}: {status_by_exit_code[code]}")
                difference = get_diff_for_mutant(name, path=data.path).splitlines()[3:]
                print("\n".join(line for line in difference if line.startswith(("-", "+"))))
        print(f"{file}: {killed} of {sum(found.values())} killed {dict(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", default=FILES, help="files to mutate, e.g. kvstore/ledger/ledger.py")
    parser.add_argument("--tests", action="append", help="tests to run instead of the whole folder's")
    parser.add_argument("--processes", type=int, default=2, help="mutants that run side by side")
    parser.add_argument("--report", action="store_true", help="print what an earlier run found")
    parser.add_argument("--fresh", action="store_true", help="run again what an earlier run found")
    asked = parser.parse_args()
    folders: dict[str, list[str]] = collections.defaultdict(list)
    for file in asked.files:
        folders[str(pathlib.Path(file).parent)].append(file)
    for folder, files in folders.items():
        if asked.fresh:
            shutil.rmtree(WORK / folder, ignore_errors=True)
        if asked.report:
            report(folder, files)
            continue
        # mutmut keeps its state in modules, so each folder has a process.
        child = os.fork()
        if not child:
            code = 1
            try:
                quick = [f"tests/{folder}/{file}" for file in TESTS.get(folder, ("",))]
                run(folder, files, asked.tests or quick, asked.processes)
                report(folder, files)
                code = 0
            finally:
                sys.stdout.flush()
                os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(f"mutants of {folder} could not be run")


if __name__ == "__main__":
    main()

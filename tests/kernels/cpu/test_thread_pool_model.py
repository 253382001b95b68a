"""The model of the thread pool and of core lending, thread_pool.pml: it follows the code word by word, and spin finds
no defect in it, but every planted one."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from pillion.host import core_lending_table
from pillion.kernels.cpu.runtime import thread_pool_code

CODE = Path(thread_pool_code.__file__)
MODEL = CODE.with_name("thread_pool.pml")
PAGE = "lab/docs/thread-pool.md"
# Lines of the model's text that only spin's preprocessor reads.
MUTANT = re.compile(r"^#(ifdef|ifndef|else|endif)\b[ \t]*(\w*)", re.MULTILINE)
# Shapes in which the model is searched, with the mutants that each of them must find.
FOUND_IN = {
    "POOL": [
        "COUNT_SLEEPERS_BEFORE_THE_MOVE",
        "DRAW_IN_TWO_STEPS",
        "DROP_THE_COMPARISON",
        "LEAVE_HELPERS_INSIDE",
        "LOOK_AT_THE_DOOR_FIRST",
        "MOVE_BEFORE_THE_STOP",
        "SLEEP_UNCOUNTED",
    ],
    "RUNS": ["MOVE_AT_THE_LAST_DRAW", "MOVE_BACKWARDS", "OPEN_THE_DOOR_FIRST"],
    "BORROWER": ["BORROW_FOR_A_WHOLE_RUN", "CLAIM_AFTER_GIVING_BACK", "WAIT_WITHOUT_A_LIMIT"],
    "CALLS": ["LEAVE_WITHOUT_A_CALL"],
    "OWNER": ["KEEP_CORES_FOR_EVER"],
    "RIVALS": ["CLAIM_IN_TWO_STEPS", "GIVE_BACK_WHAT_IS_ANOTHER_S"],
}
# Max steps of a search, far above the deepest one.
MAX_DEPTH = 1_000_000
CALLS = {"sleep", "wait", "work", "_poll", "_move", "_join", "_claim", "_give_back", "_keep_cores"}
CALLS |= {"_execute_items", "_wait_until_out"}
INSTRUCTIONS = {"atomic_load", "atomic_add", "atomic_swap", "atomic_raise", "atomic_exchange", "futex", "usleep"}
# Words that are written without atomics, and that others read.
PLAIN = {"OWNED_UNTIL"}


def word_of(address: ast.expr) -> str:
    """Return the name of the word at an address: the last name in capitals, or the gate."""
    names = [node.id.lstrip("_") for node in ast.walk(address) if isinstance(node, ast.Name) and node.id.isupper()]
    names = [name for name in names if name not in ("VALUE", "DOOR", "FIRST_THREAD_LINE", "LINE_BYTES")]
    return names[-1] if names else "GATE"


def steps_of_code(method: ast.FunctionDef) -> list[str]:
    """Return a method's steps that are visible to other threads, in the text's order."""
    found = []
    for node in ast.walk(method):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if name in INSTRUCTIONS:
            found.append((node, f"{name} {word_of(node.args[1])}"))
        elif name == "store_int" and word_of(node.args[0]) in PLAIN:
            found.append((node, f"store_int {word_of(node.args[0])}"))
        elif name in CALLS:
            found.append((node, name.lstrip("_")))
        elif name == "call":
            called = ast.unparse(node.args[0])
            found += [(node, word) for word in ("sleep", "wait", "work") if called == word]
            found += [(node, "usleep")] * ("usleep" in called)
    # A call's arguments are computed before it, and the loop's condition before its body.
    return [step for node, step in sorted(found, key=lambda one: (one[0].end_lineno, one[0].end_col_offset))]


def without_mutants(text: str) -> str:
    """The unchanged model."""
    kept, stack = [], []
    for line in text.splitlines():
        if directive := MUTANT.match(line):
            word, name = directive.groups()
            if word == "ifdef":
                stack.append(name.endswith("SHAPE"))
            elif word == "ifndef":
                stack.append(True)
            elif word == "else":
                stack[-1] = not stack[-1]
            else:
                stack.pop()
        elif all(stack):
            kept.append(line)
    return re.sub(
        r"/\*.*?\*/", lambda comment: comment[0] if "code:" in comment[0] else "", "\n".join(kept), flags=re.S
    )


def steps_of_model() -> dict[str, list[str]]:
    """Collect the atomic operations of each piece of the model, by the name of the corresponding method."""
    found = {}
    for method, body in re.findall(
        r"/\* code: (\w+) \*/\s*(?:inline|proctype) (.*?\n\}\n)", without_mutants(MODEL.read_text()) + "\n", re.S
    ):
        steps = []
        for name, word in re.findall(r"\b(\w+)\((?=([^;]*))", body.partition("{")[2]):
            name = {"atomic_load_until": "atomic_load", "atomic_load_for_a_while": "atomic_load"}.get(name, name)
            name = "futex" if name.startswith("futex_") else name
            touched = re.search(r"([A-Z_]{3,})\[", word)
            if name in INSTRUCTIONS - {"usleep"} or (name == "store_int" and touched and touched[1] in PLAIN):
                steps.append(f"{name} {touched[1]}")
            elif name in {"usleep", *(call.lstrip("_") for call in CALLS)}:
                steps.append(name)
        # Both branches of an `if` may end with the same step.
        found[method] = [step for step, before in zip(steps, ["", *steps], strict=False) if step != before]
    return found


def methods() -> dict[str, ast.FunctionDef]:
    (pool,) = [
        node
        for node in ast.parse(CODE.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "_ThreadPoolCode"
    ]
    return {node.name: node for node in pool.body if isinstance(node, ast.FunctionDef)}


def test_pool_methods_have_the_steps_of_the_model():
    model = steps_of_model()
    code = {name: steps for name, method in methods().items() if (steps := steps_of_code(method))}
    assert code.keys() == model.keys(), f"methods that {MODEL.name} does not follow, or that are gone: see {PAGE}"
    for name, steps in code.items():
        assert model[name] == steps, f"{name} has other steps than {MODEL.name}: see {PAGE}"


def test_pool_words_have_the_names_of_the_model():
    text = MODEL.read_text()
    (left_out,) = re.findall(r"left out: ([A-Z_\s]+?)\n", text)
    words = set()
    for module in (thread_pool_code, core_lending_table):
        for node in ast.parse(Path(module.__file__).read_text()).body:
            # Places of words are multiples of 8, most of them declared together.
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                words |= {name.id for name in node.targets[0].elts if isinstance(name, ast.Name)}
    words -= {"RUN", "MAIN", "BORROW", "_PLAIN_MXCSR", "_PLAIN_FPCR", "_VALUE"}
    words |= {"LEASE_NS", "LINGER_NS"}
    for word in sorted(words):
        name = word if word in ("_LEADER", "_HELPER", "_BORROWER") else word.lstrip("_")
        known = re.search(rf"\b{name}\b", text)
        assert known, f"{MODEL.name} has no {name}, which the pool's memory has: see {PAGE}"
    for word in left_out.split():
        assert word in {name.lstrip("_") for name in words}, (
            f"{MODEL.name} leaves out {word}, which is gone: see {PAGE}"
        )


def test_each_mutant_of_the_model_is_searched_for():
    named = {name for _, name in MUTANT.findall(MODEL.read_text()) if name and not name.endswith("_SHAPE")}
    assert named - {"OWNER_DIED", "TABLE_ALONE"} == {mutant for mutants in FOUND_IN.values() for mutant in mutants}


@cache
def missing() -> str:
    """The tools of the model checker that this machine lacks."""
    return ", ".join(tool for tool in ("spin", "cc") if shutil.which(tool) is None)


def search(folder: Path, shape: str, *mutants: str) -> str:
    """Return spin's output of a search through all orders of steps, for a shape of the model."""
    if missing():
        pytest.skip(f"{missing()} is not there: on Debian, apt-get install spin gcc libc6-dev")
    defines = [f"-D{name}" for name in (f"{shape}_SHAPE", *mutants)]
    for command in (
        ["spin", *defines, "-a", str(MODEL)],
        ["cc", "-w", "-DSAFETY", "-o", "pan", "pan.c"],
        ["./pan", f"-m{MAX_DEPTH}", "-w22"],
    ):
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout


@pytest.mark.long
@pytest.mark.parametrize("shape", FOUND_IN)
def test_no_order_of_steps_breaks_the_model(tmp_path, shape):
    said = search(tmp_path, shape)
    assert "errors: 0" in said
    assert "max search depth too small" not in said


@pytest.mark.long
@pytest.mark.parametrize(("shape", "mutant"), [(shape, name) for shape, names in FOUND_IN.items() for name in names])
def test_a_planted_defect_is_found(tmp_path, shape, mutant):
    said = search(tmp_path, shape, mutant)
    assert re.search(r"pan:1: (assertion violated|invalid end state)", said), said


@pytest.mark.long
@pytest.mark.parametrize("shape", ["POOL", "RUNS"])
def test_every_run_ends(tmp_path, shape):
    """The model's state graph has no cycle, so that no order of steps is infinite."""
    if missing():
        pytest.skip(f"{missing()} is not there: on Debian, apt-get install spin gcc libc6-dev")
    subprocess.run(["spin", f"-D{shape}_SHAPE", "-a", str(MODEL)], cwd=tmp_path, check=True)
    subprocess.run(["cc", "-w", "-DNP", "-o", "pan", "pan.c"], cwd=tmp_path, check=True)
    said = subprocess.run(["./pan", "-l", f"-m{MAX_DEPTH}", "-w22"], cwd=tmp_path, capture_output=True, text=True)
    assert "errors: 0" in said.stdout, said.stdout

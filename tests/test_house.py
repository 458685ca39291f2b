"""House rules that no linter knows: sizes of functions, one home for each variant, torch where it belongs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8

SOURCES = sorted(p for top in ("src", "tests", "benchmarks", "tools") for p in (ROOT / top).rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def parameters(function: Function) -> int:
    a = function.args
    named = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"])) + (a.vararg is not None) + (a.kwarg is not None)


def lines(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def tracked() -> list[Path]:
    """Every file that git tracks or would track; an unpacked source distribution has no git."""
    found = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        pytest.skip("not a git checkout")
    return [path for name in found.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# ------------------------------------------------------------------------------------------------ sizes


def test_sources_are_found():
    assert Path(__file__) in SOURCES
    assert ROOT / "src/normlab/__init__.py" in SOURCES


@pytest.mark.slow
def test_functions_are_short_and_take_few_parameters():
    too_big = [
        f"{path.relative_to(ROOT)}:{f.lineno} {f.name}: {lines(f)} lines, {parameters(f)} parameters"
        for path in SOURCES
        for f in functions(parse(path))
        if lines(f) > MAX_FUNCTION_LINES or parameters(f) > MAX_PARAMETERS
    ]
    assert too_big == []


def test_the_counters_count():
    method = next(
        functions(ast.parse("class A:\n  def f(self, a, /, b, *c, d=1, **e):\n    pass\n    pass\n"))
    )
    assert (lines(method), parameters(method)) == (3, 5)


# --------------------------------------------------------------------------- one home for each variant


def registered(node: ast.AST) -> list[str]:
    """The names that a class (``name="post"``) or function (``@SCHEDULES.register("linear")``) takes."""
    if isinstance(node, ast.ClassDef):
        values = [k.value for k in node.keywords if k.arg == "name"]
    elif isinstance(node, Function):
        calls = [d for d in node.decorator_list if isinstance(d, ast.Call) and d.args]
        values = [c.args[0] for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "register"]
    else:
        values = []
    return [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]


def registry_names(trees: list[ast.Module]) -> set[str]:
    names: set[str] = set()
    for tree in trees:
        names.update(name for node in ast.walk(tree) for name in registered(node))
    return names


def texts(node: ast.AST) -> set[str]:
    """The string literals of one side of a comparison, alone or in a tuple, list or set."""
    parts = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    return {p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)}


def comparisons(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, set[str]]]:
    """Line and names of every comparison or match with a registered name outside a registered variant."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if registered(node):
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Compare):
            compared = set().union(*(texts(side) for side in (node.left, *node.comparators)))
        elif isinstance(node, ast.MatchValue):
            compared = texts(node.value)
        else:
            continue
        if compared & names:
            yield node.lineno, compared & names


@pytest.mark.slow
def test_no_variant_is_known_by_name_outside_its_home():
    # these import no variant and read anybody's model: their words for what they see are their own
    reads_models = [ROOT / "src/normlab" / room for room in ("diagnosis", "trace", "checks")]
    trees = {
        p: parse(p)
        for p in SOURCES
        if p.is_relative_to(ROOT / "src") and not any(p.is_relative_to(room) for room in reads_models)
    }
    names = registry_names(list(trees.values()))
    assert {"post", "pre", "admin", "residual", "layernorm", "smallinit", "linear"} <= names
    found = [
        f"{path.relative_to(ROOT)}:{line} compares with {sorted(known)}"
        for path, tree in trees.items()
        for line, known in comparisons(tree, names)
    ]
    assert found == [], "ask the variant itself (a method or attribute of its class) instead"


def test_the_comparison_check_bites():
    home = 'class Post(Placement, name="post"):\n    def conflict(self, x):\n        return x == "post"\n'
    tree = ast.parse(
        home + 'if x.placement == "post" or y in ("pre", "post"):\n    pass\n'
        'match z:\n    case "post":\n        pass\nassert kind == "train"\n'
    )
    names = registry_names([tree])
    assert names == {"post"}
    assert sorted(line for line, _ in comparisons(tree, names)) == [4, 4, 7]


# ---------------------------------------------------------------------------------- imports when they run


def imported_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def everything_in(*packages: str) -> str:
    """An import statement for all modules of packages."""
    assert [name for name in packages if not (ROOT / "src/normlab" / name).is_dir()] == []
    modules = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for package in packages
        for path in sorted((ROOT / "src/normlab" / package).rglob("*.py"))
        if path.name != "__main__.py"
    ]
    return f"import {', '.join(['normlab', *modules])}"


@pytest.mark.slow
def test_configurations_run_folders_pages_and_papers_work_without_torch():
    rooms = ("base", "lab/runs", "report", "papers/liu2020", "papers/nguyen2019", "papers/xiong2020", "cli")
    assert "torch" not in imported_by(f"{everything_in(*rooms)}, normlab.lab.config")


@pytest.mark.slow
def test_training_imports_no_report_and_no_command_line():
    statement = everything_in("nn", "optim", "lab")
    heavy = {"tyro", "polars", "altair", "vl_convert", "jinja2", "playwright", "num2words", "babel"}
    assert imported_by(statement) & heavy == set()


# --------------------------------------------------------------------------------------------- the text


def test_no_tracked_file_names_a_path_of_one_machine():
    private = re.compile(rb"(?<![\w.~/-])/(?:" + b"work|op" + rb"t|home/\w+|root)/")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1)
        if private.search(line)
    ]
    assert found == []


def test_the_folders_of_the_makefile_are_there():
    named = re.search(r"addprefix tests/,(.*?)\)", (ROOT / "Makefile").read_text(), re.DOTALL)
    folders = named[1].replace("\\", "").split()
    assert [name for name in folders if not (ROOT / "tests" / name).is_dir()] == []

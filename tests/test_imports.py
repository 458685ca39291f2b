"""No file imports itself by way of others."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp

RESULTS = (
    "normlab.checks.report",
    "normlab.lab.comparison.result",
    "normlab.diagnosis.result",
    "normlab.judging.experiment",
    "normlab.judging.judgement",
    "normlab.scaling.result",
    "normlab.trials.verdict",
    "normlab.watching.watcher",
)
"""The modules whose results draw their own page."""


def modules_in_a_circle(imports: dict[str, set[str]]) -> list[str]:
    """The modules of a circle of imports, the first one twice; empty where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_a_circle_is_found():
    assert modules_in_a_circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    circle = modules_in_a_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    assert circle[0] == circle[-1]
    assert set(circle) == {"b", "c"}


def test_no_file_imports_itself_by_way_of_others():
    """Imports inside functions count, and those that only a type checker sees, but for the one by which a
    result's ``page`` calls the report above it.
    """
    graph = grimp.build_graph("normlab", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    for result in RESULTS:
        assert any(name.startswith("normlab.report.") for name in imports[result])
        imports[result] = {name for name in imports[result] if not name.startswith("normlab.report.")}
    assert len(imports) > 100
    assert modules_in_a_circle(imports) == []

"""Few cases that say as much as many: covering designs, and one test of one statement about many things."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, signature
from itertools import permutations, product
from typing import Any

import pytest

Check = Callable[..., None]


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each axis, such that every two values of different axes are in one of them.

    Greedy: a row begins with the first pair that is missing, and each further axis adds the value with which
    most missing pairs meet. The rows and their order depend on the axes alone.
    """
    values = [[(i, value) for value in axis] for i, axis in enumerate(axes)]
    missing = dict.fromkeys(pair for two in permutations(values, 2) for pair in product(*two))
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for i, axis in enumerate(values):
            if i not in row:
                meets = [sum((value, other) in missing for other in row.items()) for value in axis]
                row.update([axis[meets.index(max(meets))]])
        rows.append(tuple(row[i] for i in range(len(values))))
        for pair in permutations(row.items(), 2):
            missing.pop(pair, None)
    return rows


def slow(*values: Any) -> Any:
    """A row of parameters that `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def wide(*values: Any) -> Any:
    """A row of parameters that `make test-wide` runs."""
    return pytest.param(*values, marks=pytest.mark.wide)


def mostly_wide(values: Iterable[Any], named: Iterable[str]) -> list[Any]:
    """Parameters with names: `make test-slow` runs the named ones, and `make test-wide` the others."""
    at_once = set(named)
    return [slow(value) if value.name in at_once else wide(value) for value in values]


def few(rows: Iterable[Any], number: int) -> list[Any]:
    """Rows of parameters of a slow test: `make test-slow` runs this number of them, evenly spread, and
    `make test-wide` the others.
    """
    every = list(rows)
    in_slow = {i * len(every) // number for i in range(number)}
    marked = []
    for i, row in enumerate(every):
        values = row if isinstance(row, tuple) else (row,)
        marked.append(row if i in in_slow else wide(*values))
    return marked


def mostly_slow(names: Iterable[str], quick: Iterable[str]) -> list[Any]:
    """Parameters by their names: `make test` runs the quick ones, and `make test-slow` the others."""
    at_once, known = set(quick), list(names)
    assert at_once <= set(known), f"unknown: {at_once - set(known)}"
    return [name if name in at_once else slow(name) for name in known]


def each(names: str | Iterable[str], values: Iterable[Any], ids: Any = str) -> Callable[[Check], Any]:
    """``pytest.mark.parametrize`` within one test: for a quick statement about many values.

    Every value is tried, and the test's error names each that fails. Fixtures are shared by all of them.
    """
    arguments = tuple(n.strip() for n in names.split(",")) if isinstance(names, str) else tuple(names)
    rows = [row if len(arguments) > 1 else (row,) for row in values]
    labels = [", ".join(str(ids(v)) for v in row) for row in rows] if callable(ids) else [*ids]
    given = [dict(zip(arguments, row, strict=True)) for row in rows]

    def decorate(check: Check) -> Any:
        inner = getattr(check, "cases", [("", {})])
        check = getattr(check, "check", check)
        cases = [
            (f"{label}, {more}".removesuffix(", ")[:200], one | other)
            for label, one in zip(labels, given, strict=True)
            for more, other in inner
        ]

        @wraps(check)
        def test(**fixtures: Any) -> None:
            assert cases, f"no {', '.join(arguments)}"
            failed = {}
            for label, case in cases:
                try:
                    check(**case, **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    failed[label] = error
            if failed:
                names = "; ".join(failed)
                raise BaseExceptionGroup(f"{len(failed)} of {len(cases)}: {names}", [*failed.values()])

        vars(test).update(cases=cases, check=check)
        fixtures = [n for n in signature(check).parameters if n not in cases[0][1]] if cases else []
        kept = [Parameter(name, Parameter.KEYWORD_ONLY) for name in fixtures]
        test.__signature__ = signature(check).replace(parameters=kept)  # ty: ignore
        return test

    return decorate

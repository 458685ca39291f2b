"""A finding from outside the package: one rule, which reads a table that a study of normlab's measures."""

from __future__ import annotations

import pytest

from normlab.diagnosis import Finding, Table, find, rule
from normlab.diagnosis.study import _RULES


@pytest.fixture(autouse=True)
def own_rule():
    @rule
    def growing_stream(tables):
        for stack, table in tables.stacks("scales"):
            sizes = [row["mean_square"] for row in table.where(signal="after")]
            factor = sizes[-1] / sizes[0]
            severity = "warning" if factor > 100 else "note"
            yield Finding(
                "growing_stream", severity, f"{stack}: {factor:.3g}", "scales", {"mean_square": sizes[-1]}
            )

    yield
    _RULES.remove(growing_stream)


def scales(*sizes: float) -> dict[str, Table]:
    """The table of scales of a stack, and its structure, as studies of normlab's give them."""
    sublayers = [
        {"stack": "h", "index": i, "layer": i, "role": "ffn", "module": f"h.{i}", "block": f"h.{i}"}
        for i in range(len(sizes))
    ]
    structure = [row | {"placement": "pre", "relation": "after = before + branch"} for row in sublayers]
    unknown = {"theory": None, "theory_low": None, "theory_high": None, "source": ""}
    rows = [
        row | unknown | {"signal": "after", "mean_square": size}
        for row, size in zip(sublayers, sizes, strict=True)
    ]
    return {"structure": Table("structure", tuple(structure)), "scales": Table("scales", tuple(rows))}


def growing(found):
    return [finding for finding in found if finding.name == "growing_stream"]


def test_it_stands_beside_those_of_studies_with_its_severity():
    findings = find(scales(1.0, 20.0, 400.0))
    assert [(finding.name, finding.severity) for finding in findings] == [
        ("hidden_scale", "warning"),
        ("growing_stream", "warning"),
        ("placement", "note"),
    ]
    (grave,) = growing(findings)
    assert grave.numbers == {"mean_square": 400.0}
    (mild,) = growing(find(scales(1.0, 2.0)))
    assert mild.severity == "note"


def test_it_says_nothing_where_the_study_did_not_run():
    assert growing(find({})) == []

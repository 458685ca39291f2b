"""Judge kept comparisons anew from their run folders: ``python tools/judge_comparisons.py results/gl-en
results/gl-en-low``.

Outcomes, scores and conclusions are read and computed again, and the pages written anew. In a comparison of
an earlier version the seed that chose the learning rates was among the reported ones: it is dropped from
them.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from normlab.base.files import read_json, write_text_atomic
from normlab.base.io import from_plain, to_json
from normlab.base.metric import Metric
from normlab.lab.comparison.compare import judge
from normlab.lab.comparison.result import Comparison, RecipeResult
from normlab.report.compare import compare_page

Json = dict[str, Any]

JUDGED = {"outcomes", "trains", "scores", "means", "train_seconds", "total_seconds"}
"""Fields of a recipe that follow from its runs."""


def today(old: Json) -> Comparison:
    """Return a comparison of this version or the one before it, without its conclusions."""
    swept = "margin" not in old and len(old["lrs"]) > 1
    content = {
        **{name: value for name, value in old.items() if name not in ("differences", "sentences")},
        "recipes": [_recipe(recipe, swept=swept, one_rate=len(old["lrs"]) < 2) for recipe in old["recipes"]],
    }
    if "margin" not in old:
        first: Metric = from_plain(tuple[Metric, ...], old["metrics"])[0]
        content |= {"margin": first.margin, "rate_by": old["best_by"], "sample_seed": old["seeds"][0]}
    if swept:
        content |= {"seeds": old["seeds"][1:], "sweep_seed": old["seeds"][0]}
    comparison: Comparison = from_plain(Comparison, content)
    return comparison


def _recipe(old: Json, *, swept: bool, one_rate: bool) -> Json:
    known = {f.name for f in fields(RecipeResult)} - JUDGED
    recipe = {name: value for name, value in old.items() if name in known}
    if swept:
        recipe |= {"runs": recipe["runs"][1:]}
    return recipe | ({"trials": []} if one_rate else {})


def write(path: Path, comparison: Comparison) -> Comparison:
    """Write the conclusions of a comparison, whose runs lie beside ``path``, and its page."""
    judged = judge(comparison, path.parent)
    write_text_atomic(path, to_json(judged))
    write_text_atomic(path.with_suffix(".html"), compare_page(judged, path.parent).html())
    return judged


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(
            "name the folders of the comparisons: tools/judge_comparisons.py results/gl-en results/gl-en-low"
        )
    for given in sys.argv[1:]:
        file = Path(given) / "comparison.json"
        for sentence in write(file, today(read_json(file))).sentences:
            print(f"{given}: {sentence}")

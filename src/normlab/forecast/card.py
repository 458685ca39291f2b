"""The model card of a forecaster: what it was fitted on, how good it is, and what it is not for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from normlab.forecast.evaluation import CONFIGURATION, MEASURED, WIDE, judged, several
from normlab.forecast.scores import SCORES
from normlab.forecast.table import SurveyedRun

LIMITS: Final = (
    "It says whether the first 150 to 200 steps of a training lower the loss as a sound training does, not "
    "how good the trained model becomes. It was fitted on models of 1 to 18 layers and of width 16 to 64, "
    "two texts, batches of 512 tokens, and optimisers of the Adam family and SGD."
)


def card(runs: Sequence[SurveyedRun]) -> dict[str, Any]:
    """Return the card of a forecaster of these runs, of which the wide ones are for testing alone."""
    fitted, wide = ([run for run in runs if (run.kind == "wide") is yes] for yes in (False, True))
    axes = {name: sorted({run.choices[name] for run in fitted}, key=str) for name in fitted[0].choices}
    splits = [*several(fitted), *([WIDE] if wide else [])]
    return {
        "limits": LIMITS,
        "runs": len(fitted),
        "models": len({run.model for run in fitted}),
        "outcomes": dict(Counter(run.outcome for run in fitted).most_common()),
        "fitted on": axes,
        "scores with a group left out": {
            split: {name: _scores(fitted, split, name, wide) for name in (MEASURED, CONFIGURATION)}
            for split in splits
        },
    }


def _scores(
    runs: Sequence[SurveyedRun], split: str, name: str, wide: Sequence[SurveyedRun]
) -> dict[str, float]:
    one = judged(runs, split, name, wide=wide)
    return {score: round(of(one.p, one.happened), 3) for score, of in SCORES.items()}

"""Tables 6 and 8: much data, and perplexities (Nguyen and Salazar 2019, arXiv 1910.05895)."""

from __future__ import annotations

from typing import Final

from normlab.papers import studies
from normlab.papers.bases import CONVERGED, CURVES
from normlab.papers.cells import declared
from normlab.papers.claim import at_least, below_one, positive, within
from normlab.papers.measures import Difference, ScoreRatio, TrainPerplexityRatio
from normlab.papers.nguyen2019.bases import MODELS, TED, WMT
from normlab.papers.scales import at_each

TABLE6: Final = declared(
    "nguyen2019.table6",
    studies.trainings,
    settings={
        "measures": {"pre_scalenorm": Difference("bleu", "Pre+FixNorm+ScaleNorm", "Pre+LN")},
        "gpu": {
            "post": Difference("bleu", "Post+LN", "Pre+LN"),
            "post_scalenorm": Difference("bleu", "Post+FixNorm+ScaleNorm", "Post+LN"),
        },
    },
    trainings=at_each(
        lambda s: {
            name: {"recipe": recipe + s.recipe, **s.peak}
            for name, recipe in (
                ("Pre+LN", "pre"),
                ("Pre+FixNorm+ScaleNorm", "pre+fixnorm+scalenorm"),
                ("Post+LN", "post"),
                ("Post+FixNorm+ScaleNorm", "post+fixnorm+scalenorm"),
            )
        },
        WMT,
    ),
    claims=(
        positive("BLEU of Post-LN minus that of Pre-LN", "post", needs=CONVERGED),
        *(
            at_least(
                -1.0,
                f"BLEU of {name} with FixNorm and ScaleNorm minus that with LayerNorm",
                measure,
                convention="not worse: at most 1 BLEU below",
                needs=needs,
            )
            for name, measure, published, needs in (
                ("Pre-LN", "pre_scalenorm", "27.07 against 26.83", ""),
                ("Post-LN", "post_scalenorm", "27.57 against 27.58", CONVERGED),
            )
        ),
    ),
    drawings=CURVES,
)

TABLE8: Final = declared(
    "nguyen2019.table8",
    studies.trainings,
    settings={
        "shown": "perplexity_smoothed",
        "measures": {
            "train": TrainPerplexityRatio("ScaleNorm", "LayerNorm"),
            "test": ScoreRatio("perplexity_smoothed", "ScaleNorm", "LayerNorm"),
        },
    },
    trainings=at_each(
        lambda s: {"LayerNorm": MODELS["Pre+FixNorm+LN"], "ScaleNorm": MODELS["Pre+FixNorm+ScaleNorm"]},
        TED,
        laptop=" One text stands for five pairs.",
    ),
    claims=(
        within(
            0.8,
            1.25,
            "perplexity of ScaleNorm on the training text over that of LayerNorm",
            "train",
            convention="no clear effect: less than a quarter either way",
        ),
        below_one("perplexity of ScaleNorm on the test text over that of LayerNorm", "test"),
    ),
    drawings=CURVES,
)

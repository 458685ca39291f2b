"""What a number of trainings can tell apart, which is known before any of them is run."""

from __future__ import annotations

import math

from normlab.comparison.seeds import detectable
from normlab.comparison.trains import share, share_gap
from normlab.config.units import count
from normlab.papers import own_studies as studies
from normlab.papers.artefact import Artefact
from normlab.papers.measures import ShareGap, ShareTrained, ShareTrainedToTheEnd
from normlab.papers.trainings import Scale


def resolution(artefact: Artefact, scale: Scale) -> str:
    """Which differences and shares its trainings at that scale can tell apart, in sentences; empty for an
    artefact whose study is another one than ``trainings``.
    """
    if artefact.study != studies.trainings or scale not in artefact.trainings:
        return ""
    measures, seeds, said = artefact.settings["measures"], artefact.trainings[scale].seeds, list[str]()
    if any(one.within_seeds for one in measures.values()):
        least = detectable(2, seeds)
        said.append(
            f"With {count(seeds, 'seed')} a cell, a difference of {least:.1f} standard deviations over seeds "
            "is found four times in five."
            if math.isfinite(least)
            else "With one seed a cell, no difference between two cells can be tested."
        )
    shares = [one for one in measures.values() if isinstance(one, (ShareTrained, ShareTrainedToTheEnd))]
    pooled = sorted({seeds * len(one.cells) for one in shares})
    paired = sorted({seeds * len(one.a) for one in measures.values() if isinstance(one, ShareGap)})
    said += [
        f"If all of {count(runs, 'run')} train, the interval of their share begins at "
        f"{share(runs, runs).low:.2f}."
        for runs in pooled
    ]
    said += [
        f"If both sides of {count(pairs, 'pair')} train alike, their shares are known to differ by "
        f"{share_gap(0, 0, pairs).high:.2f} at most."
        for pairs in paired
    ]
    return " ".join(said)

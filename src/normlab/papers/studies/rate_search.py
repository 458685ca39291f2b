"""Recipes compared at their own learning rates, which a sweep with an unreported seed chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from normlab.config.config import Config, SeedConfig, run_id
from normlab.config.metric import NLL
from normlab.papers.artefact import Measurement
from normlab.papers.lab import Lab, Row, finished
from normlab.papers.measures import OfRuns
from normlab.papers.studies.trained import trainings
from normlab.papers.trainings import at_factor, changed, side_of
from normlab.runs.folder import RunFolder

Sweep: TypeAlias = dict[float, Config]
"""Configurations by learning rate."""


def tuned(
    lab: Lab,
    *,
    measures: Mapping[str, OfRuns],
    shown: str,
    seeds: Sequence[int],
    factors: Sequence[float] = (1,),
) -> Measurement:
    """Take measures of the sides of a sweep, as in ``trainings``: each at the rate with the lowest dev NLL,
    with seeds that chose nothing, under its own name; at multiples of that rate, under ``at_factor``'s.

    The artefact's runs are cells of ``trainings.sweep``. A side whose best rate is at an end of those tried
    is tried an octave beyond, until its best rate has a worse one on either side.
    """
    sweeps: dict[str, Sweep] = {}
    for cell, (folder,) in lab.runs.items():
        config = folder.config()
        sweeps.setdefault(side_of(cell), {})[config.optim.lr] = config
    swept = _widened(lab, sweeps)
    best = {side: _best(own, swept) for side, own in sweeps.items()}
    lab.log(f"best rates: {_in_words(best)}")
    configs = {
        at_factor(side, factor): [
            changed(sweeps[side][rate], {"seeds": SeedConfig(seed, seed, seed), "optim.lr": factor * rate})
            for seed in seeds
        ]
        for side, rate in best.items()
        for factor in factors
    }
    runs = finished([config for own in configs.values() for config in own], lab.queue(lab.root))
    cells = {cell: tuple(runs[run_id(config)] for config in own) for cell, own in configs.items()}
    found = trainings(replace(lab, runs=cells), measures=measures, shown=shown)
    tables = {**found.tables, "rates": _rates(sweeps, swept)}
    return replace(found, tables=tables, facts={**found.facts, "rates": f"at rates of {_in_words(best)}"})


def _widened(lab: Lab, sweeps: Mapping[str, Sweep]) -> dict[str, RunFolder]:
    """Train the sweeps, widened by octaves until every best rate is inside; return the folders by run id."""
    while True:
        swept = finished([config for own in sweeps.values() for config in own.values()], lab.queue(lab.root))
        wider = False
        for own in sweeps.values():
            best = _best(own, swept)
            if beyond := {min(own): best / 2, max(own): best * 2}.get(best):
                own[beyond] = changed(own[best], {"optim.lr": beyond})
                wider = True
        if not wider:
            return swept


def _best(sweep: Sweep, swept: Mapping[str, RunFolder]) -> float:
    return max(sweep, key=lambda rate: NLL.sort_key(_dev_nll(swept[run_id(sweep[rate])])))


def _dev_nll(folder: RunFolder) -> float | None:
    return folder.status().best_dev.get("nll")


def _in_words(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{rate:g} ({side})" for side, rate in rates.items())


def _rates(sweeps: Mapping[str, Sweep], swept: Mapping[str, RunFolder]) -> list[Row]:
    """Return the dev NLL of each side at each rate of its sweep, lowest rate first."""
    return [
        {"cell": side, "rate": rate, "nll": _dev_nll(swept[run]), "run": run}
        for side, own in sweeps.items()
        for rate, config in sorted(own.items())
        for run in (run_id(config),)
    ]

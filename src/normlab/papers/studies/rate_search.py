"""Recipes compared at their own learning rates, which a sweep with an unreported seed chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from normlab.lab.comparison.result import SweepRun, choose
from normlab.lab.config import Config, SeedConfig
from normlab.lab.runs.folder import RunFolder
from normlab.papers.artefact import Measurement
from normlab.papers.lab import Lab, Row, finished
from normlab.papers.studies.trained import trainings
from normlab.papers.trainings import at_factor, changed, side_of

Sweep: TypeAlias = dict[float, RunFolder]
"""Runs by learning rate."""


def tuned(lab: Lab, *, shown: str, seeds: Sequence[int], factors: Sequence[float] = (1,)) -> Measurement:
    """Return the tables of the sides of a sweep, as in ``trainings``: each at the rate that ``choose`` gives,
    with seeds that chose nothing, under its own name; at multiples of that rate, under ``at_factor``'s.

    The artefact's runs are cells of ``trainings.sweep``. A side whose best rate is at an end of those tried
    is tried an octave beyond, until its best rate has a worse one on either side.
    """
    sweeps: dict[str, Sweep] = {}
    for cell, (folder,) in lab.runs.items():
        sweeps.setdefault(side_of(cell), {})[folder.config().optim.lr] = folder
    while beyond := _beyond(sweeps):
        for (side, rate), (folder,) in finished(beyond, lab.queue(lab.root)).items():
            sweeps[side][rate] = folder
    best = {side: _best(sweep) for side, sweep in sweeps.items()}
    lab.log(f"best rates: {_in_words(best)}")
    configs = dict[str, list[Config]]()
    for side, rate in best.items():
        for factor in factors:
            config = changed(sweeps[side][rate].config(), {"optim.lr": factor * rate})
            configs[at_factor(side, factor)] = [replace(config, seeds=SeedConfig.of(seed)) for seed in seeds]
    runs = finished(configs, lab.queue(lab.root))
    measured = trainings(replace(lab, runs=runs), shown=shown)
    tables = {**measured.tables, "rates": _rates(sweeps)}
    facts = {**measured.facts, "rates": f"at rates of {_in_words(best)}"}
    return replace(measured, tables=tables, facts=facts)


def _beyond(sweeps: Mapping[str, Sweep]) -> dict[tuple[str, float], list[Config]]:
    """Return what is to be trained an octave beyond each end of a sweep that is its best rate."""
    beyond: dict[tuple[str, float], list[Config]] = {}
    for side, sweep in sweeps.items():
        best = _best(sweep)
        for end, rate in ((min(sweep), best / 2), (max(sweep), best * 2)):
            if best == end:
                beyond[side, rate] = [changed(sweep[best].config(), {"optim.lr": rate})]
    return beyond


def _best(sweep: Sweep) -> float:
    return choose([SweepRun.of(folder.path.name, rate, folder.status()) for rate, folder in sweep.items()])


def _in_words(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{rate:g} ({side})" for side, rate in rates.items())


def _rates(sweeps: Mapping[str, Sweep]) -> list[Row]:
    """Return the dev NLL of each side at each rate of its sweep, lowest rate first."""
    return [
        {"cell": side, "rate": rate, "nll": folder.status().best_dev.get("nll"), "run": folder.path.name}
        for side, sweep in sweeps.items()
        for rate, folder in sorted(sweep.items())
    ]

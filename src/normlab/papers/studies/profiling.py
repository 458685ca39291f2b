"""Admin's profile: how far ω depends on the batch, and on the weights (Liu et al. 2020, Section 4.3)."""

from __future__ import annotations

import math
from functools import partial
from statistics import fmean, stdev
from typing import cast

import numpy as np

from normlab.diagnosis.studies.output_change import output_change
from normlab.diagnosis.subject import Subject
from normlab.nn import ProfiledPlacement, Seq2Seq, Sublayer
from normlab.nn.init import profile_
from normlab.papers.artefact import Measurement
from normlab.papers.intervals import Array, exponential, jackknife
from normlab.papers.lab import Lab, Row, size


def profiles(
    lab: Lab, *, text: str, model: str, layers: int, tokens: int, batches: int, seeds: int
) -> Measurement:
    """ω of an Admin encoder over batches of sentences of any length, and over seeds of the weights; and how
    far the output moves under the profile of the first batch and under that of all.
    """
    rows: list[Row] = []
    moved: list[tuple[float, float]] = []
    omegas: list[list[list[float]]] = []
    fed = lab.random_batches(text, tokens, batches)
    for seed in range(seeds):
        subject = lab.subject(size(model, "admin", layers), text, seed=seed, tokens=tokens)
        network = cast("Seq2Seq", subject.model)
        found = [profile_(network, partial(network.hidden, one["source"], one["target_in"])) for one in fed]
        paths = [path for path in found[0] if path.startswith("encoder.")]
        omegas.append([[one[path] ** 0.5 for path in paths] for one in found])
        for i, over in enumerate(zip(*omegas[-1], strict=True)):
            ends = {"low": min(over), "high": max(over), "deviation": stdev(over)}
            rows.append({"seed": seed, "sublayer": i, "omega": fmean(over), **ends})
        whole = {path: fmean(one[path] for one in found) for path in found[0]}
        moved.append((_moved(subject, found[0], seed), _moved(subject, whole, seed)))
    changes = [{"seed": s, "profiled_on": n, "change": c} for s, both in enumerate(moved)
               for n, c in zip(("1 batch", f"{batches} batches"), both, strict=True)]  # fmt: skip
    measures = {
        "batches_over_seeds": exponential(jackknife(np.log(omegas), _log_spread_ratio)),
        "change_in_deviations": jackknife(np.log(moved), _deviations),
    }
    facts = {"text": lab.text(text), "batches": f"{batches} of {tokens:,} positions, {seeds} seeds"}
    return Measurement(measures, {"omegas": rows, "changes": changes}, facts)


def _moved(subject: Subject, variances: dict[str, float], seed: int) -> float:
    """The change of the encoder's output when a random change moves the weights, under this profile."""
    for path, variance in variances.items():
        place = cast("Sublayer", subject.model.get_submodule(path)).place
        cast("ProfiledPlacement", place).init_(variance)
    encoder = subject.structure.stacks[0].name
    table = output_change(subject, seeds=[seed], stacks=[encoder])
    return float(table.rows[-1]["change"] or 0)


def _log_spread_ratio(logs: Array) -> float:
    """ln of the deviation over batches over that over seeds, of ln ω `[seeds, batches, sublayers]`."""
    within = logs.var(1, ddof=1).mean()
    between = logs.mean(1).var(0, ddof=1).mean() - within / logs.shape[1]
    return 0.5 * math.log(within / max(between, 1e-12))


def _deviations(logs: Array) -> float:
    """The mean difference of ln change under both profiles `[seeds, 2]`, in deviations of it over seeds."""
    one, all_ = logs.T
    return float((one - all_).mean() / all_.std(ddof=1))

"""The page of one run: how it ended, its curves, its exact configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import polars as pl
from markupsafe import Markup

from normlab.errors import UserError
from normlab.figures.curves import Axis, curve
from normlab.report.flight import flown, watched
from normlab.report.page import Cell, Chart, Grid, Page, Section, Table
from normlab.report.pictures import SPIKY_POINTS
from normlab.report.runs import RunView, marks, metrics_frame, run_details, seed_of, view
from normlab.spec.units import duration, quality, rate
from normlab.store.folder import RunFolder, read_json

SIDES: Final = ("training", "dev")

TEST_SCORES: Final = {
    "bleu": ("BLEU", ".2f"),
    "chrf": ("chrF", ".2f"),
    "bleu_tokenised": ("tokenised BLEU", ".2f"),
    "perplexity": ("perplexity of a token", ".2f"),
    "perplexity_smoothed": ("label-smoothed perplexity", ".2f"),
    "word_perplexity": ("perplexity of a word", ".2f"),
    "bits_per_byte": ("bits a byte", ".3f"),
    "nll": ("nats a token", ".3f"),
    "tokens": ("tokens", ",.0f"),
}
"""By their names in ``scores.json``: what they are called here, and their format."""


def run_page(folder: Path) -> str:
    """The run in ``folder`` as one self-contained HTML page; also while it is still running.

    Raises:
        UserError: the folder holds no readable run.
    """
    folder = folder.resolve()
    run = view(folder.parent, folder.name)
    if run.config is None:
        raise UserError(
            f"{folder} holds no readable run ({run.problem}); `normlab runs` lists those there are"
        )
    details, kept = run_details(run, folder.parent, {}), RunFolder(folder)
    return Page(
        title=f"{run.config.recipe}, run {run.id}",
        headline=_headline(run),
        facts=_facts(run),
        lead=(run.status.outcome.evidence if run.status and run.status.outcome else ""),
        blocks=[
            Section("", [_pictures(run)], "pictures", listed=False),
            *flown(kept.flights()),
            *watched(kept.probes()),
            *_test(run, read_json(kept.best_scores) if kept.best_scores.exists() else {}),
            Section("The run, exactly", details.blocks, f"run-{run.id}"),
        ],
        recipes=SIDES,
    ).html()


def _headline(run: RunView) -> Markup:
    assert run.config is not None
    assert run.status is not None
    name = Markup('{} at <span class="whole">{}</span>').format(run.config.recipe, rate(run.config.optim.lr))
    best = quality(bleu=run.status.best_dev.get("bleu"), nll=run.status.best_dev.get("nll"))
    score = f": {best} on dev" if best else ""
    if run.outcome == "trained":
        return Markup("{} trained{}").format(name, score)
    if run.outcome in ("stuck", "diverged"):
        verb = "was stuck" if run.outcome == "stuck" else "diverged"
        return Markup("{} {} at step {}").format(name, verb, f"{run.status.step:,}")
    state = {"new": "has not begun", "running": "is running", "interrupted": "was interrupted"}
    said = state.get(run.outcome, "ended in an error" if run.outcome == "failed" else run.outcome)
    return Markup("{} {} (step {}){}").format(name, said, f"{run.status.step:,}", score)


def _facts(run: RunView) -> list[str]:
    assert run.config is not None
    assert run.status is not None
    facts = [*marks(run), f"seed {seed_of(run)}", f"{run.status.step:,} of {run.config.train.steps:,} steps"]
    facts.append(f"{duration(run.status.train_seconds)} of training")
    ends = metrics_frame(run, "train", ("tokens", "seconds")).tail(1).to_dicts()
    if ends and ends[0]["tokens"] and ends[0]["seconds"]:
        facts.append(f"{ends[0]['tokens'] / ends[0]['seconds']:,.0f} target tokens a second")
    return [*facts, run.status.hardware] if run.status.hardware else facts


def _pictures(run: RunView) -> Grid:
    train = _named(run, "train", SIDES[0], ("nll", "grad_norm_l2", "lr"))
    dev = _named(run, "dev", SIDES[1], ("nll", "bleu"))
    both = pl.concat([train.drop("grad_norm_l2", "lr"), dev.drop("bleu")])
    loss = Axis("nll", "nats per token", extremes=True, height=260)
    norm = Axis("grad_norm_l2", "L2 norm", log=True, extremes=True, number=".3g")
    charts = [
        Chart("loss", "Loss", "Without label smoothing.", curve(both, SIDES, loss), both),
        *_dev_charts(dev),
        Chart(
            "grad-norm",
            "Gradient norm",
            "Before clipping, log scale; the band shows single spikes.",
            curve(train, SIDES, norm, points=SPIKY_POINTS),
            train,
        ),
        Chart(
            "lr",
            "Learning rate",
            "",
            curve(train, SIDES, Axis("lr", "learning rate", zero=True, number=".3g")),
            train,
        ),
    ]
    return Grid(charts)


def _dev_charts(dev: pl.DataFrame) -> list[Chart]:
    """BLEU where there is one, else perplexity; nothing before the first validation."""
    if dev.is_empty():
        return []
    if not dev["bleu"].is_null().all():
        axis = Axis("bleu", "BLEU", zero=True, height=260)
        return [Chart("bleu", "Dev BLEU", "Greedy decoding.", curve(dev, SIDES, axis), dev)]
    frame = dev.drop("bleu").with_columns(perplexity=pl.col("nll").exp())
    axis = Axis("perplexity", "perplexity of a token", log=True, number=".1f", height=260)
    return [Chart("perplexity", "Dev perplexity", "Of a token, log scale.", curve(frame, SIDES, axis), frame)]


def _test(run: RunView, beside: Mapping[str, Any]) -> list[Section]:
    """What the run's weights did on the test text, once they have been scored."""
    columns = [run.scores, beside] if beside else [run.scores]
    rows = [
        [Cell(said), *(Cell(format(float(scores[name]), form)) for scores in columns)]
        for name, (said, form) in TEST_SCORES.items()
        if name in run.scores
    ]
    if not rows:
        return []
    header = ("score", "best checkpoint")
    if beside:
        header = ("score", "average of the last checkpoints", "best checkpoint")
    return [Section("On the test text", [Table(header, rows)], "test")]


def _named(run: RunView, kind: str, side: str, columns: tuple[str, ...]) -> pl.DataFrame:
    constants = {"recipe": side, "run": f"{run.id} {side}", "seed": seed_of(run), "outcome": run.outcome}
    frame = metrics_frame(run, kind, columns)
    return frame.select(*[pl.lit(v).alias(k) for k, v in constants.items()], "step", *columns)

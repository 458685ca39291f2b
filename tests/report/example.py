"""A made-up comparison with run folders: recipes that win, tie, get stuck, diverge and fail."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np

from normlab.base.metric import Outcome
from normlab.lab.comparison.compare import judge
from normlab.lab.comparison.result import Comparison, RecipeResult, Sample, SweepRun
from normlab.lab.config import Config, DataConfig, MachineConfig, ModelConfig, OptimConfig, SeedConfig, run_id
from normlab.lab.runs.folder import RunFolder, Status, write_json_atomic
from normlab.lab.tasks.translation import Translation

METRICS = Translation.metrics
ENTROPY = 4.12
LRS = (5e-4, 1e-3, 2e-3)
SEEDS = (1, 2, 3)
SWEEP_SEED = 0

# recipe: (final dev BLEU by learning rate, with a word instead of a number where it went wrong; index chosen)
PLAN: dict[str, tuple[tuple[float | str, ...], int]] = {
    "post": ((31.2, "stuck", "diverged"), 0),
    "post+warmup": ((33.0, 35.6, "stuck"), 1),
    "pre": ((33.4, 36.1, 36.7), 2),
    "admin": ((33.9, 36.9, 35.0), 1),
    "pre+scalenorm": ((34.6, 37.4, 36.2), 1),
    "pre+fixnorm+scalenorm": ((35.2, 38.6, 38.1), 1),
    "enc:post/dec:pre": (("stuck", "stuck", "diverged"), 0),
}


def make(
    root: Path, *, rows: int = 120, plan: dict[str, tuple[tuple[float | str, ...], int]] | None = None
) -> Comparison:
    """Write run folders under ``root`` and return the comparison that they belong to."""
    plan = plan or PLAN
    recipes = tuple(_recipe(root, name, ends, chosen, rows) for name, (ends, chosen) in plan.items())
    comparison = Comparison(
        title="Multi30k, German to English",
        command="normlab compare --train-src train.de --train-tgt train.en --recipes " + " ".join(plan),
        date="2026-03-14",
        machine="2 cores, 8 GB",
        task="translation",
        metrics=METRICS,
        best_by="bleu",
        data={
            "corpus": "29,000 training pairs, 1,014 dev, 1,000 test",
            "vocabulary": "4,000 joint BPE types",
            "unigram entropy": f"{ENTROPY} nats a token",
        },
        seeds=SEEDS,
        lrs=LRS,
        signatures={
            "bleu": "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.5.1",
            "chrf": "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.5.1",
            "bleu_tokenised": "nrefs:1|case:mixed|eff:no|tok:intl|smooth:none|version:2.5.1",
        },
        unigram_entropy_nats=ENTROPY,
        recipes=recipes,
        samples=tuple(_sample(i, tuple(plan)) for i in range(9)),
        margin=1.0,
        sweep_seed=SWEEP_SEED,
        sample_seed=SEEDS[0],
    )
    return judge(comparison, root)


def _recipe(root: Path, name: str, ends: tuple[float | str, ...], chosen: int, rows: int) -> RecipeResult:
    runs = [_run(root, name, lr, SWEEP_SEED, end, rows) for lr, end in zip(LRS, ends, strict=True)]
    return RecipeResult(
        name=name,
        resolves_to="pre norm, ScaleNorm, FixNorm embedding, SmallInit, inverse square root without warm-up",
        trials=tuple(
            SweepRun(lr, run, _dev(e), e if isinstance(e, str) else "trained")
            for lr, run, e in zip(LRS, runs, ends, strict=True)
        ),
        lr=LRS[chosen],
        runs=tuple(_run(root, name, LRS[chosen], seed, ends[chosen], rows) for seed in SEEDS),
    )


def _dev(end: float | str) -> dict[str, float]:
    if end == "diverged":
        return {}
    bleu, nll = (0.2, ENTROPY) if isinstance(end, str) else (end, 3.0 - end / 25)
    return {"bleu": bleu, "nll": nll}


def _run(root: Path, name: str, lr: float, seed: int, end: float | str, rows: int) -> str:
    config = Config(
        recipe=name,
        model=ModelConfig(
            encoder_placement=name.split("+")[0],
            norm="scalenorm" if "scalenorm" in name else "layernorm",
            embedding="fixnorm" if "fixnorm" in name else "plain",
        ),
        data=DataConfig(train_src="train.de", train_tgt="train.en", digest="b1c2"),
        optim=OptimConfig(lr=lr, warmup_steps=400 if "warmup" in name else 0),
        seeds=SeedConfig(seed, seed, seed),
        machine=MachineConfig(threads=1),
    )
    run = run_id(config)
    folder = RunFolder.create(root / run, config, METRICS)
    state = end if isinstance(end, str) else "trained"
    curve = _metrics(np.random.default_rng([seed, len(name), int(lr * 1e5)]), end, lr, rows)
    for row in curve:
        folder.append_metrics(row)
    evidence = (
        f"smoothed training loss {curve[-1].get('nll', math.nan):.2f} against a unigram entropy of {ENTROPY}"
    )
    folder.set_status(
        Status(
            state="done",
            step=int(curve[-1]["step"]),
            outcome=Outcome(state, int(curve[-1]["step"]), evidence),
            best_dev=_dev(end),
            train_seconds=598.0,
            hardware="Xeon, 2 cores",
        )
    )
    if isinstance(end, float):
        luck = np.random.default_rng([seed, len(name)]).normal(0, 0.2)
        bleu = end - 0.4 + 0.25 * (seed - 2) + luck
        write_json_atomic(folder.scores, {"bleu": bleu, "chrf": bleu + 20.0, "bleu_tokenised": bleu + 0.6})
    return run


def _metrics(
    random: np.random.Generator, end: float | str, lr: float, rows: int
) -> list[dict[str, float | str]]:
    """A loss that falls from ln V to what fits the score, hangs at the entropy, or goes up and away."""
    final = ENTROPY if isinstance(end, str) else 3.0 - end / 25
    pace = 0.05 + 60 * lr * (0.4 if isinstance(end, str) else 1.0)
    found: list[dict[str, float | str]] = []
    count = rows if isinstance(end, float) else rows // 2
    for i in range(count):
        step = 20 * (i + 1)
        nll = final + (8.2 - final) * math.exp(-pace * i * 120 / rows) + random.normal(0, 0.06)
        norm = (
            math.exp(random.normal(-0.3, 0.25))
            * (1 + 3 * math.exp(-i / 9))
            * (6.0 if random.random() < 0.01 else 1)
        )
        if end == "diverged" and i > 0.5 * count:
            nll, norm = nll + 0.05 * (i - 0.5 * count) ** 2, norm * 1.3 ** (i - 0.5 * count)
            if i == count - 1:
                nll = norm = math.inf
        row = {
            "loss": nll + 0.9,
            "nll": nll,
            "grad_norm_l2": norm,
            "lr": lr,
            "tokens": step * 1800,
            "padded_tokens": step * 4096,
        }
        found.append({"kind": "train", "step": step, **row, "seconds": step * 0.25})
        if (i + 1) % max(1, rows // 8) == 0 and math.isfinite(nll):
            bleu = max(0.0, end * (1 - math.exp(-pace * i * 40 / rows))) if isinstance(end, float) else 0.2
            bleu += random.normal(0, 0.3) if isinstance(end, float) else 0.0
            found.append(
                {
                    "kind": "dev",
                    "step": step,
                    "nll": nll + 0.15,
                    "bleu": max(0.0, bleu),
                    "seconds": step * 0.25,
                }
            )
    return found


def _sample(number: int, recipes: tuple[str, ...]) -> Sample:
    source = "Ein Mann mit einem orangefarbenen Hut, der etwas <anstarrt> & lacht."
    reference = "A man in an orange hat staring at something and laughing ."
    variants = [
        "A man in an orange hat staring at something and laughing .",
        "A man with an orange hat is staring at something .",
        "A man wearing an orange hat looks at something and laughs .",
    ]
    outputs = {name: variants[(number + i) % 3] for i, name in enumerate(recipes)}
    outputs[recipes[-1]] = "" if number == 0 else "A a a a a a a a ."
    return Sample(source, reference, outputs)


def without_runs(comparison: Comparison) -> Comparison:
    """The same comparison, but no folder has the ids of the first recipe's runs."""
    first, *others = comparison.recipes
    lost = dataclasses.replace(
        first,
        trials=tuple(dataclasses.replace(t, run=f"lost{i}") for i, t in enumerate(first.trials)),
        runs=tuple(f"lost{i}" for i in range(len(first.runs))),
    )
    return dataclasses.replace(comparison, recipes=(lost, *others), failed=("lost9: out of memory",))

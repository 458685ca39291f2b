"""Runs whose forecasts are written down before they are trained: new sizes, and other people's classes.

    python benchmarks/forecasts.py --forecast advised   # measure models of a group, and write the forecasts
    python benchmarks/forecasts.py --train              # train what has no outcome yet, and add it

``new``: eight recipes at sizes that no run of the table has, each at a quarter, twice and four times the
largest rate that is forecast to train. ``later``: the same for the last eight models of the survey's
sequence, in other sizes, by a forecaster that knows deep models. ``foreign``: ten classes at three rates,
200 steps of AdamW on blocks of the Brown corpus. ``advised``: a Post-LN of 18 and 18 layers at 5e-4, and the
changes of it that `normlab advise` tries. A forecast is for the plan as it stands: no warm-up or lower rate
is tried in its place. The baselines are the same learner on the configuration and on the learning rate alone.
`normlab forecast --evaluate` puts both into its report.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normlab.configs import demo
from normlab.data.blocks import blocks_in_order
from normlab.data.plain import TextCorpus
from normlab.diagnosis import diagnose
from normlab.diagnosis.forecasting import NEEDED, told_features
from normlab.diagnosis.rules.features import VERSION
from normlab.diagnosis.rules.finding import Tables
from normlab.examine.advice import PLAN
from normlab.examine.advising import Advisor, advise_recipe, usual
from normlab.examine.subjects import Case, of_config
from normlab.forecast.answer import STEPS, Trial, answer
from normlab.forecast.evaluation import CONFIGURATION, ENCODINGS, forecaster_of, whole
from normlab.forecast.forecaster import Features, Forecaster
from normlab.forecast.shipping import shipped
from normlab.forecast.table import Foretold, SurveyedRun, read, write
from normlab.nn import PAD
from normlab.recipes.grammar import resolve
from normlab.spec.config import Config
from normlab.survey.design import Model, models, start_rate
from normlab.survey.measuring import TOKENS
from normlab.tasks.language_model import LanguageModel
from normlab.training.outcome import outcome
from normlab.training.train import train
from small_classes import FOREIGN, MASK, Foreign

TABLE = Path("results/forecast/foretold.jsonl.xz")
RUNS = Path("runs/foretold")
SEED = 7
AROUND = (1 / 4, 2.0, 4.0)
GRID = tuple(4.0**k for k in range(-2, 5))
FOREIGN_RATES = (1e-3, 1e-2, 1e-1)
MASKED = 0.15
SMALL_TOKENS = 256
ADVISED, ADVISED_RATE = 18, 5e-4
"""Layers of an encoder and of a decoder, and the learning rate that is planned for them."""
LATER, LATER_LAYERS, LATER_WIDTH = 8, (5, 7), 48
"""The number of later models, their layers in turn, and their width."""


def _model(
    text: str, placement: str, norm: str, scheme: str, optimiser: str, layers: int, width: int
) -> Model:
    names = ("text", "placement", "norm", "scheme", "optimiser", "layers", "width")
    values = (text, placement, norm, scheme, optimiser, layers, width)
    choices = dict(zip(names, values, strict=True)) | {"beta2": 0.98, "warmup": 0}
    return Model(f"{placement}, {layers} layers of width {width}, {text}", choices)


NEW = (
    _model("dates", "post", "layernorm", "xavier", "adam", 5, 48),
    _model("brown", "post", "rmsnorm", "xavier_uniform", "adamw", 8, 48),
    _model("brown", "pre", "layernorm", "xavier", "adam", 8, 48),
    _model("dates", "sandwich", "rmsnorm", "xavier", "adamw", 5, 48),
    _model("dates", "admin", "layernorm", "xavier", "radam", 5, 48),
    _model("brown", "deepnorm", "layernorm", "xavier", "adam", 10, 48),
    _model("brown", "keel", "rmsnorm", "smallinit", "adamw", 5, 48),
    _model("dates", "rezero", "layernorm", "xavier", "adam", 8, 48),
)


@cache
def _later() -> tuple[Model, ...]:
    """The last models of the survey's sequence, in sizes that no run of the table has, without a warm-up."""
    words = "{placement}, {norm}, {optimiser}, {layers} layers of width {width}, {text}"
    found = list[Model]()
    for i, drawn in enumerate(list(models())[-LATER:]):
        sizes: dict[str, str | float] = {"layers": LATER_LAYERS[i % 2], "width": LATER_WIDTH, "warmup": 0}
        choices = {**drawn.choices, **sizes}
        found.append(Model(words.format(**choices), choices))
    return tuple(found)


@cache
def _text() -> LanguageModel:
    config = replace(NEW[2].config(1e-3, SEED))
    data, corpus = LanguageModel.prepare(config.data, RUNS / "data")
    return LanguageModel(replace(config, data=data), corpus, torch.device("cpu"))


def _given(ids: Tensor, target: Tensor, index: int, *, masked: bool) -> dict[str, Tensor]:
    """A batch for a class: next tokens, or the masked ones of the text itself."""
    if not masked:
        return {"input_ids": ids, "labels": target.masked_fill(target == PAD, -100)}
    chosen = torch.rand(target.shape, generator=torch.Generator().manual_seed(index)) < MASKED
    chosen &= target != PAD
    return {"input_ids": target.masked_fill(chosen, MASK), "labels": target.masked_fill(~chosen, -100)}


def _batch(index: int, *, masked: bool) -> dict[str, Tensor]:
    batch = _text().batch(index)
    return _given(batch.ids, batch.target, index, masked=masked)


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean cross-entropy of the labels, in place, without a shift."""
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _built(foreign: Foreign) -> nn.Module:
    torch.manual_seed(SEED)
    return foreign.build()


def _case(foreign: Foreign, lr: float) -> Case:
    rows = [
        {k: v[: SMALL_TOKENS // 48] for k, v in _batch(i, masked=foreign.masked).items()} for i in range(4)
    ]
    whole_batch = [_batch(i, masked=foreign.masked) for i in (0, 1)]
    batch = {k: torch.cat([one[k] for one in whole_batch]) for k in whole_batch[0]}
    make = partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.98))
    return Case("", _built(foreign), batch, loss=loss, optimiser=make, batches=rows)


def _measured(case: Case, lr: float) -> Features:
    found = diagnose(
        case.model,
        case.batch,
        loss=case.loss,
        optimiser=case.optimiser,
        batches=case.batches,
        studies=NEEDED,
        **{k: v for k, v in case.plan.items() if k != "studies"},
    )
    return told_features(Tables(found.tables, lr))


@cache
def _baselines() -> dict[str, Forecaster]:
    _, runs = shipped(VERSION)
    return {name: forecaster_of(runs, ENCODINGS[name]) for name in (CONFIGURATION, "learning rate")}


def _foretold(group: str, name: str, choices: Mapping[str, Any], lr: float, case: Case) -> Foretold:
    begun = time.perf_counter()
    features, (forecaster, runs) = _measured(case, lr), shipped(VERSION)
    found = answer(forecaster, runs, [Trial(lr, 0, features)])
    seconds = time.perf_counter() - begun
    trivial = _trivial(name, choices, lr)
    return Foretold(group, name, choices, lr, found.kind, found.probability, *trivial, seconds)


def _trivial(name: str, choices: Mapping[str, Any], lr: float) -> list[float]:
    """What the baselines forecast."""
    run = SurveyedRun("", name, "drawn", choices, lr, SEED, STEPS, "", None, 0.0, {}, VERSION)
    return [one.probability(whole(ENCODINGS[key](run) or {}, one)) for key, one in _baselines().items()]


def forecast_around(model: Model, group: str) -> list[Foretold]:
    """Forecast a recipe around the largest rate that is forecast to train."""
    forecaster, _ = shipped(VERSION)
    rates = [float(f"{start_rate(model) * factor:.4g}") for factor in GRID]

    def case(lr: float) -> Case:
        return of_config(model.config(lr, SEED), RUNS, tokens=TOKENS)

    edge = forecaster.ceiling({lr: _measured(case(lr), lr) for lr in rates}) or start_rate(model)
    around = [float(f"{edge * factor:.3g}") for factor in AROUND]
    return [_foretold(group, model.name, model.choices, lr, case(lr)) for lr in around]


def forecast_foreign(name: str) -> list[Foretold]:
    """Forecast a class at each of the rates."""
    foreign = FOREIGN[name]
    return [_foretold("foreign", name, foreign.choices, lr, _case(foreign, lr)) for lr in FOREIGN_RATES]


def _advised() -> dict[str, Config]:
    """The plan that advice is asked for, and the usual changes of it, by name."""
    plan = resolve("post", demo())
    plan = replace(
        plan,
        model=replace(plan.model, encoder_layers=ADVISED, decoder_layers=ADVISED),
        optim=replace(plan.optim, lr=ADVISED_RATE),
        train=replace(plan.train, precision="fp32"),
    )
    return {PLAN: plan, **dict(usual(plan))}


def forecast_advised() -> list[Foretold]:
    """Forecast a deep Post-LN, and the changes of it that are tried by default."""
    configs, found = _advised(), list[Foretold]()
    begun = time.perf_counter()
    advice = advise_recipe(configs[PLAN], RUNS, tokens=2048, advisor=Advisor(factors=()))
    seconds = (time.perf_counter() - begun) / len(advice.alternatives)
    for one in advice.alternatives:
        config = configs[one.name]
        words = {"text": "dates", "placement": config.model.encoder_placement, "norm": config.model.norm}
        numbers = {"layers": ADVISED, "width": config.model.dim, "warmup": config.optim.warmup_steps}
        choices = {**words, "optimiser": "adam", **numbers}
        trivial = _trivial(one.name, choices, ADVISED_RATE)
        kind = "cannot say" if one.answer is None else one.answer.kind
        told = Foretold("advised", one.name, choices, ADVISED_RATE, kind, one.probability, *trivial, seconds)
        found.append(told)
    return found


def train_new(row: Foretold) -> Foretold:
    """Train a run of ours."""
    model = next(model for model in (*NEW, *_later()) if model.name == row.model)
    return _trained_by(model.config(row.lr, SEED), row)


def train_advised(row: Foretold) -> Foretold:
    """Train the plan, or a change of it."""
    return _trained_by(_advised()[row.model], row)


def _trained_by(config: Config, row: Foretold) -> Foretold:
    found = train(replace(config, machine=replace(config.machine, threads=1)), RUNS).status().outcome
    return replace(row, outcome=found.state if found else "")


def train_foreign(row: Foretold) -> Foretold:
    """Train a run of a class, and judge it by the rule of every run."""
    foreign, text = FOREIGN[row.model], _text()
    model = _built(foreign)
    optimiser = torch.optim.AdamW(model.parameters(), lr=row.lr, betas=(0.9, 0.98))
    rows = list[dict[str, Any]]()
    for step in range(1, STEPS + 1):
        optimiser.zero_grad()
        nll = loss(model.train(), _batch(step - 1, masked=foreign.masked))
        nll.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
        optimiser.step()
        rows.append(
            {"kind": "train", "step": step, "loss": nll.item(), "nll": nll.item(), "grad_norm_l2": norm}
        )
    rows.append({"kind": "dev", "step": STEPS, "nll": _dev(model, text.corpus, foreign)})
    found = outcome(
        rows,
        unigram_entropy_nats=text.corpus.unigram_entropy_nats,
        total_steps=STEPS,
        best_step=STEPS,
        has_source=False,
        final=True,
    )
    return replace(row, outcome=found.state if found else "")


def _dev(model: nn.Module, corpus: TextCorpus, foreign: Foreign) -> float:
    """The mean loss on the development text."""
    found = list[float]()
    with torch.no_grad():
        for i, batch in enumerate(blocks_in_order(corpus.dev.tokens, block_len=48, rows=20)):
            found.append(loss(model.eval(), _given(batch.ids, batch.target, i, masked=foreign.masked)).item())
    return sum(found) / len(found)


def _forecasts(pool: ProcessPoolExecutor, groups: Sequence[str]) -> Iterator[Foretold]:
    asked = {
        "foreign": [partial(forecast_foreign, name) for name in FOREIGN],
        "new": [partial(forecast_around, model, "new") for model in NEW],
        "later": [partial(forecast_around, model, "later") for model in _later()],
        "advised": [forecast_advised],
    }
    waiting = [pool.submit(one) for group in groups for one in asked[group]]
    yield from (row for one in waiting for row in one.result())


def _trained(pool: ProcessPoolExecutor, rows: list[Foretold]) -> Iterator[Foretold]:
    kinds = {"new": train_new, "later": train_new, "foreign": train_foreign, "advised": train_advised}
    waiting = [None if row.outcome else pool.submit(kinds[row.group], row) for row in rows]
    yield from (row if one is None else one.result() for row, one in zip(rows, waiting, strict=True))


def _said(rows: Iterator[Foretold]) -> Iterator[Foretold]:
    for row in rows:
        p = "abstains" if row.probability is None else f"{row.probability:.2f}"
        seconds = f"{row.seconds:.1f} s"
        columns = f"{row.group:8}{row.model:42}{row.lr:<9.3g}{p:9}{row.configuration:.2f}"
        print(f"{columns}  {seconds:8}{row.outcome}", flush=True)
        yield row


def main() -> None:
    """Forecast or train, and print each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forecast", nargs="+", choices=("new", "later", "foreign", "advised"), default=())
    parser.add_argument("--train", action="store_true")
    asked = parser.parse_args()
    context = get_context("spawn")
    with ProcessPoolExecutor(2, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        if asked.forecast:
            kept = [row for row in read(TABLE, Foretold) if row.group not in asked.forecast]
            write(TABLE, [*kept, *_said(_forecasts(pool, asked.forecast))])
        if asked.train:
            write(TABLE, _said(_trained(pool, read(TABLE, Foretold))))


if __name__ == "__main__":
    main()

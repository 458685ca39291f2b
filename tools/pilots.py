"""Pilots of the papers' trainings: ``NORMLAB_DATA=... python tools/pilots.py BATCH ... --runs FOLDER``.

A pilot chooses a regime and never counts for a claim: its seeds are 1000 and up, those that count begin at 1.
Each finished run leaves one line in ``results/pilots/BATCH.jsonl``, metrics alone; the run folders, with the
weights, stay in the folder of ``--runs``. A configuration that has a line is skipped, and an interrupted run
goes on from its last checkpoint. Without names the batches are listed, with how many of their runs are there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from normlab.lab.config import Config, MachineConfig, SeedConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.runs.folder import RunFolder
from normlab.lab.training.train import train
from normlab.papers.bases import DATES, LANGUAGE_MODEL, MULTI30K_QUARTER, MULTI30K_SMALL, MULTI30K_WIDTH_64
from normlab.papers.disputes import BASELINE, RATES, recipe
from normlab.papers.experiments import PILOT_SEED, key, line, made_at
from normlab.papers.liu2020.bases import FP16, HALF
from normlab.papers.nguyen2019.bases import GL_EN, GL_EN_SMALL, MODELS, PAST_BEST
from normlab.papers.trainings import changed, sweep

HOME: Final = Path(__file__).resolve().parent.parent
KEPT: Final = HOME / "results" / "pilots"
FIRST_SEED: Final = PILOT_SEED
Changes: TypeAlias = Mapping[str, Any]
Rates: TypeAlias = tuple[float, ...]

_EDGE: Final = changed(DATES, {"train.stop_early": False})
REAL: Final = MULTI30K_WIDTH_64


@dataclass(frozen=True)
class Batch:
    """Pilots of one question."""

    question: str
    base: Config
    cells: Mapping[str, Changes]
    seeds: int = 1
    device: str = "cpu"

    def configs(self) -> Iterator[tuple[str, int, Config]]:
        """Each cell and seed with its resolved configuration."""
        for seed in range(FIRST_SEED, FIRST_SEED + self.seeds):
            for cell, changes in self.cells.items():
                config = changed(self.base, changes)
                config = replace(
                    config,
                    seeds=SeedConfig.of(seed),
                    machine=MachineConfig(self.device, threads=1, probes="", checkpoint_every_steps=10_000),
                )
                yield cell, seed, resolve(config.recipe, config)


def _edges(recipe: str, rates: Rates, warmups: tuple[int, ...], **more: Any) -> dict[str, Changes]:
    """A recipe at each rate and warm-up."""
    return {
        f"{recipe} lr {rate:g} warm-up {steps}": {
            "recipe": recipe + ("+warmup" if steps else ""),
            "optim.lr": rate,
            "optim.warmup_steps": steps,
            **more,
        }
        for steps in warmups
        for rate in rates
    }


def _radam(rates: Rates, betas: Rates, placement: str = "post") -> dict[str, Changes]:
    """Figure 10 of Liu et al. 2020: RAdam without warm-up, the rate falling in a line."""
    return {
        f"{placement} RAdam lr {rate:g} β₂ {beta}": {
            "recipe": f"{placement}+radam+linear",
            "optim.lr": rate,
            "optim.betas": (0.9, beta),
        }
        for beta in betas
        for rate in rates
    }


def _depths(rates: Rates, depths: tuple[int, ...], placement: str = "post") -> dict[str, Changes]:
    """Table 5 of Nguyen and Salazar 2019: SmallInit, no warm-up, by depth."""
    return {
        f"{placement} {layers} layers lr {rate:g}": {
            "recipe": f"{placement}+smallinit+val_decay",
            "optim.lr": rate,
            "model.encoder_layers": layers,
            "model.decoder_layers": layers,
        }
        for rate in rates
        for layers in depths
    }


def _peak(recipe: str, rate: float, warmup: int = 400) -> dict[str, Changes]:
    """One recipe with warm-up at one rate."""
    return _edges(recipe, (rate,), (warmup,))


_END: Final = changed(
    REAL,
    {
        "optim.schedule": "linear",
        "train.steps": 1500,
        "train.validate_every_steps": 300,
        "train.dev_decode_sentences": 100,
    },
)
_DEPTH: Final = {"model.encoder_layers": 18, "model.decoder_layers": 18}
_DEEP: Final = changed(REAL, {"train.max_tokens": 1024, "train.validate_every_steps": 300, **_DEPTH})
"""18+18 layers on the same text, 1,200 steps of 1,024 positions."""
_HALF: Final = HALF["gpu"]
_VARIANT: Final = "pre+fixnorm+scalenorm+smallinit"
_ROWS: Final = {name: MODELS[name] for name in ("Post+LN", "Pre+LN", "Pre+FixNorm+ScaleNorm")}
"""Rows of Table 3 of Nguyen and Salazar 2019."""
_DROPOUT: Final = dict.fromkeys(("model.dropout", "model.attention_dropout", "model.ffn_dropout"), 0.1)
_TED: Final = {"optim.betas": (0.9, 0.999), "optim.eps": 1e-8, "optim.max_grad_norm": 1.0}
_GL_EN_GPU: Final = changed(
    GL_EN,
    {
        "optim.warmup_steps": 600,
        "optim.stop_lr": 0.0,
        "train": replace(
            PAST_BEST["laptop"].base.train,
            steps=2500,
            max_tokens=16_384,
            precision="bf16",
            validate_every_steps=250,
            dev_decode_sentences=100,
            best_by="nll",
        ),
    },
)
BATCHES: Final[Mapping[str, Batch]] = {
    "pace": Batch("How long does a step take?", DATES, _edges("post", (1e-3,), (0,))),
    "pace-real": Batch("How long does a step take?", REAL, _edges("post", (1e-3,), (0,))),
    "C-adam": Batch(
        "Where is Post-LN's edge under Adam, by warm-up of 0, 40 and 300 of 1,200 steps?",
        _EDGE,
        _edges("post", (2e-3, 4e-3), (0, 40, 300)),
    ),
    "C-inverse": Batch(
        "The same with the paper's inverse square root after the warm-up",
        changed(_EDGE, {"optim.schedule": "inverse_sqrt"}),
        _edges("post", (1e-3, 2e-3, 4e-3), (0, 40, 300)),
    ),
    "C-sgd": Batch(
        "At which rates does a warm-up decide whether Post-LN learns under SGD?",
        changed(_EDGE, {"optim.schedule": "inverse_sqrt"}),
        _edges("post+sgd", (0.2, 0.1, 0.04), (0, 300)),
    ),
    "C-radam": Batch(
        "Where is Post-LN's edge under RAdam without warm-up?", _EDGE, _radam((4e-3, 8e-3), (0.999,))
    ),
    "C-simplified": Batch(
        "Where is the edge of the simplified model, one head and W_Q = W_K = 0, without warm-up?",
        changed(_EDGE, {"optim.schedule": "inverse_sqrt"}),
        _edges("post", (2e-3,), (0,), **{"model.scheme": "uniformattention", "model.heads": 1}),
    ),
    "C-radam-others": Batch(
        "Do Pre-LN and Admin train under RAdam without warm-up at 20 times the paper's largest rate?",
        _EDGE,
        {**_radam((10e-3,), (0.999,), "pre"), **_radam((10e-3,), (0.999,), "admin")},
    ),
    "C-depth": Batch(
        "Where is Post-LN's edge with SmallInit without warm-up, by depth?",
        changed(_EDGE, _TED),
        {**_depths((4.8e-3, 3.6e-3, 2.4e-3), (6, 4)), **_depths((2.4e-3,), (6,), "pre")},
    ),
    "C-start": Batch(
        "Does a factor of 8 separate Xavier from SmallInit with a short warm-up, and what does the batch do?",
        changed(_EDGE, {**_TED, "optim.schedule": "inverse_sqrt"}),
        {
            **_edges("post+smallinit", (4e-3,), (40,)),
            **_edges("post", (4e-3,), (40,)),
            "post lr 0.004 warm-up 40 batch 256": {
                **_edges("post", (4e-3,), (40,))["post lr 0.004 warm-up 40"],
                "train.max_tokens": 256,
            },
        },
    ),
    "C-batch": Batch(
        "What does a batch of 4,096 positions do to Post-LN with a short warm-up?",
        changed(_EDGE, {**_TED, "optim.schedule": "inverse_sqrt"}),
        {
            f"{cell} batch 4096": {**changes, "train.max_tokens": 4096}
            for cell, changes in _edges("post", (4e-3,), (40,)).items()
        },
    ),
    "F-long": Batch(
        "Does Post-LN converge in 6,000 steps, and at which rate?",
        changed(_END, {"train.steps": 6000, "train.validate_every_steps": 500}),
        {**_peak("post", 1e-3), **_peak("post", 2e-3)},
    ),
    "F-liu": Batch(
        "Does Liu et al.'s Post-LN come to its end on a quarter of the text, where dev NLL rises again?",
        changed(_END, {"data": MULTI30K_QUARTER, "train.steps": 3000}),
        {"post": {"recipe": "post+radam+warmup+inverse_sqrt", "optim.lr": 2e-3, "optim.warmup_steps": 400}},
    ),
    "F-nguyen": Batch(
        "Do Nguyen and Salazar's models, with SmallInit and clipping?", PAST_BEST["laptop"].base, _ROWS
    ),
    "F-dropout": Batch(
        "The same with the dropout of gl_en_small, without which the models differ in how soon they overfit",
        changed(
            PAST_BEST["laptop"].base,
            {**_DROPOUT, "train.steps": 4800, "train.validate_every_steps": 300, "train.best_by": "nll"},
        ),
        _ROWS,
    ),
    "F-eighth": Batch(
        "The same on an eighth of Multi30k: do models pass their best sooner there?",
        changed(
            PAST_BEST["laptop"].base,
            {
                **_DROPOUT,
                "data.train_src": f"{MULTI30K_SMALL.train_src}[:3625]",
                "data.train_tgt": f"{MULTI30K_SMALL.train_tgt}[:3625]",
                "train.steps": 2700,
            },
        ),
        _ROWS,
    ),
    "F-gl-en": Batch(
        "Do the rows of Table 3 come to their end on the paper's own smallest text, at width 64?",
        changed(
            GL_EN_SMALL,
            {
                "model.dim": 64,
                "model.ffn_dim": 256,
                "optim.lr": 2e-3,
                "optim.warmup_steps": 400,
                "train": replace(
                    PAST_BEST["laptop"].base.train, steps=6000, validate_every_steps=300, best_by="nll"
                ),
            },
        ),
        _ROWS,
    ),
    "F-gl-en-gpu": Batch(
        "At which rate do models of the paper's size pass their best on gl-en, with four times its batch?",
        _GL_EN_GPU,
        sweep(MODELS, (1e-3, 2e-3)),
        device="cuda",
    ),
    "F-rate": Batch("Does Post-LN converge sooner at a higher rate?", _END, _peak("post", 2e-3)),
    "F-end": Batch(
        "Do six layers converge in 1,500 steps of Multi30k, with headroom, and at which rates?",
        _END,
        {**_peak("post", 1e-3), **_peak("pre", 2e-3)},
    ),
    "F-admin": Batch("The same of Admin", _END, _peak("admin", 2e-3)),
    "E-deep": Batch(
        "Which of 18 layers fail for 1,200 steps of Multi30k, and does the rate decide it?",
        _DEEP,
        {**_peak("post", 2e-3, 240), **_peak("pre", 2e-3, 240)},
    ),
    "E-dates": Batch(
        "Which of 18 layers fail for 1,200 steps of dates, and does a warm-up four times as long change it?",
        changed(_EDGE, {"optim.schedule": "inverse_sqrt", **_DEPTH}),
        {
            **_edges("enc:post/dec:post", (2e-3,), (40, 160)),
            **_edges("enc:post/dec:pre", (2e-3,), (40,)),
            **_edges("enc:pre/dec:pre", (2e-3,), (40,)),
            **_edges("admin", (2e-3,), (40,)),
        },
    ),
    "E-half": Batch(
        "Does a Pre-LN of 18 layers train in half precision in 1,200 steps of Multi30k, at the paper's size?",
        _HALF.base,
        {"pre": {**_HALF.recipe("pre", (18, 18)), **FP16}},
        device="cuda",
    ),
    "G-noise": Batch(
        "How far do seeds of a small language model differ, alone and within a pair?",
        LANGUAGE_MODEL,
        sweep({"baseline": BASELINE, "QK-norm": recipe("headnormed")}, RATES[1:2]),
        seeds=3,
    ),
    "F-norms": Batch(
        "The same of FixNorm and ScaleNorm, and what they learn as scales",
        _END,
        {
            **_peak(_VARIANT, 2e-3),
            **{
                f"{cell}, no smoothing": {**changes, "optim.label_smoothing": 0.0}
                for cell, changes in _peak(_VARIANT, 2e-3).items()
            },
        },
    ),
}


def kept(batch: str) -> dict[str, dict[str, Any]]:
    """The lines of a batch by key."""
    path = KEPT / f"{batch}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


def _curve(folder: RunFolder) -> list[list[float]]:
    """Step, NLL and BLEU of each validation."""
    rows = [row for row in folder.metrics() if row["kind"] == "dev"]
    return [[row["step"], round(row["nll"], 3), round(row.get("bleu", -1.0), 1)] for row in rows]


def pilot_line(cell: str, seed: int, config: Config, folder: RunFolder) -> dict[str, Any]:
    """What is kept of a finished pilot."""
    return {**line(cell, seed, config, folder), "dev": _curve(folder), "commit": commit()}


def commit() -> str:
    """The commit of the code that runs."""
    command = ["git", "-C", str(HOME), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def provenance() -> dict[str, str]:
    """Commit, date and hardware of a measurement."""
    return {"commit": commit(), **made_at()}


def run(batch: str, runs: Path) -> None:
    """Train what is missing of a batch, one run after the other."""
    for cell, seed, config in BATCHES[batch].configs():
        if key(config) in kept(batch):
            continue
        folder = train(config, runs)
        row = pilot_line(cell, seed, config, folder)
        KEPT.mkdir(parents=True, exist_ok=True)
        with (KEPT / f"{batch}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        for weights in (folder.last, folder.previous):
            shutil.rmtree(weights, ignore_errors=True)
        print(batch, cell, seed, row["outcome"], row["dev"][-1:], row["test"], row["seconds"], flush=True)


def main() -> None:
    """Run the named batches, or list all."""
    parser = argparse.ArgumentParser(description="Pilots of the papers' trainings.")
    parser.add_argument("batch", nargs="*", choices=[[], *BATCHES], default=[])
    parser.add_argument("--runs", type=Path, default=Path("runs/pilots"), help="folder of the run folders")
    asked = parser.parse_args()
    for batch in asked.batch:
        run(batch, asked.runs)
    if not asked.batch:
        for name, batch in BATCHES.items():
            configs = list(batch.configs())
            there = sum(key(config) in kept(name) for *_, config in configs)
            print(f"{name}: {there} of {len(configs)}; {batch.question}")


if __name__ == "__main__":
    main()

"""A made-up regime of two steps, planned before its runs, and trainings of it that take no time."""

from __future__ import annotations

from normlab.lab.runs import RunFolder
from normlab.papers import experiments

TOY = """
question = "Does Post-LN differ from Pre-LN after two steps?"
findings = ["X1"]
base = "demo"
seeds = [5]
used_before = [1]
status = "ready"
pilot = "none"
fixed = "nothing"
measure = ["dependency"]
measure_at = [0]

[changes]
"model.dim" = 16
"model.ffn_dim" = 32
"model.encoder_layers" = 1
"model.decoder_layers" = 1
"data.builtin_pairs" = 4000
"train.steps" = 2
"train.validate_every_steps" = 1
"train.dev_decode_sentences" = 2
"train.precision" = "fp32"
"optim.warmup_steps" = 0

[cells.post]
recipe = "post"

[cells.pre]
recipe = "pre"
"optim.lr" = 2e-3
"""


class TrainedNothing:
    """In place of a training: notes the recipes that it is asked for, and lets ``meanwhile`` happen."""

    def __init__(self, monkeypatch, meanwhile=lambda: None):
        self.recipes = []
        self.meanwhile = meanwhile
        monkeypatch.setattr(experiments, "train", self.train)
        monkeypatch.setattr(experiments, "experiment_line", self.line)
        monkeypatch.setattr(experiments, "measure_run", lambda *_: [])

    def train(self, config, runs):
        self.recipes.append(config.recipe)
        self.meanwhile()
        folder = RunFolder(runs / experiments.key(config))
        folder.best.mkdir(parents=True)
        return folder

    def line(self, cell, seed, config, folder):
        named = {"key": experiments.key(config), "cell": cell, "seed": seed, "outcome": "trained"}
        return {**named, "dev": [], "test": {}, "seconds": 1}

"""A made-up regime of two steps, planned before its runs."""

from __future__ import annotations

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

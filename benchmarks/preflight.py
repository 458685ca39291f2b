"""Seconds of a preflight of GPT-2 small: 12 layers of width 768, 124 million parameters, a batch of 2 x 64.

python benchmarks/preflight.py             # print the seconds of each run and of the slowest studies
python benchmarks/preflight.py --write     # write benchmarks/results/preflight.json, too
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers as tf

from normlab.diagnosis import diagnose
from normlab.training.devices import hardware

RESULTS = Path(__file__).resolve().parent / "results/preflight.json"
ROWS, LENGTH, RUNS, THREADS = 2, 64, 3, 2
CONFIG = {"n_layer": 12, "n_embd": 768, "n_head": 12, "use_cache": False}


def measured() -> dict[str, Any]:
    """Build the model, and time a preflight of it as its user would type it."""
    torch.manual_seed(0)
    model = tf.GPT2LMHeadModel(tf.GPT2Config(**CONFIG))
    ids = torch.randint(5, model.config.vocab_size, (ROWS, LENGTH))
    optimiser = partial(torch.optim.AdamW, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    begun = time.perf_counter()
    found = diagnose(
        model,
        {"input_ids": ids, "labels": ids},
        optimiser=optimiser,
        preset="preflight",
        max_grad_norm=1.0,
        warmup_steps=2000,
    )
    seconds = time.perf_counter() - begun
    studies = {name: round(s, 3) for name, s in sorted(found.seconds.items(), key=lambda one: -one[1])}
    return {"seconds": round(seconds, 2), "verdict": found.verdict, "studies": studies}


def main() -> None:
    """Time the runs one after the other, and keep them if asked to."""
    parser = argparse.ArgumentParser(description="Seconds of a preflight of GPT-2 small.")
    parser.add_argument("--write", action="store_true", help="write the results file")
    args = parser.parse_args()
    tf.logging.set_verbosity_error()
    torch.set_num_threads(THREADS)
    runs: list[dict[str, Any]] = []
    for _ in range(RUNS):
        runs.append(measured())
        print(json.dumps(runs[-1]), flush=True)
    content = {
        "about": f"{hardware(torch.device('cpu'))}, transformers {tf.__version__}",
        "load": [round(load, 2) for load in os.getloadavg()],
        "median_seconds": median(run["seconds"] for run in runs),
        "runs": runs,
    }
    print(f"median: {content['median_seconds']} s; load of the machine: {content['load']}")
    if args.write:
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

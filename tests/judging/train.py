"""A script that trains for a moment: its loss is drawn from the seed, lower by ``--gain``."""

import argparse
import os
import random
import signal
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--gain", type=float, default=0.0)
parser.add_argument("--seconds", type=float, default=0.0)
parser.add_argument("--diverges", default="")
parser.add_argument("--crashes", default="")
parser.add_argument("--killed", default="")
parser.add_argument("--times", type=int, default=99)
typed = parser.parse_args()

with Path("ran.txt").open("a") as file:
    file.write(f"begin {typed.gain} {typed.seed}\n")
print("val_loss: 3.9", flush=True)
time.sleep(typed.seconds)
loss = 3.3 - typed.gain + 0.01 * random.Random(f"{typed.seed} {typed.gain}").gauss(0, 1)
begun = Path("ran.txt").read_text().count(f"begin {typed.gain} {typed.seed}\n")
if str(typed.seed) in typed.killed.split(",") and begun <= typed.times:
    os.kill(os.getpid(), signal.SIGKILL)
if str(typed.seed) in typed.crashes.split(","):
    raise SystemExit("out of memory")
print("val_loss:", "nan" if str(typed.seed) in typed.diverges.split(",") else round(loss, 5))
with Path("ran.txt").open("a") as file:
    file.write(f"end {typed.gain} {typed.seed}\n")

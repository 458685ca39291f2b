"""How many passes and steps each property of ``check`` takes, beside what it says that it takes.

    python benchmarks/passes.py            # measure and print; about three minutes
    python benchmarks/passes.py --write    # keep the result in results/passes.json

Each setup is checked with no limit of time. A property's passes are its seconds in units of one exact forward
pass: the largest over the setups whose step takes no more than the part of the batch that is tested. Its
steps are what it takes besides, in units of a whole step, where the user's step needs many more rows. What a
property is the first to ask for, such as the wiring, counts for it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normlab.checks.check import examine, properties
from normlab.setups.setup import Declaration, Setup
from normlab.trace import parts
from normlab.trace.restore import restored, same_globals, same_random_state
from normlab.trace.step_under_test import StepUnderTest

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results/passes.json"
VOCAB, WIDTH, HEADS, LAYERS, COLUMNS = 512, 256, 4, 4, 96
FEW, MANY = 4, 48
"""Rows of a batch that is tested whole, and of one of which two rows are tested."""


class Block(nn.Module):
    """Attention and a feed-forward branch, each with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm_2, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y, future = self.norm(x), torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.dropout(self.attention(y, y, y, attn_mask=future, need_weights=False)[0])
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class Decoder(nn.Module):
    """A decoder whose head is tied to its embedding."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(COLUMNS, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("ones", torch.ones(WIDTH))
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = (self.embed(ids) + self.places(torch.arange(ids.shape[1]))) * self.ones
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the cross-entropy of the next tokens, without padding."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


def tokens(rows: int) -> Tensor:
    """Return random tokens, which end in padding."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCAB, (rows, COLUMNS), generator=draw)
    lengths = torch.randint(COLUMNS // 2, COLUMNS + 1, (rows,), generator=draw)
    lengths[0] = COLUMNS
    return ids.masked_fill(torch.arange(COLUMNS) >= lengths[:, None], 0)


def by_two_halves(model: nn.Module, ids: Tensor, optimizer: torch.optim.Optimizer, scheduler: object) -> None:
    """Make a step of two micro-batches, each of which weighs as much as the targets that it counts."""
    optimizer.zero_grad()
    counted = int((ids[:, 1:] != 0).sum())
    for part in ids.chunk(2):
        (loss_of(model, part) * int((part[:, 1:] != 0).sum()) / counted).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()  # type: ignore[attr-defined]


def setup(rows: int, *, checkpointed: bool = False, steps: bool = False, low: bool = False) -> Setup:
    """Return a setup of so many rows."""

    def make() -> Decoder:
        model = Decoder(checkpointed=checkpointed)
        return model.bfloat16() if low else model

    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    return Setup(
        model,
        tokens(rows),
        loss=loss_of,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
        step=by_two_halves if steps else None,
        make=make,
        declare=Declaration(pad_id=0),
    )


def measured(given: Setup) -> tuple[dict[str, float], StepUnderTest]:
    """Return the seconds of each property that was judged, and the step."""
    with restored(given), same_globals(), same_random_state(0):
        step = StepUnderTest(given, budget_s=1e6)
        report = examine(step, properties())
    return {n: s for n, s in report.seconds.items() if n not in report.untestable}, step


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--write", action="store_true", help=f"keep the result in {RESULTS.name}")
    torch.set_num_threads(1)
    write = options.parse_args().write

    passes: dict[str, float] = {}
    for more in ({}, {"checkpointed": True}, {"low": True}):
        seconds, step = measured(setup(FEW, **more))
        for name, taken in seconds.items():
            passes[name] = max(passes.get(name, 0.0), taken / step.estimates.pass_s)

    parts.LARGE = 1  # two rows are tested, and the step takes all of them
    parts.COLUMNS = COLUMNS
    seconds, step = measured(setup(MANY, steps=True))
    alone, small = measured(setup(MANY))
    slower = step.estimates.pass_s / small.estimates.pass_s
    steps: dict[str, float] = {}
    for name, taken in seconds.items():
        beyond_passes = max(0.0, taken - alone.get(name, 0.0) * slower)
        steps[name] = beyond_passes / step.estimates.step_s

    # where a step takes no more than the part of the batch, it is three passes
    print(f"{'property':<28}{'passes':>8}{'stated':>8}{'steps':>8}{'stated':>8}")
    rows = {
        one.name: {"passes": round(passes.get(one.name, 0.0), 1), "steps": round(steps.get(one.name, 0.0), 1)}
        for one in properties()
    }
    for one in properties():
        taken = rows[one.name]
        stated = one.passes + 3 * one.steps
        print(f"{one.name:<28}{taken['passes']:>8}{stated:>8}{taken['steps']:>8}{one.steps:>8}")
    if write:
        RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

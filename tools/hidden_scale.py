"""Measures how the stream grows with depth at initialisation, for the catalogue's pictures."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import torch
import vl_convert
from torch import Tensor, nn

from normlab.lab.config import ModelConfig
from normlab.lab.data.batches import Batch, dev_batches
from normlab.lab.data.builtin import generate
from normlab.lab.data.ragged import Ragged, TokenPairs
from normlab.lab.data.tokenizer import BytePairs
from normlab.lab.tasks.task import build_model
from normlab.nn import PAD, Seq2Seq
from normlab.nn.init import profile_
from normlab.report.charts.drawing import Drawn
from normlab.report.charts.drawing import rows as inline
from normlab.report.charts.theme import Mode, dash, theme

FOLDER = Path(__file__).resolve().parents[1] / "docs/catalogue"
KEPT = FOLDER / "scale.json"
MODES: Mapping[Mode, str] = {"light": "", "dark": "-dark"}
"""Mode to what stands at the end of the picture's name."""

SIZE = ModelConfig(dim=256, ffn_dim=1024, heads=4, encoder_layers=12, decoder_layers=12, dropout=0.0)
CORPUS, PAIRS, VOCAB = "mixed-de-en", 2000, 2000
SEEDS = (1, 2, 3)
SENTENCES = 32

Points = dict[str, list[tuple[float, float, float]]]
"""Stack to lowest, middle and highest seed before each sublayer and behind the last one."""


def batches() -> tuple[list[Batch], int]:
    """A batch of the built-in corpus for each seed, and the vocabulary's size."""
    splits = generate(CORPUS, pairs=PAIRS, seed=0)
    tokenizer = BytePairs.train([*splits.train.source, *splits.train.target], VOCAB)
    made = []
    for i in range(len(SEEDS)):
        rows = slice(i * SENTENCES, (i + 1) * SENTENCES)
        sides = (splits.dev.source[rows], splits.dev.target[rows])
        pairs = TokenPairs(*(Ragged.of(tokenizer.encode(side)) for side in sides))
        made += dev_batches(pairs, max_tokens=10**6)
    return made, tokenizer.vocab_size


def measure(size: ModelConfig, data: Sequence[Batch], vocab_size: int) -> Points:
    """Root mean square of the stream's first tensor over real positions, in evaluation mode."""
    runs = [_one(size, batch, vocab_size, seed) for seed, batch in zip(SEEDS, data, strict=True)]
    return {
        stack: [
            (min(values), statistics.median(values), max(values))
            for values in zip(*(run[stack] for run in runs), strict=True)
        ]
        for stack in runs[0]
    }


@torch.no_grad()
def _one(size: ModelConfig, batch: Batch, vocab_size: int, seed: int) -> dict[str, list[float]]:
    model = build_model(Seq2Seq, replace(size, dropout=0.0), vocab_size, seed).eval()
    forward = partial(model, batch.source, batch.target_in)
    profile_(model, forward)
    found: dict[str, list[float]] = {"encoder": [], "decoder": []}

    def note(stack: str, real: Tensor, module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0][0] if isinstance(args[0], tuple) else args[0]
        found[stack].append(float(x[real].square().mean().sqrt()))

    for name, ids in (("encoder", batch.source), ("decoder", batch.target_in)):
        stack: Any = model.get_submodule(name)
        for module in (*stack.sublayers, stack.end):
            module.register_forward_pre_hook(partial(note, name, ids != PAD))
    forward()
    return found


def keep(points: Mapping[str, Points]) -> None:
    """Write the measurements, five digits each."""
    lines = []
    for name, stacks in points.items():
        short = {s: [[float(f"{v:.5g}") for v in row] for row in rows] for s, rows in stacks.items()}
        lines.append(f"{json.dumps(name)}: {json.dumps(short, separators=(',', ':'))}")
    FOLDER.mkdir(exist_ok=True)
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def kept() -> dict[str, Points]:
    """Read the measurements; none before the first one."""
    if not KEPT.exists():
        return {}
    found = json.loads(KEPT.read_text(encoding="utf-8"))
    return {
        name: {s: [(low, mid, high) for low, mid, high in rows] for s, rows in stacks.items()}
        for name, stacks in found.items()
    }


def domain(points: Iterable[Points]) -> tuple[float, float]:
    """The vertical axis of all pictures: whole half-decades around everything that was measured."""
    values = [v for stacks in points for rows in stacks.values() for row in rows for v in row]
    low, high = math.log10(min(values)), math.log10(max(values))
    return 10 ** (math.floor(2 * low) / 2), 10 ** (math.ceil(2 * high) / 2)


def picture(frame: pl.DataFrame, ends: Sequence[float]) -> Drawn:
    """Draw the root mean square of the stream against the sublayers that it has passed, on a log scale.

    ``frame`` has a row a point: ``stack``, ``sublayer``, ``low``, ``mid``, ``high``; positive values.
    ``ends`` are those of the vertical axis, given so that pictures can be compared. The size is fixed.
    """
    stacks = frame["stack"].unique(maintain_order=True).to_list()
    low, high = ends
    ticks = [t for e in range(-6, 10) for t in (float(f"1e{e}"), float(f"3e{e}")) if low <= t <= high]
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    axis = alt.Axis(values=ticks, format="~g")
    y = partial(alt.Y, type="quantitative", scale=scale, title="RMS", axis=axis)
    across = alt.Axis(grid=False, tickCount=6, format="d")
    x = alt.X("sublayer:Q", title="sublayers passed", scale=alt.Scale(nice=False), axis=across)
    colours = alt.Scale(domain=stacks, range="category")
    dashes = alt.Scale(domain=stacks, range=[list(dash(i)) for i in range(len(stacks))])
    legend = alt.Legend(
        orient="top-left", direction="horizontal", symbolType="stroke", symbolSize=400, offset=2
    )
    base = alt.Chart(inline(frame)).encode(x=x)
    band = base.mark_area(clip=True, opacity=0.25, strokeWidth=0)
    line = base.mark_line(clip=True)
    layers: list[Any] = [
        band.encode(y=y("low"), y2="high:Q", fill=alt.Fill("stack:N", legend=None, scale=colours)),
        line.encode(
            y=y("mid"),
            color=alt.Color("stack:N", title=None, legend=legend, scale=colours),
            strokeDash=alt.StrokeDash("stack:N", title=None, legend=legend, scale=dashes),
        ),
    ]
    # else the band's lack of a legend would count for all layers
    apart = alt.Resolve(legend=alt.LegendResolveMap(fill="independent"))
    return alt.layer(*layers, resolve=apart).properties(width=340, height=150)


def draw(points: Mapping[str, Points]) -> None:
    """Two pictures a placement, for a light and a dark page; others are removed."""
    axis = domain(points.values())
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.svg"):
        old.unlink()
    for name, stacks in points.items():
        frame = pl.DataFrame(
            [
                {"stack": stack, "sublayer": i, "low": low, "mid": mid, "high": high}
                for stack, rows in stacks.items()
                for i, (low, mid, high) in enumerate(rows)
            ]
        )
        chart = picture(frame, axis).to_dict()
        for mode, ending in MODES.items():
            svg = vl_convert.vegalite_to_svg(chart, config=theme(mode))
            (FOLDER / f"{name}{ending}.svg").write_text(svg, encoding="utf-8")

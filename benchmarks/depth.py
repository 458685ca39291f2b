"""Fifty steps without warm-up of a language model of 1,000 sublayers, under every placement.

    python benchmarks/depth.py             # two steps of a few placements, to see that it runs
    python benchmarks/depth.py --write     # all placements and rates but those that depth.json holds
    python benchmarks/depth.py --page      # write docs/depth.md from depth.json, without measuring

Models have the same weights where placements do not differ, the same batches and the same constant rate from
the first step on, without clipping and without dropout. A placement whose start depends on data is profiled
on the first batch. A row is written as soon as it is measured, so that a long run can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.lab.config import MachineConfig, ModelConfig, OptimConfig
from normlab.lab.data.builtin import generate
from normlab.lab.data.tokenizer import EOS, BytePairs
from normlab.lab.tasks.task import build_model
from normlab.lab.training.devices import prepare_process
from normlab.nn import Decoder, Embedding, Placement
from normlab.nn.init import profile_
from normlab.optim import build_optimizer, set_rate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/depth.json"
PAGE = ROOT / "docs/depth.md"

SIZE = ModelConfig(dim=64, ffn_dim=128, heads=2, encoder_layers=0, decoder_layers=500, dropout=0.0)
VOCAB = 256
CORPUS, SENTENCES = "mixed-en-de", 4000
BATCH, LENGTH, DEV_ROWS = 8, 32, 64
STEPS = 50
RATES = (1e-3, 1e-4)
SEED = 1
FEW = ("post", "pre", "deepnorm")


@dataclass(frozen=True)
class Text:
    """Windows of the corpus's English side, `[rows, LENGTH + 1]`."""

    train: Tensor
    dev: Tensor
    vocab_size: int
    unigram_entropy_nats: float
    """Of the dev tokens: what a model would lose that knows how frequent each is, and nothing else."""


@dataclass(frozen=True)
class Row:
    """One model at one rate. Losses are nats a token."""

    placement: str
    claims: bool
    """Whether its source claims that very deep models train with it."""
    embedding: str
    rate: float
    sublayers: int
    start_nats: float
    """On the dev windows, as ``end_nats``, which is None where a step was not finite."""
    end_nats: float | None
    train_nats: list[float]
    """Before each step."""
    grad_norm_l2: float
    """The largest of all finite steps."""
    finite_steps: int
    """Steps with a finite loss, finite gradients and, after them, finite weights."""
    seconds_a_step: float

    @property
    def fell(self) -> bool:
        return self.end_nats is not None and self.end_nats < self.start_nats


def text() -> Text:
    """The built-in corpus's English sentences end to end, cut into windows."""
    splits = generate(CORPUS, pairs=SENTENCES, seed=0)
    tokenizer = BytePairs.train(splits.train.source, VOCAB)

    def windows(lines: Sequence[str]) -> Tensor:
        ids = torch.tensor([i for line in tokenizer.encode(lines) for i in (*line, EOS)])
        return ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].unflatten(0, (-1, LENGTH + 1))

    dev = windows(splits.dev.source)[:DEV_ROWS]
    share = dev[:, 1:].flatten().bincount().double() / dev[:, 1:].numel()
    return Text(
        windows(splits.train.source), dev, tokenizer.vocab_size, float(torch.special.entr(share).sum())
    )


def sized(placement: str, layers: int) -> ModelConfig:
    """A model of this placement, with the first embedding that it is defined with."""
    size = replace(SIZE, decoder_layers=layers, encoder_placement=placement, decoder_placement=placement)
    sizes = (replace(size, embedding=embedding) for embedding in Embedding.registry)
    return next(s for s in sizes if Placement.registry[placement].conflict(s) is None)


def nats(model: Decoder, rows: Tensor) -> Tensor:
    """Mean loss of a token."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every element is."""
    largest = torch.stack(torch._foreach_norm(list(tensors), ord=float("inf")))
    return bool(largest.isfinite().all())


def norm_l2(tensors: Sequence[Tensor]) -> float:
    """Of all elements together; squares that float32 cannot hold are summed in float64."""
    norm = float(nn.utils.get_total_norm(tensors))
    return norm if math.isfinite(norm) else float(nn.utils.get_total_norm([t.double() for t in tensors]))


def measure(placement: str, rate: float, data: Text, *, layers: int, steps: int) -> Row:
    """Train one model for ``steps`` steps, or until something is not finite."""
    size = sized(placement, layers)
    model = build_model(Decoder, size, data.vocab_size, SEED)
    profile_(model, lambda: model(data.train[:BATCH, :-1]))
    weights = list(model.parameters())
    optimizer = set_rate(build_optimizer(model, OptimConfig(lr=rate, schedule="constant")), rate)
    with torch.no_grad():
        start = float(nats(model, data.dev))
    losses: list[float] = []
    norms: list[float] = []
    began = time.perf_counter()
    for step in range(steps):
        loss = nats(model, data.train[step * BATCH : (step + 1) * BATCH])
        loss.backward()
        grads = [w.grad for w in weights if w.grad is not None]
        if not (loss.isfinite() and finite(grads)):
            break
        losses.append(round(float(loss.detach()), 4))
        norms.append(norm_l2(grads))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not finite(weights):
            break
    taken = (time.perf_counter() - began) / max(1, len(losses))
    whole = len(losses) == steps and finite(weights)
    with torch.no_grad():
        end = float(nats(model, data.dev)) if whole else math.nan
    return Row(
        placement=placement,
        claims=Placement.registry[placement].deep,
        embedding=size.embedding,
        rate=rate,
        sublayers=len(list(model.decoder)),
        start_nats=round(start, 4),
        end_nats=round(end, 4) if math.isfinite(end) else None,
        train_nats=losses,
        grad_norm_l2=float(f"{max(norms, default=0.0):.4g}"),
        finite_steps=len(losses) if finite(weights) else len(losses) - 1,
        seconds_a_step=round(taken, 2),
    )


def kept() -> list[Row]:
    """What ``depth.json`` holds."""
    if not RESULTS.exists():
        return []
    return [Row(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]]


def keep(rows: Sequence[Row], data: Text) -> None:
    """Write ``depth.json`` in the registry's order."""
    order = list(Placement.registry)
    rows = sorted(rows, key=lambda r: (-r.rate, order.index(r.placement)))
    about = {
        "hardware": f"{os.cpu_count()}-core CPU, one thread, torch {torch.__version__}",
        "unigram_entropy_nats": round(data.unigram_entropy_nats, 4),
        "vocab_size": data.vocab_size,
    }
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    RESULTS.write_text(f'{{"about": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown lines: those whose source claims depth first, then the lowest loss first."""
    yield "| placement | claims depth | loss at the start | after the steps | fell | largest gradient norm |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for r in sorted(rows, key=lambda r: (not r.claims, r.end_nats is None, r.end_nats or 0.0)):
        end = f"not finite after step {r.finite_steps}" if r.end_nats is None else f"{r.end_nats:.2f}"
        claims, fell = ("yes" if said else "no" for said in (r.claims, r.fell))
        yield f"| `{r.placement}` | {claims} | {r.start_nats:.2f} | {end} | {fell} | {r.grad_norm_l2:.2g} |"


def page() -> str:
    """``docs/depth.md``, from what is kept."""
    rows, about = kept(), json.loads(RESULTS.read_text(encoding="utf-8"))["about"]
    seconds, entropy = sorted(r.seconds_a_step for r in rows), about["unigram_entropy_nats"]
    other = dict.fromkeys(f"`{r.placement}`" for r in rows if r.embedding != SIZE.embedding)
    setting = (
        f"A decoder language model of {SIZE.decoder_layers} layers, {rows[0].sublayers} sublayers "
        f"(d {SIZE.dim}, FFN {SIZE.ffn_dim}, {SIZE.heads} heads, vocabulary {about['vocab_size']}), takes "
        f"{STEPS} steps of Adam at a constant rate from the first step on: no warm-up, no clipping, no "
        f"dropout. A step sees {BATCH} x {LENGTH} tokens of the built-in corpus (`{CORPUS}`, English side), "
        "float32, one seed. Weights that placements have in common start alike, by Xavier with each "
        "placement's own gains; starts that depend on data are profiled on the first batch. Input and "
        f"output share one embedding{', except where the placement refuses it: ' if other else ''}"
        f"{', '.join(other)}."
    )
    reading = (
        f"Losses are nats a token on {DEV_ROWS} x {LENGTH} dev tokens. A model that knows nothing but how "
        f"frequent each token is has {entropy:.2f}, the entropy of their frequencies. A "
        "placement *claims depth* when its source says that very deep models train with it (`deep` of its "
        "class). A step is finite when all of its losses, gradients and weights are. That does not mean that "
        "the model learns; the loss shows that."
    )
    made = (
        f"{about['hardware']}; a median of {seconds[len(seconds) // 2]:.1f} s a step, {seconds[0]:.1f} to "
        f"{seconds[-1]:.1f}. Every loss before every step is in "
        "[`benchmarks/results/depth.json`](../benchmarks/results/depth.json). `python benchmarks/depth.py "
        "--page` writes this page. To measure a line again, delete it in that file and type "
        "`python benchmarks/depth.py --write`."
    )
    purpose = "This page shows how the placements that claim depth fare in a model of a thousand sublayers."
    paragraphs = ["# A thousand sublayers", purpose, setting, reading]
    for rate in sorted({r.rate for r in rows}, reverse=True):
        at = [r for r in rows if r.rate == rate]
        paragraphs += [f"## Learning rate {rate:g}", "\n".join(table(at)), verdict(at, entropy)]
    return "\n\n".join([*paragraphs, "## How it was measured", made]) + "\n"


def verdict(rows: Sequence[Row], unigram_entropy_nats: float) -> str:
    """What the table says of the claims, those against them by name."""

    def of(kept: Iterable[Row]) -> str:
        return ", ".join(f"`{r.placement}`" for r in kept) or "none"

    claiming, others = [r for r in rows if r.claims], [r for r in rows if not r.claims]
    whole = [r for r in claiming if r.end_nats is not None]
    sentences = [f"{len(whole)} of the {len(claiming)} that claim depth made {STEPS} finite steps"]
    if len(whole) < len(claiming):
        sentences[0] += f"; those that did not: {of(r for r in claiming if r.end_nats is None)}"
    if rose := [r for r in whole if not r.fell]:
        sentences.append(f"Against the claim, the loss did not fall for {of(rose)}")
    if rose := [r for r in others if not r.fell]:
        sentences.append(f"Of those that do not claim depth it did not fall for {of(rose)}")
    below = [r for r in rows if r.end_nats is not None and r.end_nats < unigram_entropy_nats]
    sentences.append(f"Below the entropy of the token frequencies: {of(below)}")
    ours = [name for name, place in Placement.registry.items() if place.__module__.startswith("normlab.")]
    if left := [f"`{name}`" for name in ours if name not in {r.placement for r in rows}]:
        sentences.append(f"Not measured: {', '.join(left)}")
    return ". ".join(sentences) + "."


def main() -> None:
    """Measure what is asked for and not kept yet."""
    parser = argparse.ArgumentParser(description="1,000 sublayers under each placement.")
    parser.add_argument("--placements", nargs="+", choices=list(Placement.registry))
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--write", action="store_true", help="all steps, kept in depth.json")
    parser.add_argument("--page", action="store_true", help="write docs/depth.md and no more")
    args = parser.parse_args()
    if not args.page:
        prepare_process(MachineConfig(threads=1))
        data, rows = text(), kept() if args.write else []
        done = {(r.placement, r.rate) for r in rows}
        names = args.placements or (Placement.registry if args.write else FEW)
        for rate in args.rates if args.write else args.rates[:1]:
            for name in (name for name in names if (name, rate) not in done):
                steps = STEPS if args.write else 2
                row = measure(name, rate, data, layers=SIZE.decoder_layers, steps=steps)
                rows.append(row)
                print(list(table([row]))[-1], f"{rate:g}, {row.seconds_a_step} s a step", flush=True)
                if args.write:
                    keep(rows, data)
    if args.write or args.page:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

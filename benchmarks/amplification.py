"""How far the output moves when the weights do, against depth, under five placements.

    python benchmarks/amplification.py             # one seed of one placement, to see that it runs
    python benchmarks/amplification.py --write     # all cases but those in results/amplification.jsonl
    python benchmarks/amplification.py --page      # write docs/amplification.md from them, without measuring
A case is one model, written as soon as it is measured: a long run can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean

import polars as pl
import torch
import torch.nn.functional as F
import vl_convert
from torch import Tensor, nn

from normlab.diagnosis.laws import LawFit
from normlab.diagnosis.reading import read_structure
from normlab.diagnosis.structure import Structure
from normlab.diagnosis.studies.output_change import SIZE, output_change, output_change_fit
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.tables import Table
from normlab.lab.config import MachineConfig, ModelConfig
from normlab.lab.data.builtin import generate
from normlab.lab.data.tokenizer import EOS, UNK, BytePairs
from normlab.lab.tasks.task import build_model
from normlab.lab.training.devices import prepare_process
from normlab.nn import Encoder, Seq2Seq, TokenModel
from normlab.nn.init import profile_
from normlab.report.charts.diagnosis import growth
from normlab.report.charts.theme import theme

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results/amplification.jsonl"
PAGE, PICTURE = ROOT / "docs/amplification.md", ROOT / "docs/amplification.svg"

PLACEMENTS = ("post", "pre", "admin", "deepnorm", "rezero")
SEEDS = 10  # of a placement, at least; ``Family.more`` says where an exponent's interval needs more of them
RATE, SMALL_RATE = 5e-4, 5e-6  # of Adam's first update: one that people train at, and a hundredth of it
WANTED = 0.1  # half-width of an exponent's interval
CLEAR = 2.0  # AICs so far apart call one law the better one (Burnham and Anderson 2002, Section 2.6)
UNDECIDED = "not decided"
SATURATED = 0.5  # change of an element of a normed output, of about 2 at most, that follows nothing any more
EXPECTED = {
    "post": ("linear", "Corollary 2 (linear in N)"),
    "pre": ("log", "Corollary 1 (linear in log N)"),
    "admin": ("log", "Section 4.3 (as a Pre-LN, log N)"),
}
KINDS = (
    ("random", RATE, "A random change"),
    ("update", RATE, f"One update of Adam at {RATE:g}"),
    ("update", SMALL_RATE, f"One update of Adam at {SMALL_RATE:g}"),
)
DRAWN = ("encoder", "random", RATE)
CORPUS, SENTENCES, VOCAB, BATCH, LENGTH, MASKED = "mixed-en-de", 4000, 256, 8, 32, 0.15


@dataclass(frozen=True)
class Family:
    """Models of one kind and width at several depths."""

    kind: type[TokenModel]
    size: ModelConfig
    layers: tuple[int, ...]
    more: Mapping[str, int]
    """Placement to its seeds."""
    rates: tuple[float, ...]

    def sized(self, placement: str, layers: int) -> ModelConfig:
        """The configuration of one of them."""
        depths = {"encoder_layers": layers, "decoder_layers": layers if self.kind is Seq2Seq else 0}
        return replace(self.size, **depths, encoder_placement=placement, decoder_placement=placement)


FAMILIES = {
    "encoder": Family(
        Encoder,
        ModelConfig(dim=128, ffn_dim=512, heads=4, dropout=0.0),
        layers=(6, 12, 18, 24, 36, 60),
        more={"post": 60, "pre": 16, "admin": 16},
        rates=(RATE, SMALL_RATE),
    ),
    "encoder-decoder": Family(
        Seq2Seq,
        ModelConfig(dim=512, ffn_dim=1024, heads=4, dropout=0.0),
        layers=(6, 12, 18),
        more={"post": 24, "pre": 14, "admin": 14},
        rates=(RATE,),
    ),
}


@dataclass(frozen=True)
class Case:
    """One model."""

    family: str
    placement: str
    layers: int
    rate: float
    seed: int
    """Of the start, of the random change and, by its number, of the batch."""


@dataclass(frozen=True)
class Measured:
    """Mean square changes of an element of the output, over real tokens."""

    case: Case
    sublayers: int
    """Of all stacks."""
    random: float
    update: float
    seconds: float


def cases() -> Iterator[Case]:
    """All of them, those of one shape one after the other."""
    for rate, name, placement in product((RATE, SMALL_RATE), FAMILIES, PLACEMENTS):
        family = FAMILIES[name]
        seeds = family.more.get(placement, SEEDS) if rate == RATE else SEEDS
        for layers, seed in product(family.layers, range(seeds if rate in family.rates else 0)):
            yield Case(name, placement, layers, rate, seed)


@cache
def text() -> tuple[Tensor, Tensor, int]:
    """Both sides of the built-in corpus end to end, cut into windows `[rows, LENGTH]`, and the vocabulary."""
    pairs = generate(CORPUS, pairs=SENTENCES, seed=0).train
    tokenizer = BytePairs.train([*pairs.source, *pairs.target], VOCAB)

    def windows(lines: Sequence[str]) -> Tensor:
        ids = torch.tensor([i for line in tokenizer.encode(lines) for i in (*line, EOS)])
        return ids[: len(ids) // LENGTH * LENGTH].unflatten(0, (-1, LENGTH))

    return windows(pairs.source), windows(pairs.target), tokenizer.vocab_size


def batch_of(kind: type[TokenModel], seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """What the model is given, and what it is to predict `[B, T]`, -100 where nothing is asked: an encoder
    the masked tokens of English, an encoder-decoder each next token of German. No row is padded.
    """
    english, german, _ = text()
    rows = slice(seed * BATCH, (seed + 1) * BATCH)
    source, target = english[rows], german[rows]
    if kind is Seq2Seq:
        return (source, target[:, :-1]), target[:, 1:]
    hidden = torch.rand(source.shape, generator=torch.Generator().manual_seed(seed)) < MASKED
    return (source.masked_fill(hidden, UNK),), source.masked_fill(~hidden, -100)


def subject_of(case: Case, structure: Structure | None) -> Subject:
    """The model at its start, data-dependent parts profiled on the batch; its loss is a mean over tokens."""
    family = FAMILIES[case.family]
    model = build_model(family.kind, family.sized(case.placement, case.layers), text()[2], case.seed)
    if isinstance(model, Encoder):  # scaled by √d, as the kept results are and a BERT's tokens are not
        model.position_encoding.register_forward_pre_hook(lambda _, x: (x[0] * family.size.dim**0.5, *x[1:]))
    given, wanted = batch_of(family.kind, case.seed)
    profile_(model, lambda: model(*given))

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        found = model(*batch)
        logits = found if isinstance(found, Tensor) else found[0]
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    return Subject(model.eval(), given, loss, structure or read_structure(model, given))


def measure(case: Case, structure: Structure | None = None) -> tuple[Measured, Structure]:
    """One case; models of one shape have one structure, which is read once."""
    began = time.perf_counter()
    subject = subject_of(case, structure)
    optimizer = partial(torch.optim.Adam, lr=case.rate)
    table = output_change(subject, optimizer=optimizer, seeds=[case.seed])
    changes = {str(row["kind"]): row for row in table}  # the deepest is the last
    found = Measured(
        case=case,
        sublayers=len(subject.structure.sublayers),
        random=float(str(changes["random"]["change"])),
        update=float(str(changes["update"]["change"])),
        seconds=round(time.perf_counter() - began, 2),
    )
    return found, subject.structure


def kept() -> list[Measured]:
    """What ``results/amplification.jsonl`` holds; a line that was cut off is none."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    rows = (json.loads(line) for line in lines if line.endswith("}"))
    return [
        Measured(Case(**{k: row.pop(k) for k in ("family", "placement", "layers", "rate", "seed")}), **row)
        for row in rows
    ]


def keep(found: Measured) -> None:
    """Append one line."""
    row = asdict(found)
    row = {**row.pop("case"), **row}
    for name in ("random", "update"):
        row[name] = float(f"{row[name]:.6g}")
    RESULTS.parent.mkdir(exist_ok=True)
    cut_off = RESULTS.exists() and not RESULTS.read_bytes().endswith(b"\n")
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write("\n" * cut_off + json.dumps(row) + "\n")


@dataclass(frozen=True)
class Growth:
    """How the change of one kind grows with depth in one family under one placement."""

    placement: str
    seeds: int
    sublayers: int
    """Of a layer."""
    means: Mapping[int, float]
    """Layers to the mean over seeds."""
    fits: Mapping[str, LawFit]
    """By law."""

    @property
    def power(self) -> LawFit | None:
        """None where nothing moved."""
        return self.fits.get("power")

    @property
    def law(self) -> str:
        """``log`` or ``linear``, by AIC, or that it does not tell."""
        found = sorted((self.fits["log"], self.fits["linear"]), key=lambda fit: fit.aic)
        return found[0].law if found[1].aic - found[0].aic > CLEAR else UNDECIDED


def growths(
    found: Sequence[Measured], family: str, kind: str, rate: float, *, most: int = 1000
) -> list[Growth]:
    """One for each placement that has been measured, of the seeds, ``most`` of them, that have all depths."""
    layers, grown = FAMILIES[family].layers, list[Growth]()
    of_family = [m for m in found if (m.case.family, m.case.rate) == (family, rate)]
    for placement in PLACEMENTS:
        those = [m for m in of_family if m.case.placement == placement and m.case.seed < most]
        depths = Counter(m.case.seed for m in those)
        whole = [m for m in those if depths[m.case.seed] == len(layers)]
        whole.sort(key=lambda m: (m.case.seed, m.sublayers))
        rows = [
            {"kind": kind, "depth": m.sublayers, "change": float(getattr(m, kind)), "seed": m.case.seed}
            for m in whole
        ]
        if not rows:
            continue
        table = output_change_fit(Table("output_change", tuple(rows)))
        laws = {str(row["law"]): LawFit(**{k: x for k, x in row.items() if k != "kind"}) for row in table}
        means = {n: fmean(getattr(m, kind) for m in whole if m.case.layers == n) for n in layers}
        seeds, a_layer = len({m.case.seed for m in whole}), whole[0].sublayers // whole[0].case.layers
        grown.append(Growth(placement, seeds, a_layer, means, laws))
    return grown


def table(grown: Sequence[Growth]) -> Iterator[str]:
    """Markdown lines."""
    layers = list(grown[0].means)
    head = ["placement", "seeds", *(f"{n} layers" for n in layers), "exponent p", "R² log N", "R² N", "AIC"]
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for g in grown:
        cells = [f"`{g.placement}`", str(g.seeds), *(f"{g.means[n]:.3g}" for n in layers)]
        if g.power is None:
            cells += ["none", "", "", ""]
        else:
            p, width = float(g.power.exponent or 0), (g.power.high - g.power.low) / 2
            cells += [f"{p:.2f} ± {width:.2f}", f"{g.fits['log'].r2:.3f}", f"{g.fits['linear'].r2:.3f}"]
            cells.append({"log": "log N", "linear": "N", UNDECIDED: UNDECIDED}[g.law])
        yield f"| {' | '.join(cells)} |"


def said(grown: Sequence[Growth], kind: str, few: Sequence[Growth] = ()) -> str:
    """What the table shows, what is against the theory by name, and how it was after a ``few`` seeds."""
    sentences, moving = list[str](), [g for g in grown if g.power is not None]
    for g in grown:
        if g.power is None:
            sentences.append(
                f"`{g.placement}`: nothing moved in any of {g.seeds} seeds, so there is no exponent: "
                "a scalar that is 0 until the first update multiplies what its branches compute"
            )
        elif kind == "random" and g.placement in EXPECTED:
            law, claim = EXPECTED[g.placement]
            holds = {law: "holds", UNDECIDED: "is not decided"}.get(g.law, "does not hold")
            sentences.append(f"{claim} {holds} by AIC for `{g.placement}`")
    full = [g for g in moving if max(g.means.values()) > SATURATED]
    if full:
        sentences.append(
            f"{_names(full)} moved by more than {SATURATED:g}, and unrelated outputs of a norm are 2 "
            "apart: these are saturated, so the exponent says little about the law"
        )
    falling = [g for g in moving if g.power is not None and g.power.high < 0]
    if falling:
        sentences.append(f"{_names(falling)} moves less the deeper it is")
    wide = [g for g in moving if g.power is not None and (g.power.high - g.power.low) / 2 > WANTED]
    width = f"above {WANTED:g} for {_names(wide)}" if wide else f"{WANTED:g} or less"
    sentences.append(f"Half-widths of the intervals are {width}")
    seeds = {g.placement: g.seeds for g in grown}
    for g in (g for g in few if g.power is not None and g.seeds < seeds[g.placement]):
        cells = list(table([g]))[-1].split(" | ")
        sentences.append(f"With {g.seeds} seeds `{g.placement}` has p = {cells[-4]}, AIC: {cells[-1][:-2]}")
    last = {g.placement: list(g.means.values())[-1] for g in grown}
    if {"post", "pre"} <= last.keys():
        ratio = last["post"] / last["pre"]
        sentences.append(f"At the largest depth `post` moves {ratio:.2g} times as far as `pre`")
    return ". ".join(sentences) + "."


def _names(grown: Sequence[Growth]) -> str:
    return ", ".join(f"`{g.placement}`" for g in grown)


def page(found: Sequence[Measured]) -> str:
    """``docs/amplification.md``."""
    setting = (
        "This page shows how far a model's output moves at its start when its weights do. The movement is "
        "the mean square over elements of its last normed stream, over real tokens, without dropout, in "
        "float32. *A random change* adds to every matrix of a sublayer normal noise of "
        f"{SIZE:g} times the matrix's root mean square; *an update* is Adam's first on the batch, embeddings "
        "included. Every depth is a model of its own, because DeepNorm's factors depend on the depth; Admin "
        "is profiled on the batch. Each seed has another start, another change and another batch: "
        f"{BATCH} x {LENGTH} tokens of the built-in corpus (`{CORPUS}`, vocabulary {VOCAB}). An encoder "
        f"fills them in ({MASKED:.0%} masked), an encoder-decoder translates them, teacher-forced."
    )
    reading = (
        "The exponent p of b N^p, with N in sublayers, is the mean over the exponents of single seeds. Its "
        f"95 % interval is Student's over the seeds: {SEEDS} of them, or more where the interval was wide. "
        "R² and AIC compare a + b log N with a + b N on the means over seeds. AICs less than "
        f"{CLEAR:g} apart decide nothing, and three depths say less than six. Liu et al. 2020 (Section 4.2 "
        "and Figure 4, arXiv 2004.08249) published that a Post-LN's change is linear in N (Corollary 2) and "
        "a Pre-LN's in log N (Corollary 1), R² 0.99 each. With Adam's update they found R² 0.75, and Post-LN "
        "above Pre-LN by multiple magnitudes; Admin's change grows as a Pre-LN's."
    )
    paragraphs = ["# How the output moves with depth", setting, reading]
    for name, family in FAMILIES.items():
        size = family.size
        paragraphs.append(f"## {name.capitalize()}, d {size.dim}, FFN {size.ffn_dim}, {size.heads} heads")
        for kind, rate, title in KINDS:
            few = growths(found, name, kind, rate, most=SEEDS)
            if grown := growths(found, name, kind, rate):
                paragraphs += [f"### {title}", "\n".join(table(grown)), said(grown, kind, few)]
            if (name, kind, rate) == DRAWN:
                paragraphs.append(f"![A random change against depth]({PICTURE.name})")
    made = (
        f"{len(found):,} models, {sum(m.seconds for m in found) / 60:.0f} minutes of one thread. Each is a "
        "line of [`results/amplification.jsonl`](../results/amplification.jsonl). This page is written by "
        "`python benchmarks/amplification.py --page`; `--write` measures what is not there yet."
    )
    return "\n\n".join([*paragraphs, "## How it was measured", made]) + "\n"


def draw(grown: Sequence[Growth]) -> str:
    """The means and their power laws as SVG."""
    points, laws = list[dict[str, str | float]](), list[dict[str, str | float]]()
    for g, fit in ((g, g.power) for g in grown if g.power is not None):
        for n, change in g.means.items():
            here = {"recipe": g.placement, "depth": n * g.sublayers}
            points.append({**here, "change": change, "seed": g.seeds})
            law = fit.coefficient * (n * g.sublayers) ** (fit.exponent or 0.0)
            laws.append({**here, "law": fit.law, "value": law})
    chart = growth(pl.DataFrame(points), pl.DataFrame(laws)).properties(width=560).to_dict()
    return vl_convert.vegalite_to_svg(chart, config=theme())


def main() -> None:
    """Measure what is asked for and not kept yet."""
    parser = argparse.ArgumentParser(description="Output change against depth.")
    parser.add_argument("--write", action="store_true", help="all cases, kept in results/amplification.jsonl")
    parser.add_argument("--page", action="store_true", help="write docs/amplification.md and no more")
    args = parser.parse_args()
    if not args.page:
        prepare_process(MachineConfig(threads=1))
        wanted = [c for c in cases() if args.write or (c.placement, c.rate, c.seed) == ("pre", RATE, 0)]
        done = {found.case for found in kept()} if args.write else set()
        structures: dict[tuple[str, str, int], Structure] = {}
        for case in (case for case in wanted if case not in done):
            shape = case.family, case.placement, case.layers
            found, structures[shape] = measure(case, structures.get(shape))
            print(*asdict(case).values(), found.random, found.update, found.seconds, flush=True)
            if args.write:
                keep(found)
    if args.write or args.page:
        PAGE.write_text(page(kept()), encoding="utf-8")
        PICTURE.write_text(draw(growths(kept(), *DRAWN)), encoding="utf-8")


if __name__ == "__main__":
    main()

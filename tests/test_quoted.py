"""Numbers in prose are those of the result files: a quotation builds what a document must hold anew."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import pytest

from kept import ROOT, Kept
from normlab.base.io import from_plain
from normlab.lab.comparison.compare import judge
from normlab.lab.comparison.result import Comparison
from normlab.papers import ARTEFACTS
from normlab.papers.estimate import Estimate

OF_PAPERS = {id_: one for id_, one in ARTEFACTS.items() if one.kind == "artefact"}
QUOTATIONS: list[tuple[str, Callable[[], Iterator[str]]]] = []


def quotes(document: str) -> Callable[[Callable[[], Iterator[str]]], Callable[[], Iterator[str]]]:
    """Register a function that yields what a document says, with its numbers."""

    def enter(sentences: Callable[[], Iterator[str]]) -> Callable[[], Iterator[str]]:
        QUOTATIONS.append((document, sentences))
        return sentences

    return enter


def prose(document: str) -> str:
    return " ".join((ROOT / document).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("document", "sentences"), QUOTATIONS, ids=lambda x: getattr(x, "__name__", x))
def test_the_numbers_of_a_document_are_those_of_its_files(document, sentences):
    expected = list(sentences())
    assert expected
    written = prose(document)
    assert [sentence for sentence in expected if sentence not in written] == []


# -------------------------------------------------------------------------------------------------- checks


@quotes("docs/check.md")
def what_keeps_a_budget() -> Iterator[str]:
    rows = json.loads((ROOT / "benchmarks/results/budgets.json").read_text())
    assert {row["budget_s"] for row in rows} == {60.0}
    largest = max(row["parameters"] for row in rows)
    kept = [row for row in rows if row["check_s"] - row["pass_s"] - row["budget_s"] <= 0.1 * row["budget_s"]]
    well_judged = [row for row in rows if row["judged"] >= 0.8 * row["applicable"]]
    yield f"up to {largest / 1e6:.0f}M parameters"
    yield f"{len(kept)} of {len(rows)} checks took"
    yield f"and {len(well_judged)} judged four fifths of the properties that apply or more"


# ------------------------------------------------------------------------------------------------- scripts


@quotes("docs/scripts.md")
def the_way_to_the_first_step() -> Iterator[str]:
    rows = json.loads((ROOT / "benchmarks/results/scripts.json").read_text())["scripts"]
    assert len(rows) == 40
    factors = [row["recorded_s"] / row["alone_s"] for row in rows]
    more = max(row["recorded_s"] - row["alone_s"] for row in rows)
    assert round(2 * more) == 1  # half a second
    yield f"take {median(factors):.2f} times as long to their first step as they do alone, in the median"
    yield f"and {max(factors):.2f} times at most, which is half a second more"


# ----------------------------------------------------------------------------------------------- comparisons


@quotes("docs/multi30k.md")
def multi30k_one_model() -> Iterator[str]:
    (run,) = (ROOT / "results/multi30k").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    dev = {row["step"]: row for row in rows if row["kind"] == "dev"}
    in_time = max(dev[step]["bleu"] for step in dev if dev[step]["seconds"] < 15 * 60)
    (step,) = (s for s in dev if dev[s]["bleu"] == in_time)
    yield f"| 15 min | step {step} | {in_time:.1f} |"
    scores, status = (json.loads((run / name).read_text()) for name in ("scores.json", "status.json"))
    minutes, seconds = divmod(round(status["train_seconds"]), 60)
    last = max(dev)
    ends = f"{dev[last]['bleu']:.1f} | {scores['bleu']:.1f} | {scores['chrf']:.1f} |"
    yield f"| {minutes} min {seconds} s (whole run) | step {last} | {ends}"
    yield f"`{scores['signatures']['bleu']}`"


@quotes("docs/multi30k.md")
def multi30k_recipes() -> Iterator[str]:
    kept = Kept("multi30k-recipes")
    for name, recipe in kept.recipes.items():
        yield f"| {name} | {recipe['lr']:g} | {kept.row(name)}"
    for a, b in itertools.combinations(kept.ranked, 2):
        yield f"| {a} over {b} | {kept.pair(a, b)}"
    yield from kept.sentences
    yield f"its dev NLL is {kept.dev('post')[1]:.2f} nats per token"


GL_EN = {
    "(1)": "post+smallinit+warmup",
    "(2)": "pre+smallinit+warmup",
    "(3)": "pre+fixnorm+smallinit+warmup",
    "(4)": "pre+fixnorm+scalenorm+smallinit+warmup",
}


@quotes("docs/gl-en.md")
def gl_en() -> Iterator[str]:
    kept = Kept("gl-en")
    for row, name in GL_EN.items():
        yield f"| {row} | {name} | {kept.recipes[name]['lr']:g} | {kept.row(name)}"
    for (row_b, b), (row_a, a) in itertools.combinations(GL_EN.items(), 2):
        yield f"| {row_a} over {row_b} | {kept.pair(a, b)}"
    yield from kept.sentences
    of_the_paper = replace(from_plain(Comparison, kept.data), margin=1.5)
    closest = judge(of_the_paper, kept.folder, exchanges=100).differences[0]
    one = kept.difference(closest.a, closest.b)
    shown = f"{closest.seeds_needed} seeds of each recipe would show a difference of {closest.effect}"
    yield f"{shown}, and {one['seeds_needed']} one of {one['effect']:.1f}."
    bleu_by_row = {row: kept.recipes[name]["scores"]["bleu"] for row, name in GL_EN.items()}
    apart = {row: abs(a - b) for row, (a, b) in bleu_by_row.items()}
    yield f"differs by {min(apart.values()):.1f} (Post-LN) to {max(apart.values()):.1f} BLEU (Pre-LN)"
    post = kept.recipes[GL_EN["(1)"]]
    (first_cost, first_bleu), (second_cost, second_bleu) = (exchanged("gl-en", run) for run in post["runs"])
    yield f"costs them only {first_cost:.2f} and {second_cost:.2f} nats"
    yield f"what they write has {first_bleu:.1f} and {second_bleu:.1f} BLEU"
    yield from post_at_twice_the_rate()
    low, high = kept.dev(post["name"])
    yield f"({low:.2f} against {high:.2f} nats)"


AT_TWICE_THE_RATE = ("411ad77bb8e1", "d5e9d02f31f2")
"""Post-LN of gl-en at 2e-3, seeds 2 and 3."""


def post_at_twice_the_rate() -> Iterator[str]:
    (first_cost, first_bleu), (second_cost, second_bleu) = (
        exchanged("gl-en", run) for run in AT_TWICE_THE_RATE
    )
    yield f"exchanging costs {first_cost:.2f} and {second_cost:.2f} nats"
    yield f"Their test BLEU is {first_bleu:.1f} and {second_bleu:.1f}."


def exchanged(folder: str, run: str) -> tuple[float, float]:
    """The nats a token that exchanging the sources costs the best weights on dev, and the test BLEU."""
    where = ROOT / "results" / folder / run
    status, scores = (json.loads((where / name).read_text()) for name in ("status.json", "scores.json"))
    rows = map(json.loads, (where / "metrics.jsonl").read_text().splitlines())
    (best,) = (row for row in rows if row["kind"] == "dev" and row["step"] == status["best_step"])
    return best["nll_exchanged"] - best["nll"], scores["bleu"]


@quotes("docs/gl-en.md")
def gl_en_low() -> Iterator[str]:
    kept = Kept("gl-en-low")
    for row, name in GL_EN.items():
        (bleu,), (chrf,) = (kept.recipes[name]["scores"][metric] for metric in ("bleu", "chrf"))
        yield f"| {row} | {name} | {bleu:.1f} | {chrf:.1f} |"
    said = {
        pair: kept.difference(*(GL_EN[row] for row in pair))["models"]
        for pair in (("(4)", "(3)"), ("(4)", "(2)"), ("(3)", "(2)"), ("(2)", "(1)"), ("(4)", "(1)"))
    }
    yield ", ".join(f"{a} over {b} {value:.1f}" for (a, b), value in said.items())
    yield from kept.sentences


@quotes("docs/brown.md")
def brown() -> Iterator[str]:
    kept = Kept("brown")
    for name, recipe in kept.recipes.items():
        outcomes = ", ".join(trial["outcome"] for trial in recipe["trials"])
        yield f"| {name} | {recipe['lr']:g} | {kept.bits(name)} | {outcomes} |"
    yield kept.data["command"].replace("'", '"')
    yield from kept.sentences
    yield from (d["sentence"] for d in kept.data["differences"])


@quotes("docs/brown.md")
def decoders() -> Iterator[str]:
    kept = Kept("decoders")
    gains = list[float]()
    for name, recipe in kept.recipes.items():
        dev = [t["dev"]["bits_per_byte"] if t["outcome"] == "trained" else None for t in recipe["trials"]]
        shown = ", ".join("stuck" if bits is None else f"{bits:.3f}" for bits in dev)
        yield f"| {name} | {recipe['lr']:g} | {kept.bits(name)} | {shown} |"
        best = [t["lr"] for t in recipe["trials"]].index(recipe["lr"])
        if 0 < best < len(dev) - 1 and dev[best + 1] is not None:
            below, least, above = dev[best - 1 : best + 2]
            gains.append(((above - below) / 2) ** 2 / (2 * (above + below - 2 * least)))
    yield f"falls at most {max(gains):.3f} bits per byte below it"
    yield kept.data["command"]
    yield from kept.sentences
    every = [d["sentence"] for d in kept.data["differences"]]
    unsure = [sentence for sentence in every if "cannot tell" in sentence]
    yield f"Of the {len(every)} differences {len(every) - len(unsure)} are significant"
    yield from unsure
    for better, worse, words in (
        ("llama+post", "llama", "llama+post is better than llama by at least {}"),
        ("llama+post+muon", "llama+muon", "llama+post+muon than llama+muon by at least {}"),
        ("llama+muon", "llama", "by at least {} for llama,"),
        ("llama+post+muon", "llama+post", "{} for llama+post and"),
        ("nanochat", "nanochat+adamw", "{} for nanochat."),
    ):
        yield words.format(f"{-kept.difference(better, worse)['ends'][1]:.3f}")


# --------------------------------------------------------------------------------------------------- papers


@quotes("README.md")
def papers_in_the_readme() -> Iterator[str]:
    yield from (f"of which there are {len(OF_PAPERS)}", f"{len(ARTEFACTS) - len(OF_PAPERS)} public disputes")
    untrained = sum(bool(a.study) and not a.trainings for a in OF_PAPERS.values())
    yield f"The {untrained} that need no training are measured"
    yield f"Another {sum(bool(a.trainings) for a in OF_PAPERS.values())} are trainings"


def ends(measure: Estimate, digits: int = 2) -> str:
    """``0.58 [0.54, 0.62]``."""
    value, low, high = (f"{x:.{digits}f}" for x in (measure.value, measure.low, measure.high))
    return f"{value} [{low}, {high}]"


@quotes("docs/lab-book/papers.md")
def amplification_in_the_lab_book() -> Iterator[str]:
    """The page of the amplification is written from its file, and a test of its own holds it to that."""
    page = prose("docs/amplification.md").partition("### One update")[0]
    (ten,) = re.findall(r"With 10 seeds `post` has p = (\S+ ± \S+), AIC:", page)
    (sixty,) = re.findall(r"\| `post` \| 60 \|(?:[^|]*\|){6} (\S+ ± \S+) \|", page)
    yield f"ten give p = {ten} for the growth"
    yield f"sixty {sixty} ([amplification.md]"


# ---------------------------------------------------------------------------------------------------- speed


def ratios(benchmark: str, side: str, field: str, **where: str) -> list[float]:
    """Medians of how many times our own time a side takes."""
    rows = json.loads((ROOT / "benchmarks/results" / f"{benchmark}.json").read_text())["rows"]
    found = [row for row in rows if row["side"] == side]
    return [row[field][1] for row in found if all(row[key] == value for key, value in where.items())]


def written(values: list[float]) -> str:
    """As prose has it: one number, or the least and the largest."""
    first, last = f"{min(values):.1f}", f"{max(values):.1f}"
    return first if first == last else f"{first} to {last}"


@quotes("README.md")
def speed_in_the_readme() -> Iterator[str]:
    step = written(ratios("step", "torch.nn", "speedup"))
    yield f"a training step of `torch.nn.Transformer` takes {step} times as long as ours"
    yield f"beam search by Hugging Face's Marian {written(ratios('search', 'Marian', 'slower'))} times"


@quotes("docs/speed.md")
def speed_page() -> Iterator[str]:
    for side, sentence in (
        ("torch.nn", "torch.nn takes {fp32} times our time in fp32 and {bf16} in bf16"),
        ("Marian", "Marian {fp32} and {bf16}"),
        ("x-transformers", "x-transformers {fp32} and {bf16}"),
    ):
        ours = {p: ratios("step", side, "speedup", setting="small", precision=p) for p in ("fp32", "bf16")}
        yield sentence.format(**{p: written(found) for p, found in ours.items()})
    yield f"Marian's `generate` takes {written(ratios('search', 'Marian', 'slower'))} times"


@quotes("docs/speed.md")
def norms_on_the_speed_page() -> Iterator[str]:
    rows = json.loads((ROOT / "benchmarks/results/norms.json").read_text())["rows"]
    alone = {row["norm"]: row["of_peer"][1] for row in rows if row["threads"] == 1}
    both = [row["of_peer"][1] for row in rows if row["norm"] == "rmsnorm"]
    yield f"{alone['scalenorm']:.2f} times as long as LayerNorm"
    yield f"the formula in plain torch takes {alone['scalenorm, plain']:.1f} times"
    yield f"still {written(both)} times as long as LayerNorm"
    for norm in ("DyT", "Derf"):
        ours, plain = alone[norm.lower()], alone[f"{norm.lower()}, plain"]
        yield f"{norm} takes {ours:.1f} times as long as LayerNorm, its plain form {plain:.1f}"


@quotes("docs/speed.md")
def decoders_and_plans_on_the_speed_page() -> Iterator[str]:
    results = ROOT / "benchmarks/results"
    kept = {name: json.loads((results / f"{name}.json").read_text()) for name in ("decoder", "decoder-avx2")}

    def medians(name: str, precision: str) -> Iterator[str]:
        """Ends over our eager step: eager peers, compiled ones, ours compiled, the products."""
        rows = [row for row in kept[name]["steps"] if row["precision"] == precision]
        for own, compiled in ((False, False), (False, True), (True, True)):
            sides = [r for r in rows if r["parameters"] and r["side"].endswith("compiled") == compiled]
            found = [r["ours"][1] for r in sides if r["side"].startswith("normlab") == own]
            yield f"{min(found):.2f} to {max(found):.2f}"
        alone = [100 * row["ours"][1] for row in rows if not row["parameters"]]
        yield f"{min(alone):.0f} to {max(alone):.0f}%"

    eager, compiled, ours, alone = medians("decoder", "bf16")
    yield f"take {eager} times as long as our eager step, compiled ones {compiled};"
    yield f"our own step compiled takes {ours} of it"
    yield f"the matrix products alone take {alone} of our step"
    eager, compiled, _, first = medians("decoder", "fp32")
    yield f"peers {eager} of ours eager, {compiled} compiled"
    eager, compiled, _, second = medians("decoder-avx2", "fp32")
    yield f"(`results/decoder-avx2.md`; {eager} and {compiled})"
    yield f"take {first} of our step on the one and {second} on the other"
    rows = [row for one in kept.values() for row in one["generation"] if row["side"] != "normlab"]
    ends = (f(row["ours"][1] for row in rows) for f in (min, max))
    yield "takes {:.1f} to {:.1f} times as long for one sample and for eight".format(*ends)
    plans = json.loads((results / "plan.json").read_text())["rows"]
    plans = [row["taken"] / row["planned"] for row in plans]
    yield f"they took {min(plans):.2f} to {max(plans):.2f} times that"


@quotes("docs/lab-book/engine.md")
def gradients_of_several_ranks() -> Iterator[str]:
    table = (ROOT / "docs/ranks.md").read_text().partition("<!-- table")[2].partition("\n\n#")[0]
    largest = max(float(x) for x in re.findall(r"(\d\.\de-\d\d), \d", table))
    yield f"two ranks and two sharded ranks differ by at most {largest:.1e}".replace("e-0", "e-")

"""Write docs/catalogue.md: every registered variant, from its docstring and from what it is when built.

    python tools/catalogue.py              # page and pictures; scales are measured where none are kept
    python tools/catalogue.py --measure    # measure the scale of every placement again

Equations, initial values and sources come from the docstrings, numbers of parameters from models built here,
and refusals from the variants. Variants that other packages registered are left out.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import hidden_scale
from normlab.lab.recipes.baselines import NamedBaseline
from normlab.lab.recipes.build import paragraphs, summary
from normlab.lab.recipes.grammar import PLACEMENT, RecipePart, baselines, resolve
from normlab.nn import Placement
from variant_facts import (
    BASE,
    MODEL_AXES,
    PLAIN,
    SIZE,
    VOCAB,
    difference,
    gains,
    own_parameters,
    refusals,
    shipped,
    simplest,
)

PAGE = Path(__file__).resolve().parents[1] / "docs/catalogue.md"
COMMAND = "python tools/catalogue.py"


def linked(text: str) -> str:
    """A docstring's paragraph as Markdown: mathematics, names as code, links to arXiv."""
    text = re.sub(r":math:`([^`]*)`", r"$`\1`$", text)
    text = re.sub(r"``([^`]*)``", r"`\1`", text)
    return re.sub(r"\barXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def placement_facts(part: RecipePart) -> Iterator[str]:
    """The list below a placement's picture."""
    placement, recipe = Placement.registry[part.name], simplest(part.axis, part.name)
    yield f"Parameters of a sublayer: {'; '.join(own_parameters(placement)) or 'none'}."
    number, which = difference(part, PLACEMENT)
    if part.name != PLAIN:
        yield f"Against `{PLAIN}`: {more(number, which)}."
    factors = list(gains(placement, recipe.config().model))
    if factors:
        yield f"Factors on the scheme's standard deviation: {'; '.join(factors)}."
    set_too = []
    for axis in MODEL_AXES:
        if axis.of_branch and getattr(placement, axis.field) != axis.plain:
            set_too.append(f"{axis.name} `{getattr(placement, axis.field)}`")
    if set_too:
        yield f"Its source also sets: {', '.join(set_too)}."
    if recipe.named:
        yield f"Built here as `{recipe.typed}`."
    if placement.deep:
        yield "Its source claims that very deep models train with it ([measured here](depth.md))."


def facts(part: RecipePart) -> Iterator[str]:
    """The list below a part of another axis."""
    axis = next((a for a in MODEL_AXES if a.name == part.axis), None)
    if axis is None:
        return
    if part.name == axis.plain:
        yield "The default: what a model has unless its recipe says otherwise."
        return
    number, which = difference(part, axis)
    yield f"Against `{axis.plain}`: {more(number, which)}."


def more(number: int, which: str) -> str:
    """A difference of parameters in words."""
    return f"{signed(number)} parameters, {which}" if which else "the same parameters"


def signed(number: int) -> str:
    """With a sign in front and commas between thousands."""
    return f"{number:+,}".replace("-", "−") if number else "0"


def entry(part: RecipePart) -> Iterator[str]:
    """The paragraphs of one part."""
    yield f"### `{part.name}`"
    yield from (linked(text) for text in paragraphs(part.source) if text)
    if part.axis == PLACEMENT.name:
        light, dark = (f"catalogue/{part.name}{ending}.svg" for ending in hidden_scale.MODES.values())
        yield (
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
            f'<img src="{light}" alt="Hidden scale by depth with {part.name}"></picture>'
        )
    items = list(placement_facts(part) if part.axis == PLACEMENT.name else facts(part))
    items += [f"Refuses {why}." for why in refusals(part)]
    if items:
        yield "\n".join(f"- {item}" for item in items)


BASELINES = (
    "These are language models as published: a recipe, and the fields that no part of a recipe sets. Names "
    "after a baseline's replace its parts, and the first of them may be a placement: `llama+post+qknorm`. "
    "`like:` may be left out unless a placement has the same name. Sizes, learning rate and the number of "
    "warm-up steps are those of the base configuration. A flag on the command line overrides the baseline."
)


def baseline(part: RecipePart) -> Iterator[str]:
    """The paragraphs of one baseline."""
    source = NamedBaseline.registry[part.name]
    yield f"### `{part.name}`"
    yield from (linked(text) for text in paragraphs(source) if text)
    yield f"- Recipe: `{source.recipe}`.\n- Other fields: {source.numbers()}."


LEFT_OUT = (
    "Some methods for language models are not here, because no source was found that confirms their "
    "equations: hyper-connections and mHC (arXiv 2512.24880; public ports disagree), attention residuals "
    "(arXiv 2603.15031), QK-clip and MuonH. The baseline `nanochat` leaves out value embeddings, smear, "
    "backout and its own Muon; `hybridnorm` leaves out the variant whose first layer differs, and its start."
)


def index(axis: str, members: Sequence[RecipePart], points: Mapping[str, hidden_scale.Points]) -> str:
    """The table at the head of an axis."""
    of_model = next((a for a in (PLACEMENT, *MODEL_AXES) if a.name == axis), None)
    columns = ["name", "source"]
    if of_model:
        columns.append("parameters")
    if of_model is PLACEMENT:
        columns += ["scale at the end: encoder, decoder", "claims depth"]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    for part in members:
        cells = [f"[`{part.name}`](#{part.name})", linked(summary(part)[1])]
        if of_model:
            cells.append(signed(difference(part, of_model)[0]))
        if of_model is PLACEMENT:
            cells.append(", ".join(f"{points[part.name][s][-1][1]:.2g}" for s in ("encoder", "decoder")))
            cells.append("yes" if Placement.registry[part.name].deep else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def about() -> Iterator[str]:
    """The paragraphs before the first axis."""
    measured, size = hidden_scale.SIZE, SIZE
    yield "# Catalogue"
    yield (
        "This page lists everything that a recipe can name, axis by axis, with the equation, initial value "
        f"and source that its docstring gives. `{COMMAND}` writes it: change the docstring, not this page. A "
        "recipe is a placement followed by at most one name from each other axis, joined by `+`, such as "
        "`pre+fixnorm+scalenorm`."
    )
    yield (
        "In the equations, x is the stream, f the branch, LN the chosen norm, N and M the numbers of layers "
        "of the encoder and the decoder, L that of a single stack, S the number of a stack's sublayers, d "
        "the width and w the width of a head. In a schedule, n is the step, k the last step of the warm-up "
        "and N the last step of all. Parameters and factors are given for a "
        f"Transformer of {size.encoder_layers}-{size.decoder_layers} layers, D = {size.dim}, "
        f"D_ff = {size.ffn_dim}, H = {size.heads} heads, V = {VOCAB}, compared with the same model with "
        "plain Post-LN, or with the axis's plain choice."
    )
    yield (
        "The pictures show the root mean square of the stream (of its first tensor if there are several) "
        "before each sublayer and after the last one, before training, in a Transformer of "
        f"{measured.encoder_layers}-{measured.decoder_layers} layers (d {measured.dim}, "
        f"FFN {measured.ffn_dim}, {measured.heads} heads), over the real positions of "
        f"{hidden_scale.SENTENCES} sentence pairs of the built-in corpus `{hidden_scale.CORPUS}`; "
        "the point at 0 is the embeddings. The line is the median of "
        f"{len(hidden_scale.SEEDS)} seeds, each with its own weights and sentences; the band reaches from "
        "the lowest to the highest. Parameters initialised from data are profiled on the same sentences. All "
        "pictures have the same axis. The numbers are in [`catalogue/scale.json`](catalogue/scale.json)."
    )


def page(points: Mapping[str, hidden_scale.Points]) -> str:
    """The whole page, from the docstrings and kept measurements."""
    by_axis: dict[str, list[RecipePart]] = defaultdict(list)
    for part in shipped():
        by_axis[part.axis].append(part)
    blocks = [
        *about(),
        "Axes: " + " · ".join(f"[{axis}](#axis-{axis.replace(' ', '-')})" for axis in by_axis),
    ]
    for axis, members in by_axis.items():
        blocks += [f"## Axis: {axis}", index(axis, members, points)]
        blocks += [text for part in members for text in entry(part)]
    blocks += ["## Baselines", BASELINES]
    blocks += [text for part in baselines() for text in baseline(part)]
    blocks += ["## Left out", linked(LEFT_OUT)]
    return "\n\n".join(blocks) + "\n"


def measured(names: Iterable[str]) -> dict[str, hidden_scale.Points]:
    """The hidden scale of placements, each in its simplest recipe."""
    data, vocab_size = hidden_scale.batches()
    found = {}
    for name in names:
        model = replace(BASE, model=hidden_scale.SIZE)
        config = resolve(simplest(PLACEMENT.name, name).typed, model)
        found[name] = hidden_scale.measure(config.model, data, vocab_size)
        print(f"measured {name}", flush=True)
    return found


def main() -> None:
    """Measure what is not kept, draw, write."""
    parser = argparse.ArgumentParser(description="Write docs/catalogue.md.")
    parser.add_argument("--measure", action="store_true", help="measure again what is kept, too")
    args = parser.parse_args()
    names = [part.name for part in shipped() if part.axis == PLACEMENT.name]
    kept = {} if args.measure else hidden_scale.kept()
    kept |= measured(name for name in names if name not in kept)
    points = {name: kept[name] for name in names}
    hidden_scale.keep(points)
    hidden_scale.draw(points)
    PAGE.write_text(page(points), encoding="utf-8")


if __name__ == "__main__":
    main()

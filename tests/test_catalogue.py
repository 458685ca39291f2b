"""The catalogue page is what the code says today: every variant, every picture, and its numbers again."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

import catalogue
import hidden_scale
import variant_facts
from cases import each
from normlab.base.registry import Registry
from normlab.lab.recipes.grammar import PLACEMENT, RecipePart
from normlab.nn import Placement
from normlab.nn.init import SCHEMES
from normlab.nn.placement.base import XAVIER
from variant_facts import Recipe, refusals, shipped

STALE = f"docs/catalogue.md is not what the code says; type: {catalogue.COMMAND}"
POINTS = hidden_scale.kept()
PAGE = catalogue.PAGE.read_text(encoding="utf-8")
PARTS_OF_RECIPES = ("normlab.nn.", "normlab.optim.", "normlab.lab.recipes.")
"""Other rooms keep other things by name, such as the properties of a check."""
PLACEMENTS = [part.name for part in shipped() if part.axis == PLACEMENT.name]


def entry(name: str) -> str:
    """The part of the page below a name's heading."""
    return PAGE.split(f"\n### `{name}`\n")[1].split("\n##")[0]


def registered() -> Iterator[tuple[str, str]]:
    """Kind and name of all variants of this package in all registries, whether a recipe knows them or not."""
    gc.unfreeze()  # conftest.py hides what was made before the first test from the collector
    objects = gc.get_objects()
    gc.freeze()
    for registry in objects:
        # isinstance would wake what other libraries load lazily; a task is no part of a recipe
        if type(registry) is Registry and registry.kind != "task":
            for name, variant in registry.items():
                if str(getattr(variant, "__module__", "")).startswith(PARTS_OF_RECIPES):
                    yield registry.kind, name


def test_every_placement_is_measured():
    assert sorted(POINTS) == sorted(PLACEMENTS), STALE


@pytest.mark.slow
def test_the_page_is_the_generated_one_and_names_no_variant_of_somebody_else(monkeypatch):
    # the page has 1,500 recipes: their sizes fit and their parts are the package's, so check neither
    monkeypatch.setattr("normlab.lab.recipes.grammar._require_sizes", lambda model: None)
    monkeypatch.setattr("normlab.lab.recipes.grammar.own_code", lambda config: "")

    class Outsider(Placement, name="catalogue_outsider"):
        def write(self, stream: object, y: object) -> object:
            return stream

    try:
        fresh = catalogue.page(POINTS)
    finally:
        del Placement.registry["catalogue_outsider"]
    changed = [new for new, old in zip(fresh.splitlines(), PAGE.splitlines(), strict=False) if new != old]
    assert fresh == PAGE, f"{STALE} (first line that differs: {changed[:1]})"


def test_every_registered_name_has_an_entry():
    headings = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
    assert len(headings) == len(set(headings))
    names = list(registered())
    assert {"placement", "norm", "embedding", "scheme", "schedule", "optimizer", "bias"} <= {
        k for k, _ in names
    }
    missing = [f"{kind} {name}" for kind, name in names if name not in headings]
    assert not missing, f"{missing} not on the page; {STALE}"


def test_every_entry_has_an_equation_or_a_sentence_and_all_mathematics_is_rendered():
    for part in shipped():
        first_paragraph = entry(part.name).strip().split("\n\n")[0]
        is_a_list_or_a_picture = first_paragraph.startswith(("- ", "<picture>"))
        is_a_source = re.match(r"[^.]+( et al\.)? \d{4}, ", first_paragraph)
        has_equation = re.search(r"\$`.+?`\$", first_paragraph)
        has_sentence = re.search(r"\w+ \w+.*\.$", first_paragraph)
        assert not is_a_list_or_a_picture, part.name
        assert not is_a_source, part.name
        assert has_equation or has_sentence, part.name
    assert ":math:" not in PAGE
    assert "``" not in PAGE.replace("`` ` ``", "")
    assert all(formula.count("{") == formula.count("}") for formula in re.findall(r"\$`(.+?)`\$", PAGE))


@each("name", PLACEMENTS)
def test_each_placement_has_a_small_picture_for_both_modes(name: str):
    for ending in hidden_scale.MODES.values():
        picture = hidden_scale.FOLDER / f"{name}{ending}.svg"
        assert picture.is_file(), f"no {picture.name}; type: {catalogue.COMMAND}"
        assert f"catalogue/{picture.name}" in entry(name)
        drawn = picture.read_text(encoding="utf-8")
        assert len(drawn) < 20_000
        assert {"encoder", "decoder", "sublayers passed"} <= set(re.findall(r">([^<>]+)</text>", drawn))


def test_no_picture_is_left_of_a_placement_that_is_gone():
    stems = {picture.stem.removesuffix("-dark") for picture in hidden_scale.FOLDER.glob("*.svg")}
    assert stems == set(PLACEMENTS), STALE


def test_linked_files_exist():
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", PAGE):
        assert (catalogue.PAGE.parent / target).exists(), target


# ------------------------------------------------------------------------------------- what is measured


@pytest.mark.slow
def test_a_measurement_comes_out_again():
    again = catalogue.measured(["admin"])["admin"]
    for stack, rows in POINTS["admin"].items():
        for new, old in zip(again[stack], rows, strict=True):
            assert new == pytest.approx(old, rel=1e-3), f"the scale changed; {catalogue.COMMAND} --measure"


def test_what_the_scales_must_be():
    def middle(name: str, stack: str = "encoder") -> list[float]:
        return [mid for _, mid, _ in POINTS[name][stack]]

    sublayers = hidden_scale.SIZE.encoder_layers * 2
    assert {len(rows) for rows in (middle(name) for name in PLACEMENTS)} == {sublayers + 1}
    assert middle("post")[1:] == pytest.approx([1.0] * sublayers, rel=1e-3)  # a norm writes the stream
    assert middle("rezero") == [middle("rezero")[0]] * (sublayers + 1)  # alpha = 0: every sublayer is silent
    assert middle("pre") == sorted(middle("pre"))  # a sum of branches that nothing norms
    # each branch of Sandwich-LN adds a vector of mean square 1 to a stream that starts with one of 1 to 2
    first, last = middle("sandwich")[0], middle("sandwich")[-1]
    assert last**2 == pytest.approx(first**2 + sublayers, rel=0.2)
    assert all(low <= mid <= high for rows in POINTS["pre"].values() for low, mid, high in rows)


def test_the_axis_holds_every_picture():
    low, high = hidden_scale.domain(POINTS.values())
    values = [v for stacks in POINTS.values() for rows in stacks.values() for row in rows for v in row]
    assert low <= min(values) < low * 10**0.5
    assert high / 10**0.5 < max(values) <= high


# ----------------------------------------------------------------------------- parameters and refusals


@pytest.mark.slow
@each(
    ("name", "number"),
    [
        ("pre", 2 * 2 * 512),  # a final norm in each stack
        ("sandwich", (30 + 2) * 2 * 512),  # and another norm in each of 12 + 18 sublayers
        ("admin", 30 * 512),
        ("rezero_post", 12),  # one scalar a layer
        ("skipinit", 30 - 30 * 2 * 512),
        ("layerscale", 2 * 2 * 512 + 30 * 512),
        ("headgain", 18 * 8),
        ("untied", 32000 * 512),
        ("learned", 1000 * 512),
        ("swiglu", 12 * (512 + 1) * 2048),
    ],
)
def test_extra_parameters(name: str, number: int):
    (part,) = (part for part in shipped() if part.name == name)
    axis = next(a for a in (PLACEMENT, *variant_facts.MODEL_AXES) if a.name == part.axis)
    assert variant_facts.difference(part, axis)[0] == number
    assert f"{catalogue.signed(number)} parameters" in entry(name)


def test_initial_values_are_those_of_the_built_parameters():
    for name, parameter, value in (
        ("rezero", "`alpha` `[1]`", "0"),
        ("admin", "`omega` `[D]`", "profiled"),
        ("layerscale", "`lam` `[D]`", "0.1"),
    ):
        assert re.search(rf"{re.escape(parameter)}, \w+ {value}\b", entry(name)), name
    beta = 0.87 * (6**4 * 6) ** (-1 / 16)
    assert re.search(rf"encoder [a-z_, ]*\bffn_out {beta:.3g}\b", entry("deepnorm"))


@pytest.mark.slow
def test_refusals_are_those_of_conflict():
    names = ("post", "pre", "relu", "fixup", "deepnorm", "looklinear", "rezero")
    told = {part.name: "\n".join(refusals(part)) for part in shipped() if part.name in names}
    assert told["pre"] == told["relu"] == ""
    refused = {name: [line.partition(": ")[0] for line in lines.splitlines()] for name, lines in told.items()}
    assert refused["post"] == ["parametrisation `completep`, `depth_mup`"]
    assert "any embedding but `untied`" in refused["fixup"]
    others = ", ".join(f"`{name}`" for name in SCHEMES if name not in XAVIER)
    assert f"scheme {others}" in refused["deepnorm"]
    assert any("other placement" in line for line in refused["deepnorm"])
    assert "any activation but `relu`" in refused["looklinear"]
    assert "any norm" in refused["rezero"]


def test_a_new_refusal_appears():
    class Picky:
        """A scheme that will have no Pre-LN in the decoder, and one activation only."""

        @staticmethod
        def conflict(model: object) -> str | None:
            if model.decoder_placement == "pre":
                return "not with pre"
            return "gelu is too smooth" if model.activation == "gelu" else None

    told = list(refusals(RecipePart("scheme", "xavier", Picky)))
    assert told == ["activation `gelu`: gelu is too smooth"]
    assert Recipe("post").but("norm", "rmsnorm").typed == "post+rmsnorm"


def test_pictures_are_drawn_from_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hidden_scale, "FOLDER", tmp_path)
    monkeypatch.setattr(hidden_scale, "KEPT", tmp_path / "scale.json")
    (tmp_path / "gone.svg").write_text("", encoding="utf-8")
    points = {"one": {"encoder": [(1.0, 2.0, 3.0), (2.0, 3.0, 30.0)], "decoder": [(1.0, 1.0, 1.0)]}}
    hidden_scale.keep(points)
    assert hidden_scale.kept() == points
    hidden_scale.draw(points)
    assert sorted(p.name for p in tmp_path.glob("*.svg")) == ["one-dark.svg", "one.svg"]
    assert "NaN" not in (tmp_path / "one.svg").read_text(encoding="utf-8")


def test_docstrings_become_markdown():
    given = r"LN: :math:`\|x\|_2`, ``f`` of `[D]`. Li et al. 2024, Section 3 (arXiv 2412.13795)."
    assert catalogue.linked(given) == (
        r"LN: $`\|x\|_2`$, `f` of `[D]`. Li et al. 2024, Section 3 "
        "([arXiv 2412.13795](https://arxiv.org/abs/2412.13795))."
    )


def test_numbers_of_the_scale_file_are_positive_and_finite():
    frame = pl.DataFrame(
        [v for stacks in POINTS.values() for rows in stacks.values() for row in rows for v in row]
    )
    assert frame.to_series().is_finite().all()
    assert frame.to_series().min() > 0

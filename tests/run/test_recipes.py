"""Recipe names: what they resolve to and the sentences of what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from normlab.nn import Placement
from normlab.run.recipes import CITATION, Part, describe, parts, resolve, summary
from normlab.spec.config import Config, ModelConfig, OptimConfig, run_id

BASE = Config(
    model=ModelConfig(dim=64, norm="rmsnorm", scheme="smallinit"),
    optim=OptimConfig(schedule="linear", warmup_steps=77),
)
PLACEMENTS = ", ".join(Placement.registry)
OTHERS = ", ".join(p.name for p in parts() if p.axis != "placement")

RESOLVED = {
    "post": "post; layernorm; plain embedding; xavier; linear, no warm-up",
    "post+warmup": "post; layernorm; plain embedding; xavier; linear, 77 warm-up steps",
    "pre+fixnorm+scalenorm": "pre; scalenorm; fixnorm embedding; xavier; linear, no warm-up",
    "pre+smallinit+warmup+inverse_sqrt": (
        "pre; layernorm; plain embedding; smallinit; inverse_sqrt, 77 warm-up steps"
    ),
    "enc:post/dec:pre+rmsnorm": (
        "encoder post, decoder pre; rmsnorm; plain embedding; xavier; linear, no warm-up"
    ),
    "enc:pre/dec:pre": "pre; layernorm; plain embedding; xavier; linear, no warm-up",
    "enc:rezero/dec:post+rmsnorm": (
        "encoder rezero, decoder post; rmsnorm; plain embedding; xavier; linear, no warm-up"
    ),
    "enc:pre/dec:rezero+scalenorm": (
        "encoder pre, decoder rezero; scalenorm; plain embedding; xavier; linear, no warm-up"
    ),
    "rezero+constant": "rezero; layernorm; plain embedding; xavier; constant, no warm-up",
}


@pytest.mark.parametrize(("name", "line"), RESOLVED.items(), ids=list(RESOLVED))
def test_a_name_resolves_to_its_parts_and_defaults(name, line):
    config = resolve(name, BASE)
    assert config.recipe == name
    assert describe(config) == line
    assert config.model.dim == 64
    assert replace(config.optim, schedule="linear", warmup_steps=77) == BASE.optim


def test_names_of_the_same_numbers_are_the_same_run():
    assert run_id(resolve("enc:pre/dec:pre", BASE)) == run_id(resolve("pre+layernorm+xavier", BASE))
    ids = [run_id(resolve(name, BASE)) for name in RESOLVED if name != "enc:pre/dec:pre"]
    assert len(set(ids)) == len(ids)


def beginning(recipe: str, wrong: str, hint: str = "") -> str:
    start = f"recipe {recipe!r} begins with a placement or enc:A/dec:B; {wrong!r} is not one"
    return f"{start}{hint} (allowed: {PLACEMENTS})"


REFUSED = {
    "": beginning("", ""),
    "psot": beginning("psot", "psot", ", did you mean 'post'?"),
    "scalenorm+pre": beginning("scalenorm+pre", "scalenorm"),
    "enc:post/dec:prr": beginning("enc:post/dec:prr", "prr", ", did you mean 'pre'?"),
    "enc:post": beginning("enc:post", "enc:post", ", did you mean 'post'?"),
    "pre+scalenrom": (
        f"recipe 'pre+scalenrom': unknown part 'scalenrom', did you mean 'scalenorm'? (allowed: {OTHERS})"
    ),
    "pre+": f"recipe 'pre+': unknown part '' (allowed: {OTHERS})",
    "pre+rmsnorm+scalenorm": "recipe 'pre+rmsnorm+scalenorm' names two of norm; keep one",
    "pre+warmup+warmup": "recipe 'pre+warmup+warmup' names two of warm-up; keep one",
    "rezero+scalenorm": (
        "recipe 'rezero+scalenorm': ReZero has no norm, so scalenorm would do nothing; "
        "use another part, or --force (in Python force=True) to run it all the same"
    ),
    "enc:rezero/dec:rezero+layernorm": (
        "recipe 'enc:rezero/dec:rezero+layernorm': ReZero has no norm, so layernorm would do nothing; "
        "use another part, or --force (in Python force=True) to run it all the same"
    ),
    "enc:post/dec:deepnorm+smallinit": (
        "recipe 'enc:post/dec:deepnorm+smallinit': DeepNorm's beta is a gain on Xavier initialisation; "
        "with smallinit it is not defined; use another part, or --force (in Python force=True) to run it "
        "all the same"
    ),
}


@pytest.mark.parametrize(("name", "sentence"), REFUSED.items(), ids=list(REFUSED))
def test_what_is_refused_says_what_to_type(name, sentence):
    with pytest.raises(ValueError, match="recipe") as refusal:
        resolve(name, BASE)
    assert str(refusal.value) == sentence


def test_force_runs_what_is_not_defined_but_not_what_is_unknown():
    assert describe(resolve("deepnorm+smallinit", BASE, force=True)).startswith("deepnorm; layernorm")
    with pytest.raises(ValueError, match="unknown part"):
        resolve("pre+nothing", BASE, force=True)


@pytest.mark.parametrize("part", parts(), ids=lambda part: part.name)
def test_every_part_can_be_named_and_says_what_it_is(part):
    name = part.name if part.axis == "placement" else f"post+{part.name}"
    config = resolve(name, BASE, force=True)
    assert part.name in describe(config).replace("77 warm-up", "warmup").replace(" embedding", "")
    assert len({p.name for p in parts()}) == len(parts()), "one word for one thing"


@pytest.mark.parametrize("part", parts(), ids=lambda part: part.name)
def test_a_docstring_is_an_equation_and_then_its_citation(part):
    equation, citation = summary(part)
    assert len(equation) > 10
    assert not CITATION.search(equation), "the citation stands in a paragraph of its own, after the equation"
    assert "arXiv" not in equation
    assert citation or part.axis == "schedule", "Author YEAR, Section (arXiv id)"


def test_a_summary_is_the_first_paragraph_and_what_is_cited():
    class Named:
        """An equation: it goes on
        here.

        More words, in 1999. Müller-Lüdenscheidt and O'Neill 2021, Table 2 (arXiv 2101.00001), after others.
        """

    cited = "Müller-Lüdenscheidt and O'Neill 2021, Table 2 (arXiv 2101.00001)"
    assert summary(Part("norm", "named", Named)) == ("An equation: it goes on here", cited)


def test_a_warm_up_of_no_steps_names_the_flag_and_the_field():
    with pytest.raises(
        ValueError, match=r"--warmup-steps 400, or in Python .*OptimConfig\(warmup_steps=400\)"
    ):
        resolve("post+warmup", Config())

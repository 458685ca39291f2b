"""Recipe names: what they resolve to, and the sentences with which others are refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cases import each
from normlab.errors import UserError
from normlab.lab.config import Config, ModelConfig, OptimConfig, run_id
from normlab.lab.recipes.baselines import alias_of
from normlab.lab.recipes.build import CITATION, explain, summary
from normlab.lab.recipes.grammar import RecipePart, baselines, describe, listed, parts, require_known, resolve
from normlab.nn import Norm, Placement, PreNorm

BASE = Config(
    model=ModelConfig(dim=64, norm="rmsnorm", scheme="smallinit", embedding="fixnorm", bias="nobias"),
    optim=OptimConfig(schedule="linear", warmup_steps=77, decay_step=100),
)
PLACEMENTS = ", ".join(Placement.registry)
OTHERS = ", ".join(p.name for p in parts() if p.axis != "placement")
OWN = "if a module of yours defines it, add --import my_package.my_module"

RESOLVED = {
    "post": "post; layernorm; xavier; linear, no warm-up",
    "post+warmup": "post; layernorm; xavier; linear, 77 warm-up steps",
    "pre+fixnorm+scalenorm": "pre; scalenorm; fixnorm embedding; xavier; linear, no warm-up",
    "pre+smallinit+warmup+inverse_sqrt": "pre; layernorm; smallinit; inverse_sqrt, 77 warm-up steps",
    "enc:post/dec:pre+rmsnorm": "encoder post, decoder pre; rmsnorm; xavier; linear, no warm-up",
    "enc:pre/dec:pre": "pre; layernorm; xavier; linear, no warm-up",
    "enc:rezero/dec:post+rmsnorm": "encoder rezero, decoder post; rmsnorm; xavier; linear, no warm-up",
    "rezero+constant": "rezero; no norm; xavier; constant, no warm-up",
    "rezero+rmsnorm+innernorm": "rezero; rmsnorm; xavier; innernorm; linear, no warm-up",
    "fixup+untied": "fixup; no norm; untied embedding; xavier; scalarbias; linear, no warm-up",
    "pre+qknorm+rope+swiglu+radam+cosine": (
        "pre; layernorm; xavier; rope; swiglu; qknorm; radam; cosine, no warm-up"
    ),
    "olmo2": "olmo2; layernorm; xavier; normed; linear, no warm-up",
    "olmo2+scaled": "olmo2; layernorm; xavier; scaled; linear, no warm-up",
    "enc:olmo2/dec:normformer+nobias": (
        "encoder olmo2, decoder normformer; layernorm; xavier; encoder normed; nobias; "
        "decoder ffn_innernorm; decoder headgain; linear, no warm-up"
    ),
}


@each(("name", "line"), RESOLVED.items(), ids=list(RESOLVED))
def test_a_name_resolves_to_its_parts_and_defaults(name, line):
    config = resolve(name, BASE)
    assert config.recipe == name
    assert describe(config) == line
    assert config.model.dim == 64
    assert replace(config.optim, schedule="linear", warmup_steps=77, optimiser="adam") == BASE.optim
    assert config.forced == config.own_code == ""


def test_what_a_recipe_does_not_name_stays_the_bases_where_that_is_no_property_of_its_paper():
    kept = {"position_encoding": "rope", "activation": "swiglu", "kv_heads": 2, "max_positions": 99}
    model = replace(BASE.model, inner_norm="innernorm", head_gain="headgain", qk_norm="qknorm", **kept)
    config = resolve("olmo2", replace(BASE, model=model, optim=replace(BASE.optim, optimiser="adamw")))
    assert {name: getattr(config.model, name) for name in kept} == kept
    assert config.optim.optimiser == "adamw"
    own = ("inner_norm", "head_gain", "qk_norm", "bias")
    assert [getattr(config.model, name) for name in own] == [""] * 4
    assert describe(config) == ("olmo2; layernorm; xavier; rope; swiglu; normed; adamw; linear, no warm-up")


def test_names_of_the_same_numbers_are_the_same_run():
    spelled = replace(BASE, model=replace(BASE.model, kv_heads=BASE.model.heads))
    assert run_id(resolve("pre", spelled)) == run_id(resolve("pre", BASE))
    assert run_id(resolve("enc:pre/dec:pre", BASE)) == run_id(resolve("pre+layernorm+xavier", BASE))
    assert run_id(resolve("pre+scaled+bias", BASE)) == run_id(resolve("pre", BASE))
    assert run_id(resolve("olmo2+normed", BASE)) == run_id(resolve("olmo2", BASE))
    assert run_id(resolve("enc:olmo2/dec:pre+normed", BASE)) != run_id(resolve("enc:olmo2/dec:pre", BASE))
    ids = [run_id(resolve(name, BASE)) for name in RESOLVED if name != "enc:pre/dec:pre"]
    assert len(set(ids)) == len(ids)


def beginning(recipe: str, wrong: str, hint: str = "") -> str:
    heads = "a placement, enc:A/dec:B or a baseline such as like:llama"
    start = f"recipe {recipe!r} begins with {heads}; {wrong!r} is not one"
    allowed = PLACEMENTS if "/dec:" in recipe else f"{PLACEMENTS}, gpt2, llama, gemma3, nanochat"
    return f"{start}{hint} (allowed: {allowed}); {OWN}"


def conflict(recipe: str, why: str, to_type: str) -> str:
    end = "--force (in Python force=True) runs it all the same, with a mark"
    return f"recipe {recipe!r}: {why}; type {to_type}; {end}"


DEEPNORM = "DeepNorm's alpha and beta are derived for an encoder and a decoder that both use it"
FIXUP = "FixUp initialises the classifier with 0, which a tied embedding does not allow"

REFUSED = {
    "": beginning("", ""),
    "psot": beginning("psot", "psot", ", did you mean 'post'?"),
    "llamma": beginning("llamma", "llamma", ", did you mean 'llama'?"),
    "scalenorm+pre": (
        "recipe 'scalenorm+pre' begins with a placement, enc:A/dec:B or a baseline such as like:llama; "
        f"'scalenorm' is a name of norm; {OWN}"
    ),
    "enc:post/dec:prr": beginning("enc:post/dec:prr", "prr", ", did you mean 'pre'?"),
    "enc:post": beginning("enc:post", "enc:post", ", did you mean 'post'?"),
    "pre+scalenrom": (
        "recipe 'pre+scalenrom': unknown part 'scalenrom', did you mean 'scalenorm'? "
        f"(allowed: {OTHERS}); {OWN}"
    ),
    "pre+": f"recipe 'pre+': unknown part '' (allowed: {OTHERS}); {OWN}",
    "pre+rmsnorm+scalenorm": "recipe 'pre+rmsnorm+scalenorm' names two of norm; keep one",
    "pre+admin": (
        "recipe 'pre+admin': 'admin' is a placement, and a stack has one, which comes first; "
        "type pre or admin or enc:pre/dec:admin"
    ),
    "enc:pre/dec:post+rope+admin": (
        "recipe 'enc:pre/dec:post+rope+admin': 'admin' is a placement, and a stack has one, which comes "
        "first; type enc:pre/dec:post or admin"
    ),
    "pre+pre": "recipe 'pre+pre': 'pre' is a placement, and a stack has one, which comes first; type pre",
    "pre+rope+learned": "recipe 'pre+rope+learned' names two of position encoding; keep one",
    "pre+warmup+warmup": "recipe 'pre+warmup+warmup' names two of warm-up; keep one",
    "rezero+scalenorm": conflict(
        "rezero+scalenorm",
        "ReZero has no norm, so scalenorm would do nothing",
        "rezero or rezero+scalenorm+normed",
    ),
    "enc:rezero/dec:skipinit+rmsnorm": conflict(
        "enc:rezero/dec:skipinit+rmsnorm",
        "ReZero and SkipInit have no norm, so rmsnorm would do nothing",
        "enc:rezero/dec:skipinit or enc:rezero/dec:skipinit+rmsnorm+normed",
    ),
    "deepnorm+smallinit": conflict(
        "deepnorm+smallinit",
        "DeepNorm's beta is a gain on Xavier initialisation; with smallinit it is not defined",
        "deepnorm or deepnorm+xavier_uniform",
    ),
    "enc:post/dec:deepnorm": conflict("enc:post/dec:deepnorm", DEEPNORM, "post"),
    "fixup+cosine": conflict("fixup+cosine", FIXUP, "fixup+cosine+untied"),
    "fixup+fixnorm": conflict("fixup+fixnorm", FIXUP, "fixup+untied"),
    "pre+looklinear+gelu": conflict(
        "pre+looklinear+gelu",
        "LookLinear is defined for ReLU only, not for gelu",
        "pre+looklinear or pre+xavier+gelu",
    ),
}


@pytest.mark.slow
@each(("name", "sentence"), REFUSED.items(), ids=list(REFUSED))
def test_what_is_refused_says_what_to_type(name, sentence):
    with pytest.raises(ValueError, match="recipe") as refusal:
        resolve(name, BASE)
    assert str(refusal.value) == sentence


@each("name", [name for name, sentence in REFUSED.items() if "--force" in sentence])
def test_what_a_refusal_says_to_type_is_accepted(name):
    offered = REFUSED[name].partition("; type ")[2].partition(";")[0].split(" or ")
    assert all(not resolve(other, BASE).forced for other in offered)


def test_force_runs_what_is_not_defined_and_marks_it_but_not_what_is_unknown():
    config = resolve("deepnorm+smallinit", BASE, force=True)
    assert describe(config).startswith("deepnorm; layernorm; smallinit")
    assert config.forced == (
        "DeepNorm's beta is a gain on Xavier initialisation; with smallinit it is not defined"
    )
    assert explain(config)["forced"] == config.forced
    assert run_id(config) == run_id(replace(config, forced=""))
    assert resolve("pre", config, force=True).forced == ""
    with pytest.raises(ValueError, match="unknown part"):
        resolve("pre+nothing", BASE, force=True)


def test_a_forced_recipe_holds_every_reason():
    assert resolve("enc:post/dec:deepnorm+smallinit", BASE, force=True).forced == DEEPNORM
    both = resolve("enc:rezero/dec:fixup+rmsnorm+looklinear+gelu", BASE, force=True).forced
    assert both.startswith("ReZero and FixUp have no norm, so rmsnorm would do nothing; LookLinear is ")
    assert both.endswith("; FixUp counts the branches of an encoder and a decoder that both use it")


def test_a_stack_that_the_model_does_not_have_is_not_asked():
    decoder = replace(BASE, model=replace(BASE.model, encoder_layers=0))
    assert describe(resolve("enc:rezero/dec:deepnorm", decoder)).startswith("deepnorm; layernorm")
    assert describe(resolve("rezero", decoder)).startswith("rezero; no norm")
    encoder = replace(BASE, model=replace(BASE.model, decoder_layers=0))
    assert describe(resolve("rezero+rmsnorm", encoder)).startswith("rezero; rmsnorm"), "its head has a norm"


def test_a_schedule_without_its_step_is_refused_before_anything_is_trained():
    with pytest.raises(ValueError, match=r"'step_decay' .*decay_step = 0"):
        resolve("post+step_decay", replace(BASE, optim=replace(BASE.optim, decay_step=0)))


@pytest.mark.slow
@each("part", parts(), ids=lambda part: part.name)
def test_every_part_can_be_named_and_says_what_it_is(part):
    name = part.name if part.axis == "placement" else f"post+{part.name}"
    explained = explain(resolve(name, BASE, force=True))
    equation, _ = summary(part)
    assert equation
    if part.axis == "warm-up":
        assert explained["warm-up"].startswith("77 steps")
    elif part.axis in explained:
        assert explained[part.axis].startswith(f"{part.name}: ")
    else:
        plain = explained["plain choices"].replace(" embedding", "").replace(" parametrisation", "")
        assert part.name in plain.split(", ")


def test_one_word_means_one_thing():
    assert len({part.name for part in parts()}) == len(parts())


def test_two_axes_with_one_name_are_told(monkeypatch):
    monkeypatch.setitem(Norm.registry, "rezero", Norm.registry["rmsnorm"])
    sentence = r"^'rezero' is the name of a placement and a norm; a recipe could mean either, rename one$"
    with pytest.raises(ValueError, match=sentence):
        resolve("pre", BASE)


def test_a_configuration_with_somebody_elses_placement_says_how_to_import_it():
    require_known(BASE)
    for field, name in (("encoder_placement", "mine"), ("bias", "mine"), ("norm", "mine")):
        config = replace(BASE, model=replace(BASE.model, **{field: name}))
        with pytest.raises(ValueError, match=rf"'mine'.*; {OWN}$"):
            require_known(config)


def test_a_part_of_ones_own_stands_in_the_id_by_its_code(monkeypatch, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("version = 1")

    class Mine(PreNorm, name="test_own"):
        pass

    try:
        monkeypatch.setattr(Mine, "__module__", "mine")
        monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(__file__=str(file)))
        first = resolve("test_own", BASE)
        assert resolve("test_own", BASE) == first
        file.write_text("version = 2")
        assert run_id(resolve("test_own", BASE)) != run_id(first)
        assert resolve("enc:pre/dec:pre", first).own_code == ""
    finally:
        del Placement.registry["test_own"]


def test_the_lines_of_both_tables_of_methods_are_listed():
    rows = """post pre scalenorm rmsnorm layernorm fixedscalenorm fixnorm smallinit admin admin_code
    admin_free enc:A/dec:B rezero rezero_post fixup looklinear radam adam sgd inverse_sqrt constant step_decay
    step_decay_inverse_sqrt linear val_decay deepnorm sandwich periln olmo2 subln normformer residual b2t
    mixln lnscale layerscale skipinit tfixup keel qknorm dyt derf"""
    names = [part.name for part in listed()]
    assert set(rows.split()) <= set(names)
    assert len(names) == len(parts()) + 1 + len(baselines())


@each("part", [*parts(), *baselines()], ids=lambda part: part.name)
def test_a_docstring_is_an_equation_and_then_its_citation(part):
    equation, citation = summary(part)
    assert len(equation) > 10
    assert not CITATION.search(equation), "the citation stands in a paragraph of its own, after the equation"
    assert "arXiv" not in equation
    assert citation or part.name == "constant", "Author YEAR, Section (arXiv id)"


def test_a_summary_is_the_first_paragraph_and_what_is_cited():
    class Named:
        """An equation: it goes on
        here.

        More words, in 1999. Müller-Lüdenscheidt and O'Neill 2021, Table 2 (arXiv 2101.00001), after others.
        """

    cited = "Müller-Lüdenscheidt and O'Neill 2021, Table 2 (arXiv 2101.00001)"
    assert summary(RecipePart("norm", "named", Named)) == ("An equation: it goes on here", cited)


def test_a_source_that_is_not_on_arxiv_is_cited_by_its_conference():
    source = Placement.registry["tfixup"]
    assert (
        summary(RecipePart("placement", "tfixup", source))[1] == "Huang et al. 2020, Section 3.2 (ICML 2020)"
    )


def test_a_class_without_a_docstring_has_no_equation():
    class Silent(PreNorm):
        pass

    assert summary(RecipePart("placement", "silent", Silent)) == ("", "")


# ------------------------------------------------------------------------------------------ baselines

DECODER = replace(BASE, model=replace(BASE.model, encoder_layers=0))
PARTS = "rmsnorm; untied embedding; noembedscale; normal002; rope; swiglu; nobias; adamw; cosine"
LLAMA = f"{PARTS}, 77 warm-up steps"
LIKE = {
    "like:llama": f"pre; {LLAMA}",
    "llama": f"pre; {LLAMA}",
    "llama+post": f"post; {LLAMA}",
    "llama+qknorm+layernorm": f"pre; {LLAMA}".replace("rmsnorm", "layernorm").replace(
        "nobias", "qknorm; nobias"
    ),
    "olmo2": "olmo2; layernorm; xavier; normed; linear, no warm-up",
}


@each(("name", "line"), LIKE.items(), ids=list(LIKE))
def test_a_baseline_has_its_parts_and_later_names_replace_them(name, line):
    assert describe(resolve(name, DECODER)) == line
    assert describe(resolve(f"short name={name}", DECODER)) == line


def test_a_baseline_is_one_run_by_either_name_and_sets_what_no_part_names():
    llama = resolve("llama", DECODER)
    assert (
        run_id(llama) == run_id(resolve("A = like:llama", DECODER)) != run_id(resolve("llama+post", DECODER))
    )
    assert (llama.optim.betas, llama.optim.weight_decay, llama.optim.max_grad_norm) == ((0.9, 0.95), 0.1, 1.0)
    assert (llama.model.dim, llama.optim.lr) == (BASE.model.dim, BASE.optim.lr)
    typed = replace(DECODER, optim=replace(DECODER.optim, weight_decay=0.3))
    assert resolve("llama", typed, kept=["weight_decay"]).optim.weight_decay == 0.3
    assert resolve("llama", typed, kept=["weight_decay"]).optim.max_grad_norm == 1.0
    without = replace(DECODER, optim=replace(DECODER.optim, warmup_steps=0))
    assert resolve("llama", without).optim.warmup_steps == 0


def test_a_baseline_is_explained_with_its_numbers():
    explained = explain(resolve("A=llama+post", DECODER))
    assert explained["baseline"].startswith("like:llama: Llama: Pre-LN with RMSNorm")
    assert "weight decay 0.1" in explained["baseline"]
    assert explained["placement"].startswith("post: ")


def test_a_recipe_has_a_short_name():
    assert alias_of("A = llama+qknorm") == "A"
    assert alias_of("llama+qknorm") == "llama+qknorm"


NO_LIKE = {
    "like:lama": r"unknown baseline 'like:lama', did you mean 'like:llama'\?",
    "llama+pre+post": "'post' is a placement, and a stack has one",
    "llama+deepnorm": r"with normal002 it is not defined; type like:llama\+deepnorm\+xavier",
    "=llama": "the short name before = has 1 to 40 letters",
    "A=B=llama": "the short name before = has 1 to 40 letters",
}


@each(("name", "sentence"), NO_LIKE.items(), ids=list(NO_LIKE))
def test_what_is_no_baseline_is_refused(name, sentence):
    with pytest.raises(UserError, match=sentence):
        resolve(name, DECODER)


def test_a_warm_up_of_no_steps_names_the_flag_and_the_field():
    with pytest.raises(ValueError, match=r"--warmup-steps 400, .*OptimConfig\(warmup_steps=400\)"):
        resolve("post+warmup", Config())

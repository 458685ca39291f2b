"""The scales gpu and paper: every cell of the smallest scale is there, and can be built."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cases import each
from normlab.lab.config import Config
from normlab.lab.recipes.grammar import resolve
from normlab.lab.tasks import TASKS
from normlab.papers import ARTEFACTS
from normlab.papers.bases import SOURCES, source_of, text_name
from normlab.papers.trainings import (
    LAPTOP,
    SCALES,
    ScaledTraining,
    Trainings,
    changed,
    for_each_scale,
    unlike,
)

TRAINED = {id_: one for id_, one in ARTEFACTS.items() if one.trainings and one.kind == "artefact"}
LARGE = [scale for scale in SCALES if scale != LAPTOP]


def test_36_artefacts_have_trainings_at_every_scale_but_one_that_no_cpu_trains():
    assert len(TRAINED) == 36
    others = [one.id for one in TRAINED.values() if set(one.trainings) != set(SCALES)]
    assert others == ["liu2020.section5_3"]
    assert list(TRAINED[others[0]].trainings) == LARGE
    assert all(
        config.train.precision == "fp16" for _, _, config in TRAINED[others[0]].trainings["gpu"].configs()
    )


@each("scale", LARGE)
@each("id_", TRAINED)
def test_the_cells_of_the_smallest_scale_are_among_them(id_, scale):
    smallest, large = (TRAINED[id_].trainings[s] for s in (TRAINED[id_].shown_at(LAPTOP), scale))
    assert [cell for cell in large.cells if cell in smallest.cells] == list(smallest.cells)
    assert large.seeds <= smallest.seeds
    assert large.differs.endswith(".")
    assert source_of(large.base.data) is not None
    for cell, changes in smallest.cells.items():
        assert large.cells[cell]["recipe"].partition("+")[0] == changes["recipe"].partition("+")[0]


def configs():
    """A configuration for each distinct recipe, depth and schedule of the large scales."""
    every = [
        config
        for artefact in TRAINED.values()
        for scale in LARGE
        for _, seed, config in artefact.trainings[scale].configs()
        if seed == 1
    ]
    return {
        (c.recipe, c.model.heads, c.model.encoder_layers, c.optim.warmup_steps > 0, c.optim.decay_step): c
        for c in every
    }.values()


@pytest.mark.slow
def test_every_recipe_can_be_built():
    for config in configs():
        resolved = resolve(config.recipe, config, force=True)
        TASKS[resolved.task].check(resolved)


def test_architectures_are_the_papers():
    def model(id_, cell=""):
        trainings = TRAINED[id_].trainings["paper"]
        m = changed(trainings.base, trainings.cells[cell] if cell else {}).model
        return m.dim, m.ffn_dim, m.heads, m.encoder_layers, m.decoder_layers

    assert model("xiong2020.fig2a") == (512, 1024, 4, 6, 6)
    assert model("xiong2020.fig4cd") == (512, 2048, 8, 6, 6)
    assert model("xiong2020.fig5a") == (768, 3072, 12, 12, 0)
    assert model("nguyen2019.table2") == (512, 2048, 8, 6, 6)
    assert model("nguyen2019.table3") == (512, 2048, 4, 4, 4)
    assert model("liu2020.table2", "Pre IWSLT'14 6L-6L small") == (512, 1024, 4, 6, 6)
    assert model("liu2020.table2", "Pre WMT'14 En-De 18L-18L") == (512, 2048, 8, 18, 18)
    assert model("liu2020.table4", "En-Fr Admin BLEU") == (512, 2048, 8, 60, 12)
    assert model("liu2020.section5_3", "ReZero") == (512, 2048, 8, 18, 18)


def test_numbers_of_the_cells_are_the_papers():
    def cell(id_, name):
        return changed(TRAINED[id_].trainings["paper"].base, TRAINED[id_].trainings["paper"].cells[name])

    fig2a = cell("xiong2020.fig2a", "lr 5e-4, warm-up 500").optim
    assert (fig2a.lr, fig2a.warmup_steps, fig2a.betas) == (5e-4, 500, (0.9, 0.98))
    assert cell("xiong2020.fig6", "fixed lr 1e-4").optim.lr == 1e-4
    tuned = cell("xiong2020.footnote1", "Pre-LN, tuned")
    assert (tuned.optim.lr, tuned.optim.decay_step, tuned.model.attention_dropout) == (7.5e-4, 8000, 0.1)
    grid = cell("liu2020.fig10", "lr 5e-4 Post β₂ 0.999").optim
    assert grid.lr == pytest.approx(5e-4)
    assert grid.betas == (0.9, 0.999)
    assert cell("liu2020.warmup", "warm-up 32k").optim.warmup_steps == 32_000
    assert cell("nguyen2019.table2", "warm-up 4k Xavier Post").optim.warmup_steps == 4000
    assert cell("nguyen2019.table2", "warm-up 16k SmallInit Pre").optim.lr == pytest.approx(
        (512 * 16_000) ** -0.5
    )
    assert cell("nguyen2019.table4", "NoWarmup").optim.lr == pytest.approx(3e-4)
    both, neither = (cell("liu2020.dropout", name).model for name in ("both", "neither"))
    assert (both.attention_dropout, both.ffn_dropout, neither.attention_dropout) == (0.1, 0.1, 0.0)
    assert neither.dropout == both.dropout == 0.3
    wet, dry = (cell("liu2020.section5_3", name) for name in ("ReZero, dropout", "ReZero"))
    assert (wet.model.dropout, dry.model.dropout, dry.model.ffn_dropout) == (0.1, 0.0, 0.0)
    assert {wet.train.precision, dry.train.precision} == {"fp16"}
    settings = ARTEFACTS["xiong2020.fig5bc"].settings_at("paper")
    assert (settings["batches"], settings["epochs"]) == ((16, 32), (3, 4, 5, 6, 7, 8))


def test_a_text_is_named_by_the_beginning_of_its_path():
    data = {id_: artefact.trainings for id_, artefact in TRAINED.items()}
    assert text_name(data["xiong2020.fig2a"]["laptop"].base.data) == "the built-in corpus dates-de-en"
    assert text_name(data["xiong2020.fig2a"]["gpu"].base.data) == "a part of IWSLT'14 De-En"
    assert text_name(data["xiong2020.fig2a"]["paper"].base.data) == "IWSLT'14 De-En"
    assert text_name(data["liu2020.table4"]["paper"].base.data) == "WMT'14 En-Fr"
    assert all(source.name and source.get for source in SOURCES.values())


def test_one_function_gives_the_cells_of_every_scale():
    settings = {
        "laptop": ScaledTraining(Config(), differs="Small."),
        "gpu": ScaledTraining(changed(Config(), {"model.dim": 512}), differs="Large."),
    }
    found = for_each_scale(
        lambda s: {"a": {"recipe": "post", "model.ffn_dim": 2 * s.base.model.dim}},
        settings,
        seeds=2,
        of_studies={"gpu": {"lrs": (1.0,)}},
    )
    assert found["laptop"] == Trainings(
        Config(), {"a": {"recipe": "post", "model.ffn_dim": 512}}, 2, "Small."
    )
    assert (found["gpu"].cells["a"]["model.ffn_dim"], found["gpu"].differs) == (1024, "Large.")
    assert found["laptop"].settings == {}
    assert found["gpu"].settings == {"lrs": (1.0,)}


def test_an_artefact_says_how_a_scale_differs_after_what_its_setting_says():
    fig10, warmup = (ARTEFACTS[f"liu2020.{name}"].trainings["gpu"].differs for name in ("fig10", "warmup"))
    assert fig10.startswith("A tenth of the paper's text")
    assert fig10.endswith(
        " minutes on an H200. The rates fall linearly, as in the authors' recipe; one seed a cell."
    )
    assert warmup.startswith("Multi30k En-De")
    assert "sacreBLEU" in ARTEFACTS["liu2020.fig10"].trainings["paper"].differs


def test_changes_lead_from_one_configuration_to_another():
    one = Config()
    other = changed(
        one, {"recipe": "pre", "model.dim": 32, "data.vocab_size": 99, "optim.betas": (0.9, 0.99)}
    )
    assert changed(one, unlike(one, other)) == other
    assert unlike(other, other) == {}
    assert set(unlike(one, replace(other, task="bert_pretraining"))) >= {"task", "model.dim"}

"""From a model and a batch to findings; and what is said of models and batches that cannot be diagnosed."""

import html
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers as tf
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, StepLR

from diagnosis.small import BATCH, labelled, translating, untouched
from normlab.base.io import to_plain
from normlab.diagnosis import Table, diagnose, read_structure, registered, study
from normlab.diagnosis.tables import Row
from normlab.errors import UserError
from normlab.setups.setup import Setup
from zoo import PostNorm


class Tower(nn.Module):
    """A stack of Post-LN layers, and a head."""

    def __init__(self, dim=16, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(PostNorm(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))


def tower(**kwargs):
    torch.manual_seed(0)
    return Tower(**kwargs)


def square(model, batch):
    return model(batch).square().mean()


@pytest.fixture(scope="module")
def seen():
    """The standard diagnosis of a small Post-LN encoder-decoder."""
    subject = translating("post", encoder_layers=3, decoder_layers=3)
    return diagnose(subject.model, BATCH[:2], loss=labelled, lr=1e-3)


# -------------------------------------------------------------------------------------- what comes out of it


@pytest.mark.slow
def test_every_study_of_the_preset_gives_its_table(seen):
    studies = registered("standard")
    assert set(seen.seconds) == {one.name for one in studies} == {one.name for one in seen.studies}
    assert {f.name for f in seen.findings} & {"not_done", "not_finite"} == set()
    names = {one.name for one in studies}
    expected = {"residual_dependency", "output_change_fit", "curvature", *names}
    assert set(seen.tables) >= expected - {"critical_lr", "dependency"}
    assert all(seconds > 0 for seconds in seen.seconds.values())
    assert seen.peak_memory_bytes > 1e7


@pytest.mark.slow
def test_findings_rest_on_the_tables(seen):
    (found,) = [f for f in seen.findings if f.name == "placement" and f.sentence.startswith("decoder")]
    assert found.numbers == {"layers": 3, "sublayers": 9, "post": 9}
    assert {row["placement"] for row in seen.tables["structure"]} == {"post"}
    assert str(found) in str(seen)
    assert seen.at_least("note") == list(seen.findings)


def test_facts_are_those_of_the_model(seen):
    model = translating("post", encoder_layers=3, decoder_layers=3).model
    parameters = sum(p.numel() for p in model.parameters())
    assert seen.facts["parameters"] == f"{parameters:,}"
    assert seen.facts["batch"] == "4×6, 4×5"
    assert (seen.facts["optimizer"], seen.facts["device"]) == ("Adam, lr 1e-3", "cpu")


def test_all_of_it_can_be_written_as_json(seen):
    plain = json.loads(json.dumps(to_plain(seen.to_plain()), allow_nan=False))
    assert plain["stacks"] == {"encoder.sublayers": "encoder", "decoder.sublayers": "decoder"}
    assert plain["tables"]["scales"] == [dict(row) for row in seen.tables["scales"]]
    assert [f["sentence"] for f in plain["findings"]] == [f.sentence for f in seen.findings]


@pytest.mark.slow
def test_a_notebook_shows_the_verdict_and_the_findings(seen, tmp_path):
    assert repr(seen).startswith(f"<Diagnosis of {seen.model}: {seen.verdict} (")
    assert len(repr(seen)) < 600
    shown = seen._repr_html_()
    assert shown.count("<li>") == len(seen.findings)
    assert html.escape(seen.verdict) in shown
    frames = seen.to_polars()
    assert frames.keys() == {*seen.tables, "findings"}
    assert len(frames["scales"]) == len(seen.tables["scales"])
    assert frames["findings"]["name"].to_list() == [finding.name for finding in seen.findings]
    page = seen.page(tmp_path / "mine.html")
    assert page.name == "mine.html"
    assert json.loads(page.with_suffix(".json").read_text())["verdict"] == seen.verdict


def test_presets_name_studies_and_grow():
    cheap, standard, full = ({s.name for s in registered(p)} for p in ("cheap", "standard", "full"))
    assert cheap < standard < full


def test_full_has_second_derivatives():
    found = diagnose(tower(), X, loss=square, lr=1e-3, preset="full").tables["curvature"]
    second = {"largest_eigenvalue", "directional_sharpness", "preconditioned_sharpness"}
    assert set(found.column("quantity")) == {"critical_lr", *second}


@pytest.mark.slow
def test_post_and_pre_are_told_apart():
    own = {}
    for placement in ("post", "pre"):
        subject = translating(placement, encoder_layers=6, decoder_layers=6)
        found = diagnose(subject.model, BATCH[:2], loss=labelled)
        own[placement] = [f.numbers["sum_beta_sq"] for f in found.findings if f.name == "residual_dependency"]
    assert len(own["post"]) == 2  # encoder and decoder
    assert all(post > 1.5 * pre for post, pre in zip(own["post"], own["pre"], strict=True))


@pytest.mark.slow
def test_nothing_is_changed():
    def study(subject):
        found = diagnose(subject.model, BATCH[:2], loss=labelled, preset="standard")
        rows = ({"name": f.name, "sentence": f.sentence} for f in found.findings)
        return Table("found", tuple[Row, ...](rows))

    untouched("post", study)


def test_without_a_learning_rate_nothing_is_said_of_it():
    found = diagnose(tower(), X, loss=square)
    assert "learning_rate" not in {f.name for f in found.findings}
    assert "curvature" in found.tables


def test_the_optimizer_that_is_given_is_used():
    model = tower()
    made = diagnose(model, X, loss=square, optimizer=partial(torch.optim.SGD, lr=0.5), preset="standard")
    assert made.facts["optimizer"] == "SGD, lr 0.5"
    ratios = [r["update_l2"] / r["grad_l2"] for r in made.tables["updates"] if r["grad_l2"]]
    assert ratios == pytest.approx([0.5] * len(list(model.parameters())), rel=1e-4)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    square(model, X).backward()
    adam.step()
    amid = diagnose(model, X, loss=square, optimizer=adam, preset="cheap")
    assert amid.facts["optimizer"] == "Adam during its training, lr 1e-2"


@pytest.mark.parametrize("made", [False, True])
def test_an_optimizer_may_find_its_own_rate(made):
    model = tower()
    adafactor = tf.Adafactor(model.parameters()) if made else tf.Adafactor
    found = diagnose(model, X, loss=square, optimizer=adafactor, preset="cheap")
    assert found.facts["optimizer"] == "Adafactor, lr 0"


def test_an_empty_parameter_has_no_step():
    model = tower()
    model.layers[1].extra = nn.Parameter(torch.empty(0, 16))
    found = diagnose(model, X, loss=square, studies=["updates", "parameter_gradients"])
    for name in ("updates", "parameter_gradients"):
        assert found.tables[name].column("parameter")
        assert "layers.1.extra" not in found.tables[name].column("parameter")


def test_a_study_that_does_not_exist_is_named_with_the_nearest():
    with pytest.raises(UserError, match=r"'updatez'.*updates"):
        diagnose(tower(), X, loss=square, studies=["updatez"])


def test_a_declared_warm_up_is_a_table_for_the_rules():
    declared, amid = tower(), tower()
    optimizer = torch.optim.Adam(amid.parameters(), lr=1e-3)
    square(amid, X).backward()
    optimizer.step()
    of = partial(diagnose, batch=X, loss=square, studies=["updates"], warmup_steps=10)
    assert of(declared, lr=1e-3).tables["plan"].rows == ({"warmup_steps": 10},)
    assert "plan" not in of(amid, optimizer=optimizer).tables, "that warm-up is over"


RISES = {
    "a function of the step": (lambda o: LambdaLR(o, lambda i: min(1, (i + 1) / 40)), 40, 1 / 40),
    "from a tenth": (lambda o: LinearLR(o, 0.1, total_iters=50), 51, 0.1),
    "from nothing": (lambda o: LambdaLR(o, lambda i: min(1, i / 20)), 21, 1 / 20),
    "one cycle": (lambda o: OneCycleLR(o, 0.2, total_steps=100, cycle_momentum=False), 30, 1 / 25),
}


def fast_setup():
    """A setup whose rate is too high for a first step."""
    model = translating("post").model
    return Setup(
        model, BATCH[:2], loss=labelled, optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.2)
    )


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("name", RISES)
def test_the_warm_up_of_a_scheduler_is_known(name, ready):
    (schedule, steps, share), setup = RISES[name], fast_setup()
    if ready:
        optimizer = setup.optimizer(setup.model)
        schedule = schedule(optimizer)
        setup = replace(setup, optimizer=optimizer)
    found = diagnose(replace(setup, scheduler=schedule), studies=["updates"])
    (plan,) = found.tables["plan"]
    assert plan["warmup_steps"] == steps
    assert plan["first_share"] == pytest.approx(share)
    (large,) = [f for f in found.findings if f.name == "large_update"]
    assert large.numbers["first_update"] == pytest.approx(large.numbers["update_over_weight"] * share)
    assert found.facts["optimizer"] == "Adam, lr 0.2"
    if ready:
        assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] < 0.2


def test_a_rate_that_only_falls_has_no_warm_up():
    found = diagnose(replace(fast_setup(), scheduler=lambda o: StepLR(o, 5)), studies=["updates"])
    assert "plan" not in found.tables
    (large,) = [f for f in found.findings if f.name == "large_update"]
    assert large.severity == "warning"


def test_a_study_that_fails_becomes_a_warning(monkeypatch):
    def fail(context):
        raise ZeroDivisionError("division\n by zero")

    broken = study.Study("scales", fail, "cheap")
    monkeypatch.setattr(study, "_STUDIES", {**study._STUDIES, "scales": broken})
    found = diagnose(tower(), X, loss=square, preset="cheap")
    (failed,) = [f for f in found.findings if f.name == "not_done" and "scales" in f.sentence]
    assert failed.severity == "warning"
    assert failed.sentence.endswith("ZeroDivisionError: division by zero")
    assert "sublayer_gradients" in found.tables


def test_a_model_without_attention_is_told_so():
    found = diagnose(tower(), X, loss=square, preset="cheap")
    (note,) = [f for f in found.findings if f.name == "not_done"]
    assert note.severity == "note"
    assert "study attention" in note.sentence
    assert "attn_implementation" not in note.sentence
    assert "attention" not in found.applied


class ItsOwnLoss(Tower):
    def forward(self, x):
        return super().forward(x).square().mean()


def test_a_model_that_returns_its_loss_alone_is_measured_as_any():
    torch.manual_seed(0)
    alone, beside = diagnose(ItsOwnLoss(), X, lr=1e-3), diagnose(tower(), X, loss=square, lr=1e-3)
    assert alone.tables == beside.tables
    assert alone.at_least("warning") == beside.at_least("warning")


@pytest.mark.parametrize("compiled", ["layers", "forward"])
def test_compiled_parts_are_measured_as_they_were_written(compiled):
    model = tower()
    if compiled == "layers":
        for layer in model.layers:
            layer.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    with torch.no_grad():
        model(X)
    found, plain = diagnose(model, X, loss=square, lr=1e-3), diagnose(tower(), X, loss=square, lr=1e-3)
    assert found.tables == plain.tables
    assert found.findings == plain.findings


class Hidden(Tower):
    """The same tower with some of its layers in a list of Python's."""

    def __init__(self, first):
        super().__init__(layers=4)
        self.blocks = list(self.layers[first:])
        self.layers = self.layers[:first]

    def forward(self, x):
        for layer in (*self.layers, *self.blocks):
            x = layer(x)
        return self.head(x)


class Sum(nn.Module):
    def forward(self, streams):
        return sum(streams)


class TwoEnds(Tower):
    """Two streams, equal here, whose sum is normed at the end."""

    def __init__(self):
        super().__init__(layers=6)
        self.end = nn.Sequential(Sum(), nn.LayerNorm(16))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.end((x, x)))


def test_a_sum_of_streams_before_the_last_norm_is_no_norm():
    found = diagnose(TwoEnds(), X, loss=square)
    assert [f.severity for f in found.findings if f.name == "not_done"] == ["note"], "there is no attention"
    assert found.structure.stacks[0].final_norm is None


def test_a_model_whose_every_layer_is_in_a_plain_list_is_told_so():
    model = Hidden(0)
    model.head = nn.Identity()
    with pytest.raises(UserError, match=r"\bblocks .*PostNorm"):
        diagnose(model, X, loss=square)


def test_layers_of_parameters_alone_are_pointed_out():
    class Functions(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(16, 16) / 8 for _ in range(4))

        def forward(self, x):
            for w in self.weights:
                x = x + nn.functional.linear(nn.functional.rms_norm(x, (16,)), w)
            return x

    with pytest.raises(UserError, match=r"\bweights\b"):
        diagnose(Functions(), X, loss=square)


def test_a_structure_may_be_given():
    model = tower()
    structure = read_structure(model, X, blocks="layers", branches=("branch",))
    found = diagnose(model, X, loss=square, preset="cheap", structure=structure)
    assert found.structure is structure
    assert {row["relation"] for row in found.tables["structure"]} == {
        view.relation for _, view in structure.sublayers
    }


# ---------------------------------------------------------------------------------- what cannot be diagnosed


def frozen():
    return tower().requires_grad_(requires_grad=False)


@pytest.mark.parametrize(
    ("model", "batch", "loss", "named"),
    [
        (tower, X[..., :5], square, "RuntimeError: mat1 and mat2"),
        (tower, {"y": X}, square, r"TypeError: linear\(\)"),
        (frozen, X, square, r"Tower.*requires_grad_\(\)"),
        (tower, X.to("meta"), square, "on cpu and the batch on meta"),
        (lambda: "bert", X, square, "'bert'"),
        (tower, X, None, "Tower.*loss=lambda model, batch"),
        (tower, X, lambda m, b: m(b), r"shape \[4, 6, 3\]"),
        (tower, X, lambda m, b: m(b).mean().item(), "float"),
        (tower, X, lambda m, b: m(b).mean().detach(), "no gradient"),
        (tower, X, lambda m, b: b["labels"], r"\w+Error.*loss=lambda"),
    ],
)
def test_what_cannot_be_diagnosed_is_said_with_what_to_do(model, batch, loss, named):
    with pytest.raises(ValueError, match=named):
        diagnose(model(), batch, loss=loss)


def test_a_preset_that_there_is_not():
    with pytest.raises(ValueError, match=r"'quick'.*cheap, .*full"):
        diagnose(tower(), X, loss=square, preset="quick")


def test_a_wrapper_is_looked_through():
    subject = translating("pre")
    found = diagnose(nn.DataParallel(subject.model), BATCH[:2], loss=labelled, preset="cheap")
    assert found.model == "Seq2Seq"
    assert replace(found, seconds={}).tables.keys() >= {"scales", "attention"}


def test_a_model_without_a_stream_and_a_loss_that_is_not_finite_are_refused():
    with pytest.raises(UserError, match=r"\bstream\b.*blocks="):
        diagnose(nn.Sequential(nn.Linear(16, 16)), X, loss=square, lr=1e-3)
    with pytest.raises(UserError, match="nan"):
        diagnose(tower(), X, loss=lambda m, b: square(m, b) * float("nan"))


# ------------------------------------------------------------------------------------------- one Setup


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def test_a_setup_is_diagnosed_as_its_parts_are():
    whole = diagnose(Setup(tower(), X, loss=square, optimizer=adam), preset="cheap")
    model = tower()
    parts = diagnose(model, X, loss=square, optimizer=adam(model), preset="cheap")
    assert to_plain(whole.tables) == to_plain(parts.tables)
    assert whole.facts == parts.facts


def test_a_setup_without_an_optimizer_is_stepped_at_its_rate():
    setup = Setup(tower(), X, loss=square, lr=3e-4)
    assert diagnose(setup, preset="cheap").facts["optimizer"] == "Adam, lr 3e-4"
    assert diagnose(setup, lr=1e-2, preset="cheap").facts["optimizer"] == "Adam, lr 1e-2"


@pytest.mark.parametrize(
    ("setup", "more", "named"),
    [
        (Setup(tower(), X, square), {"loss": square}, "Setup or a trainer alone"),
        (Setup(tower(), X, square), {"optimizer": adam}, "Setup or a trainer alone"),
        (Setup(tower(), X, square, adam), {"lr": 1e-3}, r"lr \(--lr\)"),
        (Setup(tower(), X, square, lambda m: [adam(m), adam(m)]), {}, "2 optimizers"),
        (tower(), {"loss": square}, "batch"),
    ],
)
def test_a_setup_with_more_than_it_holds_is_refused(setup, more, named):
    with pytest.raises(UserError, match=named):
        diagnose(setup, **more)

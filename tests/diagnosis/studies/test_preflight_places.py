"""What a preflight must tell apart: faults from sound models that look like them, and two faults from one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diagnosis.studies.test_preflight import BATCH, TEXT, VOCAB, Gpt, Labelled, layer, loss, preflight
from normlab.diagnosis import Diagnosis, diagnose
from normlab.diagnosis.plan import Start
from normlab.diagnosis.rules.finding import Finding, consequences
from normlab.diagnosis.studies import declared


def test_a_missing_mask_is_named_where_the_loss_shifts_the_tokens_itself():
    def shifted(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def examined(model: nn.Module, loss) -> Diagnosis:
        return diagnose(model, TEXT, loss=loss, lr=1e-3, preset="preflight")

    open_ = Gpt()
    open_.layers[3].attention.causal = False
    found = examined(open_, shifted).cause
    assert found is not None
    assert (found.name, found.module) == ("causal_leak", "layers.3.attention")
    assert examined(Gpt(), shifted).cause is None
    own = examined(open_, lambda model, x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()))
    assert "causal_leak" not in {f.name for f in own.findings}, "each token is asked for itself"


def test_a_number_that_is_called_after_a_drop_is_no_dropout():
    model = Labelled()
    layer(model, 2).drop_every_steps, layer(model, 3).dropout_seed = 4, 1
    assert preflight(model).cause is None
    layer(model, 4).attention_dropout = 1.0
    found = preflight(model).cause
    assert found is not None
    assert (found.name, found.module) == ("dropout", "gpt.layers.4")


def test_two_faults_have_two_findings_and_the_first_line_is_the_earlier_one():
    model = Labelled()
    with torch.no_grad():
        for matrix in (layer(model, 1).attention.qkv, layer(model, 1).attention.out):
            matrix.weight.mul_(40)
        layer(model, 4).norm2.weight.mul_(5)
    found = preflight(model)
    assert found.cause is not None
    assert found.cause.layer == 1
    folded = consequences(found.findings, found.cause)
    apart = [f for f in found.at_least("warning") if f is not found.cause and f not in folded]
    assert any(f.layer == 4 for f in apart)


@pytest.mark.parametrize("number_first", [True, False])
def test_the_only_number_in_a_tuple_is_the_loss(number_first):
    class Both(Labelled):
        def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.gpt(ids)
            value = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return (value, logits) if number_first else (logits, value)

    assert diagnose(Both(), BATCH, lr=1e-3, preset="preflight").cause is None


def truncated(std: float, at: float) -> Labelled:
    model = Labelled()
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.trunc_normal_(p, std=std, a=-at * std, b=at * std)
    return model


def test_a_truncated_start_may_be_declared_by_its_argument_or_by_what_is_left():
    everywhere = {role: Start(0.05) for role in ("embedding", "output", "ffn_in", "ffn_out", "query", "qkv")}
    for std in (0.05, 0.05 / declared.truncated(2.0)):
        found = preflight(truncated(std, 2.0), declared=everywhere, truncated_at=2.0)
        assert [str(f) for f in found.findings if f.name == "unlike_declared"] == []
    whole = preflight(Labelled(), declared=everywhere, truncated_at=2.0).cause
    assert whole is not None
    assert "truncation at 2" in whole.sentence


def test_the_deviation_of_a_truncated_normal_is_that_of_samples():
    x = nn.init.trunc_normal_(torch.empty(100_000), a=-1.5, b=1.5)
    assert declared.truncated(1.5) == pytest.approx(x.std().item(), rel=0.01)
    assert declared.truncated(2.0) == pytest.approx(0.88, abs=0.001)


def zeroed(*names: str) -> Labelled:
    """A GPT in whose layers these parts, the matrices and their biases, begin at zero."""
    model = Labelled()
    for block in model.gpt.layers:
        for name in names:
            for p in block.get_submodule(name).parameters():
                nn.init.zeros_(p)
    return model


def test_two_matrices_that_are_both_zero_are_named_and_one_is_not():
    found = preflight(zeroed("up", "down")).cause
    assert found is not None
    assert (found.name, found.module) == ("dead_zero", "gpt.layers.0.up")
    assert "and 11 other matrices are zero" in found.sentence
    for one in (zeroed("down"), zeroed("up"), zeroed("attention.out")):
        names = {f.name for f in preflight(one).findings}
        assert not names & {"dead_zero", "no_activation"}
    both = {f.name for f in preflight(zeroed("attention.qkv", "attention.out")).at_least("problem")}
    assert "dead_zero" in both


def test_a_small_difference_from_a_declared_start_is_a_warning_and_a_large_one_a_problem():
    found = {}
    for std in (0.05, 0.06, 0.2):
        plan = {"embedding": Start(std)}
        named = [f for f in preflight(Labelled(), declared=plan).findings if f.name == "unlike_declared"]
        found[std] = [f.severity for f in named]
    assert found == {0.05: [], 0.06: ["warning"], 0.2: ["problem"]}


def test_the_first_line_is_as_severe_as_the_gravest_of_what_it_explains():
    def one(name: str, severity: str, **more) -> Finding:
        return Finding(name, severity, f"{name} is so", "weights", {}, **more)

    model = Labelled()
    sound = preflight(model)
    folded = replace(sound, findings=(one("b", "problem"), one("a", "warning", explains=("b",), layer=2)))
    assert folded.verdict == "problem: a is so (layer 2)"
    assert folded.to_plain()["cause"]["gravest"] == "problem"
    assert sound.severity == ""


@pytest.mark.parametrize(("rows", "found"), [(0, None), (5, "odd_rows"), (VOCAB, None)])
def test_rows_that_were_added_in_another_size_are_named(rows, found):
    model = Labelled()
    with torch.no_grad():
        model.gpt.embedding.weight[VOCAB - rows :] *= 20
    odd = [f for f in preflight(model).findings if f.name == "odd_rows"]
    assert [(f.name, f.module, f.numbers["rows"]) for f in odd] == (
        [(found, "gpt.embedding", rows)] if found else []
    )
    assert all(f.numbers["factor"] == pytest.approx(20, rel=0.3) for f in odd)


def test_matrices_that_are_drawn_with_a_deviation_of_one_are_named_and_wide_ones_with_a_usual_one_not():
    large = nn.init.normal_(nn.Linear(64, 64).weight)
    found = [f for f in rules_of(large) if f.name == "drawn_too_large"]
    assert [f.module for f in found] == ["layers.0"]
    assert found[0].numbers["amplifies"] == pytest.approx(8, rel=0.1)
    for usual in (nn.init.xavier_normal_, nn.init.kaiming_normal_, partial(nn.init.normal_, std=0.02)):
        assert not rules_of(usual(nn.Linear(64, 64).weight))


def rules_of(weight):
    """What is said of a model whose first matrix is this one."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    with torch.no_grad():
        model.layers[0].weight.copy_(weight)
    model.forward = lambda x: model.layers[1](model.layers[0](x).relu())
    found = diagnose(model, torch.randn(4, 64), lr=1e-3, preset="preflight",
                     loss=lambda model, x: model(x).square().mean())  # fmt: skip
    return [f for f in found.at_least("warning") if f.table == "weights"]


def test_labels_that_are_all_ignored_are_named():
    batch = {**BATCH, "labels": torch.full_like(BATCH["labels"], -100)}
    found = diagnose(Labelled(), batch, loss=loss, lr=1e-3, preset="preflight")
    assert found.cause is not None
    assert (found.cause.name, found.cause.numbers["labels"]) == ("no_labels", BATCH["labels"].numel())


def test_layers_that_compute_without_a_graph_are_named():
    model = Labelled()
    model.gpt.embedding.requires_grad_(False)
    model.gpt.head.weight = nn.Parameter(model.gpt.head.weight.detach().clone())
    for one in model.gpt.layers:
        one.forward = partial(checkpoint, one.forward, use_reentrant=True)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        cause = preflight(model).cause
    assert cause is not None
    assert (cause.name, cause.module) == ("cut_gradient", "gpt.layers")
    assert cause.numbers["parameters"] == len(list(model.gpt.layers.parameters()))


def test_a_frozen_embedding_of_words_is_a_warning_and_one_of_positions_none():
    model = Labelled()
    model.gpt.position = nn.Embedding(4, 4).requires_grad_(False)
    assert preflight(model).cause is None
    model.gpt.embedding.requires_grad_(False)
    cause = preflight(model).cause
    assert cause is not None
    assert (cause.name, cause.severity, cause.module) == ("frozen_embedding", "warning", "gpt.embedding")
    assert "gpt.head" in cause.sentence


def test_an_embedding_that_is_frozen_with_much_else_is_no_fault():
    model = Labelled()
    model.gpt.embedding.requires_grad_(False)
    for one in model.gpt.layers[:3]:
        one.requires_grad_(False)
    assert "frozen_embedding" not in [f.name for f in preflight(model).findings]


class Rectified(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).relu()


def test_logits_behind_a_relu_are_named_and_logits_that_are_all_zero_not():
    model = Labelled()
    model.gpt.__class__ = Rectified
    cause = preflight(model).cause
    assert cause is not None
    assert cause.name == "cut_logits"
    assert cause.numbers["cut"] == pytest.approx(0.5, abs=0.1)
    zero = Labelled()
    zero.gpt.head.weight = nn.Parameter(torch.zeros(VOCAB, zero.gpt.head.in_features))
    assert "cut_logits" not in [f.name for f in preflight(zero).findings]


class DropConnect(nn.Module):
    """A dropout that is not torch's."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)


@pytest.mark.parametrize(("p", "severity"), [(0.1, None), (0.9, "warning"), (1.0, "problem")])
def test_a_dropout_of_a_class_of_its_own_is_read(p, severity):
    model = Labelled()
    layer(model, 2).drop = DropConnect(p)
    cause = preflight(model).cause
    assert (cause.severity if cause else None) == severity
    assert cause is None or (cause.name, cause.module) == ("dropout", "gpt.layers.2.drop")


def test_an_optimiser_of_some_of_the_parameters_that_it_is_given_is_measured():
    model = Labelled()

    def of_the_last(parameters):
        return torch.optim.Adam(parameters[-4:], lr=1e-3)

    cause = diagnose(model, BATCH, loss=loss, optimiser=of_the_last, preset="preflight").cause
    assert cause is not None
    assert cause.name == "not_stepped"
    assert cause.numbers["parameters"] > 40


class WithMask(Gpt):
    """Holds a vector that is only used where something is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.masked = nn.Parameter(torch.zeros(4))


def test_a_parameter_that_this_batch_does_not_use_is_no_cut():
    model = Labelled()
    model.gpt = WithMask()
    assert "cut_gradient" not in [f.name for f in preflight(model).findings]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_layers_behind_sound_checkpoints_are_not_cut():
    model = Labelled()
    for one in model.gpt.layers:
        one.forward = partial(checkpoint, one.forward, use_reentrant=True)
    assert "cut_gradient" not in [f.name for f in preflight(model).findings]


class UnitScaled(nn.Linear):
    """A map whose weights have a deviation of one, and which divides by the root of its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.in_features**0.5, self.bias)


def test_weights_of_unit_deviation_are_sound_where_their_module_scales_them_or_is_no_linear_map():
    model = nn.Module()
    model.layers = nn.ModuleList([UnitScaled(64, 64), nn.Linear(64, 64)])
    model.latents = nn.Parameter(torch.randn(64, 64))
    nn.init.normal_(model.layers[0].weight)
    model.forward = lambda x: model.layers[1](model.layers[0](x + model.latents[:4]).relu())
    found = diagnose(model, torch.randn(4, 64), lr=1e-3, preset="preflight",
                     loss=lambda model, x: model(x).square().mean())  # fmt: skip
    assert "drawn_too_large" not in [f.name for f in found.findings]


def test_a_head_that_is_tied_to_an_embedding_of_unit_deviation_is_no_matrix_drawn_too_large():
    model = Labelled()
    nn.init.normal_(model.gpt.embedding.weight, std=2.0)
    names = [f.name for f in preflight(model).findings]
    assert "drawn_too_large" not in names
    assert "initial_loss" in names  # which is what is wrong with it where nothing scales it down


def test_an_output_that_is_cut_on_purpose_is_no_fault_without_a_cross_entropy():
    model = Labelled()
    model.gpt.__class__ = Rectified
    found = diagnose(model, BATCH, loss=lambda m, b: m(**b).amax(1).square().mean(), lr=1e-3,
                     preset="preflight")  # fmt: skip
    assert "cut_logits" not in [f.name for f in found.findings]

"""Gradients are derivatives, reach every trainable part, and nothing between trained parts is frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cases import each

from .test_structure import Attending
from .tiny import DIM, LENGTH, VOCAB, Block, Decoder, first, loss_of, report_of, tokens


class Wrong(torch.autograd.Function):
    """The identity, with a gradient that is a little too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 1.001 * g


class Attach(torch.autograd.Function):
    """The identity, which also gives a number a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, torch.ones((), dtype=g.dtype)


class Sums(torch.autograd.Function):
    """The input, and its sum over features, which may be left unused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x.sum(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        return g + h[..., None]


class Changed(Block):
    def __init__(self, change: Any):
        super().__init__()
        self.change, self.spare = change, None

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, x)


def with_block(change: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder()
    model.blocks[2] = Changed(change)
    return model


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    return Block.forward(block, x)


@pytest.mark.parametrize("name", ["derivative", "gradients", "frozen"])
def test_they_hold_for_a_sound_model(name: str):
    assert report_of(name).holds == (name,)


def test_a_wrong_backward_is_named_at_what_it_reaches_first():
    model = with_block(lambda block, x: x + block.down(block.up(Wrong.apply(block.norm(x)))))
    assert first(report_of("derivative", model=model)) == ("derivative", "blocks.2.norm.bias")


def test_a_wrong_backward_in_training_alone_is_named():
    def wrong(block: nn.Module, x: Tensor) -> Tensor:
        y = block.norm(x)
        return x + block.down(block.up(Wrong.apply(y) if block.training else y))

    assert first(report_of("derivative", model=with_block(wrong))) == ("derivative", "blocks.2.norm.bias")


def test_the_row_of_padding_keeps_the_gradient_that_a_lookup_drops():
    model = Decoder(0.0)
    model.embed = nn.Embedding(VOCAB, DIM, padding_idx=0)
    model.head.weight = model.embed.weight
    ids = tokens()
    ids[:, -3:] = 0
    assert report_of("derivative", model=model, batches=ids).holds == ("derivative",)


@pytest.mark.slow
def test_a_detached_branch_is_named():
    model = with_block(lambda block, x: x + block.down(block.up(block.norm(x.detach()))))
    assert first(report_of("derivative", model=model))[1].startswith("blocks.1")
    model = with_block(lambda block, x: x + block.down(block.up(block.norm(x).detach())))
    report = report_of("derivative", "gradients", model=model)
    assert first(report) == ("gradients", "blocks.2.norm.weight")
    assert [v.property for v in report.failures[0].follows] == ["derivative"]


def by_detach(x: Tensor) -> Tensor:
    return x.detach()


def by_data(x: Tensor) -> Tensor:
    return x.data


def of_norm(weight: Tensor, cut: Any) -> Tensor:
    return cut(weight.norm(dim=1, keepdim=True))


def without_graph(weight: Tensor, cut: Any) -> Tensor:
    with torch.no_grad():
        return weight.norm(dim=1, keepdim=True)


class Decomposed(nn.Linear):
    """A map of low rank on top of another whose rows have lengths of their own, as in DoRA (Liu et al. 2024,
    section 4.3, 2402.09353): the norm that they are divided by is taken for a constant.
    """

    def __init__(self, of: nn.Linear, length: Any = of_norm, cut: Any = by_detach):
        super().__init__(of.in_features, of.out_features)
        self.down, self.up = nn.Parameter(torch.randn(2, DIM)), nn.Parameter(torch.randn(32, 2))
        self.lengths = nn.Parameter(torch.ones(32, 1))
        self.length, self.cut = length, cut

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 0.1 * self.up @ self.down
        return nn.functional.linear(x, self.lengths * weight / self.length(weight, self.cut), self.bias)


def decomposed(*cut: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder()
    for block in model.blocks[1:3]:
        block.up = Decomposed(block.up, *cut)
    return model


CUTS = [(of_norm, by_detach), (of_norm, by_data), (without_graph, by_detach)]


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_a_detached_scale_is_named_with_its_module_unless_it_is_declared(cut: Any):
    report = report_of("derivative", model=decomposed(*cut))
    assert first(report)[0] == "derivative"
    assert "blocks.1.up, blocks.2.up" in report.failures[0].evidence
    for declare in ({"detached": "*.up"}, {"frozen": ["*.up.weight", "*.up.down", "*.up.up"]}):
        assert report_of("derivative", model=decomposed(*cut), declare=declare).holds == ("derivative",)
    report = report_of("derivative", model=decomposed(*cut), declare={"detached": "blocks.1.*"})
    assert first(report)[0] == "derivative"
    assert "blocks.1.up" not in report.failures[0].evidence


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_what_a_library_detaches_is_a_note(cut: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("normlab.checks.gradients.is_installed", lambda file: file == __file__)
    report = report_of("derivative", model=decomposed(*cut))
    assert report.holds == ("derivative",)
    assert [n.module for n in report.notes] == ["blocks.1.up"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("added", "holds"),
    [
        (lambda losses: 0.01, True),
        (lambda losses: losses.new_tensor(0.01), True),
        (lambda losses: 0.5 * losses.mean().detach(), False),
    ],
    ids=["a number", "a tensor", "a term that is cut off"],
)
def test_weights_detached_in_the_loss_define_it_whatever_number_is_added(added: Any, *, holds: bool):
    def focal(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids[:, :-1])
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return (losses * (1 - (-losses).exp()).detach()).mean() + added(losses)

    report = report_of("derivative", loss=focal)
    assert (report.holds == ("derivative",)) is holds


class Probed(Decoder):
    """Classifies what its last block gives, which is no part of its training."""

    def __init__(self):
        super().__init__(0.0)
        self.probe = nn.Linear(DIM, 3)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x), self.probe(x.detach())


def of_both(model: nn.Module, ids: Tensor) -> Tensor:
    logits, classes = model(ids[:, :-1])
    probed = F.cross_entropy(classes.transpose(1, 2), ids[:, 1:] % 3)
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:]) + probed


def optimizers(*parts: str) -> Any:
    """One optimizer for each part of a model, and one for all the others."""

    def made(model: nn.Module) -> list[torch.optim.Optimizer]:
        of_parts = [[p for n, p in model.named_parameters() if n.startswith(part)] for part in parts]
        held = {id(p) for parameters in of_parts for p in parameters}
        others = [p for p in model.parameters() if id(p) not in held]
        return [torch.optim.SGD(parameters, lr=1e-3) for parameters in (*of_parts, others)]

    return made


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "holds"), [(["probe"], True), ([], False), (["blocks"], False)])
def test_what_a_probe_with_its_own_optimizer_reads_is_a_constant(parts: list[str], *, holds: bool):
    torch.manual_seed(0)
    names = ("derivative", "explained")
    report = report_of(*names, model=Probed(), loss=of_both, optimizer=optimizers(*parts))
    assert report.holds == (names if holds else ("explained",))
    assert [(n.property, n.module) for n in report.notes] == ([("derivative", "loss")] if holds else [])


def test_a_part_that_is_detached_beside_another_is_no_term_of_the_loss():
    def bounded(model: nn.Module, ids: Tensor) -> Tensor:
        mean, spread = model(ids[:, :-1])[..., 1:].chunk(2, -1)
        mean_held, spread = torch.cat([mean.detach(), spread], -1).chunk(2, -1)  # as DiT does
        bound = spread + (mean_held - 1).square() * (-spread).exp()
        return (mean - 1).square().mean() + bound.mean()

    report = report_of("derivative", loss=bounded)
    assert report.holds == ("derivative",)
    assert report.notes


@pytest.mark.slow
def test_a_cut_term_that_is_stacked_with_others_is_found():
    def stacked(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids[:, :-1])
        return torch.stack([logits.square().mean(), logits.exp().mean().detach()]).mean()

    assert first(report_of("derivative", loss=stacked))[0] == "derivative"


@pytest.mark.slow
def test_a_wrong_gradient_beside_what_is_meant_is_found():
    model = decomposed()
    model.blocks[3] = Changed(lambda block, x: x + Wrong.apply(block.down(block.up(x))))
    report = report_of("derivative", model=model, declare={"detached": "*.up"})
    assert first(report) == ("derivative", "blocks.3.down.bias")
    assert "detached" not in report.failures[0].evidence


@pytest.mark.slow
def test_nothing_changes_where_a_graph_is_left_whole():
    model = decomposed()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    report_of("derivative", model=model)
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_a_straight_through_gradient_and_an_attached_one_are_noted():
    def rounded(block: nn.Module, x: Tensor) -> Tensor:
        y = block.norm(x)
        return block.down(block.up(y + ((10 * y).round() / 10 - y).detach()))

    assert report_of("derivative", model=with_block(rounded)).ok
    attached = with_block(lambda b, x: plainly(b, Attach.apply(x, 0.1 * b.up.weight.square().mean())))
    report = report_of("derivative", "gradients", model=attached)
    assert report.ok
    assert report.notes


def test_what_is_attached_to_nothing_is_named():
    def thrown(block: nn.Module, x: Tensor) -> Tensor:
        Attach.apply(x, block.up.weight.square().mean())
        return plainly(block, x)

    assert first(report_of("gradients", model=with_block(thrown))) == ("gradients", "blocks.2")


def test_a_result_that_is_left_beside_another_holds_and_a_number_that_is_kept_is_noted():
    assert report_of("gradients", model=with_block(lambda b, x: plainly(b, Sums.apply(x)[0]))).holds

    def kept(block: nn.Module, x: Tensor) -> Tensor:
        block.spare = block.up.weight.square().mean()
        return plainly(block, x)

    report = report_of("gradients", model=with_block(kept))
    assert report.ok
    assert [note.module for note in report.notes] == ["blocks.2"]


@pytest.mark.parametrize("rows", [slice(None, LENGTH - 1), slice(-(LENGTH - 1), None)])
def test_a_table_of_positions_may_be_read_from_either_end(rows: slice):
    model = with_block(lambda block, x: plainly(block, x + block.table[rows]))
    model.blocks[2].table = nn.Parameter(torch.randn(5 * (LENGTH - 1), DIM))
    assert report_of("gradients", model=model).holds == ("gradients",)


class Rankless(nn.Module):
    """A matrix beside an adapter of rank 0."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(DIM, DIM)
        self.a, self.b = nn.Parameter(torch.empty(0, DIM)), nn.Parameter(torch.empty(DIM, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix(x) + x @ self.a.T @ self.b.T


class Classless(nn.Module):
    """A head of no classes, whose outputs are added up."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight.T).sum(-1, keepdim=True)


class Unused(nn.Module):
    """Holds a vector of no entries, which nothing reads."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.slow
@each("part", [Rankless, Classless, Unused], ids=lambda cls: cls.__name__)
@each("held", [True, False])
def test_there_is_nothing_to_train_in_a_parameter_without_entries(part, held):
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        grouped_parameters = [p for p in model.parameters() if held or p.numel()]
        vectors = {"params": [p for p in grouped_parameters if p.ndim < 2], "weight_decay": 0.0}
        return torch.optim.AdamW([{"params": [p for p in grouped_parameters if p.ndim > 1]}, vectors])

    model = with_block(lambda block, x: plainly(block, block.spare(x)))
    model.blocks[2].spare = part()
    names = "gradients", "derivative", "optimizer_coverage", "groups", "update", "overfit"
    assert {*report_of(*names, model=model, optimizer=grouped).holds} == {*names}


def test_a_parameter_that_is_never_used_is_named():
    model = Decoder()
    model.blocks[1].scale = nn.Parameter(torch.ones(DIM))
    assert first(report_of("gradients", model=model)) == ("gradients", "blocks.1.scale")


def test_reentrant_checkpoints_without_a_gradient_at_their_input_are_named():
    class Checkpointed(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True) if self.training else block(x)
            return self.head(self.norm(x))

    model = Checkpointed()
    model.embed.requires_grad_(requires_grad=False)
    assert first(report_of("gradients", model=model)) == ("gradients", "blocks.0.norm.weight")


def test_an_expert_without_a_token_is_noted():
    def routed(block: nn.Module, x: Tensor) -> Tensor:
        return plainly(block, x) + block.experts[0](x)

    model = with_block(routed)
    model.blocks[2].experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
    report = report_of("gradients", model=model)
    assert report.ok
    assert report.notes


def test_a_part_that_nothing_runs_is_no_expert_beside_parts_that_run():
    """Sublayers in a list are no alternatives: each of them runs."""

    def listed(block: nn.Module, x: Tensor) -> Tensor:
        x = x + block.parts[0]["map"](block.parts[0]["norm"](x))
        return plainly(block, x) + block.parts[1]["map"](x)

    model = with_block(listed)
    parts = ({"norm": nn.LayerNorm(DIM), "map": nn.Linear(DIM, DIM)} for _ in range(2))
    model.blocks[2].parts = nn.ModuleList(nn.ModuleDict(part) for part in parts)
    assert first(report_of("gradients", model=model)) == ("gradients", "blocks.2.parts.1.norm.weight")


def test_rows_of_a_matrix_that_nothing_reads_are_named():
    def half(block: nn.Module, x: Tensor) -> Tensor:
        y = block.up(block.norm(x))
        return x + block.down(torch.cat([y[..., :24].sin(), torch.zeros_like(y[..., 24:])], -1))

    report = report_of("gradients", model=with_block(half))
    assert first(report) == ("gradients", "blocks.2.up.weight")


def test_columns_of_a_matrix_that_read_nothing_are_named():
    def half(block: nn.Module, x: Tensor) -> Tensor:
        y = block.norm(x)
        return x + block.down(block.up(torch.cat([y[..., :8], torch.zeros_like(y[..., 8:])], -1)).sin())

    report = report_of("gradients", model=with_block(half))
    assert first(report) == ("gradients", "blocks.2.up.weight")


def test_a_zero_start_may_wake_and_two_that_multiply_each_other_may_not():
    def adapted(block: nn.Module, x: Tensor) -> Tensor:
        return plainly(block, x) + x @ block.a @ block.b

    for start, ok in ((torch.randn(DIM, 2), True), (torch.zeros(DIM, 2), False)):
        model = with_block(adapted)
        model.blocks[2].a, model.blocks[2].b = nn.Parameter(start), nn.Parameter(torch.zeros(2, DIM))
        report = report_of("gradients", model=model)
        assert report.ok is ok
    assert first(report) == ("gradients", "blocks.2.a")


def test_a_loss_without_a_gradient_is_named():
    report = report_of("gradients", loss=lambda model, ids: loss_of(model, ids).detach())
    assert first(report) == ("gradients", "loss")


# ------------------------------------------------------------------------------------------- surrogates
class Passed(torch.autograd.Function):
    """Rounds, and passes the gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def levels(x: Tensor) -> Tensor:
    return x + ((4 * x).round() / 4 - x).detach()


def signs(x: Tensor) -> Tensor:
    return x.sign().detach() - x.tanh().detach() + x.tanh()


def turned(x: Tensor) -> Tensor:
    """Scale what is read to the length of its nearest level, by a factor that is taken for a constant."""
    return x * ((4 * x).round() / (4 * x)).detach()


def chosen(x: Tensor) -> Tensor:
    return nn.functional.gumbel_softmax(x, hard=True)


def by_own_function(x: Tensor) -> Tensor:
    return Passed.apply(4 * x) / 4


class Quantized(Block):
    """A block whose features are quantized, with a term of the loss that trains what is quantized."""

    def __init__(self, quantize: Any, *, wrong: bool = False):
        super().__init__()
        self.ask, self.quantize, self.wrong = nn.Linear(DIM, 8), quantize, wrong
        self.table = nn.Parameter(torch.randn(8, DIM))
        self.term = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        asked = self.ask(self.norm(x))
        self.term = asked.square().mean()
        asked = Wrong.apply(asked) if self.wrong else asked
        y = super().forward(x)
        return y + self.quantize(asked) @ self.table + (asked * self.wrong) @ self.table


class Coded(Block):
    """A block that reads the nearest entries of a codebook, and itself computes what they and their reader
    cost, each with the other as a constant.
    """

    def __init__(self, *, by_row: bool = False, cut_off: bool = False):
        super().__init__()
        self.codes, self.by_row, self.cut_off = nn.Parameter(torch.randn(7, DIM)), by_row, cut_off
        self.term = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        nearest = self.codes[torch.cdist(z.flatten(0, 1), self.codes).argmin(-1)].view_as(z)
        apart = (nearest - z.detach()).square() + 0.3 * (nearest.detach() - z).square()
        self.term = apart.flatten(1).mean(-1).mean() if self.by_row else apart.mean()
        straight = z + (nearest - z).detach()
        y = self.down(self.up(straight).tanh())
        return x + (y.detach() if self.cut_off else y)


def with_quantized(block: nn.Module) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(0.0)
    model.blocks[1] = block
    return model


def with_term(model: Any, ids: Tensor) -> Tensor:
    return loss_of(model, ids) + 0.1 * model.blocks[1].term


@pytest.mark.parametrize("quantize", [levels, signs, turned, chosen, by_own_function])
def test_what_passes_straight_through_a_quantizer_is_a_note_though_a_term_trains_it_too(quantize: Any):
    report = report_of("derivative", model=with_quantized(Quantized(quantize)), loss=with_term)
    assert report.holds == ("derivative",)
    assert report.notes


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [levels, chosen])
def test_a_wrong_gradient_beside_a_surrogate_is_found(quantize: Any):
    model = with_quantized(Quantized(quantize, wrong=True))
    report = report_of("derivative", model=model, loss=with_term)
    assert first(report)[0] == "derivative"
    assert first(report)[1].startswith("blocks.1.")


@pytest.mark.slow
@pytest.mark.parametrize("by_row", [True, False])
def test_a_codebook_whose_module_computes_its_cost_is_a_note(by_row: Any):
    report = report_of("derivative", model=with_quantized(Coded(by_row=by_row)), loss=with_term)
    assert report.holds == ("derivative",)
    assert {note.module for note in report.notes} >= {"loss"}


@pytest.mark.slow
def test_a_branch_that_is_cut_off_behind_a_codebook_is_named():
    report = report_of("derivative", model=with_quantized(Coded(cut_off=True)), loss=with_term)
    assert first(report)[0] == "derivative"


# ---------------------------------------------------------------------------------------------- frozen
def frozen(*paths: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder()
    for path in paths:
        model.get_submodule(path).requires_grad_(requires_grad=False)
    return model


def test_what_is_frozen_between_trained_blocks_is_named_unless_declared():
    assert first(report_of("frozen", model=frozen("blocks.2"))) == ("frozen", "blocks.2.norm.weight")
    assert report_of("frozen", model=frozen("blocks.2"), declare={"frozen": "blocks.2.*"}).ok


@pytest.mark.parametrize(
    ("declared", "place"), [("embed*", "blocks.0.norm.weight"), (["embed*", "blocks.0.*"], "")]
)
def test_what_is_declared_frozen_is_all_that_is(declared: Any, place: str):
    report = report_of("frozen", model=frozen("embed", "blocks.0"), declare={"frozen": declared})
    assert first(report)[1] == place


def partly_without_head(model: nn.Module, ids: Tensor) -> Tensor:
    """A loss from a part of which the head is cut off."""
    logits = model(ids[:, :-1])
    scores = F.linear(model.norm(model.embed(ids[:, :-1])), model.head.weight.detach())
    return F.cross_entropy((logits + scores).transpose(1, 2), ids[:, 1:])


def test_a_declaration_of_what_is_cut_off_says_nothing_of_what_is_frozen():
    declared = {"frozen": "head*", "trained": True}
    report = report_of(
        "frozen", model=frozen("embed", "blocks.0"), loss=partly_without_head, declare=declared
    )
    assert report.holds == ("frozen",)


def test_a_frozen_bottom_and_frozen_blocks_hold():
    assert report_of("frozen", model=frozen("embed", "blocks.0")).holds == ("frozen",)
    assert report_of("frozen", model=frozen("embed", "blocks")).holds == ("frozen",)


def test_a_table_that_is_frozen_as_it_was_drawn_is_named():
    assert first(report_of("frozen", model=frozen("embed"))) == ("frozen", "embed.weight")
    report = report_of("frozen", model=frozen("embed"), declare={"trained": True})
    assert report.holds == ("frozen",)


def test_a_part_of_a_matrix_may_be_as_long_as_the_rows():
    class Same(Attending):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(q, q)

    model = Decoder()
    model.blocks[1] = Same()
    ids = torch.randint(1, VOCAB, (4, DIM + 1), generator=torch.Generator().manual_seed(0))
    report = report_of("gradients", model=model, batches=ids)
    assert first(report) == ("gradients", "blocks.1.qkv.weight")
    assert f"{DIM} to {2 * DIM - 1}" in report.failures[0].evidence


@pytest.mark.parametrize("pattern", ["spare.*", "*"])
def test_what_is_declared_frozen_together_with_what_trains_needs_a_gradient(pattern: str):
    model = Decoder(0.0)
    model.spare = nn.Linear(DIM, DIM)
    report = report_of("gradients", model=model, declare={"frozen": [pattern]})
    assert first(report) == (("", "") if pattern == "spare.*" else ("gradients", "spare.weight"))


def test_signs_that_add_up_to_nothing_over_the_rows_are_no_cut():
    """From an absolute error, a bias of the output gets as many ones as minus ones."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, above = batch
        return (model(ids)[:, -1].mean(-1) - above).abs().mean()

    model = Decoder(0.0)
    model.head = nn.Linear(DIM, VOCAB)
    ids = torch.randint(1, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    far = torch.tensor([50.0, -50.0, 50.0, -50.0])
    assert first(report_of("gradients", model=model, batches=(ids, far), loss=loss)) == ("", "")


@pytest.mark.slow
def test_a_divergence_from_what_is_detached_defines_the_loss():
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids[:, :-1])
        earlier = model.head(model.embed(ids[:, :-1]))
        meant = logits.detach().softmax(-1)
        follows = F.kl_div(earlier.log_softmax(-1), meant, reduction="batchmean")
        return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:]) + follows

    assert report_of("derivative", model=Decoder(0.0), loss=loss).holds == ("derivative",)


def test_what_is_declared_frozen_is_frozen():
    trained = report_of("frozen", model=Decoder(0.0), declare={"frozen": "blocks.0.*"})
    assert first(trained) == ("frozen", "blocks.0.norm.weight")
    model = Decoder(0.0)
    model.blocks[0].requires_grad_(False)
    assert report_of("frozen", model=model, declare={"frozen": "blocks.0.*"}).holds == ("frozen",)


def test_what_a_part_of_the_loss_is_cut_off_from_may_be_declared():
    declared = {"frozen": "head.weight"}
    report = report_of("frozen", model=Decoder(0.0), loss=partly_without_head, declare=declared)
    assert report.holds == ("frozen",)

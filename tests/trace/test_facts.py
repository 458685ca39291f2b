"""The facts of a step: each is read rightly, or said to be unknown."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases import each
from normlab.nn.kernels import linear as kernels_linear
from normlab.setups.setup import Declaration
from normlab.trace.compare import part_of, rounded
from normlab.trace.facts import Unknown
from normlab.trace.facts.documents import restarts
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.padding import real_tokens
from normlab.trace.facts.targets import read_targets
from normlab.trace.trace import Trace, output_loss

VOCAB, WIDTH = 23, 8


class Residual(nn.Linear):
    """A block that adds a map of its input to the input; without the gain it would be no more than a map."""

    def __init__(self, wide, narrow):
        super().__init__(wide, narrow)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.gain * super().forward(x)


class Reader(nn.Module):
    """Looks tokens up, adds what a mask or segments give, and puts out logits."""

    def __init__(self, *, rows_second=False, padding_idx=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=padding_idx)
        self.segments = nn.Embedding(3, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Residual(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.rows_second = rows_second

    def forward(self, ids, mask=None, segments=None, documents=None, positions=None):
        ids = ids.T if self.rows_second else ids
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for extra in (mask, documents):
            x = x if extra is None else x + 0.01 * extra.to(x)[..., None]
        x = x if segments is None else x + self.segments(segments)
        x = x if positions is None else x + 0.1 * positions.to(x)[..., None]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits.transpose(0, 1) if self.rows_second else logits


def ids(*, rows=4, width=12, seed=0):
    return torch.randint(3, VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed))


def next_token(model, batch):
    batch = batch if isinstance(batch, dict) else {"ids": batch}
    logits = model(**batch)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def facts(batch, *, loss=next_token, model=None, **declared):
    return Facts(Trace(model or Reader(), batch, loss), Declaration.of(declared))


# ------------------------------------------------------------------------------------------------ targets
def gradient(logits, loss):
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(loss(logits), logits)[0]


@pytest.fixture
def logits():
    return torch.randn(3, 5, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("penalty", [0.0, 1e-2])
def test_targets_are_read_off_the_gradient(logits, smoothing, penalty):
    asked = ids(rows=3, width=5)
    asked[0, 2:] = -100

    def loss(z):
        mean = F.cross_entropy(z.flatten(0, 1), asked.flatten(), label_smoothing=smoothing)
        return mean + penalty * z.logsumexp(-1)[asked >= 0].square().mean()

    read = read_targets(logits, gradient(logits, loss))
    assert read is not None
    assert torch.equal(read.counted, asked >= 0)
    assert torch.equal(read.ids[read.counted], asked[asked >= 0])
    assert read.weight[read.counted].sum() == pytest.approx(1, abs=1e-6)
    assert read.smoothing == pytest.approx(smoothing, abs=1e-6)
    assert (read.excess > 1e-4) == bool(penalty)


def test_weights_of_positions_are_read(logits):
    asked, weight = ids(rows=3, width=5), torch.rand(15, dtype=torch.float64)
    read = read_targets(
        logits,
        gradient(
            logits,
            lambda z: (weight * F.cross_entropy(z.flatten(0, 1), asked.flatten(), reduction="none")).sum(),
        ),
    )
    assert read is not None
    assert torch.allclose(read.weight.flatten(), weight)
    assert torch.allclose(read.nll, F.cross_entropy(logits.transpose(1, 2), asked, reduction="none"))


@pytest.mark.parametrize("loss", [lambda z: z.square().mean(), lambda z: F.mse_loss(z.softmax(-1), z * 0)])
def test_other_losses_have_no_targets(logits, loss):
    assert read_targets(logits, gradient(logits, loss)) is None


# ------------------------------------------------------------------------------------------------- tokens
def test_tokens_targets_and_shift_of_a_language_model():
    read = facts(ids())
    assert (read.tokens.place, read.shift, read.causal, read.rows) == ((), 1, True, 4)
    assert torch.equal(read.tokens.ids, ids())


@pytest.mark.parametrize(("shift", "causal"), [(0, False), (1, True), (2, True)])
def test_the_shift_is_counted(shift, causal):
    def loss(model, batch):
        return F.cross_entropy(model(batch)[:, : 12 - shift].flatten(0, 1), batch[:, shift:].flatten())

    read = facts(ids(), loss=loss)
    assert (read.shift, read.causal) == (shift, causal)


@pytest.mark.parametrize("columns", [False, True])
def test_a_cross_entropy_in_parts_has_the_logits_of_all(columns):
    class InParts(Reader):
        def forward(self, ids):
            logits, targets = super().forward(ids[:, :-1]), ids[:, 1:]
            if not columns:
                logits, targets = logits.flatten(0, 1), targets.flatten()
            parts = zip(logits.split(5, int(columns)), targets.split(5, int(columns)), strict=True)
            losses = [F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction="sum") for z, y in parts]
            return sum(losses) / targets.numel()

    model = InParts()
    read = facts(ids(), model=model, loss=lambda model, batch: model(batch))
    assert (read.shift, read.causal) == (1, True)
    assert torch.equal(read.logits.value, Reader.forward(model, ids()[:, :-1]))
    assert read.unexplained == pytest.approx(0, abs=1e-5)


class Flattened(Reader):
    """Scores flat logits in one of two orders, ``size`` positions in each call."""

    def __init__(self, *, by_columns=False, size=1000):
        super().__init__()
        self.by_columns, self.size = by_columns, size

    def forward(self, ids):
        logits, targets = super().forward(ids[:, :-1]), ids[:, 1:]
        if self.by_columns:
            logits, targets = logits.transpose(0, 1), targets.T
        pairs = zip(logits.flatten(0, 1).split(self.size), targets.flatten().split(self.size), strict=True)
        return sum(F.cross_entropy(z, y, reduction="sum") for z, y in pairs) / targets.numel()


@pytest.mark.parametrize(("by_columns", "size"), [(False, 1000), (True, 1000), (False, 7), (False, 40)])
def test_flat_logits_are_laid_out_as_their_targets_are(by_columns, size):
    model = Flattened(by_columns=by_columns, size=size)
    read = facts(ids(), model=model, loss=lambda model, batch: model(batch))
    assert read.shift == 1
    assert torch.equal(read.logits.value, Reader.forward(model, ids()[:, :-1]))
    wider = torch.cat([ids(), ids(width=3, seed=4)], 1)[:3]
    shown = read.logits.of(read.trace.again(batch=wider))
    assert torch.equal(shown, Reader.forward(model, wider[:, :-1]))


def test_logits_of_chosen_positions_stay_flat():
    def loss(model, batch):
        chosen = torch.zeros(4, 12, dtype=torch.bool)
        chosen[0, :8] = True  # as many as there would be in four rows of two
        return F.cross_entropy(model(batch)[:, :-1][chosen[:, 1:]], batch[:, 1:][chosen[:, 1:]])

    class Chosen(Reader):
        def forward(self, ids):
            return loss(super().forward, ids)

    read = facts(ids(), model=Chosen(), loss=lambda model, batch: model(batch))
    assert len(read.logits.shape) == 2


def test_rows_that_are_scored_in_parts_have_the_logits_of_all():
    class InParts(Reader):
        def forward(self, ids, labels):
            logits = super().forward(ids)[:, -1]
            parts = zip(logits.split(3), labels.split(3), strict=True)
            return sum(F.cross_entropy(z, y, reduction="sum") for z, y in parts) / len(labels)

    model, labels = InParts(), torch.tensor([3, 1, 4, 1])
    read = facts({"ids": ids(), "labels": labels}, model=model, loss=output_loss)
    assert torch.equal(read.targets.ids, labels)
    assert torch.equal(read.logits.value, Reader.forward(model, ids())[:, -1])


def test_logits_and_targets_with_rows_second_are_those_of_the_same_positions():
    class RowsSecond(Reader):
        def forward(self, ids):
            return super().forward(ids).transpose(0, 1)

    def scored(model, batch):
        logits, labels = model(batch), torch.where(batch > 18, -100, batch)
        return F.cross_entropy(logits[:-1].flatten(0, 1), labels[:, 1:].T.flatten())

    model = RowsSecond()
    read = facts(ids(width=9), model=model, loss=scored)
    assert torch.equal(read.logits.value, Reader.forward(model, ids(width=9)))
    of_tokens = -read.logits.value.log_softmax(-1).gather(-1, read.targets.ids[..., None])[..., 0]
    assert torch.allclose(
        of_tokens[read.targets.counted].double(), read.targets.nll[read.targets.counted], atol=1e-5
    )


def test_a_part_without_entries_is_none():
    last = torch.arange(5) == 4
    assert part_of(last.expand(2, 5))(torch.ones(2, 4, 3)) is None
    assert part_of(last.expand(2, 5))(torch.ones(2, 5, 3)) is not None
    assert part_of(torch.zeros(2, dtype=torch.bool))(torch.ones(2, 3)) is None


def test_parameters_are_rounded_as_the_coarsest_of_their_types():
    parameters = {"wide": torch.ones(4), "narrow": torch.ones(4, dtype=torch.bfloat16)}
    moved, eps = rounded(parameters, torch.Generator().manual_seed(0))
    assert eps == torch.finfo(torch.bfloat16).eps
    assert not torch.equal(moved["wide"], parameters["wide"])


def test_rows_may_come_second_in_the_model():
    read = facts(ids(width=9), model=Reader(rows_second=True))
    assert torch.equal(read.tokens.ids, ids(width=9))
    assert read.shift == 1


def test_a_part_of_an_entry_is_found_with_its_column():
    def loss(model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    read = facts(ids(width=13), loss=loss)
    assert read.tokens.ids.shape == (4, 12)
    changed = read.with_tokens(read.tokens.ids.roll(1, 0))
    assert torch.equal(changed[:, :-1], ids(width=13)[:, :-1].roll(1, 0))
    assert torch.equal(changed[:, -1], ids(width=13)[:, -1])


def test_a_decoder_reads_its_labels_behind_a_start():
    labels = ids(seed=3)

    def loss(model, batch):
        start = F.pad(batch["labels"], (1, 0), value=0)[:, :-1]
        return F.cross_entropy(model(start).flatten(0, 1), batch["labels"].flatten())

    read = facts({"labels": labels}, loss=loss)
    assert read.tokens.column == -1
    assert read.shift == 1
    later = torch.arange(12).expand(4, 12) > 5
    changed = read.other_tokens(later)["labels"]
    assert torch.equal(changed[:, :5], labels[:, :5])
    assert not torch.equal(changed[:, 5:11], labels[:, 5:11])


def test_without_a_lookup_tokens_are_unknown():
    model = nn.Linear(4, 3)
    read = facts(torch.randn(5, 4), model=model, loss=lambda m, x: m(x).square().mean())
    for fact in ("tokens", "targets", "causal", "padding", "documents"):
        with pytest.raises(Unknown):
            getattr(read, fact)


# ------------------------------------------------------------------------------------------------ padding
def padded(side, pad=0):
    batch, real = ids(), torch.ones(4, 12, dtype=torch.bool)
    for row, length in enumerate((12, 8, 5, 10)):
        real[row, slice(length, None) if side == "right" else slice(0, 12 - length)] = False
    return batch.masked_fill(~real, pad), real


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bool", "long", "float", "hidden", "additive", "wide"])
def test_a_mask_of_any_kind_is_read(side, kind):
    batch, real = padded(side)
    mask = {
        "bool": real,
        "long": real.long(),
        "float": real.float(),
        "hidden": ~real,
        "additive": torch.zeros(4, 12).masked_fill(~real, -1e4),
        "wide": real[:, None, None],
    }[kind]

    def loss(model, batch):
        return next_token(model, {"ids": batch["ids"]})

    read = facts({"ids": batch, "mask": mask}, loss=loss)
    assert torch.equal(read.padding.real, real)
    assert (read.padding.side, read.padding.pad_id, read.padding.mask) == (side, 0, ("mask",))


def test_what_hides_other_ids_is_no_padding():
    chosen = torch.zeros(4, 12, dtype=torch.bool)
    chosen[:, :3] = True  # a prompt whose loss is left out
    with pytest.raises(Unknown):
        _ = facts({"ids": ids(), "mask": chosen}).padding


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_read_off_the_ids(side):
    batch, real = padded(side)
    assert torch.equal(facts(batch, pad_id=0).padding.real, real)
    assert torch.equal(facts(batch, model=Reader(padding_idx=0)).padding.real, real)
    guessed = facts(batch).padding
    assert guessed.source == "runs"
    assert torch.equal(guessed.real, real)


def test_a_token_at_both_ends_of_rows_is_no_padding():
    batch, _ = padded("right")
    batch[0, 0] = 0
    with pytest.raises(Unknown):
        _ = facts(batch).padding


def test_the_first_of_padding_that_is_also_the_end_is_real():
    batch, real = padded("right", pad=2)
    read = facts(batch, pad_id=2, eos_id=2).padding.real
    assert int((read & ~real).sum()) == 3
    assert torch.equal(real_tokens(batch, 2, ends=True), read)


def test_a_start_with_the_padding_id_is_no_padding():
    batch, real = padded("right")
    batch[:, 0] = 0
    assert torch.equal(facts(batch, pad_id=0).padding.real, real)


# ---------------------------------------------------------------------------------------------- documents
PACKED = torch.tensor([[0] * 5 + [1] * 7] * 4)
RESTARTING = torch.cat([torch.arange(5), torch.arange(7)]).expand(4, 12)


@pytest.mark.parametrize(
    ("name", "entry"), [("positions", RESTARTING), ("documents", PACKED + 1), ("documents", PACKED + 3)]
)
def test_documents_are_read_off_positions_and_numbers(name, entry):
    assert torch.equal(facts({"ids": ids(), name: entry.clone()}).documents, PACKED)


def test_a_mask_of_prompts_is_no_documents():
    answers = torch.arange(12).expand(4, 12) >= torch.tensor([[3], [5], [4], [7]])
    with pytest.raises(Unknown):
        _ = facts({"ids": ids(), "mask": answers.long()}).documents


def test_segments_that_are_looked_up_are_no_documents():
    with pytest.raises(Unknown):
        _ = facts({"ids": ids(), "segments": PACKED + 1}).documents


def test_documents_may_be_declared():
    assert torch.equal(facts(ids(), documents=PACKED).documents, PACKED)
    with pytest.raises(Unknown, match="no entry"):
        _ = facts(ids(), documents="doc").documents


def test_positions_that_end_in_padding_do_not_restart():
    positions = torch.tensor([[0, 1, 2, 3, 0, 0]])
    assert restarts(positions) is None
    assert restarts(torch.arange(6)[None]) is None


# -------------------------------------------------------------------------------- stacks, roles, training
def test_stacks_and_roles():
    read = facts(ids())
    assert {name: len(blocks) for name, blocks in read.stacks.items()} == {"layers": 3}
    assert read.roles["embed.weight"] == "embedding"
    assert (read.roles["head.weight"], read.roles["head.bias"]) == ("head", "bias")
    assert read.roles["layers.1.weight"] == "hidden"


def test_the_head_is_the_matrix_whose_product_the_logits_are():
    class Tied(Reader):
        def __init__(self):
            super().__init__()
            self.head = nn.Sequential(nn.Linear(WIDTH, VOCAB), nn.Tanh(), nn.Linear(VOCAB, WIDTH))

        def forward(self, ids):
            return super().forward(ids) @ self.embed.weight.T

    read = facts(ids(), model=Tied())
    assert "head" not in read.roles.values()
    assert read.head == "embed.weight"


class Hidden(torch.autograd.Function):
    """A product that a graph shows as nothing known."""

    @staticmethod
    def forward(ctx, x, weight) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


class Wide(nn.Module):
    """A block whose hidden layer is as wide as there are classes."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, VOCAB), nn.Linear(VOCAB, WIDTH)

    def forward(self, x):
        return x + self.outer(self.inner(x).relu())


@each("product", [Hidden.apply, kernels_linear.MkldnnLinear.apply], ids=["unknown", "our own"])
def test_no_matrix_of_a_block_is_taken_for_the_head(product):
    more = (None, torch.float32) if product == kernels_linear.MkldnnLinear.apply else ()

    class Tied(Reader):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Wide() for _ in range(3))
            self.head = nn.Identity()

        def forward(self, ids):
            return product(super().forward(ids), self.embed.weight, *more)

    read = facts(ids(), model=Tied())
    assert "head" not in read.roles.values()
    assert read.head == "embed.weight"
    assert bool(read.logits.matrices) == (product != Hidden.apply)


def test_a_trained_model_prefers_its_targets():
    model, batch = Reader(), ids(rows=8, width=16)
    assert not facts(batch, model=model).trained
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)
    for _ in range(60):
        optimizer.zero_grad()
        next_token(model, batch).backward()
        optimizer.step()
    assert facts(batch, model=model).trained
    assert not facts(batch, model=model, trained=False).trained


def test_the_loss_may_be_the_models_own():
    class Own(Reader):
        def forward(self, ids, labels):
            logits = super().forward(ids)
            return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}

    read = facts({"ids": ids(), "labels": ids(seed=5)}, model=Own(), loss=output_loss)
    assert torch.equal(read.targets.ids, ids(seed=5))
    assert read.shift is None

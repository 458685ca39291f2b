"""The studies that need no theory, on a small GPT of plain modules."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.diagnosis import Diagnosis, diagnose
from normlab.diagnosis.plan import Plan, Start
from normlab.diagnosis.rules.finding import consequences
from normlab.nn.model import Seq2Seq
from normlab.spec.model import ModelConfig
from normlab.tasks.build import build_model

DIM, VOCAB, LAYERS, TIME = 32, 50, 6, 16
SIZES = {"layers": 2, "attention_heads": 2, "ffn_dim": 4 * DIM}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.scale, self.causal = (DIM // 2) ** -0.5, True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.drop = Attention(), nn.Dropout(0.1)
        self.up, self.act, self.down = nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


TEXT = torch.randint(0, VOCAB, (2, TIME + 1), generator=torch.Generator().manual_seed(1))
BATCH = {"ids": TEXT[:, :-1], "labels": TEXT[:, 1:]}


class Labelled(nn.Module):
    """Takes the labels too, so that they are in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.gpt(ids)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(**batch).flatten(0, 1), batch["labels"].flatten())


def preflight(model: nn.Module, **plan) -> Diagnosis:
    adam = partial(torch.optim.Adam, lr=1e-3)
    return diagnose(model, BATCH, loss=loss, optimiser=adam, preset="preflight", **plan)


def layer(model: Labelled, index: int) -> Layer:
    return model.gpt.layers[index]


def test_nothing_is_found_in_a_sound_model():
    found = preflight(Labelled(), max_grad_norm=1.0, warmup_steps=100)
    assert found.cause is None
    idle = [study.name for study in found.studies if study.name not in found.applied]
    assert {"declared", "buffers"} <= set(idle)
    applied = len(found.studies) - len(idle)
    assert found.verdict == f"nothing found in {applied} studies (not applicable: {', '.join(idle)})"
    assert found.at_least("warning") == []
    assert found.to_plain()["cause"] is None


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_queries_that_are_divided_before_a_product_whose_first_factor_are_keys_are_scaled(placement):
    found = diagnose(*deep(placement), loss=guess, preset="preflight")
    rows = found.tables["attention_scale"]
    assert len(rows) == 18
    assert rows.column("scale") == pytest.approx([1.0] * 18)
    assert found.cause is None


def deep(placement):
    """A model of six and six layers of ours, whose search takes keys for the first factor, and a batch."""
    placements = {"encoder_placement": placement, "decoder_placement": placement}
    sizes = {"dim": 32, "ffn_dim": 64, "heads": 2, "encoder_layers": 6, "decoder_layers": 6}
    draw = torch.Generator().manual_seed(2)
    tokens = tuple(torch.randint(4, VOCAB, (3, TIME), generator=draw) for _ in range(2))
    return build_model(Seq2Seq, ModelConfig(**sizes, **placements), VOCAB, 0), tokens


def guess(model, batch):
    return F.cross_entropy(model(*batch).flatten(0, 1), batch[1].flatten())


def enlarged(m):
    with torch.no_grad():
        for p in layer(m, 3).parameters():
            p.mul_(30)


def zeroed(m):
    nn.init.zeros_(layer(m, 2).up.weight)


def frozen(m):
    layer(m, 4).requires_grad_(False)


def detached(m):
    layer(m, 3).attention.register_forward_hook(lambda _, __, y: y.detach())


def detached_stream(m):
    whole = Layer.forward
    layer(m, 3).forward = lambda x: whole(layer(m, 3), x.detach())


def unmasked(m):
    layer(m, 1).attention.causal = False


def unscaled(m):
    for one in m.gpt.layers:
        one.attention.scale = 1.0


def dropping_all(m):
    layer(m, 5).drop.p = 1.0


def random_in_evaluation(m):
    layer(m, 2).drop.forward = lambda x: F.dropout(x, 0.1)


def large_embedding(m):
    nn.init.normal_(m.gpt.embedding.weight)


def without_final_norm(m):
    m.gpt.norm = nn.Identity()


def without_residual(m):
    one = layer(m, 2)
    one.forward = lambda x: one.down(one.act(one.up(one.norm2(x + one.attention(one.norm1(x))))))


def without_activation(m):
    for one in m.gpt.layers:
        one.act = nn.Identity()


def huge_epsilon(m):
    for module in m.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e5


def empty_buffer(m):
    layer(m, 0).register_buffer("angles", torch.full((8,), 1.0))


def broken_buffer(m):
    layer(m, 4).register_buffer("angles", torch.tensor([1.0, math.nan, 0.5, 0.2]))


def one_frequency(m):
    steps = torch.arange(16.0)[:, None].expand(16, 8)
    layer(m, 4).register_buffer("angles", torch.stack((steps.sin(), steps.cos()), -1).flatten(1))


def square_without_root(m):
    layer(m, 3).norm2.forward = lambda x: x / x.square().mean(-1, keepdim=True)


def attention_over_the_rows(m):
    one = layer(m, 2).attention
    one.forward = lambda x: Attention.forward(one, x.transpose(0, 1)).transpose(0, 1)


def probabilities(m):
    m.gpt.head.forward = lambda x: F.linear(x, m.gpt.head.weight).softmax(-1)


def repeated(m):
    m.gpt.layers = nn.ModuleList([layer(m, 0)] * LAYERS)


@pytest.mark.parametrize(
    ("plant", "name", "module", "severity"),
    [
        (enlarged, "unlike_siblings", "gpt.layers.3", "problem"),
        (zeroed, "unlike_siblings", "gpt.layers.2.up", "problem"),
        (frozen, "frozen_layer", "gpt.layers.4", "warning"),
        (detached, "cut_gradient", "gpt.layers.3.attention", "problem"),
        (detached_stream, "cut_gradient", "gpt.layers.3", "problem"),
        (unmasked, "causal_leak", "gpt.layers.1.attention", "problem"),
        (unscaled, "no_scale", "gpt.layers.0.attention", "warning"),
        (dropping_all, "dropout", "gpt.layers.5.drop", "problem"),
        (random_in_evaluation, "random", "gpt.layers.2.drop", "problem"),
        (large_embedding, "initial_loss", "gpt.head", "problem"),
        (without_final_norm, "no_final_norm", "gpt.layers", "warning"),
        (without_residual, "no_residual", "gpt.layers.2", "problem"),
        (without_activation, "no_activation", "gpt.layers.0.up", "problem"),
        (huge_epsilon, "silent_norm", "gpt.layers.0.norm1", "problem"),
        (empty_buffer, "strange_buffer", "gpt.layers.0", "problem"),
        (broken_buffer, "strange_buffer", "gpt.layers.4", "problem"),
        (one_frequency, "strange_buffer", "gpt.layers.4", "problem"),
        (square_without_root, "loud_norm", "gpt.layers.3.norm2", "problem"),
        (attention_over_the_rows, "rows_leak", "gpt.layers.2.attention", "problem"),
        (probabilities, "probabilities", "gpt.head", "problem"),
        (repeated, "repeated_layer", "gpt.layers", "warning"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_cause_is_the_fault_and_its_place(plant, name, module, severity):
    model = Labelled()
    plant(model)
    found = preflight(model)
    assert found.cause is not None
    assert (found.cause.name, found.cause.module, found.cause.severity) == (name, module, severity)
    assert found.cause.do
    assert found.verdict.startswith(f"{severity}: ")
    numbers = [int(part) for part in module.split(".") if part.isdecimal()]
    assert found.cause.layer == (numbers[0] if numbers else None)


def test_a_plain_list_of_layers_is_pointed_out_before_all_that_follows():
    model = Labelled()
    layers = list(model.gpt.layers)
    del model.gpt.layers
    model.gpt.layers = layers
    found = preflight(model)
    assert found.cause is not None
    assert (found.cause.name, found.cause.module) == ("unregistered", "gpt.layers")
    assert {f.name for f in consequences(found.findings, found.cause)} >= {"unread"}


def test_padding_that_is_seen_is_named():
    class Masked(nn.Module):
        def __init__(self, *, heed: bool) -> None:
            super().__init__()
            self.gpt, self.heed = Gpt(), heed
            for one in self.gpt.layers:
                one.attention.causal = False

        def forward(self, ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
            return self.gpt(ids * attention_mask if self.heed else ids)

    batch = {"ids": TEXT, "attention_mask": torch.ones_like(TEXT), "labels": TEXT.flip(1)}
    names = {}
    for heed in (True, False):
        found = diagnose(Masked(heed=heed), batch, loss=loss, lr=1e-3, preset="preflight")
        names[heed] = [f.name for f in found.at_least("warning")]
    assert names == {True: ["no_positions"], False: ["padding_leak", "no_positions"]}


def test_a_step_that_rounding_takes_away_is_named():
    found = preflight(Labelled().to(torch.bfloat16))
    assert "lost_in_rounding" in [f.name for f in found.at_least("warning")]


def test_parameters_that_the_optimiser_does_not_hold_are_named():
    model = Labelled()
    held = [p for path, p in model.named_parameters() if "layers.2." not in path]
    found = diagnose(model, BATCH, loss=loss, optimiser=torch.optim.AdamW(held, lr=1e-3), preset="preflight")
    assert found.cause is not None
    assert found.cause.name == "not_stepped"
    assert found.cause.module.startswith("gpt.layers.2.")


def test_clipping_that_decides_the_step_is_named_for_an_optimiser_that_keeps_scale():
    model = Labelled()
    sgd = partial(torch.optim.SGD, lr=0.1)
    options = {"loss": loss, "optimiser": sgd, "preset": "preflight"}
    assert diagnose(model, BATCH, **options, max_grad_norm=1e6).cause is None
    found = diagnose(model, BATCH, **options, max_grad_norm=1e-3).cause
    assert found is not None
    assert found.name == "clipped_step"


# ------------------------------------------------------------------------------ declared starts, baselines


@pytest.mark.parametrize("broken", range(LAYERS))
def test_one_layer_of_another_size_does_not_make_its_neighbours_unlike(broken: int):
    model = Labelled()
    with torch.no_grad():
        layer(model, broken).down.weight.mul_(30)
    named = [f.module for f in preflight(model).findings if f.name == "unlike_siblings"]
    assert named == [f"gpt.layers.{broken}.down"]


def test_a_start_that_is_not_the_declared_one_is_named():
    plan = Plan(declared={"embedding": Start(0.05), "output": Start(0.05, depth="total")})
    found = preflight(Labelled(), **plan)
    assert found.cause is not None
    assert found.cause.name == "unlike_declared"
    assert found.cause.module.endswith("attention.out")
    assert found.cause.numbers["expected"] == pytest.approx(0.05 / math.sqrt(2 * LAYERS))
    meant = Plan(
        declared={"embedding": Start(0.05), "output": Start(0.05), "norm": Start(value=1.0)}, tied=True
    )
    assert preflight(Labelled(), **meant).cause is None


def test_a_tie_that_is_declared_and_broken_is_named():
    model = Labelled()
    model.gpt.head.weight = nn.Parameter(model.gpt.head.weight.detach().clone())
    found = preflight(model, tied=True).cause
    assert found is not None
    assert (found.name, found.module) == ("unlike_declared", "gpt.head")


@pytest.mark.parametrize("family", ["Bart", "Marian"])
def test_tables_of_positions_are_no_copies_and_not_tied(family: str):
    tf = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIZES.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = getattr(tf, f"{family}Config")(
        vocab_size=VOCAB, d_model=DIM, max_position_embeddings=2 * VOCAB, **sizes, **tokens
    )
    torch.manual_seed(0)
    model = getattr(tf, "MarianMTModel" if family == "Marian" else "BartForConditionalGeneration")(config)
    read, predicted = torch.randint(3, VOCAB, (2, 4, TIME))
    found = diagnose(model, {"input_ids": read, "labels": predicted}, preset="preflight")
    assert [str(f) for f in found.at_least("warning")] == []


def test_a_baseline_names_the_one_matrix_that_changed():
    before = preflight(Labelled()).tables["weights"].rows
    model = Labelled()
    nn.init.normal_(layer(model, 4).down.weight, std=0.01)
    found = preflight(model, baseline=before)
    changed = [f for f in found.findings if f.name == "changed"]
    assert [f.module for f in changed] == ["gpt.layers.4.down"]
    assert changed[0].numbers["before"] == pytest.approx(0.05, rel=0.05)
    assert preflight(Labelled(), baseline=before).cause is None

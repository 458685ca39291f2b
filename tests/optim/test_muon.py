"""Muon on hidden matrices and AdamW on everything else, against torch's own two."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from cases import each
from normlab.base.model_config import ModelConfig
from normlab.errors import UserError
from normlab.lab.config import OptimConfig
from normlab.lab.tasks.task import build_model
from normlab.lab.training.parallel import FSDP, SingleProcess
from normlab.nn import Decoder
from normlab.optim import build_optimizer, set_rate
from normlab.optim.optimizer import CombinedOptimizer

MODEL = ModelConfig(
    dim=16,
    ffn_dim=24,
    heads=4,
    kv_heads=2,
    encoder_layers=0,
    decoder_layers=2,
    encoder_placement="pre",
    decoder_placement="pre",
    activation="swiglu",
    dropout=0.0,
)
OPTIM = OptimConfig(
    optimiser="muon", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, weight_decay_on="matrices"
)
RATES = (0.02, 0.05, 0.03)


def model():
    return build_model(Decoder, MODEL, 11, 1)


def trained(model, optimizer, rates, before=0):
    """Take a step at each rate, on losses that depend on the number of the step alone."""
    for n, lr in enumerate(rates, start=before):
        ids = torch.randint(1, 11, (3, 7), generator=torch.Generator().manual_seed(n))
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        set_rate(optimizer, lr)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class TorchsOwn:
    """torch.optim.Muon of each matrix by itself, and AdamW of everything else."""

    def __init__(self, model, config, adjust):
        self.model = model
        rows_of_packed = {"qkv": (16, 8, 8), "inner": (24, 24), "out": (16,), "outer": (16,)}
        tables, vectors = [], []
        self.pieces = []
        """A packed parameter, the row at which one of its matrices begins, and a copy of that matrix."""
        for name, p in model.named_parameters():
            if p.dim() != 2:
                vectors.append(p)
            elif "sublayers" not in name:
                tables.append(p)
            else:
                begin, layer = 0, name.split(".")[-2]
                for rows in rows_of_packed[layer]:
                    piece = torch.nn.Parameter(p.detach()[begin : begin + rows].clone())
                    self.pieces.append((p, begin, piece))
                    begin += rows
        self.rates = [torch.zeros(()) for _ in range(2)]
        muon, adam = self.rates
        self.muon = torch.optim.Muon(
            [piece for *_, piece in self.pieces], muon, config.weight_decay, 0.95, adjust_lr_fn=adjust
        )
        self.adam = torch.optim.AdamW(
            [{"params": tables}, {"params": vectors, "weight_decay": 0.0}],
            adam,
            config.betas,
            config.eps,
            config.weight_decay,
            fused=True,
        )
        self.param_groups = [{"lr": rate, "rate": 1.0} for rate in self.rates]

    def zero_grad(self):
        self.model.zero_grad()

    @torch.no_grad()
    def step(self):
        for p, begin, piece in self.pieces:
            piece.grad = p.grad[begin : begin + len(piece)].clone()
        self.muon.step()
        self.adam.step()
        for p, begin, piece in self.pieces:
            p[begin : begin + len(piece)] = piece


@pytest.fixture
def torchs_products(monkeypatch):
    """Multiply matrices in bf16 as torch does on this machine, however slowly."""
    monkeypatch.setattr("normlab.optim.optimizer.WideProducts", nullcontext)


@each(("name", "adjust"), [("muon", "match_rms_adamw"), ("muon_original", "original")])
def test_a_model_moves_as_torchs_muon_and_adamw_move_it(torchs_products, name, adjust):
    ours, theirs = model(), model()
    config = replace(OPTIM, optimiser=name)
    found = trained(ours, build_optimizer(ours, config), RATES)
    wanted = trained(theirs, TorchsOwn(theirs, config, adjust), RATES)
    unequal = [key for key, value in wanted.items() if not torch.equal(found[key], value)]
    assert not unequal
    assert not torch.equal(wanted["embedding.weight"], model().embedding.weight)


def by_checkpoint(optimizer, other, ours, theirs):
    """Hand the state over as a run's checkpoint does."""
    SingleProcess(theirs).load_state_dict(SingleProcess(ours).state_dict(optimizer), other)
    return other


def by_torch(optimizer, other, ours, theirs):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    theirs.load_state_dict(ours.state_dict())
    return other


@pytest.mark.parametrize("hand_over", [by_checkpoint, by_torch])
def test_a_new_optimizer_goes_on_with_the_state_of_another(hand_over):
    whole = model()
    wanted = trained(whole, build_optimizer(whole, OPTIM), RATES)
    ours, theirs = model(), model()
    first, second = build_optimizer(ours, OPTIM), build_optimizer(theirs, OPTIM)
    trained(ours, first, RATES[:2])
    second = hand_over(first, second, ours, theirs)
    found = trained(theirs, second, RATES[2:], before=2)
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


def test_a_deep_copy_steps_its_own_parameters():
    ours = model()
    optimizer = build_optimizer(ours, OPTIM)
    trained(ours, optimizer, RATES[:2])
    twins, twin = copy.deepcopy((ours, optimizer))
    found = trained(twins, twin, RATES[2:], before=2)
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    wanted = trained(ours, optimizer, RATES[2:], before=2)
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    assert not torch.equal(before["embedding.weight"], wanted["embedding.weight"])


def test_one_rule_alone_is_torchs_own_optimizer():
    ours = model()
    assert type(build_optimizer(ours, replace(OPTIM, optimiser="adamw"))) is torch.optim.AdamW
    assert type(build_optimizer(ours, OPTIM)) is CombinedOptimizer


def test_muon_is_refused_where_ranks_hold_parts_of_matrices():
    ours = model()
    with pytest.raises(UserError, match=r"^Muon .*--shard"):
        FSDP(ours, build_optimizer(ours, OPTIM), 2)


def test_a_closure_is_evaluated_once_with_gradients():
    linear, calls = torch.nn.Linear(2, 2), []
    optimizer = set_rate(build_optimizer(linear, OPTIM), 0.1)

    def closure():
        calls.append(None)
        loss = linear(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert len(calls) == 1

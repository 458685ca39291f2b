from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contracts.variants import build, inputs, loss_of, tokens, uniform
from diagnosis.small import subject_read
from normlab.diagnosis.laws import LawFit
from normlab.diagnosis.studies.output_change import output_change, output_change_fit, random_change
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.tables import Table
from normlab.lab.config import ModelConfig
from normlab.lab.tasks.task import build_model
from normlab.nn import Context, Encoder
from normlab.nn.init import profile_

ADAM = partial(torch.optim.Adam, lr=1e-3)


def subject_of(model: nn.Module) -> Subject:
    return subject_read(model, inputs(model), lambda m, batch: loss_of(m, *batch))


def masks(model: nn.Module) -> dict[str, Tensor]:
    source, target = inputs(model)
    return {"encoder.sublayers": source != 0, "decoder.sublayers": target != 0}


@torch.no_grad()
def prefixes(model: nn.Module, depth: int) -> Tensor:
    """The encoder's output, had it ``depth`` sublayers."""
    source, _ = tokens()
    stream = model.encoder.begin(model.embed(source))
    for sublayer in list(model.encoder.sublayers)[:depth]:
        stream = sublayer(stream, Context(padding_mask=source != 0))
    return model.encoder.end(stream)[source != 0]


def slow(model: nn.Module, other: nn.Module) -> list[float]:
    depths = range(1, len(model.encoder.sublayers) + 1)
    return [float((prefixes(model, d) - prefixes(other, d)).square().mean()) for d in depths]


@pytest.mark.parametrize("placement", ["post", "pre", "admin", "mixln", "sandwich"])
def test_prefixes_are_those_of_a_model_cut_off(placement):
    model = build(uniform(placement, encoder_layers=3)).double().eval()
    subject = subject_of(model)
    table = output_change(
        replace(subject, padding_masks=masks(model)),
        optimizer=ADAM,
        seeds=[4],
        stacks=["encoder.sublayers"],
        size=0.1,
    )
    assert [(row["kind"], row["depth"], row["seed"]) for row in table] == [
        (kind, depth, 4) for kind in ("random", "update") for depth in range(1, 7)
    ]
    changed = deepcopy(model)
    changed.load_state_dict(random_change(subject, size=0.1, seed=4), strict=False)
    assert table.where(kind="random").column("change") == pytest.approx(slow(model, changed), rel=1e-9)

    trained = deepcopy(model)
    optimizer = ADAM(trained.parameters())
    loss_of(trained).backward()
    optimizer.step()
    assert table.where(kind="update").column("change") == pytest.approx(slow(model, trained), rel=1e-6)


def test_the_first_step_of_a_warm_up_is_one_at_its_rate():
    subject = subject_of(build(uniform("pre", encoder_layers=3)).double())
    stacks = ["encoder.sublayers", "decoder.sublayers"]
    warmed = output_change(replace(subject, warmup_steps=50), stacks=stacks, optimizer=ADAM)
    small = output_change(subject, stacks=stacks, optimizer=partial(torch.optim.Adam, lr=1e-3 / 50))
    first = warmed.where(kind="first")
    assert {row["stack"] for row in first} == {"decoder.sublayers"}
    assert first.column("change") == pytest.approx(small.where(kind="update").column("change"), rel=1e-6)
    rest = [row for row in warmed if row["kind"] != "first"]
    assert rest == list(output_change(subject, stacks=stacks, optimizer=ADAM))


def test_the_last_stack_is_meant_and_real_tokens_are_found():
    model = build(uniform("pre", encoder_layers=1)).eval()
    subject = subject_of(model)
    table = output_change(subject)
    assert table.column("depth") == [1, 2, 3, 4, 5, 6]
    assert table == output_change(replace(subject, padding_masks=masks(model)), stacks=["decoder.sublayers"])
    all_tokens = {name: torch.ones_like(mask) for name, mask in masks(model).items()}
    assert table != output_change(replace(subject, padding_masks=all_tokens))
    with pytest.raises(ValueError, match=r"'encoder';.*'encoder.sublayers', 'dec"):
        output_change(subject, stacks=["encoder"])


def test_a_random_change_is_of_the_branches_matrices():
    model = build(uniform("admin", dim=64, ffn_dim=64)).eval()
    own = dict(model.named_parameters())
    changed = random_change(subject_of(model), size=0.02, seed=1)
    assert changed.keys() == {
        path for path, p in own.items() if p.ndim == 2 and path.startswith(("encoder", "decoder"))
    }
    for path, w in changed.items():
        delta = (w - own[path]).detach()
        assert delta.square().mean().sqrt() == pytest.approx(
            0.02 * float(own[path].detach().square().mean().sqrt()), rel=0.05
        )
    again, other = (random_change(subject_of(model), size=0.02, seed=seed) for seed in (1, 2))
    assert all(torch.equal(again[path], w) and not torch.equal(other[path], w) for path, w in changed.items())


def test_the_change_is_quadratic_in_the_size():
    subject = subject_of(build(uniform("post")).double())
    small, large = (output_change(subject, size=size).column("change") for size in (1e-4, 2e-4))
    assert [b / a for a, b in zip(small, large, strict=True)] == pytest.approx([4.0] * len(small), rel=0.01)


# -------------------------------------------------------------------------------------------- the laws


def encoder(placement: str, layers: int, seed: int) -> Subject:
    config = ModelConfig(
        dim=128, ffn_dim=512, heads=4, encoder_layers=layers, decoder_layers=0, encoder_placement=placement
    )
    model = build_model(Encoder, config, 50, seed)
    with torch.no_grad():
        model.embedding.weight.mul_(config.dim**0.5)  # as a translation embeds, not as BERT does
    ids = torch.randint(4, 50, (4, 24), generator=torch.Generator().manual_seed(1))
    profile_(model, lambda: model(ids))
    return subject_read(
        model, (ids,), lambda m, batch: F.cross_entropy(m(*batch)[0].flatten(0, 1), ids.flatten())
    )


@pytest.fixture(scope="module")
def laws() -> dict[str, dict[str, LawFit]]:
    """The laws fitted to random changes over the prefixes of 24 layers, from two starts each."""
    found = {}
    for placement in ("post", "pre", "admin"):
        tables = [output_change(encoder(placement, 24, seed), seeds=[seed]) for seed in range(2)]
        fit = output_change_fit(Table("output_change", tuple(row for table in tables for row in table)))
        found[placement] = {
            str(row["law"]): LawFit(**{k: v for k, v in row.items() if k != "kind"}) for row in fit
        }
    return found


@pytest.mark.slow
def test_post_grows_like_n_and_pre_and_admin_like_log_n(laws):
    judged = {placement: (fits["log"], fits["linear"]) for placement, fits in laws.items()}
    named = {placement: min(pair, key=lambda fit: fit.aic).law for placement, pair in judged.items()}
    assert named == {"post": "linear", "pre": "log", "admin": "log"}
    assert all(laws[placement]["log"].r2 > 0.9 for placement in ("pre", "admin"))
    assert laws["post"]["linear"].r2 > 0.8
    assert laws["post"]["power"].exponent > 0.8 > laws["pre"]["power"].exponent


@pytest.mark.slow
def test_post_moves_most(laws):
    slopes = {placement: fits["linear"].coefficient for placement, fits in laws.items()}
    assert slopes["post"] > 5 * slopes["pre"]
    assert slopes["admin"] < 2 * slopes["pre"]


def test_one_seed_has_an_interval_of_its_points_and_two_that_of_their_spread():
    rows = [
        {"kind": "random", "depth": n, "change": n**p * (1.01 if n == 8 else 1), "seed": s}
        for s, p in enumerate((0.5, 0.7))
        for n in (2, 4, 8, 16)
    ]
    one, two = (
        output_change_fit(Table("output_change", tuple(r for r in rows if r["seed"] in seeds))).where(
            law="power"
        )
        for seeds in ([0], [0, 1])
    )
    ((alone,), (both,)) = one.rows, two.rows
    assert alone["high"] - alone["low"] < 0.1
    assert both["high"] - both["low"] == pytest.approx(2 * 12.706 * 0.1, rel=1e-2)
    assert alone["exponent"] == pytest.approx(0.5, abs=0.01)


def test_few_depths_have_no_law_and_no_change_no_power():
    table = output_change(subject_of(build(uniform("pre", decoder_layers=1))), stacks=["decoder.sublayers"])
    assert len(output_change_fit(table)) == 4
    short = Table("output_change", table.rows[:2])
    assert len(output_change_fit(short)) == 0

    still = output_change_fit(output_change(subject_of(build(uniform("rezero")))))
    assert still.column("law") == ["log", "linear", "constant"]
    assert still.column("coefficient") == pytest.approx([0, 0, 0])


# ---------------------------------------------------------------------------------------- good manners


def test_nothing_is_left_behind():
    model = build(uniform("post", dropout=0.1)).train()
    subject = subject_of(model)
    loss_of(model).backward()
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    state = {name: (x.clone(), x._version) for name, x in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    rng = torch.get_rng_state()
    once, again = (output_change(subject, optimizer=ADAM) for _ in range(2))
    assert once == again
    assert all(math.isfinite(change) and change > 0 for change in once.column("change"))
    assert torch.equal(torch.get_rng_state(), rng)
    assert pointers == {name: p.data_ptr() for name, p in model.named_parameters()}
    for name, x in model.state_dict().items():
        assert torch.equal(x, state[name][0])
        assert x._version == state[name][1]
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters() if p.grad is not None)
    assert all(module.training for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_frozen_model_is_told_so():
    model = build(uniform("post")).requires_grad_(requires_grad=False)
    with pytest.raises(ValueError, match=r"requires_grad_\(\)"):
        random_change(subject_of(model))
    with pytest.raises(ValueError, match="unfreeze"):
        output_change(subject_of(model))

"""Groups by role: tables of rules, what a plug-in is given, clipping, and what a run refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from normlab.base.model_config import ModelConfig
from normlab.cli.presets import language_model
from normlab.errors import UserError
from normlab.lab.config import OptimConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.tasks.task import build_model
from normlab.nn import ROLES, Decoder, parameter_roles
from normlab.optim import OPTIMIZERS, ROLE_TABLES, RoleRule, build_optimizer, clipped_together, set_rate

MODEL = ModelConfig(
    dim=8,
    ffn_dim=12,
    heads=2,
    encoder_layers=0,
    decoder_layers=2,
    encoder_placement="layerscale",
    decoder_placement="layerscale",
    embedding="untied",
    dropout=0.0,
)
ADAMW = OptimConfig(optimiser="adamw", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


@pytest.fixture
def model():
    return build_model(Decoder, MODEL, 11, 1)


@pytest.fixture
def table(monkeypatch):
    rules = {
        "embedding": RoleRule(rate=4.0, decay=0.0, betas=(0.8, 0.9)),
        "head": RoleRule("sgd", rate=0.5),
        "norm": RoleRule(eps=1e-3, decay=0.5),
    }
    monkeypatch.setitem(ROLE_TABLES, "mine", rules)


def backward(model):
    ids = torch.randint(1, 11, (3, 7), generator=torch.Generator().manual_seed(1))
    model(ids).square().mean().backward()


def test_a_table_gives_each_role_its_rule_rate_decay_betas_and_eps(model, table):
    """Each role moves as an optimizer of its own would move it."""
    optimizer = set_rate(build_optimizer(model, replace(ADAMW, roles="mine")), 0.02)
    backward(model)
    own = {
        "embedding": (0.08, 0.0, (0.8, 0.9), 1e-8),
        "norm": (0.02, 0.05, (0.9, 0.95), 1e-3),
        **dict.fromkeys(("hidden", "bias", "scalar"), (0.02, 0.1, (0.9, 0.95), 1e-8)),
    }
    wanted = {}
    for (name, p), role in zip(model.named_parameters(), parameter_roles(model).values(), strict=True):
        twin = nn.Parameter(p.detach().clone())
        twin.grad = p.grad.clone()
        if role.role == "head":
            torch.optim.SGD([twin], torch.tensor(0.01), weight_decay=0.1, fused=True).step()
        else:
            lr, decay, betas, eps = own[role.role]
            torch.optim.AdamW([twin], torch.tensor(lr), betas, eps, decay, fused=True).step()
        wanted[name] = twin.detach()
    optimizer.step()
    assert {role.role for role in parameter_roles(model).values()} == {*own, "head"}
    unequal = [name for name, p in model.named_parameters() if not torch.equal(p.detach(), wanted[name])]
    assert not unequal


def test_a_plug_in_is_given_groups_that_name_their_roles_and_packed_rows(model):
    given = {}

    @OPTIMIZERS.register("outsider")
    def outsider(groups, lr, config):
        given.update({group["role"]: group for group in groups})
        return torch.optim.SGD(groups, lr)

    try:
        optimizer = build_optimizer(model, OptimConfig(optimiser="outsider"))
    finally:
        del OPTIMIZERS["outsider"]
    assert [*given] == ["embedding", "head", "hidden", "bias", "scalar", "norm"]
    shapes = [tuple(p.shape) for p in given["hidden"]["params"][:3]]
    assert (shapes, given["hidden"]["rows"][:3]) == ([(24, 8), (8, 8), (12, 8)], [(8, 8, 8), (8,), (12,)])
    set_rate(optimizer, 0.25)
    assert {float(group["lr"]) for group in optimizer.param_groups} == {0.25}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()])


def test_shipped_tables_are_those_of_their_authors(model):
    jordan = build_optimizer(model, replace(ADAMW, lr=0.02, roles="jordan"))
    rates = {group["role"]: float(group["lr"]) for group in set_rate(jordan, 0.02).param_groups}
    assert rates == {"hidden": pytest.approx(0.02)} | dict.fromkeys(
        ("embedding", "head", "bias", "scalar", "norm"), pytest.approx(3e-4)
    )
    assert {g["eps"] for g in jordan.param_groups if g["role"] != "hidden"} == {1e-10}
    assert {g["adjust_lr_fn"] for g in jordan.param_groups if g["role"] == "hidden"} == {"original"}
    olmo2 = build_optimizer(model, replace(ADAMW, roles="olmo2"))
    assert {g["role"]: g["weight_decay"] for g in olmo2.param_groups} == {
        "embedding": 0.0,
        **dict.fromkeys(("head", "hidden", "norm", "bias", "scalar"), 0.1),
    }


def test_nanochat_has_its_groups_at_its_width_and_another_optimizer_does_without():
    """Rates, decays and betas of its code at rate 0.02; rates of embeddings and head go with the width."""
    config = resolve("like:nanochat", replace(language_model(), model=MODEL))
    built = build_model(Decoder, config.model, 11, 1)
    groups = set_rate(build_optimizer(built, config.optim), 0.02).param_groups
    names = {id(p): name.rpartition(".")[2] for name, p in built.named_parameters()}
    wide = (8 / 768) ** -0.5
    assert {names[id(g["params"][0])] if g["role"] == "scalar" else g["role"]: own(g) for g in groups} == {
        "embedding": pytest.approx((0.3 * wide, 0.001, 0.8, 0.995)),
        "head": pytest.approx((0.008 * wide, 0.01, 0.8, 0.96)),
        "r": pytest.approx((0.005, 0.05, 0.8, 0.95)),
        "mu": pytest.approx((0.5, 0.0, 0.96, 0.95)),
        "hidden": pytest.approx((0.02, 0.28)),
    }
    other = resolve("like:nanochat+adamw", replace(language_model(), model=MODEL))
    adamw = set_rate(build_optimizer(build_model(Decoder, other.model, 11, 1), other.optim), 0.02)
    assert isinstance(adamw, torch.optim.AdamW)
    assert [float(g["lr"]) for g in adamw.param_groups] == pytest.approx([0.02] * len(adamw.param_groups))


@pytest.mark.parametrize("recipe", ["like:olmo2", "like:olmo2+adam", "like:olmo2+muon"])
def test_a_table_without_rates_stays_with_another_optimizer(recipe):
    config = resolve(recipe, replace(language_model(), model=MODEL))
    optimizer = build_optimizer(build_model(Decoder, config.model, 11, 1), config.optim)
    assert {(g["role"] == "embedding", g["weight_decay"]) for g in optimizer.param_groups} == {
        (True, 0.0),
        (False, 0.1),
    }


def own(group):
    return float(group["lr"]), group["weight_decay"], *group.get("betas", ())


def test_every_table_names_roles_and_rules_that_exist(model):
    for name, rules in ROLE_TABLES.items():
        assert {role.partition(".")[0] for role in rules} <= {*ROLES}, name
        build_optimizer(model, replace(ADAMW, roles=name))


def test_an_unknown_table_is_refused_with_the_nearest(model):
    with pytest.raises(UserError, match=r"\broles 'jordon', .*'jordan'\?"):
        build_optimizer(model, replace(ADAMW, roles="jordon"))


def test_gradients_are_clipped_together_or_role_by_role(model):
    names = [own.role for own in parameter_roles(model).values()]
    assert clipped_together(model, ADAMW) == [[*range(len(names))]]
    parts = clipped_together(model, replace(ADAMW, clip_by="role"))
    assert sorted(i for part in parts for i in part) == [*range(len(names))]
    assert [{names[i] for i in part} for part in parts] == [{name} for name in dict.fromkeys(names)]

"""µP and CompleteP against the tables of EleutherAI's nanoGPT-mup, its branches ``master`` and ``completep``.

The tables are written here a second time, role by role, as functions of the ratios of widths and depths.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cases import each
from normlab.base.model_config import ModelConfig
from normlab.errors import UserError
from normlab.lab.config import Config, OptimConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.tasks.task import build_model
from normlab.nn import Context, Decoder, parameter_roles
from normlab.optim import build_optimizer, set_rate

BASE_DIM, BASE_LAYERS, VOCAB, HEADS = 32, 2, 96, 4
LR, DECAY, EPS = 0.01, 0.1, 1e-12
OPTIM = OptimConfig(
    optimiser="adamw", lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=DECAY, weight_decay_on="matrices"
)
ALPHA = {"mup": None, "completep": 1.0, "depth_mup": 0.5}
SIZES = [(32, 2), (128, 2), (32, 6), (96, 8)]


def config_of(name, dim, layers, **choices):
    return ModelConfig(
        dim=dim,
        ffn_dim=4 * dim,
        heads=HEADS,
        encoder_layers=0,
        decoder_layers=layers,
        encoder_placement="pre",
        decoder_placement="pre",
        position_encoding="learned",
        max_positions=64,
        dropout=0.0,
        parametrisation=name,
        base_dim=BASE_DIM,
        base_layers=BASE_LAYERS,
        **choices,
    )


def model_of(name, dim, layers, **choices):
    return build_model(Decoder, config_of(name, dim, layers, **choices), VOCAB, 1)


def kinds(model):
    """Every parameter, with its name and its row of the tables."""
    for name, p in model.named_parameters():
        inside = "sublayers" in name
        if not inside and p.dim() == 2:
            yield name, p, "embedding"
        elif p.dim() == 2:
            yield name, p, "hidden"
        else:
            yield name, p, "block vector" if inside else "final norm"


def published(alpha, m_n, m_l):
    """Rate, decay and eps by row. ``alpha`` is None in ``master``, which knows no depth."""
    depth = 1.0 if alpha is None else m_l ** (alpha - 1)
    eps = EPS if alpha is None else EPS / m_n / m_l**alpha
    decay = DECAY if alpha is None else DECAY * m_n
    return {
        "embedding": (LR, DECAY, eps),
        "final norm": (LR, 0.0, eps),
        "hidden": (LR / m_n * depth, decay, eps),
        "block vector": (LR * depth, 0.0, eps),
    }


@each(("dim", "layers"), SIZES)
@each("name", ALPHA)
def test_rates_decay_and_eps_are_those_of_the_tables(name, dim, layers):
    model = model_of(name, dim, layers)
    optimizer = set_rate(build_optimizer(model, OPTIM), LR)
    found = {
        id(p): (float(g["lr"]), g["weight_decay"], g["eps"])
        for g in optimizer.param_groups
        for p in g["params"]
    }
    wanted = published(ALPHA[name], dim / BASE_DIM, layers / BASE_LAYERS)
    for path, p, kind in kinds(model):
        assert found[id(p)] == pytest.approx(wanted[kind], rel=1e-6), path


@each("embedding", ["plain", "untied"])
@each(("dim", "layers"), SIZES)
@each("name", ALPHA)
def test_deviations_at_the_start_are_those_of_the_tables(name, dim, layers, embedding):
    """Embeddings start as at the base, hidden matrices smaller by the root of the width. Depth plays no part,
    as no scheme here divides by it. The base's own deviations are 1/sqrt(d) and Xavier's.
    """
    model = model_of(name, dim, layers, embedding=embedding)
    for path, p, kind in kinds(model):
        if kind == "embedding":
            std = BASE_DIM**-0.5
        elif kind == "hidden":
            packed = 3 if "qkv" in path else 1
            outs, ins = (n * BASE_DIM // dim for n in (p.shape[0] // packed, p.shape[1]))
            std = math.sqrt(2 / (outs + ins)) / math.sqrt(dim / BASE_DIM)
        else:
            assert torch.equal(p, torch.full_like(p, float(path.endswith("weight")))), path
            continue
        spread = 4 / math.sqrt(2 * p.numel())  # four standard errors of a standard deviation
        assert float(p.detach().square().mean().sqrt()) == pytest.approx(std, rel=spread), path


def forward(model, ids, alpha, m_n, m_l):
    """Logits by the tables' forward factors, in plain formulas."""
    w = {name: p.detach() for name, p in model.named_parameters()}
    dim, rows = w["embedding.weight"].shape[1], len(ids[0])
    head = dim // HEADS
    branch = 1.0 if alpha is None else m_l**-alpha
    x = w["embedding.weight"][ids] * math.sqrt(BASE_DIM) + w["position_encoding.weight"][:rows]
    for i in range(len(model.decoder.sublayers)):
        own = {k.removeprefix(f"decoder.sublayers.{i}."): v for k, v in w.items() if f"sublayers.{i}." in k}
        y = F.layer_norm(x, (dim,), own["place.norm.weight"], own["place.norm.bias"])
        if "f.qkv.weight" in own:
            packed = y @ own["f.qkv.weight"].T + own["f.qkv.bias"]
            q, k, v = (z.unflatten(2, (HEADS, head)).transpose(1, 2) for z in packed.split(dim, -1))
            scores = q @ k.transpose(2, 3) / head
            later = torch.ones(rows, rows).triu(1).bool()
            y = (scores.masked_fill(later, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
            y = y @ own["f.out.weight"].T + own["f.out.bias"]
        else:
            y = torch.relu(y @ own["f.inner.weight"].T + own["f.inner.bias"])
            y = y @ own["f.outer.weight"].T + own["f.outer.bias"]
        x = x + branch * y
    x = F.layer_norm(x, (dim,), w["decoder.end.weight"], w["decoder.end.bias"])
    return x / m_n @ w.get("embedding.output", w["embedding.weight"]).T


@each(("dim", "layers", "embedding"), [(32, 2, "plain"), (64, 6, "untied"), (96, 2, "plain")])
@each("name", ALPHA)
def test_the_forward_pass_has_the_factors_of_the_tables(name, dim, layers, embedding):
    model = model_of(name, dim, layers, embedding=embedding).double()
    with torch.no_grad():
        for p in model.parameters():  # biases and gains of no special value
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        ids = torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
        wanted = forward(model, ids, ALPHA[name], dim / BASE_DIM, layers / BASE_LAYERS)
        torch.testing.assert_close(model(ids), wanted, rtol=1e-10, atol=1e-10)


# -------------------------------------------------------------------------------------- coordinate checks


def sizes_of_activations(name, dim, layers, steps=3):
    """Mean absolute value of the stream behind the last block after a few steps, and of the logits."""
    model = model_of(name, dim, layers, embedding="untied")
    optimizer = build_optimizer(model, replace(OPTIM, weight_decay=0.0, eps=1e-8))
    ids = torch.randint(1, VOCAB, (4, 24), generator=torch.Generator().manual_seed(3))
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        set_rate(optimizer, LR)
        optimizer.step()
    with torch.no_grad():
        stream, context = model.decoder.begin(model.embed(ids)), Context(padding_mask=ids != 0)
        for sublayer in model.decoder:
            stream = sublayer(stream, context)
        return float(stream.abs().mean()), float(model(ids).abs().mean())


def test_activations_do_not_grow_with_width_under_mup_and_do_under_standard():
    growth = {}
    for name in ("standard", "mup"):
        narrow, wide = (sizes_of_activations(name, dim, 2) for dim in (32, 256))
        growth[name] = [b / a for a, b in zip(narrow, wide, strict=True)]
    assert max(growth["mup"]) <= 1.0
    assert min(growth["standard"]) > 1.5


def test_activations_do_not_grow_with_depth_under_completep_and_do_under_mup():
    growth = {}
    for name in ("mup", "completep"):
        shallow, deep = (sizes_of_activations(name, 32, layers)[0] for layers in (2, 16))
        growth[name] = deep / shallow
    assert growth["completep"] <= 1.1
    assert growth["mup"] > 1.5


# ----------------------------------------------------------------------------------------- around the tables


def test_at_the_base_and_without_one_nothing_is_scaled_but_attention():
    plain = model_of("standard", BASE_DIM, BASE_LAYERS)
    for name in ALPHA:
        config = config_of(name, BASE_DIM, BASE_LAYERS)
        for same in (config, replace(config, base_dim=0, base_layers=0)):
            model = build_model(Decoder, same, VOCAB, 1)
            pairs = zip(plain.parameters(), model.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), name
            assert {g["rate"] for g in build_optimizer(model, OPTIM).param_groups} == {1.0}


def test_a_scheme_that_does_not_fall_with_the_width_is_made_to(monkeypatch):
    """Such as one of constant deviations: hidden matrices fall by the root of the width, embeddings stay."""
    from normlab.nn.init import SCHEMES

    monkeypatch.setattr(SCHEMES["xavier"], "by_width", dict.fromkeys(("embedding", "head", "hidden"), 0.0))
    falling, constant = model_of("standard", 128, 2), model_of("mup", 128, 2)
    roles = parameter_roles(falling)
    for (name, a), b in zip(falling.named_parameters(), constant.parameters(), strict=True):
        factor = 0.5 if roles[name].role == "hidden" else 1.0
        assert torch.equal(a.detach() * factor, b.detach()), name


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("pre+fixnorm+mup", "mup fixes the embeddings' scale, which has no effect on fixnorm"),
        ("post+completep", "completep is derived for a stream that is the plain sum of its branches"),
        ("periln+completep", "that of periln is not"),
        ("pre+mup+muon", "the rates of mup are derived for adam, adamw, radam, and not for muon"),
    ],
)
def test_what_a_parametrisation_is_not_derived_for_is_refused(recipe, said):
    with pytest.raises(UserError, match=said):
        resolve(recipe, Config())


def test_a_rule_of_a_table_is_refused_as_well():
    with pytest.raises(UserError, match="muon_original"):
        resolve("pre+mup", Config(optim=replace(OPTIM, roles="jordan")))
    resolve("pre+mup", Config(optim=replace(OPTIM, roles="olmo2")))

"""What an optimizer holds, its groups, and its first step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from .tiny import DIM, Decoder, first, groups, loss_of, report_of

Make = Callable[[nn.Module], Any]


def with_optimizer(make: Make, *names: str, **setup: Any) -> Any:
    torch.manual_seed(0)
    model = Decoder()
    return report_of(*names, model=model, optimizer=make(model), **setup)


@pytest.mark.parametrize("name", ["optimizer_coverage", "groups", "update"])
def test_they_hold_for_sorted_groups(name: str):
    assert with_optimizer(groups, name, lr=1e-3).holds == (name,)
    assert report_of(name, optimizer=groups, lr=1e-3).holds == (name,)


# ------------------------------------------------------------------------------------------------ holds
def test_a_head_that_no_optimizer_holds_is_named():
    report = with_optimizer(
        lambda m: AdamW([p for n, p in m.named_parameters() if "head" not in n]), "optimizer_coverage"
    )
    assert first(report) == ("optimizer_coverage", "head.weight")


def test_a_parameter_frozen_on_purpose_need_not_be_held():
    report = with_optimizer(
        lambda m: AdamW([p for n, p in m.named_parameters() if "head" not in n]),
        "optimizer_coverage",
        declare={"frozen": "head*"},
    )
    assert report.holds == ("optimizer_coverage",)


def test_an_optimizer_of_a_copy_holds_others():
    assert first(with_optimizer(lambda m: groups(copy.deepcopy(m)), "optimizer_coverage")) == (
        "optimizer_coverage",
        "optimizer",
    )


def test_two_optimizers_must_not_hold_the_same():
    report = with_optimizer(lambda m: [groups(m), SGD(m.head.parameters(), lr=0.1)], "optimizer_coverage")
    assert first(report) == ("optimizer_coverage", "head.weight")


def test_two_optimizers_hold_together():
    report = with_optimizer(
        lambda m: [
            AdamW([p for n, p in m.named_parameters() if "head" not in n]),
            SGD([m.head.weight], lr=0.1),
        ],
        "optimizer_coverage",
    )
    assert report.holds == ("optimizer_coverage",)


def test_a_parameter_of_the_loss_is_not_foreign():
    temperature = nn.Parameter(torch.ones(()))
    report = with_optimizer(
        lambda m: AdamW([*m.parameters(), temperature]),
        "optimizer_coverage",
        loss=lambda m, ids: loss_of(m, ids) * temperature,
    )
    assert report.holds == ("optimizer_coverage",)


# ----------------------------------------------------------------------------------------------- groups
def split(model: nn.Module, decays: Callable[[str], bool]) -> AdamW:
    named = list(model.named_parameters())
    return AdamW(
        [
            {"params": [p for n, p in named if decays(n)], "weight_decay": 0.1},
            {"params": [p for n, p in named if not decays(n)], "weight_decay": 0.0},
        ]
    )


def with_empty_group(model: nn.Module, lr: float) -> AdamW:
    return AdamW([{"params": model.parameters()}, {"params": [], "lr": lr}], lr=1e-3)


class Muon(Optimizer):
    """Steps matrices by an orthogonal matrix, but by signs where the group or the state says ``flat``."""

    def __init__(self, params: Any, **defaults: Any):
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.95), "flat": False, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                change = p.grad.sign()
                if not self.state[p].get("flat", group["flat"]) and p.ndim == 2:
                    left, _, right = torch.linalg.svd(p.grad, full_matrices=False)
                    change = left @ right
                p.add_(change, alpha=-group["lr"])


FAULTS: list[tuple[Make, str]] = [
    (lambda m: split(m, lambda n: "blocks.0.norm" in n or "norm" not in n), "blocks.0.norm.weight"),
    (lambda m: split(m, lambda n: True), "blocks.0.norm.weight"),
    (lambda m: split(m, lambda n: "norm" in n), "optimizer"),
    (lambda m: split(m, lambda n: "up.weight" in n), "blocks.0.down.weight"),
    (lambda m: AdamW(m.parameters(), betas=(0.999, 0.9)), "optimizer"),
    (lambda m: AdamW(m.parameters(), lr=3e-3), "optimizer"),
    (lambda m: Muon(m.parameters(), lr=1e-3), "embed.weight"),
    (lambda m: AdamW([{"params": b.parameters(), "lr": 10.0 ** -(3 + (b is m.blocks[2]))} for b in m.blocks]),
     "blocks.2.norm.weight"),
    (lambda m: with_empty_group(m, lr=1e-4), "optimizer"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "place"), FAULTS)
def test_a_wrong_group_is_named(make: Make, place: str):
    assert first(with_optimizer(make, "groups", lr=1e-3)) == ("groups", place)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: AdamW(m.parameters(), lr=1e-3),
        lambda m: AdamW(m.parameters(), betas=(0.95, 0.95)),  # Reddi et al. compare beta1's square
        lambda m: SGD([{"params": b.parameters(), "lr": 0.1 / 2**i} for i, b in enumerate(m.blocks)]),
        lambda m: [
            Muon([p for n, p in m.named_parameters() if n.startswith("blocks") and p.ndim > 1], lr=0.02),
            AdamW([p for n, p in m.named_parameters() if not n.startswith("blocks") or p.ndim < 2], lr=1e-3),
        ],
    ],
)
def test_one_group_layerwise_rates_and_muon_on_hidden_matrices_are_sound(make: Make):
    assert with_optimizer(make, "groups").holds == ("groups",)


def test_the_rate_that_was_asked_for_may_be_that_of_one_group():
    def two_rates(model: nn.Module) -> AdamW:
        return AdamW([{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 1e-2}])

    assert with_optimizer(two_rates, "groups", lr=1e-2).ok
    assert first(with_optimizer(two_rates, "groups", lr=1e-1)) == ("groups", "optimizer")


def in_groups(is_flat: Callable[[str], bool]) -> Make:
    """Return a function that gives Muon one group for its own rule and one for the other."""

    def make(model: nn.Module) -> Muon:
        named = list(model.named_parameters())
        return Muon(
            [{"params": [p for n, p in named if is_flat(n) is flat], "flat": flat} for flat in (False, True)]
        )

    return make


def test_a_group_for_what_is_frozen_may_be_empty():
    torch.manual_seed(0)
    model = Decoder()
    model.embed.requires_grad_(False)
    report = report_of("groups", model=model, optimizer=with_empty_group(model, lr=1e-4))
    assert report.holds == ("groups",)


def test_muon_is_judged_by_the_step_that_each_group_gets():
    assert with_optimizer(in_groups(lambda n: "blocks" not in n or "norm" in n or "bias" in n), "groups").ok
    report = with_optimizer(in_groups(lambda n: n == "head.weight"), "groups")
    assert first(report) == ("groups", "embed.weight")


def test_muon_may_mark_parameters_in_its_state():
    def make(model: nn.Module, *, of_head: bool) -> Muon:
        optimizer = Muon(model.parameters())
        for n, p in model.named_parameters():
            hidden = n.startswith("blocks") or (of_head and n == "head.weight")
            optimizer.state[p]["flat"] = not hidden
        return optimizer

    assert with_optimizer(lambda m: make(m, of_head=False), "groups").ok
    assert first(with_optimizer(lambda m: make(m, of_head=True), "groups")) == ("groups", "head.weight")


def test_gains_that_decay_in_one_group_are_a_note():
    report = with_optimizer(lambda m: AdamW(m.parameters()), "groups")
    assert report.ok
    assert report.notes


class Scaled(Decoder):
    """Scales the stream before each block by a number of its own."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.ones(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = block(scale * x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("matrices", [0.1, 0.05, 0.0])
def test_a_vector_with_a_group_and_a_decay_of_its_own_is_a_note(matrices: float):
    torch.manual_seed(0)
    model = Scaled()
    spared = [p for n, p in model.named_parameters() if p.ndim == 1 and n != "scales"]
    in_groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": matrices},
        {"params": spared, "weight_decay": 0.0},
        {"params": [model.scales], "weight_decay": 0.05},
    ]
    report = report_of("groups", model=model, optimizer=AdamW(in_groups))
    assert report.ok
    assert [n.module for n in report.notes] == ["scales"]
    in_groups[0]["params"].append(in_groups.pop()["params"][0])
    report = report_of("groups", model=model, optimizer=AdamW(in_groups))
    assert report.ok is not bool(matrices)


def test_gains_that_share_a_group_with_an_embedding_are_misplaced():
    def make(model: nn.Module) -> AdamW:
        named = list(model.named_parameters())
        outside = [p for n, p in named if n.startswith(("embed", "norm"))]
        matrices = [p for n, p in named if p.ndim == 2 and not n.startswith("embed")]
        vectors = [p for n, p in named if p.ndim == 1 and not n.startswith("norm")]
        return AdamW([{"params": matrices}, {"params": outside}, {"params": vectors, "weight_decay": 0.0}])

    assert first(with_optimizer(make, "groups")) == ("groups", "norm.weight")


class Convolved(Decoder):
    """Mixes tokens by a small kernel and gates each block."""

    def __init__(self):
        super().__init__()
        self.kernels = nn.ModuleList(nn.Conv1d(DIM, DIM, 3, groups=DIM) for _ in self.blocks)
        self.gates = nn.ModuleList(nn.Linear(DIM, 2) for _ in self.blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block, kernel, gate in zip(self.blocks, self.kernels, self.gates, strict=True):
            mixed = kernel(nn.functional.pad(x.mT, (2, 0))).mT
            x = block(x + mixed * gate(x).sigmoid().prod(-1, keepdim=True))
        return self.head(self.norm(x))


@pytest.mark.parametrize("also", ["", "blocks.2.up.weight"])
def test_matrices_are_spared_by_kind_or_by_mistake(also: str):
    torch.manual_seed(0)
    model = Convolved()
    spared = {n for n, p in model.named_parameters() if p.ndim == 1 or min(p.shape) < 4} | ({also} - {""})
    report = report_of("groups", model=model, optimizer=split(model, lambda n: n not in spared))
    assert first(report) == (("groups", also) if also else ("", ""))
    assert bool(report.notes) is not bool(also)


class Pooled(Decoder):
    """Mixes tokens by torch's own attention, which holds the matrix of queries, keys and values itself."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, 3 * DIM)  # of the same size as that matrix
        self.down = nn.Linear(3 * DIM, DIM)
        self.pool = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.up(x).relu())
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.norm(x + self.pool(x, x, x, attn_mask=later, need_weights=False)[0]))


@pytest.mark.parametrize("also", ["", "up.weight"])
def test_matrices_that_no_linear_map_holds_may_be_spared_alike(also: str):
    torch.manual_seed(0)
    model = Pooled()
    maps = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    decayed = {f"{n}.weight" for n in maps} - {also}
    report = report_of("groups", model=model, optimizer=split(model, lambda n: n in decayed))
    assert first(report) == (("groups", also) if also else ("", ""))
    assert [n.module for n in report.notes] == ([] if also else ["pool.in_proj_weight"])


def test_biases_of_norms_may_be_spared_and_those_of_maps_decay():
    report = with_optimizer(lambda m: split(m, lambda n: "norm" not in n), "groups")
    assert report.ok
    assert [n.module for n in report.notes] == ["blocks.0.up.bias"]
    report = with_optimizer(
        lambda m: split(m, lambda n: "norm" not in n and n != "blocks.0.up.bias"), "groups"
    )
    assert first(report)[0] == "groups"


# ----------------------------------------------------------------------------------------------- update
@pytest.mark.parametrize(
    "make",
    [
        lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda m: Adam(m.parameters(), weight_decay=0.01, amsgrad=True),
        lambda m: torch.optim.RMSprop(m.parameters()),
        lambda m: torch.optim.Adafactor(m.parameters()),
        lambda m: torch.optim.LBFGS(m.parameters()),
    ],
)
def test_torchs_own_optimizers_keep_their_rules(make: Make):
    assert with_optimizer(make, "update").holds == ("update",)


def test_a_resumed_optimizer_keeps_its_rule():
    def trained(model: nn.Module) -> AdamW:
        optimizer = groups(model)
        for _ in range(3):
            loss_of(model, torch.arange(16).reshape(2, 8)).backward()
            optimizer.step()
        return optimizer

    assert with_optimizer(trained, "update").holds == ("update",)


class Uphill(Optimizer):
    """Adds the gradient, or subtracts it where ``sign`` is negative."""

    def __init__(self, params: Any, sign: float):
        super().__init__(params, {"lr": 1e-3})
        self.sign = sign

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.data.add_(p.grad, alpha=self.sign * 1e-3)


@pytest.mark.slow
def test_a_step_must_go_downhill():
    assert first(with_optimizer(lambda m: Uphill(m.parameters(), 1.0), "update")) == ("update", "optimizer")
    assert with_optimizer(lambda m: Uphill(m.parameters(), -1.0), "update").ok
    climbing = with_optimizer(lambda m: AdamW(m.parameters(), maximize=True), "groups", "update")
    assert first(climbing) == ("update", "optimizer")


def test_an_adam_without_bias_correction_is_not_adam():
    rule = type("Adam", (Uphill,), {})
    group = {"betas": (0.9, 0.99), "eps": 1e-8}
    report = with_optimizer(lambda m: rule([{"params": m.parameters(), **group}], -1.0), "update")
    assert first(report) == ("update", "embed.weight")


def test_a_group_at_rate_zero_does_not_learn():
    report = with_optimizer(
        lambda m: SGD(
            [{"params": m.blocks.parameters()}, {"params": m.head.parameters(), "lr": 0.0}], lr=0.1
        ),
        "update",
    )
    assert first(report) == ("update", "head.weight")


@pytest.mark.slow
def test_an_update_below_the_weights_precision_is_lost():
    torch.manual_seed(0)
    model = Decoder().bfloat16()
    assert (
        first(report_of("update", model=model, optimizer=AdamW(model.parameters(), lr=1e-7)))[0] == "update"
    )
    assert report_of("update", model=model, optimizer=AdamW(model.parameters(), lr=1e-2)).ok


def test_an_eps_above_the_gradient_is_named():
    assert first(with_optimizer(lambda m: AdamW(m.parameters(), eps=1.0), "update")) == (
        "update",
        "optimizer",
    )


class Waiting(SGD):
    """Moves nothing, as an optimizer does while it waits for its second moment."""

    def step(self, closure: Any = None) -> None:
        return None


def test_a_rule_that_waits_is_not_an_update_that_is_rounded_away():
    report = report_of("update", optimizer=lambda m: Waiting(m.parameters(), lr=0.1))
    assert report.ok
    assert [n.module for n in report.notes] == ["optimizer"]


class Kahan(SGD):
    """Keeps what the weights' type rounds away, and adds it to the next step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            kept, before = self.state[p].setdefault("kept", torch.zeros_like(p)), p.clone()
            kept.add_(p.grad.sign(), alpha=-self.param_groups[0]["lr"])
            p.add_(kept)
            kept.add_(before.sub_(p))


def test_an_update_that_a_state_keeps_is_not_lost():
    torch.manual_seed(0)
    model = Decoder().bfloat16()
    report = report_of("update", model=model, optimizer=Kahan(model.parameters(), lr=1e-7))
    assert report.holds == ("update",)


# ---------------------------------------------------------------------------------------------- masters
def with_masters(model: nn.Module, batch: Any, optimizer: Optimizer, scheduler: Any) -> None:
    """The step of weights in bfloat16 whose optimizer holds copies in float32."""
    model.zero_grad()
    loss_of(model, batch).backward()
    pairs = list(zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    for master, p in pairs:
        master.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for master, p in pairs:
            p.copy_(master)


def without_masters(model: nn.Module, batch: Any, optimizer: Optimizer, scheduler: Any) -> None:
    loss_of(model, batch).backward()
    optimizer.step()


def test_masters_in_the_optimizer_stand_for_the_weights():
    torch.manual_seed(0)
    model = Decoder().bfloat16()
    masters = AdamW([nn.Parameter(p.detach().float()) for p in model.parameters()], lr=1e-4)
    report = report_of(
        "optimizer_coverage", "step", "update", model=model, optimizer=masters, step=with_masters
    )
    assert report.ok
    assert set(report.untestable) == {"step", "update"}
    report = report_of("optimizer_coverage", model=model, optimizer=masters, step=without_masters)
    assert first(report) == ("optimizer_coverage", "optimizer")


@pytest.mark.parametrize("held", [with_masters, without_masters])
def test_masters_that_the_step_reaches_by_its_closure_alone_stand_for_the_weights(held: Any):
    torch.manual_seed(0)
    model = Decoder().bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]

    def copied_back(model: nn.Module, batch: Any, optimizer: Optimizer, scheduler: Any) -> None:
        model.zero_grad()
        loss_of(model, batch).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)

    step = copied_back if held is with_masters else without_masters
    before = [p.detach().clone() for p in masters]
    report = report_of(
        "optimizer_coverage", "update", model=model, optimizer=AdamW(masters, lr=1e-4), step=step
    )
    assert report.ok is (held is with_masters)
    assert all(map(torch.equal, before, masters))


def test_a_step_may_clip_what_its_closure_holds():
    torch.manual_seed(0)
    model = Decoder()
    parameters = list(model.parameters())

    def step(model: nn.Module, batch: Any, optimizer: Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    report = report_of("step", model=model, optimizer=groups(model), step=step)
    assert report.holds == ("step",)


# ------------------------------------------------------------------------------------ held still by rounding


def in_bfloat16(lr: float, rule: Any = AdamW, **setup: Any) -> Any:
    """Test the update of a model in bfloat16, whose gains are 1."""
    torch.manual_seed(0)
    model = Decoder(0.0).bfloat16()
    return report_of("update", model=model, optimizer=rule(model.parameters(), lr=lr), **setup)


@pytest.mark.slow
@pytest.mark.parametrize("lr", [6e-4, 1e-3])
def test_gains_that_rounding_holds_still_are_named(lr: float):
    report = in_bfloat16(lr)
    assert first(report)[0] == "update"
    at_a_larger_rate = in_bfloat16(1e-2)
    assert at_a_larger_rate.holds == ("update",)
    assert not at_a_larger_rate.notes


class RoundsAtRandom(SGD):
    """Adds steps of the size of the rate, and rounds the sums up or down at random, without bias."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            wide = p.float() - self.param_groups[0]["lr"] * p.grad.float().sign()
            bits = wide.view(torch.int32) + torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)
            p.copy_((bits & -65536).view(torch.float32) if p.dtype == torch.bfloat16 else wide)


def test_a_rule_that_rounds_at_random_holds_nothing_still():
    assert in_bfloat16(6e-4, RoundsAtRandom).holds == ("update",)


def test_a_rule_that_keeps_what_is_rounded_away_holds_nothing_still():
    assert in_bfloat16(6e-4, Kahan).holds == ("update",)


def test_a_pruned_parameter_is_held_by_its_mask_and_not_by_rounding():
    torch.manual_seed(0)
    model = Decoder(0.0).bfloat16()
    gain = model.blocks[0].norm.weight

    class Pruned(SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            held = next(iter(self.param_groups[0]["params"]))
            held.data.fill_(1.0)

    others = [p for p in model.parameters() if p is not gain]
    report = report_of("update", model=model, optimizer=Pruned([gain, *others], lr=10.0))
    assert report.holds == ("update",)


# -------------------------------------------------------------------------------------- tokens of their own
class Patches(nn.Module):
    """Blocks over features, with tokens of its own before them and positions added."""

    def __init__(self):
        super().__init__()
        self.cls, self.registers = nn.Parameter(torch.randn(1, 1, DIM)), nn.Parameter(torch.randn(1, 3, DIM))
        self.places = nn.Parameter(torch.randn(1, 6, DIM))
        self.read, self.blocks = nn.Linear(5, DIM), Decoder(0.0).blocks
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 7)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (self.cls.expand(len(x), -1, -1), self.registers.expand(len(x), -1, -1))
        h = torch.cat((*tokens, self.read(x) + self.places), 1)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h.mean(1)))


def patched(
    spared: Callable[[str], bool],
    rates: Callable[[str], float] = lambda _: 1e-3,
    kind: type[nn.Module] = Patches,
) -> Any:
    """Test the groups of a model of patches of which these parameters are spared from decay."""
    model = kind()
    keys: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        decay = 0.0 if p.ndim < 2 or spared(name) else 0.1
        keys.setdefault((rates(name), decay), []).append(p)
    groups = [{"params": held, "lr": lr, "weight_decay": decay} for (lr, decay), held in keys.items()]
    g = torch.Generator().manual_seed(0)
    batch = (torch.randn(4, 6, 5, generator=g), torch.tensor([0, 1, 2, 3]))
    return report_of(
        "groups",
        model=model,
        batches=batch,
        loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]),
        optimizer=AdamW(groups),
    )


FAULTY_TOKENS: list[tuple[Callable[[str], bool], Callable[[str], float], str]] = [
    (lambda n: n in ("cls", "places"), lambda _: 1e-3, "registers"),
    (lambda n: n in ("registers", "places"), lambda _: 1e-3, "cls"),
    (lambda n: n == "cls", lambda _: 1e-3, "cls"),
    (
        lambda n: n in ("cls", "registers", "places"),
        lambda n: 1e-3 if n == "registers" else 1e-4,
        "registers",
    ),
]


@pytest.mark.parametrize(("spared", "rates", "place"), FAULTY_TOKENS)
def test_a_token_that_is_treated_unlike_its_like_is_named(spared: Any, rates: Any, place: str):
    report = patched(spared, rates)
    assert {v.module for v in report.failures} == {place}


@pytest.mark.parametrize(
    "spared",
    [
        lambda n: False,
        lambda n: n == "places",
        lambda n: n in ("cls", "registers"),
        lambda n: n in ("cls", "registers", "places"),
    ],
)
def test_tokens_that_are_treated_alike_are_sound(spared: Callable[[str], bool]):
    assert patched(spared).holds == ("groups",)


class Prompted(Patches):
    """Puts other prompts before each block, and learns them at a rate of their own."""

    def __init__(self):
        super().__init__()
        self.prompts = nn.ParameterList(nn.Parameter(torch.randn(1, 2, DIM)) for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat((self.cls.expand(len(x), -1, -1), self.read(x) + self.places), 1)
        for block, prompt in zip(self.blocks, self.prompts, strict=True):
            h = block(torch.cat((prompt.expand(len(x), -1, -1), h), 1))[:, 2:]
        return self.head(self.norm(h.mean(1)))


def test_prompts_of_each_layer_may_have_rates_by_layer():
    def rate(name: str) -> float:
        return 1e-3 * 0.8 ** int(name.split(".")[1]) if name.startswith("prompts") else 1e-3

    assert patched(lambda n: n in ("cls", "places"), rate, Prompted).holds == ("groups",)


class MuonByFlag(Optimizer):
    """Steps the groups with ``use_muon`` by an orthogonal matrix, and the others as Adam does at first."""

    def __init__(self, groups: Any):
        super().__init__(groups, {"lr": 1e-3, "use_muon": False, "betas": (0.9, 0.95), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                change = p.grad.sign()
                if group["use_muon"]:
                    left, _, right = torch.linalg.svd(p.grad.flatten(1), full_matrices=False)
                    change = (left @ right).view_as(p)
                p.add_(change, alpha=-group["lr"])


@pytest.mark.parametrize("flag", ["use_muon", "orthogonal"])
def test_an_optimizer_of_two_rules_is_judged_by_the_step_of_each_group(flag: str):
    class Renamed(MuonByFlag):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["use_muon"] = group[flag]
            super().step()

    def made(model: nn.Module, *, all_matrices: bool) -> Optimizer:
        named = list(model.named_parameters())
        hidden = [p for n, p in named if p.ndim > 1 and (all_matrices or n.startswith("blocks"))]
        others = [p for _, p in named if all(p is not q for q in hidden)]
        return Renamed([{"params": hidden, flag: True}, {"params": others, flag: False}])

    assert with_optimizer(lambda m: made(m, all_matrices=False), "groups").ok
    report = with_optimizer(lambda m: made(m, all_matrices=True), "groups")
    assert first(report) == ("groups", "embed.weight")

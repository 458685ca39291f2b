"""What loops do around a step: steps that are skipped, rates that are set by hand, several optimizers."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import normlab
from normlab.errors import UserError
from normlab.setups.script import setup_from_script
from normlab.trace.rates import rates_of
from normlab.trace.restore import same_globals
from normlab.trials.course import read_course
from normlab.trials.training import first_steps

BEGIN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
"""


@contextmanager
def recorded(folder, code, **how):
    """The setup that a script shows."""
    (folder / "train.py").write_text(BEGIN + code)
    with setup_from_script(str(folder / "train.py"), **how) as named:
        yield named


SKIPPED = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused={fused})
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-60)
for step in range(20):
    x = torch.randn(6, 4) * 1e6
    optimizer.zero_grad(set_to_none={to_none})
    scaler.scale(model(x).pow(2).mean()).backward()
    if {clips}:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_a_step_that_a_scaler_skips_is_no_part_of_the_next(tmp_path, fused, clips, to_none):
    code = SKIPPED.format(fused=fused, clips=clips, to_none=to_none)
    with recorded(tmp_path, code) as named:
        assert named.facts["recorded"] == "1 micro-batch"
        assert not named.setup.cannot
        assert named.setup.batch["x"].shape == (6, 4)
        assert not any(torch.isinf(p.grad).any() for p in named.setup.model.parameters())


SKIPPED_BY_HAND = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(6, 4) * (1e30 if step == 0 else 1)
    model(x).pow(2).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
"""


def test_a_step_that_a_loop_skips_is_no_part_of_the_next(tmp_path):
    with recorded(tmp_path, SKIPPED_BY_HAND) as named:
        assert named.facts["recorded"] == "1 micro-batch"
        assert not named.setup.cannot


def test_batches_of_skipped_steps_are_not_harvested(tmp_path):
    with recorded(tmp_path, SKIPPED.format(fused=False, clips=True, to_none=True), batches=4) as named:
        assert len(named.setup.batches) == 4
        assert all(batch["x"].shape == (6, 4) for batch in named.setup.batches)


def scheduled_by_hand(made_with, course):
    return f"""
import math
optimizer = torch.optim.AdamW([
    {{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}},
    {{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}},
], lr={made_with})
learning_rate, warmup_iters, lr_decay_iters, min_lr = 6e-2, 2000, 600000, 6e-3

def get_lr(it):  # as in nanoGPT
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

for iter_num in range(10):
    lr = {course}
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    x = torch.randn(6, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""


def rates_in(setup):
    return [group["lr"] for group in setup.optimizer.param_groups]


def test_a_warm_up_by_hand_leads_to_the_rate_that_the_optimizer_was_made_with(tmp_path):
    with recorded(tmp_path, scheduled_by_hand("6e-2", "get_lr(iter_num)")) as named:
        assert rates_in(named.setup) == [6e-2, 6e-2]
        assert not named.setup.cannot
        assert "3e-05, 6e-05" in named.facts["rates"]
        report = normlab.check(named.setup)
        assert {"update", "overfit"} <= {*report.holds}
        course = read_course(
            named.setup, first_steps(named.setup, [named.setup.batch] * 2, seed=0, groups={})
        )
        assert (course.rate, course.warmup > 0) == (6e-2, True)


@pytest.mark.parametrize("made_with", ["0.0", "1e-5"])
def test_a_warm_up_by_hand_to_nobody_knows_where_is_not_judged(tmp_path, made_with):
    with recorded(tmp_path, scheduled_by_hand(made_with, "get_lr(iter_num)")) as named:
        assert rates_in(named.setup) == pytest.approx([2 * 6e-2 / 2001] * 2)
        report = normlab.check(named.setup)
        assert "overfit" in report.unjudged
        assert "update" in report.holds
        seen = first_steps(named.setup, [named.setup.batch] * 2, seed=0, groups={})
        with pytest.raises(UserError, match="lr="):
            read_course(named.setup, seen)
        course = read_course(replace(named.setup, lr=6e-2), seen)
        assert course.rate == pytest.approx(6e-2)


@pytest.mark.parametrize(
    ("course", "peak"),
    [("2e-2", 2e-2), ("get_lr(iter_num + 300000)", 3.3e-2), ("(5 - iter_num) * 1e-2", 5e-2)],
)
def test_rates_by_hand_that_do_not_rise_begin_at_their_peak(tmp_path, course, peak):
    with recorded(tmp_path, scheduled_by_hand("1e-3", course)) as named:
        assert rates_in(named.setup) == pytest.approx([peak] * 2, rel=1e-2)
        assert not named.setup.cannot
        assert "rates" in named.facts


def test_an_optimizer_whose_rates_nobody_sets_is_that_of_the_script(tmp_path):
    code = SKIPPED_BY_HAND.replace("AdamW", "SGD")
    with recorded(tmp_path, code) as named:
        assert "rates" not in named.facts
        assert type(named.setup.optimizer) is torch.optim.SGD
        assert rates_in(named.setup) == [1e-3]


GAN = """
generator, critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)), model
both = nn.ModuleDict({{"generator": generator, "critic": critic}})
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
of_critic = torch.optim.SGD(critic.parameters(), lr=1e-3)

def step_critic():
    real, noise = torch.randn(6, 4), torch.randn(6, 3)
    loss = critic(generator(noise).detach()).mean() - critic(real).mean()
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()

def step_generator():
    noise = torch.randn(5, 3)
    loss = -critic(generator(noise)).mean()
    of_generator.zero_grad()
    loss.backward()
    of_generator.step()

for step in range(30):
    {order}
"""
ORDERS = {
    "critic": "step_critic(); step_generator()",
    "generator": "step_generator(); step_critic()",
    "often": "step_critic(); step % 3 == 2 and step_generator()",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("number", [1, 2])
def test_each_optimizer_of_several_is_checked_with_its_own_loss(tmp_path, order, number):
    is_critic = order.startswith("step_critic") == (number == 1)
    with recorded(tmp_path, GAN.format(order=order), optimizer=number) as named:
        setup = named.setup
        assert not setup.cannot
        assert type(setup.optimizer) is (torch.optim.SGD if is_critic else torch.optim.Adam)
        held = {id(p) for group in setup.optimizer.param_groups for p in group["params"]}
        assert {id(p) for p in setup.model.parameters()} == held
        assert {len(x) for x in setup.batch.values()} == {6 if is_critic else 5}
        assert ("Adam" if is_critic else "SGD") in named.facts["not examined"]
        report = normlab.check(setup)
        assert "optimizer_coverage" in report.holds
        assert not [failure for failure in report.failures if failure.property in ("gradients", "step")]


TWO_PARTS = """
body, head = model[:2], model[2]
optimizers = [torch.optim.SGD(body.parameters(), lr=1e-3), torch.optim.Adam(head.parameters(), lr=1e-3)]
for step in range(8):
    x = torch.randn(6, 4)
    model(x).pow(2).mean().backward()
"""


@pytest.mark.slow
def test_parameters_of_a_module_that_another_optimizer_holds_are_covered(tmp_path):
    steps = """
    optimizers[0].step()
    if step == 1:
        optimizers[1].step()
    model.zero_grad()
"""
    with recorded(tmp_path, TWO_PARTS + steps) as named:
        assert named.setup.declare.frozen == ("2.weight", "2.bias")
        report = normlab.check(named.setup)
        assert "optimizer_coverage" in report.holds


@pytest.mark.slow
def test_an_optimizer_that_is_not_there_is_refused(tmp_path):
    code = GAN.format(order=ORDERS["critic"])
    with pytest.raises(UserError, match="3"), recorded(tmp_path, code, optimizer=3):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("zeroed", ["body", "head", "model"])
def test_gradients_that_one_of_two_optimizers_keeps_are_seen(tmp_path, zeroed):
    steps = f"""
    for optimizer in optimizers:
        optimizer.step()
    {zeroed}.zero_grad()
"""
    with recorded(tmp_path, TWO_PARTS + steps) as named:
        failed = [failure.property for failure in normlab.check(named.setup).failures]
        assert failed[:1] == ([] if zeroed == "model" else ["step"])


@pytest.mark.slow
def test_gradients_that_another_loss_adds_to_are_zeroed_in_time(tmp_path):
    code = GAN.format(order=ORDERS["critic"])
    for number in (1, 2):
        with recorded(tmp_path, code, optimizer=number) as named:
            assert not named.setup.step.never_zeroed


PROBED = """
probe = nn.Linear(8, 1)
trunk = torch.optim.SGD(model.parameters(), lr=1e-3)
other = torch.optim.Adam(probe.parameters(), lr=1e-3)
for step in range(8):
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    trunk.zero_grad()
    {passes}
    trunk.step()
    if step % {every} == {every} - 1:
        other.step()
        other.zero_grad()
"""
SHARED = (
    "h = model[:2](x); model[2](h).pow(2).mean().backward(); (probe(h.detach()) - y).pow(2).mean().backward()"
)
ALONE = """model(x).pow(2).mean().backward()
    with torch.no_grad():
        h = model[:2](x)
    (probe(h) - y).pow(2).mean().backward()"""


@pytest.mark.slow
@pytest.mark.parametrize("passes", [SHARED, ALONE])
def test_a_probe_with_an_optimizer_of_its_own_is_tested_with_what_it_reads(tmp_path, passes):
    with recorded(tmp_path, PROBED.format(passes=passes, every=1)) as named:
        setup = named.setup
        assert not setup.cannot
        assert len(setup.optimizers) == 2
        assert setup.batch.keys() == {"x", "y"}
        assert "derivative" in (report := normlab.check(setup)).holds
        assert report.ok


@pytest.mark.slow
@pytest.mark.parametrize("passes", [SHARED, ALONE])
def test_the_loss_of_what_no_optimizer_steps_yet_is_no_part_of_a_step(tmp_path, passes):
    with recorded(tmp_path, PROBED.format(passes=passes, every=2)) as named:
        setup = named.setup
        assert not setup.cannot
        assert setup.batch.keys() == {"x"}
        assert "not examined" in named.facts
        y = setup.batch["x"]
        for part in setup.model.children():
            y = part(y)
        assert torch.equal(setup.loss(setup.model, setup.batch), y.pow(2).mean())
        assert normlab.check(setup).ok


IN_TURN = """
other = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1))
optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (model, other)]
for step in range(8):
    for each in (model, other):
        for part in range(2):
            (each(torch.randn(6, 4)).pow(2).mean() / 2).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_of_models_that_accumulate_in_turn_the_first_is_tested(tmp_path):
    with recorded(tmp_path, IN_TURN) as named:
        assert named.setup.cannot.keys() == {"step"}
        assert named.setup.model[0].out_features == 8
        assert normlab.check(named.setup).ok


BETWEEN = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(8):
    optimizer.zero_grad()
    model(torch.randn(6, 4)).pow(2).mean().backward()
    optimizer.step()
    with torch.no_grad():
        {change}
"""
CHANGES = {
    "scaled": "model[2].weight.mul_(0.5)",
    "data": "model[2].weight.data[0].clamp_(max=0.01)",
    "copied": "model[2].weight.data = torch.full_like(model[2].weight, 0.1 * step)",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_that_a_script_changes_between_two_steps_are_those_of_the_first(tmp_path, change):
    with recorded(tmp_path, BETWEEN.format(change=change)) as named:
        assert not named.setup.cannot
        torch.manual_seed(0)
        first = [torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)][1]
        assert torch.equal(named.setup.model[2].weight, first.weight)


SHARP = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(8):
    x = torch.randn(6, 4)
    model(x).pow(2).mean().backward()
    with torch.no_grad():
        moves = [0.05 * p.grad for p in model.parameters()]
        for p, move in zip(model.parameters(), moves):
            p.add_(move)
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves):
            p.sub_(move)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_weights_that_a_script_changes_within_a_step_are_named_with_their_line(tmp_path):
    with recorded(tmp_path, SHARP) as named:
        assert named.setup.cannot.keys() == {"step"}
        line = SHARP.split("p.add_")[0].count("\n") + BEGIN.count("\n") + 1
        assert f"train.py:{line}" in named.setup.cannot["step"]
        assert "0.weight" in named.setup.cannot["step"]
        assert normlab.check(named.setup).ok


TWO_SCHEDULES = """
optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=1.0)]
schedules = torch.optim.lr_scheduler
warm_up = schedules.LambdaLR(optimizers[1], lambda i: min(1, (i + 1) / 4))
decay = schedules.ExponentialLR(optimizers[1], 0.5)
for step in range(8):
    model(torch.randn(6, 4)).pow(2).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    warm_up.step()
    if step % {every} == {every} - 1:
        decay.step()
"""


@pytest.mark.parametrize(("every", "rates"), [(1, [0.25, 0.375, 0.5]), (4, [0.5, 0.75, 1.0])])
def test_of_two_schedules_of_one_optimizer_those_that_a_step_moves_count(tmp_path, every, rates):
    with recorded(tmp_path, TWO_SCHEDULES.format(every=every)) as named, same_globals():
        course = rates_of(named.setup)
        assert ("schedule" in named.facts) == (every > 1)
    assert [row[0] for row in course.rates[:3]] == [0.1] * 3
    assert [row[1] for row in course.rates[:3]] == pytest.approx(rates)
    assert {row[0] for row in course.rates} == {0.1}


ACCUMULATED = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(8):
    for part in range(2):
        loss = model(torch.randn(6, 4)).pow(2).{reduced}
        ({scaled}).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SCALED = {
    "divided": ("mean()", "loss / 2", 0.5),
    "divided by 1, too": ("mean()", "loss / 2 / 1", 0.5),
    "multiplied by 1 first": ("mean()", "loss * 1.0 / 2", 0.5),
    "a mean over an axis": ("mean(1)", "(loss / 2).mean(0)", 1.0),
    "bounded": ("mean()", "(loss / 2).clamp(max=1e4)", 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("reduced", "scaled", "factor"), SCALED.values(), ids=SCALED)
def test_what_a_loss_is_multiplied_by_is_no_part_of_it(tmp_path, reduced, scaled, factor):
    with recorded(tmp_path, ACCUMULATED.format(reduced=reduced, scaled=scaled)) as named:
        assert [flow.factor for flow in named.setup.step.flows] == [factor] * 2


RECURRENT = """
cell = nn.GRUCell(4, 8)
both = nn.ModuleList([cell, head := nn.Linear(8, 1)])
optimizer = torch.optim.SGD(both.parameters(), lr=1e-3)
for step in range(8):
    x = torch.randn(6, 4)
    state, outputs = torch.zeros(6, 8), torch.zeros(3, 6, 8)
    for i in range(3):
        state = cell(x, state)
        outputs[i] = state{cut}
    loss = (head(torch.bmm(outputs, outputs.transpose(1, 2)) @ outputs) + head(state)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["", ".detach()"])
def test_tensors_that_a_script_makes_are_in_float64_where_all_else_is(tmp_path, cut):
    with recorded(tmp_path, RECURRENT.format(cut=cut)) as named:
        report = normlab.check(named.setup)
        assert "derivative" in report.judged
        assert [failure.property for failure in report.failures] == (["derivative"] if cut else [])


TWICE_DIFFERENTIATED = """
from torch.nn.attention import SDPBackend, sdpa_kernel
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    x = torch.randn(6, 5, 4, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        y = nn.functional.scaled_dot_product_attention(x, x, x)
        (slope,) = torch.autograd.grad(model(y).sum(), x, create_graph=True)
        loss = (slope.norm(dim=-1) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
"""


def test_attention_is_computed_by_the_kernels_that_the_script_allows(tmp_path):
    with recorded(tmp_path, TWICE_DIFFERENTIATED) as named:
        assert not named.setup.cannot


WITHOUT_DATA = """
class Holding(nn.Linear):
    def forward(self):
        return super().forward(torch.ones(6, 4)).pow(2).mean()

model = Holding(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    optimizer.zero_grad()
    model().backward()
    optimizer.step()
"""


def test_a_step_without_a_batch_is_refused(tmp_path):
    with pytest.raises(UserError, match="no batch"), recorded(tmp_path, WITHOUT_DATA):
        pass


BY_HAND = """
for step in range(3):
    x = torch.randn(6, 4)
    model.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
    {change}
raise RuntimeError("the script has gone on")
"""


@pytest.mark.parametrize(
    "change",
    [
        "[p.data.add_(p.grad, alpha=-0.1) for p in model.parameters()]",
        "torch.no_grad()(lambda: [p.sub_(0.1 * p.grad) for p in model.parameters()])()",
        "[p.data.copy_(p - 0.1 * p.grad) for p in model.parameters()]",
    ],
)
def test_a_step_without_an_optimizer_is_refused_before_it_is_made(tmp_path, change):
    with (
        pytest.raises(UserError, match=r"train\.py:\d+ .*\bweights\b"),
        recorded(tmp_path, BY_HAND.format(change=change)),
    ):
        pass


FROZEN_AND_ZEROED = """
model(torch.randn(6, 4)).pow(2).mean().backward()  # to see whether it runs
for p in model.parameters():
    p.grad = None
    p.requires_grad = p.ndim == 2
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(3):
    x = torch.randn(6, 4)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
    optimizer.step()
"""


def test_gradients_that_are_set_are_no_step_by_hand(tmp_path):
    with recorded(tmp_path, FROZEN_AND_ZEROED) as named:
        assert not named.setup.cannot


MASTERS = """
working = list(model.parameters())
masters = [p.detach().clone().requires_grad_() for p in working]
optimizer = torch.optim.AdamW(masters, lr=1e-3)
for step in range(3):
    x = torch.randn(6, 4)
    model.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
    for master, p in zip(masters, working):
        master.grad = p.grad.clone()
    optimizer.step()
    for master, p in zip(masters, working):
        p.data.copy_(master)
"""


def test_weights_that_are_copied_from_what_an_optimizer_has_stepped_are_no_step_by_hand(tmp_path):
    with recorded(tmp_path, MASTERS) as named:
        assert named.setup.cannot.keys() == {"step"}


LBFGS = """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
x = torch.randn(6, 4)
y = x.sum(1, keepdim=True)

def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    return loss

for step in range(3):
    optimizer.step(closure)
"""


def test_an_optimizer_that_asks_for_the_gradients_again_gets_them(tmp_path):
    with recorded(tmp_path, LBFGS) as named:
        setup = named.setup
        before = setup.loss_of(setup.model, setup.batch)
        setup.step(setup.model, setup.batch, setup.optimizer, None)
        assert setup.loss_of(setup.model, setup.batch) < 0.9 * before


@pytest.mark.slow
def test_a_captured_step_without_an_optimizer_leaves_the_weights():
    model = torch.nn.Linear(4, 1)
    before = model.weight.detach().clone()
    with normlab.capture() as captured:
        model(torch.randn(6, 4)).pow(2).mean().backward()
        model.weight.data.add_(model.weight.grad, alpha=-0.1)
    with pytest.raises(UserError, match="weights"):
        _ = captured.setup
    assert torch.equal(model.weight, before)


SHORTER = """
data = [torch.randn(6, 4) for _ in range(5)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(3):
    for number, x in enumerate(data):
        left = len(data) - number // 4 * 4
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean() / {divisor}
        loss.backward()
        if number % 4 == 3 or number == len(data) - 1:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("divisor", "fails"), [("4", True), ("min(4, left)", False)])
def test_a_shorter_window_is_averaged_by_its_own_length(tmp_path, divisor, fails):
    with recorded(tmp_path, SHORTER.format(divisor=divisor)) as named:
        step = named.setup.step
        report = normlab.check(named.setup)
    assert (step.shorter == (1, 0.25)) is fails
    assert ([failure.property for failure in report.failures] == ["step"]) is fails

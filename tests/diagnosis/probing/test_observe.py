from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from contracts.variants import BY_PLACEMENT, build, inputs, loss_of
from normlab.diagnosis import STATISTICS, Probe, Record, observe
from normlab.diagnosis.probes import StreamSignal
from zoo import ManyOutputs

SIGNALS = ("input", "output", "grad_input", "grad_output", "weight", "grad")
EVERYTHING = [Probe("*", signal, every_tensor=True) for signal in SIGNALS]
X = torch.randn(2, 3, 4)


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def values(records: list[Record]) -> dict[tuple[str, str], float]:
    found = {(r.module, f"{r.signal}.{r.statistic}"): r.value for r in records}
    assert len(found) == len(records), "a row was given twice"
    return found


def step(model: nn.Module) -> list[torch.Tensor]:
    """The loss and every gradient of a training step with dropout."""
    model.zero_grad()
    torch.manual_seed(3)
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("placement", ["post", "residual", "admin"])
def test_outputs_and_gradients_are_bit_identical(placement):
    config = next(c for c in BY_PLACEMENT if c.encoder_placement == placement)
    model = build(replace(config, dropout=0.1)).train()
    alone, records = step(model), []
    with observe(model, EVERYTHING, records.append) as observer:
        watched = step(model)
        observer.flush(0)
    assert [torch.equal(a, b) for a, b in zip(alone, watched, strict=True)] == [True] * len(alone)
    assert {r.signal.partition("[")[0] for r in records} == set(SIGNALS)
    assert hooks_of(model) == 0
    assert all(torch.equal(a, b) for a, b in zip(alone, step(model), strict=True))


def test_every_signal_equals_plain_autograd():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2, bias=False))
    records: list[Record] = []
    probes = [Probe("0", signal, "l2") for signal in SIGNALS] + [Probe("2", "weight", "max_abs")]
    probes += [Probe("1", "grad_input", "l2"), Probe("1", "weight", "l2")]
    probes.append(Probe("1", "grad", "l2", together=("0", "2"), stream=StreamSignal("all", 4, "grad")))
    with observe(model, probes, records.append) as observer:
        model(X).square().sum().backward()
        assert records == [], "nothing is fetched before flush"
        observer.flush(17)
    hidden = model[0](X)
    out = model[2](model[1](hidden))
    weight = model[0].weight
    loss, both = out.square().sum(), [weight, model[0].bias, model[2].weight]
    to_hidden, to_weight, *more = torch.autograd.grad(loss, [hidden, *both])
    expected = {
        ("0", "input.l2"): X.norm(),
        ("0", "output.l2"): hidden.norm(),
        ("0", "grad_output.l2"): to_hidden.norm(),
        ("0", "weight.l2"): weight.norm(),
        ("0", "grad.l2"): to_weight.norm(),
        ("2", "weight.max_abs"): model[2].weight.abs().max(),
        ("1", "grad_input.l2"): to_hidden.norm(),
        ("1", "grad.l2"): torch.nn.utils.get_total_norm([to_weight, *more]),
    }
    assert values(records) == pytest.approx({key: value.item() for key, value in expected.items()}, rel=1e-5)
    assert {r.step for r in records} == {17}
    assert {(r.stack, r.index) for r in records} == {(None, None), ("all", 4)}


def test_the_first_floating_tensor_is_measured_or_all_of_them():
    model, first, every = nn.Sequential(ManyOutputs()), [], []
    with observe(model, [Probe("0")], first.append):
        model(X)
    with observe(model, [Probe("0", every_tensor=True), Probe("0", "weight")], every.append):
        model(X)
    size = X.square().mean().sqrt().item()
    assert values(first) == pytest.approx({("0", "output.rms"): 2 * size}, rel=1e-5)
    assert values(every) == pytest.approx(
        {("0", "output.rms"): 2 * size, ("0", "output[more.0].rms"): 3 * size}, rel=1e-5
    )


def test_own_parameters_beyond_the_first_have_a_suffix():
    model, records = nn.Linear(4, 5), []
    with observe(model, [Probe("", "weight", "l2", every_tensor=True)], records.append):
        pass
    expected = {("", "weight.l2"): model.weight.norm(), ("", "weight[bias].l2"): model.bias.norm()}
    assert values(records) == pytest.approx({key: value.item() for key, value in expected.items()})


def test_steps_are_those_of_flush_and_the_rest_belongs_to_the_next():
    model, records = nn.Linear(4, 4), []
    with observe(model, [Probe("")], records.append) as observer:
        for number in (3, 8):
            model(X)
            observer.flush(number)
        model(X)
        model(X)
    assert [r.step for r in records] == [3, 8, 9, 9]


def test_no_hook_stays_when_the_body_raises():
    model, records = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []
    kept = []
    with pytest.raises(KeyError), observe(model, EVERYTHING, records.append):  # noqa: PT012
        kept.append(model(X))
        raise KeyError
    assert hooks_of(model) == 0
    before = len(records)
    assert before > 0, "what was measured until then is not lost"
    kept[0].sum().backward()
    model(X)
    assert len(records) == before
    assert not any(t._backward_hooks for t in kept)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_is_measured_once(reentrant):
    layer, records = nn.Linear(4, 4), []
    with observe(layer, [Probe("", "output"), Probe("", "grad_output")], records.append):
        x = X.clone().requires_grad_()
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert sorted(r.signal for r in records) == ["grad_output", "output"]


@pytest.mark.usefixtures("one_rank")
def test_paths_under_data_parallelism_are_those_of_the_model():
    inner, records = nn.Sequential(nn.Linear(4, 4)), []
    model = nn.parallel.DistributedDataParallel(inner)
    with observe(model, [Probe("0", signal) for signal in SIGNALS], records.append) as observer:
        model(X).sum().backward()
        observer.flush(0)
    assert values(records).keys() == {("0", f"{signal}.rms") for signal in SIGNALS if signal != "grad_input"}


@pytest.mark.parametrize("part", ["whole", "in place", "child"])
def test_compiled_code_is_left_out_with_a_warning(part):
    model, records = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []
    if part == "whole":
        given = torch.compile(model, backend="eager")
    else:
        given = model
        (model if part == "in place" else model[1]).compile(backend="eager")
    probes = [Probe("0"), Probe("1"), Probe("1", "weight")]
    with pytest.warns(UserWarning, match="run compiled"), observe(given, probes, records.append):
        given(X)
    eager = {("0", "output.rms")} if part == "child" else set()
    assert values(records).keys() == eager | {("1", "weight.rms")}
    assert hooks_of(model) == 0


def test_wrong_probes_say_what_there_is():
    with pytest.raises(ValueError, match=r"'outputs' .*\boutput, .*grad_output"):
        Probe("*", "outputs")
    with pytest.raises(ValueError, match=f"'norm' .*{', '.join(STATISTICS)}"):
        Probe("*", statistic="norm")
    with pytest.raises(ValueError, match=r"grad\.rms.*l2"):
        Probe("0", "grad", together=("0", "1"))
    with (
        pytest.raises(ValueError, match=r"'encoder\.\*'.* 0, 1"),
        observe(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), [Probe("encoder.*")], print),
    ):
        pass


def test_a_whole_model_is_fetched_in_one_transfer(monkeypatch):
    model, records, fetched = build(BY_PLACEMENT[0]), [], []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: fetched.append(x.shape) or tolist(x))
    with observe(model, [Probe("*.f"), Probe("*.norm", "weight")], records.append) as observer:
        model(*inputs(model))
        assert fetched == []
        observer.flush(0)
    assert fetched == [(len(records),)]
    assert len(records) == 20

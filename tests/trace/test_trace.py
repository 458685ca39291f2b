"""What a traced step and ``record`` see of a model: tensors and gradients, at its own weights or others."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normlab.diagnosis import read_structure
from normlab.trace.record import Want, record
from normlab.trace.restore import undisturbed
from normlab.trace.tensors import Tap, call_model, tensors_in, unwrap
from normlab.trace.trace import Trace, at_weights
from zoo import ManyOutputs

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


@dataclass
class Out:
    hidden: Tensor
    more: tuple[Tensor, ...] = ()


class Part(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor) -> Out:
        return Out(x * scale, (x + 1,))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        for _ in range(2):
            x = self.part(x, scale=torch.tensor(2.0)).hidden
        return {"out": x if y is None else x + y}


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


# ---------------------------------------------------------------------------------------------------- tensors


def test_tensors_in_nested_values():
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    by_place = dict(tensors_in(({"a": a, "none": None}, [1, Out(b, (c,))], "text")))
    assert by_place.keys() == {(0, "a"), (1, 1, "hidden"), (1, 1, "more", 0)}
    assert by_place[1, 1, "more", 0] is c


def test_batches_are_passed_by_their_kind():
    y = torch.ones(2, 3, 4)
    results = [call_model(Whole(), batch)["out"] for batch in (X, (X, y), [X, y], {"x": X, "y": y})]
    assert [torch.equal(out, 4 * X + (i > 0)) for i, out in enumerate(results)] == [True] * 4


def test_wrappers_are_taken_off():
    model = Whole()
    assert unwrap(nn.DataParallel(torch.compile(model, backend="eager"))) is model
    holder = nn.Sequential()
    holder.module = model
    assert unwrap(holder) is holder, "a module called module is no wrapper"


# ------------------------------------------------------------------------------------------------------- taps


def test_taps_reach_inputs_outputs_keywords_fields_and_later_calls():
    taps = {
        "in": Tap("part", "input", (0,)),
        "scale": Tap("part", "input", ("scale",)),
        "again": Tap("part", "input", (0,), call=1),
        "out": Tap("part", "output", ("hidden",)),
        "more": Tap("part", "output", ("more", 0), call=1),
        "root": Tap("", "output", ("out",)),
    }
    trace = Trace(Whole(), X, call_model, taps=tuple(taps.values()))
    torch.testing.assert_close(
        {name: trace[tap] for name, tap in taps.items()},
        {"in": X, "scale": torch.tensor(2.0), "again": 2 * X, "out": 2 * X, "more": 2 * X + 1, "root": 4 * X},
    )
    assert str(taps["more"]) == "part.output['more'][0] of call 1"


def test_an_unknown_module_is_refused():
    with pytest.raises(ValueError, match="module 'nowhere'"):
        _ = Trace(Whole(), X, call_model, taps=(Tap("nowhere", "output"),)).outputs


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_are_those_of_autograd_also_through_checkpoints(reentrant):
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
            return x

    torch.manual_seed(0)
    model = Checkpointed(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].requires_grad_(requires_grad=False)
    calls: list[Tensor] = []
    model[0].weight.register_post_accumulate_grad_hook(calls.append)
    trace = Trace(model, X.clone().requires_grad_(), square)
    gradients = trace.gradients
    assert calls == [], "what the user does with a gradient that arrives is not done"
    assert all(p.grad is None for p in model.parameters())
    square(model, trace.batch).backward()
    assert len(calls) == 1
    assert gradients.keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert all(torch.equal(g, model.get_parameter(path).grad) for path, g in gradients.items())
    assert all(torch.equal(g, trace.slope.gradients[path]) for path, g in gradients.items())


def test_gradients_in_taps_are_those_of_autograd():
    model, tap = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Tap("0", "output")
    with Trace(model, X, square, taps=(tap,)).with_graph() as passed:
        hidden = passed.taps[tap]
        (gradient,) = torch.autograd.grad(passed.loss, hidden)
    torch.testing.assert_close(gradient, 2 * model[1](hidden) @ model[1].weight)


def test_what_a_loss_does_not_reach_has_no_gradient_and_a_slope_of_zero():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    trace = Trace(model, X, lambda m, x: m[0](x).sum())
    assert trace.gradients["1.weight"] is None
    assert not trace.slope.gradients["1.weight"].any()
    with pytest.raises(ValueError, match="unfreeze"):
        _ = trace.again(loss_of=lambda m, x: m(x).sum().detach()).gradients


# ----------------------------------------------------------------------------------- streams written in place


class Parallel(nn.Module):
    """x + a(x) + b(x), summed in the memory of b(x) or in new memory."""

    def __init__(self, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.add = nn.Linear(4, 4), nn.Linear(4, 4), add

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        return x + F.relu(self.add(b, a), inplace=True)


def to_a_view(y: Tensor, x: Tensor) -> Tensor:
    y.flatten()[:] += x.flatten()
    return y


@pytest.mark.parametrize("add", [operator.iadd, Tensor.add_, to_a_view], ids=["operator", "method", "view"])
@pytest.mark.parametrize("grad", [True, False])
def test_what_is_added_in_place_leaves_taps_as_they_were(add, grad):
    model, taps = Parallel(add), (Tap("a", "output"), Tap("b", "output"), Tap("", "output"))
    of_each = []
    for model.add in (operator.add, add):
        trace = Trace(model, X, square, taps=taps)
        if not grad:
            of_each.append([trace[tap].clone() for tap in taps])
            continue
        with trace.with_graph() as passed:
            tapped = [passed.taps[tap] for tap in taps]
            of_each.append([x.detach().clone() for x in tapped])
            of_each[-1] += torch.autograd.grad(passed.loss, [*tapped, *model.parameters()])
    torch.testing.assert_close(of_each[1], of_each[0], rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------- other weights


def test_a_step_at_other_weights_is_that_of_a_model_that_has_them():
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    weights = {path: p.detach() for path, p in other.named_parameters()}
    before = {path: (p.data_ptr(), p.detach().clone()) for path, p in model.named_parameters()}
    trace, expected = Trace(model, X, square, weights=weights), Trace(other, X, square)
    assert torch.equal(trace.loss, expected.loss)
    assert all(torch.equal(g, expected.gradients[path]) for path, g in trace.gradients.items())
    assert all(
        (p.data_ptr(), True) == (before[n][0], p.equal(before[n][1])) for n, p in model.named_parameters()
    )


def test_weights_that_a_further_change_does_not_name_stay():
    model, zeros = nn.Linear(4, 4), {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}
    trace = Trace(model, X, square)
    for name, value in zeros.items():
        trace = trace.again(weights={name: value})
    assert trace.loss == 0


def test_a_shared_parameter_is_put_back_whatever_path_names_it():
    block = nn.Linear(4, 4)
    model = nn.Sequential(block, nn.Tanh(), block)
    before = block.weight.detach().clone()
    with at_weights(model, {"2.weight": torch.zeros(4, 4)}):
        assert not model[0].weight.any()
    with at_weights(model, {"0.weight": torch.ones(4, 4), "2.weight": torch.zeros(4, 4)}):
        assert not model[0].weight.any()
    assert torch.equal(block.weight, before)


def test_autocast_casts_other_weights_anew():
    model, weight = nn.Linear(4, 4, bias=False), torch.zeros(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(X)
        with at_weights(model, {"weight": weight}):
            assert not model(X).any()
        assert torch.equal(model(X), outputs)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f, self.scale = nn.LayerNorm(8), nn.Linear(8, 8), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.f(self.norm(x))


def test_a_block_used_several_times_is_read_and_left_as_it_was():
    model = nn.Sequential(nn.Embedding(11, 8), nn.ModuleList([Residual()] * 4), nn.Linear(8, 11))
    model.forward = lambda ids: model[2](model[1][3](model[1][2](model[1][1](model[1][0](model[0](ids))))))
    ids = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    structure = read_structure(model, ids)
    assert {path: p.detach() for path, p in model.named_parameters()}.keys() == before.keys()
    assert all(torch.equal(p, before[path]) for path, p in model.named_parameters())
    assert structure.sublayers


@pytest.mark.parametrize("fast", [True, False])
def test_padded_rows_are_not_packed_by_the_encoder_of_torch(fast):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    batch = {"src": torch.randn(2, 3, 8), "src_key_padding_mask": torch.tensor([[0, 0, 0], [0, 0, 1]]) > 0}
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(fast)
        tap = Tap("layers.1", "input", (0,))
        assert not Trace(model, batch, call_model, taps=(tap,))[tap].is_nested
        with undisturbed(model), torch.no_grad(), record(model, [Want("layers.1", "input")]) as seen:
            model(**batch)
        assert not seen[0].value.is_nested
        assert len(read_structure(model, batch).sublayers) == 4
        assert torch.backends.mha.get_fastpath_enabled() is fast
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


# ----------------------------------------------------------------------------------------------------- record


def test_record_lists_values_and_gradients_in_order():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    wants = [Want("0"), Want("*", "output", "grad", keep=Tensor.norm), Want("2", "input")]
    with record(model, wants) as seen:
        hidden = model[1](model[0](X))
        loss = model[2](hidden).square().sum()
        loss.backward()
    assert [(s.tap.module, s.want.signal) for s in seen] == [
        *[("0", "value"), ("2", "value")],
        *[("2", "grad"), ("1", "grad"), ("0", "grad")],
    ]
    assert torch.equal(seen[1].value, hidden)
    assert not seen[1].value.requires_grad


def test_record_takes_one_tensor_or_all_and_lets_go_what_is_taken():
    model = nn.Sequential(ManyOutputs())
    with record(model, [Want("0", first=True), Want("0")]) as seen:
        model(X)
        assert [(s.want.first, s.tap.place, s.nth) for s in seen] == [
            (True, ("hidden",), 0),
            (False, ("hidden",), 0),
            (False, ("more", 0), 1),
        ]
        seen.clear()
        model(X)
    assert len(seen) == 3
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("reentrant", [False, True])
def test_record_sees_a_checkpointed_layer_once(reentrant):
    layer = nn.Linear(4, 4)
    with record(layer, [Want(""), Want("", "output", "grad")]) as seen:
        checkpoint(layer, X.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert sorted(s.want.signal for s in seen) == ["grad", "value"]


def test_a_failure_inside_record_goes_to_the_one_who_takes_it():
    errors: list[Exception] = []
    broken = Want("", keep=lambda x: x.nothing)
    model = nn.Linear(4, 4)
    with record(model, [broken, Want("")], on_error=errors.append) as seen:
        model(X)
    assert (len(errors), len(seen)) == (1, 1)
    with pytest.raises(AttributeError), record(model, [broken]):
        model(X)
    with pytest.raises(ValueError, match=r"'x\.\*'"), record(model, [Want("x.*")]):
        pass


def test_hooks_on_tensors_that_are_gone_are_let_go():
    model = nn.Linear(4, 4)
    with record(model, [Want("", "output", "grad")]) as seen:
        for _ in range(600):
            model(X).sum().backward()
            seen.clear()
        held = [cell.cell_contents for cell in model._forward_hooks.popitem()[1].__closure__]
        (hooks,) = [see.__self__ for see in held if hasattr(see, "__self__")]
        assert len(hooks.handles) < 300

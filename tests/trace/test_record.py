"""What is recorded of somebody else's step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normlab.trace.record import Want, record

from .nested import X


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
    class Many(nn.Module):
        def forward(self, x: Tensor) -> dict[str, object]:
            return {"ids": torch.arange(3), "hidden": x * 2, "more": (x * 3,)}

    with record(nn.Sequential(Many()), [Want("0", first=True), Want("0")]) as seen:
        nn.Sequential()(X)
    assert seen == []
    model = nn.Sequential(Many())
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
    with record(nn.Linear(4, 4), [broken, Want("")], on_error=errors.append) as seen:
        nn.Linear(4, 4)(X)
    model = nn.Linear(4, 4)
    with record(model, [broken, Want("")], on_error=errors.append) as seen:
        model(X)
    assert (len(errors), len(seen)) == (1, 1)
    with pytest.raises(AttributeError), record(model, [broken]):
        model(X)
    with pytest.raises(ValueError, match=r"no module matches 'x\.\*'"), record(model, [Want("x.*")]):
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

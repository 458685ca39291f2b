from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.diagnosis import Tap, capture, read_structure
from normlab.diagnosis.reading.subject import undisturbed
from normlab.diagnosis.reading.taps import bare, call_model, evaluating, leaves

X = torch.randn(2, 3, 4)


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


def test_leaves_of_nested_values():
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    nested = ({"a": a, "none": None}, [1, Out(b, (c,))], "text")
    found = dict(leaves(nested))
    assert found.keys() == {(0, "a"), (1, 1, "hidden"), (1, 1, "more", 0)}
    assert found[1, 1, "more", 0] is c


def test_capture_reaches_inputs_outputs_keywords_fields_and_later_calls():
    taps = {
        "in": Tap("part", "input", (0,)),
        "scale": Tap("part", "input", ("scale",)),
        "again": Tap("part", "input", (0,), call=1),
        "out": Tap("part", "output", ("hidden",)),
        "more": Tap("part", "output", ("more", 0), call=1),
        "root": Tap("", "output", ("out",)),
    }
    model = Whole()
    with capture(model, taps.values()) as seen:
        model(X)
        model(-X)
    torch.testing.assert_close(
        {name: seen[tap] for name, tap in taps.items()},
        {"in": X, "scale": torch.tensor(2.0), "again": 2 * X, "out": 2 * X, "more": 2 * X + 1, "root": 4 * X},
    )
    assert not model.part._forward_hooks
    assert not model.part._forward_pre_hooks
    assert str(taps["more"]) == "part.output['more'][0] of call 1"


def test_what_is_captured_is_the_tensor_itself():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tap = Tap("0", "output")
    with capture(model, [tap]) as seen:
        loss = model(X).square().sum()
    (gradient,) = torch.autograd.grad(loss, seen[tap])
    torch.testing.assert_close(gradient, 2 * model[1](seen[tap]) @ model[1].weight)


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
def test_what_is_added_in_place_leaves_captured_tensors_as_they_were(add, grad):
    model, taps = Parallel(add), [Tap("a", "output"), Tap("b", "output"), Tap("", "output")]
    found = []
    for model.add in (operator.add, add):
        with capture(model, taps) as seen, torch.set_grad_enabled(grad):
            loss = model(X).square().sum()
        found.append([seen[tap].detach().clone() for tap in taps])
        if grad:
            found[-1] += torch.autograd.grad(loss, [*(seen[tap] for tap in taps), *model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_an_unknown_module_is_refused():
    with pytest.raises(ValueError, match="no module 'nowhere'"), capture(Whole(), [Tap("nowhere", "output")]):
        pass


def test_batches_are_passed_by_their_kind():
    y = torch.ones(2, 3, 4)
    results = [call_model(Whole(), batch)["out"] for batch in (X, (X, y), [X, y], {"x": X, "y": y})]
    assert [torch.equal(out, 4 * X + (i > 0)) for i, out in enumerate(results)] == [True] * 4


def test_wrappers_are_taken_off():
    model = Whole()
    assert bare(nn.DataParallel(torch.compile(model, backend="eager"))) is model
    holder = nn.Sequential()
    holder.module = model
    assert bare(holder) is holder, "a module called module is no wrapper"


def test_evaluating_gives_back_each_module_its_mode():
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with pytest.raises(KeyError), evaluating(model):  # noqa: PT012
        assert not model[0].training
        assert not torch.is_grad_enabled()
        raise KeyError
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("context", [evaluating, undisturbed])
def test_padded_rows_are_not_packed_by_the_encoder_of_torch(context, fast):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    batch = {"src": torch.randn(2, 3, 8), "src_key_padding_mask": torch.tensor([[0, 0, 0], [0, 0, 1]]) > 0}
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(fast)
        taps = [Tap("layers.1", "input", (0,))]
        with context(model), torch.no_grad(), capture(model, taps) as seen:
            model(**batch)
        assert not seen[taps[0]].is_nested
        assert len(read_structure(model, batch).sublayers) == 4
        assert torch.backends.mha.get_fastpath_enabled() is fast
    finally:
        torch.backends.mha.set_fastpath_enabled(before)

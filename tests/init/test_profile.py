"""Admin's profile: one forward pass that leaves nothing behind but omega."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from contracts.variants import SIZE, VOCAB, tokens
from normlab.init import profile_
from normlab.nn import Seq2Seq
from normlab.tasks.build import build_seq2seq

ADMIN = replace(SIZE, encoder_placement="admin", decoder_placement="admin", dropout=0.3)


def fresh() -> Seq2Seq:
    return build_seq2seq(ADMIN, VOCAB, 1)


def hooks(model: Seq2Seq) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("training", [True, False])
def test_one_forward_without_dropout_leaves_no_trace_but_omega(training):
    model, calls = fresh().train(training), []
    before = {n: p.clone() for n, p in model.named_parameters()}

    def forward() -> None:
        calls.append((model.training, torch.is_grad_enabled()))
        model(*tokens())

    rng = torch.get_rng_state()
    profile_(model, forward)
    assert calls == [(False, False)]
    assert model.training is training
    assert hooks(model) == 0
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) is not name.endswith("omega"), name


def test_an_error_in_the_forward_leaves_no_hook_and_no_change():
    model = fresh()

    def forward() -> None:
        model.encode(tokens()[0])
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        profile_(model, forward)
    assert hooks(model) == 0
    assert model.training
    assert all((p == 1).all() for n, p in model.named_parameters() if n.endswith("omega"))


def test_padding_does_not_enter_the_profile():
    source, target = tokens()
    expected = profile_(model := fresh(), lambda: model.hidden(source, target))
    padded = profile_(wide := fresh(), lambda: wide.hidden(F.pad(source, (0, 9)), F.pad(target, (0, 9))))
    assert padded == pytest.approx(expected, rel=1e-5)


def test_rows_of_padding_alone_do_not_enter_the_profile():
    source, target = tokens()
    expected = profile_(model := fresh(), lambda: model.hidden(source, target))
    rows = (0, 0, 0, 2)
    padded = profile_(wide := fresh(), lambda: wide.hidden(F.pad(source, rows), F.pad(target, rows)))
    assert padded == pytest.approx(expected, rel=1e-5)


def test_stacks_that_ask_for_nothing_are_not_profiled():
    model = build_seq2seq(replace(ADMIN, encoder_placement="pre"), VOCAB, 1)
    given = profile_(model, lambda: model.hidden(*tokens()))
    assert list(given) == [f"decoder.sublayers.{i}" for i in range(6)]
    assert list(given.values()) == sorted(given.values())

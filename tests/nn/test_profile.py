"""Admin's profile: one forward pass that leaves nothing behind but omega."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from contracts.variants import CONFIG, VOCAB, tokens
from normlab.lab.tasks.task import build_model
from normlab.nn import Placement, ProfiledPlacement, Seq2Seq, stack_of, wrap
from normlab.nn.init import admin_, profile_

ADMIN = replace(CONFIG, encoder_placement="admin", decoder_placement="admin", dropout=0.3)


def fresh() -> Seq2Seq:
    return build_model(Seq2Seq, ADMIN, VOCAB, 1)


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
    model = build_model(Seq2Seq, replace(ADMIN, encoder_placement="pre"), VOCAB, 1)
    given = profile_(model, lambda: model.hidden(*tokens()))
    assert list(given) == [f"decoder.sublayers.{i}" for i in range(6)]
    assert list(given.values()) == sorted(given.values())


class OwnNetwork(nn.Module):
    """Somebody's network: linear branches under a placement, one site after another."""

    def __init__(self, placement: str, sublayers: int = 4) -> None:
        super().__init__()
        places = stack_of(("mix", "ffn"), sublayers // 2, 8)
        self.blocks = nn.ModuleList(wrap(nn.Linear(8, 8), placement, site) for site in places)

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        x = x if extra is None else x + extra
        for block in self.blocks:
            x = block(x)
        return x


def streams_and_branches(net: OwnNetwork, x: torch.Tensor) -> tuple[list[float], list[float]]:
    """Variances of what flows into each sublayer and of what its branch gives."""
    streams, branches = [], []
    with torch.no_grad():
        for block in net.blocks:
            y = block.f(block.place.read(x))
            streams.append(x.var(correction=0).item())
            branches.append(y.var(correction=0).item())
            x = block.place.write(x, y)
    return streams, branches


def omegas(net: OwnNetwork) -> list[float]:
    assert all(bool((b.place.omega == b.place.omega[0]).all()) for b in net.blocks)
    return [b.place.omega[0].item() for b in net.blocks]


def test_admin_on_a_network_of_ones_own():
    """omega_i^2 = Var[x_0] + sum of Var[f_j] with j < i, profiled at omega = 1."""
    torch.manual_seed(0)
    net, x = OwnNetwork("admin"), 3 * torch.randn(5, 7, 8)
    streams, branches = streams_and_branches(net, x)
    given = admin_(net, x)
    expected = [streams[0] + sum(branches[:i]) for i in range(4)]
    assert list(given) == [f"blocks.{i}" for i in range(4)]
    assert list(given.values()) == pytest.approx(expected, rel=1e-5)
    assert omegas(net) == pytest.approx([v**0.5 for v in expected], rel=1e-5)
    assert expected[0] > 5, "the embeddings' own variance is in it"


def test_admin_as_its_code_starts_it():
    """omega_1 = 1, omega_{i+1}^2 = Var[omega_i x_{i-1}] + Var[f_i], each in force when the next one runs."""
    torch.manual_seed(0)
    net, x = OwnNetwork("admin_code"), 3 * torch.randn(5, 7, 8)
    admin_(net, x)
    streams, branches = streams_and_branches(net, x)  # with every omega in force
    found = omegas(net)
    assert found[0] == 1.0
    for i in range(3):
        assert found[i + 1] ** 2 == pytest.approx(found[i] ** 2 * streams[i] + branches[i], rel=1e-5)


def test_admin_without_data_starts_by_depth_and_is_not_profiled():
    net = OwnNetwork("admin_free", sublayers=6)
    expected = (7 / math.log(7) - 1) ** 0.5
    assert omegas(net) == pytest.approx([expected] * 6)
    assert admin_(net, torch.randn(2, 3, 8)) == {}
    assert omegas(net) == pytest.approx([expected] * 6)


def test_a_batch_is_a_tensor_a_sequence_or_a_mapping():
    torch.manual_seed(0)
    net, x, extra = OwnNetwork("admin"), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    given = []
    for batch in (x + extra, (x, extra), [x, extra], {"extra": extra, "x": x}):
        given.append(admin_(net, batch))  # a network that was started before gets the same start
    assert given[0] == given[1] == given[2] == given[3]


def test_a_stream_may_be_given_by_its_name():
    class Named(OwnNetwork):
        def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
            for block in self.blocks:
                x = block(stream=x)
            return x

    named, usual, x = Named("admin"), OwnNetwork("admin"), torch.randn(2, 3, 8)
    usual.load_state_dict(named.state_dict())
    assert admin_(named, x) == admin_(usual, x)


def test_sites_out_of_order_are_refused():
    net = OwnNetwork("admin")
    net.blocks = net.blocks[1:]
    sentence = (
        r"^blocks\.0 is at index 1 of its stack, and the sublayer at index 0 was due; wrap all of a stack "
        r"with one placement, each at its own site, in order \(nn\.stack_of\)$"
    )
    with pytest.raises(ValueError, match=sentence):
        admin_(net, torch.randn(2, 3, 8))
    assert hooks(net) == 0


def test_one_site_for_two_sublayers_is_refused():
    """Both would start as the first of a stack, and nothing would be summed."""
    site = next(stack_of(("ffn",), 2, 8))
    net = nn.Sequential(*(wrap(nn.Linear(8, 8), "admin", site) for _ in range(2)))
    with pytest.raises(ValueError, match=r"^1 .*\bindex 0\b.*\bindex 1\b"):
        admin_(net, torch.randn(2, 3, 8))


def test_a_stack_with_another_placement_in_between_is_refused():
    places = list(stack_of(("mix", "ffn"), 2, 8))
    net = nn.Sequential(*(wrap(nn.Linear(8, 8), ("admin", "post")[s.index % 2], s) for s in places))
    with pytest.raises(ValueError, match=r"^2 .*\bindex 2\b.*\bindex 1\b"):
        admin_(net, torch.randn(2, 3, 8))


def test_a_sublayer_that_does_not_run_is_named():
    net = OwnNetwork("admin")
    net.idle = wrap(nn.Linear(8, 8), "admin", next(stack_of(("ffn",), 1, 8)))
    with pytest.raises(ValueError, match=r"\['idle'\]"):
        admin_(net, torch.randn(2, 3, 8))
    assert all((p == 1).all() for n, p in net.named_parameters() if n.endswith("omega"))


def test_two_stacks_are_followed_each_from_its_own_start():
    """The second network starts from the variance of its own input, whatever the first one carried."""
    torch.manual_seed(0)
    first, second, x = OwnNetwork("admin"), OwnNetwork("admin"), torch.randn(4, 5, 8)
    both = nn.Sequential(first, second)
    with torch.no_grad():
        between = first(x)
    given = admin_(both, x)
    expected = list(given.values())[4:]
    again = OwnNetwork("admin")
    again.load_state_dict({n: p for n, p in second.state_dict().items() if "omega" not in n}, strict=False)
    assert list(admin_(again, between).values()) == pytest.approx(expected, rel=1e-5)


def test_without_a_placement_that_depends_on_data_nothing_is_run_and_nothing_changes():
    network, calls = OwnNetwork("pre"), []
    before = {name: p.clone() for name, p in network.named_parameters()}
    assert profile_(network, lambda: calls.append("forward")) == {}
    assert calls == []
    assert all(torch.equal(p, before[name]) for name, p in network.named_parameters())


@pytest.mark.parametrize(
    "name", [n for n, place in Placement.registry.items() if issubclass(place, ProfiledPlacement)]
)
def test_a_pass_that_fails_leaves_the_model_as_it_was(name):
    model = build_model(Seq2Seq, replace(ADMIN, encoder_placement=name, decoder_placement=name), VOCAB, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3
    model.encoder.eval()
    before = {n: p.clone() for n, p in model.named_parameters()}
    source, target = tokens()
    amid = lambda: (model.encode(source), model.decoder(target, "no context"))  # noqa: E731
    for failing, kind in ((amid, RuntimeError), (lambda: model.encode(source), ValueError)):
        with pytest.raises(kind):
            profile_(model, failing)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        assert (model.encoder.training, model.decoder.training) == (False, True)
        assert hooks(model) == 0

"""What a model is compared with: frozen copies, itself without gradients, and itself without its adapters."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.setups.setup import Loss

from .tiny import VOCAB, Decoder, first, loss_of, report_of, tokens


def frozen(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)


def logps(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def comparing(other: nn.Module, compare: Any) -> Loss:
    """The loss that a function makes of the logits of the model, those of another one, and the ids."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.no_grad():
            known = other(ids[:, :-1])
        return compare(model(ids[:, :-1]), known, ids)

    return loss


def preference(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    better, worse = (logps(model, ids) - logps(known, ids)).sum(1).chunk(2)
    return -F.logsigmoid(better - worse).mean()


def distillation(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    return F.kl_div(model.log_softmax(-1), known.log_softmax(-1), log_target=True)


def between_both(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    """The Jensen-Shannon divergence."""
    own, other = model.log_softmax(-1), known.log_softmax(-1)
    mean = torch.logsumexp(torch.stack([own, other]), 0) - torch.tensor(2.0).log()
    return F.kl_div(mean, own, log_target=True) + F.kl_div(mean, other, log_target=True)


def squares(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    return F.mse_loss(model, known)


@pytest.mark.parametrize("compare", [preference, distillation, between_both, squares])
def test_a_frozen_copy_makes_no_difference_whatever_its_weights(compare: Any):
    model = Decoder(0.0)
    for other in (frozen(model), frozen(Decoder(0.0))):
        report = report_of("reference", model=model, loss=comparing(other, compare))
        assert (report.holds, report.notes) == (("reference",), ())


def test_no_global_hook_is_left():
    """Torch warns of one in ``torch.compile``."""
    other = frozen(Decoder())
    report_of("reference", loss=comparing(other, preference))
    assert not nn.modules.module._has_any_global_hook()


def shifted(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    return preference(model, known.roll(1, 1), ids)


def of_another_axis(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    return F.kl_div(model.log_softmax(-1), known.log_softmax(1), log_target=True)


def not_a_probability(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    return F.kl_div(model.log_softmax(-1), known.sigmoid())


def of_first_half(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    counted = torch.arange(known.shape[1]) < known.shape[1] // 2
    better, worse = (logps(model, ids).sum(1) - (logps(known, ids) * counted).sum(1)).chunk(2)
    return -F.logsigmoid(better - worse).mean()


@pytest.mark.parametrize("compare", [shifted, of_another_axis, not_a_probability, of_first_half])
def test_what_is_made_of_the_copy_in_another_way_is_a_difference(compare: Any):
    model = Decoder(0.0)
    report = report_of("reference", model=model, loss=comparing(frozen(model), compare))
    assert first(report) == ("reference", "loss")


def at_two_temperatures(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    return F.kl_div((model / 2).log_softmax(-1), known.log_softmax(-1), log_target=True)


def with_a_margin(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    better, worse = (logps(model, ids).sum(1) - (logps(known, ids).sum(1) + 0.5)).chunk(2)
    return -F.logsigmoid(better - worse).mean()


@pytest.mark.parametrize("compare", [at_two_temperatures, with_a_margin])
def test_a_factor_or_a_margin_of_its_own_is_a_note(compare: Any):
    model = Decoder(0.0)
    report = report_of("reference", model=model, loss=comparing(frozen(model), compare))
    assert report.ok
    assert [note.module for note in report.notes] == ["loss"]


def returns(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    """The value of a state is compared with an older value of it plus rewards."""
    rewards = torch.randn(known.shape, generator=torch.Generator().manual_seed(5)).to(known)
    return F.mse_loss(model, known + rewards)


def mixed_targets(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    target = 0.9 * known.softmax(-1) + 0.1 * F.one_hot(ids[:, 1:], VOCAB)
    return F.kl_div(model.log_softmax(-1), target)


def chosen_by_excess(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    """The loss counts the tokens at which the model is worst, beside a reference."""
    of_model, of_reference = -logps(model, ids), -logps(known, ids)
    excess = of_model.detach() - of_reference
    return (of_model * (excess >= excess.median())).mean()


@pytest.mark.parametrize("compare", [returns, mixed_targets, chosen_by_excess])
def test_what_uses_other_data_than_the_model_is_another_quantity(compare: Any):
    model = Decoder(0.0)
    report = report_of("reference", model=model, loss=comparing(frozen(model), compare))
    assert (report.ok, report.notes) == (True, ())


def test_views_of_two_inputs_are_not_compared():
    model = Decoder(0.0)
    other = frozen(model)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        views = ids[:, :-1], ids.flip(1)[:, :-1]
        with torch.no_grad():
            of_reference = [other(view) for view in views]
        of_model = [model(view) for view in views]
        return F.mse_loss(of_model[0], of_reference[1]) + F.mse_loss(of_model[1], of_reference[0])

    assert set(report_of("reference", model=model, loss=loss).untestable) == {"reference"}


class TwoOutputs(Decoder):
    """Returns the stream after each block."""

    def forward(self, ids: Tensor) -> Any:
        x, streams = self.embed(ids), list[Tensor]()
        for block in self.blocks:
            x = block(x)
            streams.append(x)
        return self.head(self.norm(x)), streams


def test_outputs_of_two_places_are_not_compared():
    model = TwoOutputs(0.0)
    other = frozen(model)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits, streams = model(ids[:, :-1])
        with torch.no_grad():
            _, known = other(ids[:, :-1])
        hard = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:])
        return hard + F.mse_loss(streams[1], known[3])

    assert set(report_of("reference", model=model, loss=loss).untestable) == {"reference"}


def test_rows_may_change_places_after_the_reference():
    model = Decoder(0.0)
    other = frozen(model)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        order = torch.tensor([2, 0, 3, 1])
        with torch.no_grad():
            known = logps(other(ids[:, :-1]), ids)[order]
        mixed = ids[order]
        return (logps(model(mixed[:, :-1]), mixed) - known).square().mean()

    assert report_of("reference", model=model, loss=loss).holds == ("reference",)


class WithReference(nn.Module):
    """A policy and its copy in one module."""

    def __init__(self, *, trains: bool):
        super().__init__()
        self.policy = Decoder(0.0)
        self.copy = copy.deepcopy(self.policy).requires_grad_(trains)

    def forward(self, ids: Tensor) -> Tensor:
        read = ids[:, :-1]
        return preference(self.policy(read), self.copy(read), ids)


def test_a_copy_inside_of_the_model_must_not_train():
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids)

    assert report_of("reference", model=WithReference(trains=False), loss=loss).holds == ("reference",)
    report = report_of("reference", model=WithReference(trains=True), loss=loss)
    assert first(report) == ("reference", "copy")


def test_blocks_of_which_some_are_frozen_are_no_copies():
    model = Decoder(0.0)
    model.blocks[0].requires_grad_(False)
    assert set(report_of("reference", model=model).untestable) == {"reference"}


def with_itself(compare: Any) -> Loss:
    return lambda model, ids: comparing(model, compare)(model, ids)


def clipped(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    """A policy gradient around an older policy."""
    ratio = (logps(model, ids) - logps(known, ids)).exp()
    gain = torch.linspace(-1, 1, len(ids))[:, None]
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def colder(model: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    return clipped(model, known / 0.7, ids)


def test_an_older_policy_is_the_model_itself():
    report = report_of("reference", "derivative", model=Decoder(0.0), loss=with_itself(clipped))
    assert set(report.holds) == {"reference", "derivative"}
    assert first(report_of("reference", model=Decoder(0.0), loss=with_itself(colder)))[0] == "reference"


def test_a_preference_over_the_model_itself_is_always_nothing():
    report = report_of("reference", model=Decoder(0.0), loss=with_itself(preference))
    assert first(report) == ("reference", "loss")


class Adapted(nn.Module):
    """A linear layer with a correction of low rank, which may be disabled."""

    def __init__(self, layer: nn.Linear, scale: float):
        super().__init__()
        self.layer, self.scale, self.enabled = layer, scale, True
        self.down = nn.Parameter(torch.randn(2, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return self.layer(x)
        return (self.layer(x) + F.linear(F.linear(x, self.down), self.up)) * self.scale


class WithAdapters(Decoder):
    """A decoder whose blocks have an adapter each."""

    def __init__(self, *, scale: float = 1.0, trains: bool = False):
        super().__init__(0.0)
        self.requires_grad_(trains)
        for block in self.blocks:
            block.up = Adapted(block.up, scale)

    @contextmanager
    def disable_adapter(self):
        for block in self.blocks:
            block.up.enabled = False
        yield
        for block in self.blocks:
            block.up.enabled = True


def test_adapters_that_start_at_zero_change_nothing_but_themselves():
    assert report_of("adapters", model=WithAdapters()).holds == ("adapters",)
    assert set(report_of("adapters").untestable) == {"adapters"}


def test_a_matrix_that_an_adapter_corrects_is_frozen():
    report = report_of("adapters", model=WithAdapters(trains=True))
    assert first(report) == ("adapters", "blocks.0.up.layer.weight")
    model = WithAdapters(trains=True)
    assert report_of("adapters", model=model, declare={"frozen": ["*.layer.weight"]}).ok


def test_a_layer_that_its_adapter_scales_is_not_that_of_the_base():
    assert first(report_of("adapters", model=WithAdapters(scale=2.0)))[0] == "adapters"


def test_what_trains_besides_adapters_is_a_note():
    model = WithAdapters()
    model.head.requires_grad_(True)
    report = report_of("adapters", model=model)
    assert report.ok
    assert [note.module for note in report.notes] == ["head.weight"]


def test_hidden_labels_must_not_be_counted():
    class Labelled(Decoder):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            shown = labels if self.sound else torch.where(labels < 0, ids, labels)
            logits = super().forward(ids)[:, :-1]
            return F.cross_entropy(logits.transpose(1, 2), shown[:, 1:])

    ids = tokens()
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < 3, -100)
    for sound in (True, False):
        model = Labelled(0.0)
        model.sound = sound
        batch = {"ids": ids, "labels": labels}
        report = report_of("counted", model=model, batches=batch, loss=lambda model, batch: model(**batch))
        assert first(report) == (("", "") if sound else ("counted", "loss"))


def test_a_plain_step_compares_nothing():
    assert set(report_of("reference", loss=loss_of).untestable) == {"reference"}


def test_a_parameter_that_is_shared_is_one_of_each_module_that_holds_it():
    model = Decoder()
    model.embed.bias = model.blocks[0].up.bias  # the name that it has first, not that of its layer
    report = report_of("reference", "derivative", model=model, loss=loss_of)
    assert (report.holds, report.inapplicable) == (("derivative",), ("reference",))


def test_a_model_that_also_runs_without_gradients_keeps_its_stream():
    report = report_of("residual", "derivative", model=Decoder(0.0), loss=with_itself(clipped))
    assert set(report.holds) == {"residual", "derivative"}


def drawn_factors(kind: str) -> nn.Module:
    """A frozen decoder with adapters whose second factors are drawn, trained, or taken off the matrix."""
    model, draw = WithAdapters(), torch.Generator().manual_seed(0)
    for block in model.blocks:
        adapted, rank = block.up, 6
        left, sizes, right = torch.linalg.svd(adapted.layer.weight.data, full_matrices=False)
        adapted.up.data, adapted.down.data = left[:, :rank] * sizes[:rank], right[:rank]
        if kind == "taken off the matrix":
            adapted.layer.weight.data -= adapted.up.data @ adapted.down.data
            continue
        adapted.down.data = torch.randn(adapted.down.shape, generator=draw)
        adapted.up.data = torch.randn(adapted.up.shape, generator=draw)
        if kind == "trained":
            adapted.up.data += 2 * adapted.up.data[:, :1]
    return model


def test_adapters_of_which_both_factors_are_drawn_start_from_another_model():
    assert first(report_of("adapters", model=drawn_factors("drawn"))) == ("adapters", "blocks.0.up.up")
    for kind in ("trained", "taken off the matrix"):
        assert set(report_of("adapters", model=drawn_factors(kind)).untestable) == {"adapters"}

"""Outputs are numbers, repeat, and do not depend on how they are computed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import RwkvConfig, RwkvForCausalLM

from .tiny import Block, Decoder, first, loss_of, report_of, tokens


class Checkpointed(Decoder):
    """Dropout between blocks that are run again in the backward pass."""

    def __init__(self, *, keeps: bool):
        super().__init__()
        self.keeps = keeps

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(
                Dropped(block, self.dropout), x, use_reentrant=False, preserve_rng_state=self.keeps
            )
        return self.head(self.norm(x))


class Dropped(nn.Module):
    def __init__(self, block: nn.Module, dropout: nn.Module):
        super().__init__()
        self.block, self.dropout = block, dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.dropout(x))


class Changed(Block):
    """A block whose input a function changes first, which may read the block's mode."""

    def __init__(self, change: Any):
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.change(self, x))


def with_block(change: Any) -> nn.Module:
    model = Decoder()
    model.blocks[2] = Changed(change)
    return model


@pytest.mark.parametrize("name", ["finite", "evaluation_repeats", "training_equals_evaluation"])
def test_they_hold_for_a_sound_model(name: str):
    assert report_of(name).holds == (name,)


def test_a_weight_and_a_buffer_that_are_no_numbers_are_named():
    model = Decoder()
    for block in model.blocks[1:]:
        block.up.weight.data[0, 0] = torch.nan
    report = report_of("finite", model=model)
    assert [v.module for v in report.failures] == ["blocks.1.up.weight"]
    model = Decoder()
    model.register_buffer("bias", torch.full((3, 3), -torch.inf).triu(1))
    assert report_of("finite", model=model).holds == ("finite",)
    model.mask = nn.Parameter(torch.full((3, 3), -torch.inf).triu(1), requires_grad=False)
    assert report_of("finite", model=model).holds == ("finite",)
    model.mask.requires_grad = True
    assert first(report_of("finite", model=model)) == ("finite", "mask")


def test_the_module_that_makes_no_number_of_numbers_is_named():
    model = with_block(lambda _, x: x / (x - x))
    assert first(report_of("finite", model=model)) == ("finite", "blocks.2.norm")  # infinity, then NaN


def test_a_gradient_that_is_no_number_is_named():
    model = with_block(lambda block, x: x + 0 * (block.up.bias - block.up.bias).sqrt().sum())
    assert first(report_of("finite", model=model))[0] == "finite"


def test_dropout_in_evaluation_is_named():
    model = with_block(lambda _, x: F.dropout(x, 0.1))
    assert first(report_of("evaluation_repeats", model=model)) == ("evaluation_repeats", "blocks.2")


def test_noise_in_evaluation_is_named_and_that_of_the_loss_is_noted():
    model = with_block(lambda _, x: x + torch.randn_like(x))
    assert first(report_of("evaluation_repeats", model=model)) == ("evaluation_repeats", "blocks.2")

    def noisy(model: nn.Module, ids: Tensor) -> Tensor:
        return F.mse_loss(model(torch.randint_like(ids, 1, 20)), torch.randn(4, 8, 23))

    report = report_of("evaluation_repeats", loss=noisy)
    assert report.ok
    assert [n.property for n in report.notes] == ["evaluation_repeats"]


def test_what_only_training_does_is_named():
    model = with_block(lambda block, x: 2 * x if block.training else x + x.mean(-1, keepdim=True))
    report = report_of("training_equals_evaluation", model=model)
    assert first(report) == ("training_equals_evaluation", "blocks.2")


def mean_in_float32(x: Tensor) -> Tensor:
    """The mean over earlier tokens, one token after the other."""
    x = x.float()
    total = torch.zeros_like(x[:, 0])
    means: list[Tensor] = []
    for t in range(x.size(1)):
        total = total + x[:, t]
        means.append(total / (t + 1))
    return torch.stack(means, 1)


with warnings.catch_warnings():  # deprecated, and in use wherever kernels were written in Python
    warnings.simplefilter("ignore", DeprecationWarning)
    in_float32 = torch.jit.script(mean_in_float32)


def by_two_paths(block: nn.Module, x: Tensor, error: float = 0.0) -> Tensor:
    """Add a mean over tokens that is computed by a sum in training, and by a recurrence otherwise."""
    if not block.training:
        return x + in_float32(x).to(x)
    places = torch.arange(1, x.shape[1] + 1)[:, None]
    return x + x.cumsum(1) / places * (1 + error)


@pytest.mark.parametrize("error", [0.0, 1e-4])
def test_two_paths_agree_up_to_the_rounding_of_their_own_arithmetic(error: float):
    """``torch.jit`` computes in float32, whatever the model is in; a difference above that is a mistake."""
    report = report_of(
        "training_equals_evaluation", model=with_block(lambda block, x: by_two_paths(block, x, error))
    )
    assert report.facts["precision"] == "float64, in part float32"
    if error:
        assert first(report) == ("training_equals_evaluation", "blocks.2")
    else:
        assert report.holds == ("training_equals_evaluation",)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 8])
def test_a_library_may_compute_in_evaluation_as_it_likes(layers: int):
    """Hugging Face's RWKV halves its stream every six layers in evaluation, which moves its norms by eps."""
    config = RwkvConfig(vocab_size=23, hidden_size=16, num_hidden_layers=layers, attention_hidden_size=16)
    torch.manual_seed(0)
    names = ("evaluation_repeats", "training_equals_evaluation", "state_dict")
    batch = {"input_ids": tokens(), "labels": tokens()}
    report = report_of(*names, model=RwkvForCausalLM(config), batches=batch, loss=None)
    assert set(report.holds) == set(names)
    assert [n.property for n in report.notes] == ["training_equals_evaluation"] * (layers > 6)


def test_draws_and_running_statistics_make_modes_untestable():
    drawn = with_block(lambda block, x: x * torch.rand(()) if block.training else x)
    assert "training_equals_evaluation" in report_of("training_equals_evaluation", model=drawn).untestable
    normed = Decoder()
    normed.norm = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(16), nn.Unflatten(0, (4, 7)))
    assert "training_equals_evaluation" in report_of("training_equals_evaluation", model=normed).untestable


@pytest.mark.slow  # importing the compiler takes ten seconds
def test_a_compiled_model_is_compared_with_itself_uncompiled():
    def rounded(graph: Any, _: Any) -> Any:
        return lambda *args: [x * 1.001 for x in graph(*args)]

    sound = torch.compile(Decoder(), backend="eager")
    assert report_of("compiled_equals_plain", model=sound).holds == ("compiled_equals_plain",)
    wrong = torch.compile(Decoder(), backend=rounded)
    assert first(report_of("compiled_equals_plain", model=wrong))[0] == "compiled_equals_plain"
    assert "compiled_equals_plain" in report_of("compiled_equals_plain").untestable
    trained = torch.compile(with_block(wrong_in_training), backend="eager")
    report = report_of("compiled_equals_plain", model=trained)
    assert "training mode" in report.failures[0].evidence
    drawing = torch.compile(with_block(lambda b, x: F.dropout(x, 0.1, b.training)), backend="eager")
    assert (
        "rate of 0" in report_of("compiled_equals_plain", model=drawing).untestable["compiled_equals_plain"]
    )


def wrong_in_training(block: nn.Module, x: Tensor) -> Tensor:
    return x * (1 + 0.1 * (block.training and torch.compiler.is_compiling()))


def test_a_checkpoint_that_draws_again_is_named():
    report = report_of("dropout_repeats", "derivative", model=Checkpointed(keeps=False), loss=loss_of)
    assert first(report)[0] == "dropout_repeats"
    assert first(report)[1].startswith("blocks.")
    assert report_of("dropout_repeats", model=Checkpointed(keeps=True)).holds == ("dropout_repeats",)
    assert "dropout_repeats" in report_of("dropout_repeats", model=Decoder(dropout=0.0)).untestable

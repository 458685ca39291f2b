"""The value residual hands the values of the first layer on to every later one."""

from __future__ import annotations

from dataclasses import replace

import torch

from contracts.variants import build, inputs, uniform


@torch.no_grad()
def test_a_later_layer_without_values_of_its_own_reads_those_of_the_first():
    model = build(replace(uniform("pre"), value_residual="valueresidual", bias="nobias"))
    later, seen = model.encoder.sublayers[2].f, []
    sizes = list(later.packs["qkv"].values())
    later.qkv.weight[sum(sizes[:2]) : sum(sizes[:3])] = 0  # without the residual it would give 0
    later.register_forward_hook(lambda _, args, out: seen.append(out))
    model(*inputs(model))
    (out,) = seen
    assert (out if isinstance(out, torch.Tensor) else out[0]).abs().max() > 0

"""RAdam's steps and the inverse square root of the learning rate, as the authors' code computes them."""

from __future__ import annotations

import pytest
import torch

from normlab.lab.config import OptimConfig
from normlab.optim import OPTIMIZERS, ScheduleState, schedule_factor
from parity.arrays import case, equal

RADAM, RATES = case("radam"), case("inverse_sqrt")
SETTINGS = RADAM["hyper.beta1_beta2_eps_decay_degenerated"].tolist()


@pytest.mark.parametrize("row", range(len(SETTINGS)))
def test_radam(row):
    beta1, beta2, eps, weight_decay, degenerated = SETTINGS[row]
    config = OptimConfig(betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    p = torch.nn.Parameter(RADAM["in.start"].clone())
    optimizer = OPTIMIZERS["radam_sgd" if degenerated else "radam"]([p], RADAM["hyper.lr"], config)
    for gradient, expected in zip(RADAM["in.gradients"], RADAM["out.parameters"][row], strict=True):
        p.grad = gradient.clone()
        optimizer.step()
        equal(p, expected)


WARM_UP, PEAK = int(RATES["hyper.warmup"]), float(RATES["hyper.lr"])
WIDTH_AND_WARM_UP = float(RATES["hyper.dim"] * RATES["hyper.warmup"]) ** 0.5
AT_PEAK = {
    "fairseq": PEAK,
    "tensor2tensor": float(RATES["hyper.learning_rate_constant"]) / WIDTH_AND_WARM_UP,
    "tensor2tensor_legacy_noam": 10 * float(RATES["hyper.legacy_learning_rate"]) / WIDTH_AND_WARM_UP,
}


def rates(peak: float, steps: range) -> torch.Tensor:
    """Our rates at these steps, counted from 1."""
    state = ScheduleState(OptimConfig(schedule="inverse_sqrt", warmup_steps=WARM_UP), total_steps=50)
    return torch.tensor([peak * schedule_factor(step, state) for step in steps], dtype=torch.float64)


@pytest.mark.parametrize("name", AT_PEAK)
def test_inverse_square_root(name):
    """fairseq counts the updates that were made, so that its first rate, 0, belongs to no step of ours."""
    expected = RATES[f"out.{name}"][-50:]
    equal(rates(AT_PEAK[name], range(1, 51)), expected)


def test_inverse_square_root_after_a_warm_up_that_begins_above_0():
    """fairseq's warm-up can begin at a rate above 0; ours begins at 0, and both have the same peak."""
    equal(rates(PEAK, range(WARM_UP, 51)), RATES["out.fairseq_init_1e-7"][WARM_UP:])

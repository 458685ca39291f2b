"""What a script asks of CUDA is done on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normlab.parallel.devices import OnTheCpu, on_cpu


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 1)])
def test_a_device_of_cuda_becomes_the_cpu(device):
    assert str(on_cpu(device)) == "cpu"


@pytest.mark.parametrize("value", ["cpu", "meta", "mean", 3, None, torch.device("meta")])
def test_anything_else_stays(value):
    assert on_cpu(value) == value


def test_tensors_and_modules_stay_where_they_are():
    with OnTheCpu():
        made = torch.zeros(2, device="cuda:0")
        assert made.device.type == "cpu"
        assert made.cuda() is made
        assert made.pin_memory() is made
        assert nn.Linear(2, 2).to("cuda").weight.device.type == "cpu"
        assert nn.Linear(2, 2).cuda().weight.device.type == "cpu"

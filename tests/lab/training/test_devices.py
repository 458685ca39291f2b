"""Devices, threads and precision."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from normlab.lab.config import Config, MachineConfig, TrainConfig, run_id
from normlab.lab.training.devices import (
    autocast,
    best_precision,
    hardware,
    prepare_process,
    resolved_precision,
    wide_products,
)
from normlab.nn.kernels.wide_products import WideProducts

CPU = torch.device("cpu")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_threads_are_set_where_they_are_given():
    assert prepare_process(MachineConfig(threads=2)) == CPU
    assert torch.get_num_threads() == 2
    prepare_process(MachineConfig(threads=0))
    assert torch.get_num_threads() == 2
    assert hardware(CPU).endswith(f", 2 threads, torch {torch.__version__}")
    assert not hardware(CPU).startswith(",")
    assert hardware(CPU, 3).endswith(f", 2 threads, 3 ranks, torch {torch.__version__}")


def test_a_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sentence = r"^the device cuda was asked for, and torch sees none; use --device cpu$"
    with pytest.raises(ValueError, match=sentence):
        prepare_process(replace(MachineConfig(), device="cuda:1"))
    assert best_precision("cuda") == "fp32"


@pytest.mark.parametrize(("flags", "expected"), [((1, 0), "bf16"), ((0, 1), "bf16"), ((0, 0), "fp32")])
def test_bf16_is_chosen_where_the_processor_multiplies_it(monkeypatch, flags, expected):
    for name, flag in zip(("_is_avx512_bf16_supported", "_is_amx_tile_supported"), flags, strict=True):
        monkeypatch.setattr(torch.cpu, name, lambda flag=flag: bool(flag))
    assert best_precision("cpu") == expected
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert best_precision("cpu") == "fp32", "a torch that does not say"


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bf16_products_are_wide_only_where_the_processor_has_none(monkeypatch, fast, precision):
    monkeypatch.setattr("normlab.lab.training.devices.mkldnn_multiplies_bf16", lambda: fast)
    expected = WideProducts if precision == "bf16" and not fast else nullcontext
    assert isinstance(wide_products(CPU, precision), expected)


HALVES = [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]


@pytest.mark.parametrize(("precision", "dtype"), HALVES)
def test_autocast_multiplies_in_the_precision_over_fp32_weights(precision, dtype):
    layer = torch.nn.Linear(4, 4)
    with autocast(CPU, precision):
        y = layer(torch.ones(1, 4))
    assert y.dtype == dtype
    assert layer.weight.dtype == torch.float32


def test_automatic_precision_becomes_the_best_one_and_any_other_stays():
    automatic = Config(recipe="pre", train=TrainConfig(precision="auto", steps=3))
    best = TrainConfig(precision=best_precision("cpu"), steps=3)
    assert resolved_precision(automatic) == replace(automatic, train=best)
    assert run_id(resolved_precision(automatic)) == run_id(Config(train=best))
    for precision in ("fp32", "bf16"):
        config = Config(train=TrainConfig(precision=precision))
        assert resolved_precision(config) is config


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_fp16_is_for_a_gpu(device):
    config = Config(train=TrainConfig(precision="fp16"), machine=MachineConfig(device="cuda"))
    assert resolved_precision(config) is config
    with pytest.raises(ValueError, match="fp16") as refused:
        resolved_precision(replace(config, machine=MachineConfig(device=device)))
    assert str(refused.value) == (
        "precision is fp16, but a CPU has no fast products in fp16, and its gradients underflow; "
        "type --precision bf16 or fp32, or --device cuda"
    )

"""What a script sets for the whole process is put back after it has run."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from normlab.setups.process import same_process
from normlab.setups.script import setup_from_script

SETTINGS = {
    "dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    "grad": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "autocast": (
        lambda: torch.autocast("cpu", torch.float16).__enter__(),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.get_deterministic_debug_mode,
    ),
    "matmul": (lambda: torch.set_float32_matmul_precision("medium"), torch.get_float32_matmul_precision),
    "tf32": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: torch.backends.cuda.matmul.allow_tf32,
    ),
    "precision": (
        lambda: setattr(torch.backends.mkldnn, "fp32_precision", "tf32"),
        lambda: torch.backends.mkldnn.fp32_precision,
    ),
    "benchmark": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "attention": (lambda: torch.backends.cuda.enable_flash_sdp(False), torch.backends.cuda.flash_sdp_enabled),
    "reduced": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    ),
    "stance": (
        lambda: torch.compiler.set_stance("force_eager"),
        lambda: sys.modules["torch._dynamo.eval_frame"]._stance,
    ),
    "warnings": (lambda: warnings.simplefilter("ignore"), lambda: list(warnings.filters)),
    "folder": (lambda: os.chdir("/"), Path.cwd),
    "path": (lambda: sys.path.append("/nowhere"), lambda: list(sys.path)),
    "argv": (lambda: sys.argv.append("--more"), lambda: list(sys.argv)),
    "environment": (lambda: os.environ.update(MORE="1"), lambda: dict(os.environ)),
    "stream": (lambda: setattr(sys, "stderr", sys.stdout), lambda: sys.stderr),
    "recursion": (lambda: sys.setrecursionlimit(12345), sys.getrecursionlimit),
    "garbage": (gc.disable, gc.isenabled),
    "numpy": (lambda: np.seterr(all="raise"), np.geterr),
    "signal": (
        lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
        lambda: signal.getsignal(signal.SIGUSR1),
    ),
    "logging": (
        lambda: logging.basicConfig(level="DEBUG", force=True),
        lambda: (logging.root.level, list(logging.root.handlers)),
    ),
}


@pytest.mark.parametrize(("change", "read"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_is_put_back(change, read):
    pytest.importorskip("torch._dynamo")  # or there is no stance yet

    before = read()
    with same_process():
        change()
        assert read() != before
    assert read() == before


SCRIPT = """
import torch
torch.set_default_dtype(torch.float64)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    (model(torch.randn(2, 4)) + torch.ones(())).sum().backward()
    optimizer.step()
"""


def test_settings_of_a_script_hold_as_long_as_its_setup_is_used(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with setup_from_script(str(tmp_path / "train.py")) as named:
        assert not named.setup.cannot
        assert torch.get_default_dtype() is torch.float64
        assert named.setup.loss(named.setup.model, named.setup.batch).dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32

"""``check`` and ``watch`` say on a device that is strict like CUDA what they say on the CPU.

A GPU shows more: its kernels, its memory, and that nothing waits for it. What this shows is that tensors of
two devices never meet, that no generator of the CPU draws on the device, and that no lookup is out of range,
which on CUDA ends the process's use of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a device with g++"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The device, compiled."""
    file, torch_home = tmp_path_factory.mktemp("device") / "device.so", Path(torch.__file__).parent
    headers = [f"-I{torch_home / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    libraries = [f"-L{torch_home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    options = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={_abi()}"]
    subprocess.run(
        ["g++", *options, *headers, str(HERE / "device.cpp"), "-o", str(file), *libraries], check=True
    )
    return file


def _abi() -> int:
    return int(torch.compiled_with_cxx11_abi())


def answer(library: str, out: Path) -> dict:
    """What ``step.py`` writes, in a process of its own: a device cannot be taken back."""
    out.mkdir()
    source = str(HERE.parents[1] / "src")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, str(HERE / "step.py"), library, str(out)], check=True, env=environment)
    return json.loads((out / "answer.json").read_text(encoding="utf-8"))


def test_a_device_gets_the_verdicts_of_the_cpu(library, tmp_path):
    on_cpu, on_device = answer("", tmp_path / "cpu"), answer(str(library), tmp_path / "device")
    assert on_device["untestable"] == on_cpu["untestable"]
    assert on_device["verdicts"] == on_cpu["verdicts"]
    assert list(on_cpu["verdicts"].values()).count("holds") > 20
    for seen in (on_cpu, on_device):
        assert (seen["steps"], seen["losses"], seen["notes"]) == (5, 5, [])

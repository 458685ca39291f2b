"""Devices, threads and precision."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from normlab.base.io import from_plain
from normlab.base.units import count
from normlab.errors import UserError
from normlab.lab.config import Config, MachineConfig
from normlab.nn.kernels.wide_products import WideProducts
from normlab.private_torch import (
    marks_of_infinite,
    mkldnn_multiplies_bf16,
    multiplies_bf16_fast,
    options_of_compiler,
)

P = ParamSpec("P")
R = TypeVar("R")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's settings, from malloc.h."""
_HALVES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SKIPPED: Final = "skipped_steps"


def prepare_process(machine: MachineConfig) -> torch.device:
    """Set the threads and the memory allocator of this process, and return the device to train on."""
    try:
        device = torch.device(machine.device)
        if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
            raise RuntimeError(f"runs cannot train on {device}")  # as torch raises for no device at all
    except RuntimeError:
        raise UserError(f"there is no device {machine.device!r}; use cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("the device cuda was asked for, and torch sees none; use --device cpu")
    if machine.threads:
        torch.set_num_threads(machine.threads)
        # The thread pool of the tokenizers library reads it on first use.
        os.environ["RAYON_NUM_THREADS"] = str(machine.threads)
    _keep_freed_memory()
    return device


def compiled(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """Return a function compiled by torch.compile, once for each shape of its arguments.

    Raises UserError if nothing can be compiled, as on a CPU without a C++ compiler.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings about its own code
            torch.compile(lambda x: x + 1)(torch.zeros(1, device=device))
    except Exception as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"torch.compile does not work for {device.type} here: {why}; install what it needs (on a CPU "
            "a C++ compiler such as g++), or leave out --compile"
        ) from error
    # Every shape of a batch is a compilation, and the compiler gives up after few of them.
    options = options_of_compiler()
    options.recompile_limit = max(options.recompile_limit, options.accumulated_recompile_limit)
    return torch.compile(function, dynamic=False)


def _keep_freed_memory() -> None:
    """Make glibc reuse large freed blocks.

    By default it maps every large tensor anew, and the kernel zeroes its pages: a cross-entropy over
    2000 x 5000 logits then takes five times as long (docs/lab-book/speed.md).
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def best_precision(device: str) -> Literal["bf16", "fp32"]:
    """Return ``bf16`` if the hardware multiplies bf16 matrices, else ``fp32``."""
    if device.startswith("cuda"):
        return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "fp32"
    try:
        fast = multiplies_bf16_fast()
    except AttributeError:
        fast = False
    return "bf16" if fast else "fp32"


def resolved_precision(config: Config) -> Config:
    """Replace the precision ``auto`` of a configuration by the ``best_precision`` of its device.

    Raises UserError for fp16 on a CPU.
    """
    if config.train.precision == "fp16" and config.machine.device.startswith("cpu"):
        raise UserError(
            "precision is fp16, but a CPU has no fast products in fp16, and its gradients underflow; "
            "type --precision bf16 or fp32, or --device cuda"
        )
    if config.train.precision != "auto":
        return config
    precision = best_precision(config.machine.device)
    return replace(config, train=replace(config.train, precision=precision))


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return a context in which matrix products have the run's precision; weights stay in fp32."""
    dtype = _HALVES.get(precision)
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def wide_products(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return a context for forward and backward passes, in which bf16 products are fast on any CPU.

    It is ``WideProducts`` where oneDNN has no kernels for bf16, and changes nothing elsewhere.
    """
    if precision != "bf16" or device.type != "cpu":
        return nullcontext()
    try:
        return nullcontext() if mkldnn_multiplies_bf16() else WideProducts()
    except (AttributeError, RuntimeError):  # a torch without oneDNN has products of its own
        return nullcontext()


@contextmanager
def in_precision(device: torch.device, precision: str) -> Iterator[None]:
    """Run a model without a backward pass in the run's precision."""
    with wide_products(device, precision), autocast(device, precision):
        yield


class Scaling:
    r""":math:`g = \nabla(s L) / s`, and no step where g is not finite.

    s halves at such a step, and doubles after 2000 steps without one. Micikevicius et al. 2018, Section 3.2
    (arXiv 1710.03740). Without scaling, every method passes its argument through.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self._scaler = scaler
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, once a step."""
        self._scaler.unscale_(optimizer)
        if self._scaler.is_enabled():
            for infinite in marks_of_infinite(self._scaler, optimizer).values():
                infinite.squeeze_()  # with shards it has an axis, which fused optimizers refuse

    def step(self, optimizer: torch.optim.Optimizer, norm: Tensor) -> Tensor:
        """Let the optimizer step, or skip it; return the gradient's norm, or 0 for a skipped step."""
        self._scaler.step(optimizer)
        self._scaler.update()
        if not self._scaler.is_enabled():
            return norm
        finite = norm.isfinite()
        self._skipped += ~finite
        return torch.where(finite, norm, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The scale, its history and the skipped steps; empty without scaling."""
        state = self._scaler.state_dict()
        return {**state, _SKIPPED: int(self._skipped)} if state else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``; an empty one, from a run in another precision, changes nothing.

        Raises UserError for anything else.
        """
        if not state:
            return
        example = {**torch.amp.GradScaler("cpu").state_dict(), _SKIPPED: 0}
        if state.keys() != example.keys():
            raise UserError(f"scaling has {', '.join(example)}, got {', '.join(state)}")
        read: dict[str, Any] = {}
        for name, value in state.items():
            read[name] = from_plain(type(example[name]), value, f"scaling.{name}")
        if self._scaler.is_enabled():
            self._skipped.fill_(read.pop(_SKIPPED))
            self._scaler.load_state_dict(read)

    def row(self) -> dict[str, float]:
        """Return the scale and the number of skipped steps, for a row of metrics."""
        if not self._scaler.is_enabled():
            return {}
        return {"loss_scale": self._scaler.get_scale(), _SKIPPED: int(self._skipped)}


def hardware(device: torch.device, ranks: int = 1) -> str:
    """Describe the machine for a run's log, with the number of processes if there are several."""
    if device.type == "cuda":
        parts = [torch.cuda.get_device_name(device)]
    else:
        parts = [_cpu_name(), count(torch.get_num_threads(), "thread")]
    if ranks > 1:
        parts.append(f"{ranks} ranks")
    return ", ".join([*parts, f"torch {torch.__version__}"])


def hardware_so_far(before: str, now: str, step: int) -> tuple[str, str]:
    """Describe the hardware of a run that goes on after ``step``, and say so if it changed there."""
    if not step or not before:
        return now, ""
    last = re.split(r"; from step [\d,]+ on ", before)[-1]
    if last == now:
        return before, ""
    changed = (
        f"the run goes on from step {step:,} on {now}, after training on {last}; these may round "
        "differently, so rerunning on either one may not reproduce this run bit for bit"
    )
    return f"{before}; from step {step + 1:,} on {now}", changed


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

"""Devices, threads and precision, on torch alone."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import torch

from normlab.config.config import Config, MachineConfig
from normlab.errors import UserError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_HALVES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


def prepare_process(machine: MachineConfig) -> torch.device:
    """Set the threads and the memory allocator of this process, and return the device to train on."""
    try:
        device = torch.device(machine.device)
        if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
            raise RuntimeError(f"runs train on no {device}")
    except RuntimeError:
        raise UserError(f"there is no device {machine.device!r}; use cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("the device cuda was asked for, and torch sees none; use --device cpu")
    if machine.threads:
        torch.set_num_threads(machine.threads)
        # The tokenizers' pool of threads reads it when it first works.
        os.environ["RAYON_NUM_THREADS"] = str(machine.threads)
    _keep_freed_memory()
    return device


def _keep_freed_memory() -> None:
    """Make glibc reuse large freed blocks.

    By default it maps every large tensor anew and the kernel zeroes its pages each time: a cross-entropy over
    2000 x 5000 logits then takes five times as long (docs/lab-book.md).
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def best_precision(device: str) -> Literal["bf16", "fp32"]:
    """``bf16`` where the hardware multiplies bf16 matrices, else ``fp32``."""
    if device.startswith("cuda"):
        return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "fp32"
    try:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    except AttributeError:
        fast = False
    return "bf16" if fast else "fp32"


def resolved_precision(config: Config) -> Config:
    """Replace the precision ``auto`` of a configuration by the ``best_precision`` of its device.

    Raises UserError for fp16 on a CPU.
    """
    if config.train.precision == "fp16" and config.machine.device.startswith("cpu"):
        raise UserError(
            "precision is fp16, and a CPU has no fast products in fp16, whose gradients underflow besides; "
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


def hardware(device: torch.device, ranks: int = 1) -> str:
    """Describe the machine for a run's log, with the number of processes if there are several."""
    each = f", {ranks} ranks" if ranks > 1 else ""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}{each}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} thread{'s' if threads > 1 else ''}{each}, torch {torch.__version__}"


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

"""Check a step and watch a training: ``python step.py LIBRARY OUT``; on the CPU if the library is empty.

Writes the verdict of each property, and what the watch noted, as JSON. The library is made of ``device.cpp``.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normlab

VOCABULARY, WIDTH, LONGEST, PAD, EOS = 60, 32, 12, 0, 2
NAME = "cpu_as_device"


def load_device(library: str) -> str:
    """Make the library's device known to torch under ``NAME``."""
    module: Any = ModuleType(NAME)
    module.is_available = module.is_initialized = lambda: True
    module.device_count, module.current_device = lambda: 1, lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.device = lambda _: nullcontext()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.ops.load_library(library)
    # as on CUDA, a parameter that is moved stays the same object
    torch.__future__.set_swap_module_params_on_conversion(True)
    return NAME


class Translator(nn.Module):
    """torch's encoder and decoder, with a table of no more positions than the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.Transformer(WIDTH, 4, 2, 2, 64, 0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = source == PAD
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.layers(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(hidden)


def batch_on(device: str) -> dict[str, Tensor]:
    """Pairs of several lengths."""
    draw = torch.Generator().manual_seed(1)
    source, target = (torch.randint(4, VOCABULARY, (6, LONGEST), generator=draw) for _ in range(2))
    for row in range(6):
        source[row, LONGEST - row :] = PAD
        target[row, LONGEST - 1 - row] = EOS
        target[row, LONGEST - row :] = PAD
    return {"source": source.to(device), "target": target.to(device)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    target = batch["target"]
    with torch.autocast(target.device.type, torch.bfloat16):
        logits = model(batch["source"], target[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), target[:, 1:].flatten(), ignore_index=PAD)


def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _: object = None) -> Tensor:
    value = loss(model, batch)
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return value


def verdicts(report: normlab.Report) -> dict[str, str]:
    """What became of each property."""
    kinds = {"fails": [f.property for f in report.failures], "notes": [n.property for n in report.notes]}
    kinds |= {"holds": report.holds, "untestable": report.untestable}
    return {name: kind for kind, names in kinds.items() for name in names}


def main() -> None:
    """Check, then watch five steps."""
    library, out = sys.argv[1], Path(sys.argv[2])
    device = load_device(library) if library else "cpu"
    torch.manual_seed(0)
    model, batch = Translator().to(device), batch_on(device)  # drawn on the CPU, as scripts do
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    setup = normlab.Setup(model, batch, loss=loss, optimizer=optimizer, step=step, make=Translator)
    report = normlab.check(setup, budget_s=600)
    with normlab.watch(model, optimizer, out=out / "watch", every_steps=2) as watch:
        for _ in range(5):
            watch.loss(step(model, batch, optimizer))
    flight = json.loads(watch.flight.read_text(encoding="utf-8"))
    answer = {"verdicts": verdicts(report), "untestable": report.untestable, "steps": watch.steps}
    answer |= {"notes": flight["notes"], "losses": flight["losses"]}
    (out / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()

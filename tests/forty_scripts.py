"""Forty small scripts, each with what its recording must show, or with the call that cannot be repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from normlab.setups.named import NamedSetup
from normlab.setups.script import setup_from_script

SCRIPTS = Path(__file__).with_name("setups") / "scripts"


@dataclass(frozen=True)
class Script:
    """A script that can be repeated, and what its recording must show."""

    name: str
    batch: Mapping[str, tuple[int, ...]]
    """Tensors that must be in the batch, with their shapes; joined where micro-batches have one shape."""
    micro_batches: int = 1
    optimizers: Sequence[str] = ("AdamW",)
    schedulers: Sequence[str] = ()
    arguments: Sequence[str] = ()
    cannot: Sequence[str] = ()
    """What the setup must say that it does not allow."""
    whole_step: bool = True
    """Whether the first optimizer's first step takes all gradients of the setup's loss, up to one factor; not
    where several optimizers hold them, a closure computes them, or dropout is drawn anew."""


@dataclass(frozen=True)
class Unrepeatable:
    """A script that cannot be repeated, and the first call that cannot."""

    name: str
    function: str
    """What the call is called."""
    code: str = ""
    """Part of the line where it stands; empty if there is no such line."""
    reason: str = field(default="", kw_only=True)

    @property
    def line(self) -> int:
        """The number of the only line that has this code."""
        lines = (SCRIPTS / f"{self.name}.py").read_text().splitlines()
        (number,) = [n for n, line in enumerate(lines, start=1) if self.code in line]
        return number


IDS = {"ids": (6, 13)}

REPEATED = [
    Script("plain", IDS, schedulers=["CosineAnnealingLR"]),
    Script("accumulating", {"ids": (12, 13)}, micro_batches=4),
    Script("scaled", IDS),
    Script("translating", {"source": (6, 11), "target": (6, 9)}),
    Script("own_function", IDS),
    Script("loader", {"input_ids": (6, 12), "labels": (6, 12)}),
    Script("alternating", {"real": (16, 2)}, optimizers=["Adam"]),
    Script(
        "matrices",
        IDS,
        optimizers=["NormedMomentum", "AdamW"],
        schedulers=["LinearLR", "LinearLR"],
        whole_step=False,
    ),
    Script("closure", {"ids": (8, 13)}, optimizers=["LBFGS"], whole_step=False),
    Script("training_class", {"batch": (6, 13)}, schedulers=["OneCycleLR"]),
    Script(
        "preferring",
        {"ids": (4, 13), "rejected": (4, 13)},
        schedulers=["LambdaLR"],
        arguments=["--beta", "0.2"],
    ),
    Script("distilling", IDS, schedulers=["CosineAnnealingLR"]),
    Script("momentum_teacher", {"first": (8, 12), "second": (8, 12)}),
    Script("configured", IDS, schedulers=["LambdaLR"], arguments=["model.dim=24", "optim.lr=5e-4"]),
    # the name is only in the frame of a suspended generator
    Script("generating", {"tensor": (6, 13)}, schedulers=["LambdaLR"]),
    Script("distributed", IDS),
    Script("smoothed", {"ids": (6, 12)}, whole_step=False),
    Script("compiled", IDS),
    Script("counted_tokens", {"ids": (3, 11)}, micro_batches=3, whole_step=False),
    Script("sampled", {"X": (8, 12), "Y": (8, 12)}, micro_batches=2),
    Script("packing", {"ids": (4, 20)}),
    Script("masking", {"inputs": (8, 12), "labels": (8, 12)}),
    Script("vision", {"images": (8, 3, 12, 12), "labels": (8,)}, schedulers=["OneCycleLR"]),
    Script("experts", IDS),
    Script("penalty", {"real": (16, 6)}),
    Script("tied", IDS),
    Script("halves", IDS, optimizers=(), cannot=["step"]),
    Script("functional", IDS),
    Script("handmade", {"half": (8, 13)}, micro_batches=2),
    Script("hooked", IDS, optimizers=["AdamW"] * 29, cannot=["step"], whole_step=False),
]

OF_EACH_KIND = (
    "plain", "accumulating", "scaled", "compiled", "distributed", "closure", "distilling", "training_class",
)  # fmt: skip
"""Those that `make test-slow` runs in every test; the others are for `make test-wide`."""

UNREPEATABLE = [
    Unrepeatable("counting", "Counting", "model(ids[:, :-1])", reason="a count of calls"),
    Unrepeatable("weighing", "numpy", "losses.detach().numpy()", reason="a value of the model through numpy"),
    Unrepeatable("quantizing", "FakeQuantize", "FakeQuantize.apply(", reason="hidden state of a Function"),
    Unrepeatable("noisy", "Noisy", "model(ids[:, :-1])", reason="numbers of the system in forward"),
    Unrepeatable("timed", "Cooling", "logits = model(", reason="the clock"),
    Unrepeatable("reading", "Read", "model(ids[:, :-1])", reason="the position in a file"),
    Unrepeatable("threaded", "Fed", "model(ids[:, :-1])", reason="numbers of a thread"),
    Unrepeatable("evolving", "step", "optimizer.step()", reason="gradients from no backward pass"),
    Unrepeatable("caching", "Caching", "head(encoder(ids))", reason="results that are kept"),
    Unrepeatable("no_optimizer", "optimizer", reason="one compiled function is the whole step"),
]

assert set(OF_EACH_KIND) <= {script.name for script in [*REPEATED, *UNREPEATABLE]}


@contextmanager
def recorded_script(script: Script | Unrepeatable) -> Iterator[NamedSetup]:
    """The setup that a script shows."""
    arguments = script.arguments if isinstance(script, Script) else ()
    with setup_from_script(str(SCRIPTS / f"{script.name}.py"), arguments) as named:
        yield named

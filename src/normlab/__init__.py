"""Check a Transformer before you spend GPU hours on it; train and compare recipes honestly.

Names are imported when they are first used: ``import normlab`` needs neither torch nor half a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normlab import nn
    from normlab.checks.check import check
    from normlab.comparison.compare import compare
    from normlab.comparison.plan import plan
    from normlab.comparison.result import CompareRequest
    from normlab.config.config import Config
    from normlab.diagnosis import Finding, diagnose, read_structure
    from normlab.errors import UserError
    from normlab.runs import RunFolder, Runs
    from normlab.scaling.transfer import transfer
    from normlab.tasks.scores import score
    from normlab.trace.record import record
    from normlab.trace.setup import Setup
    from normlab.trace.trace import Trace
    from normlab.training.fold import fold
    from normlab.training.recipes.build import build
    from normlab.training.recipes.grammar import resolve
    from normlab.training.recipes.plugins import load_plugins
    from normlab.training.sized import sized
    from normlab.training.train import train
    from normlab.training.translate import translate
    from normlab.trials.trial import trial
    from normlab.watching.watch import watch

__version__ = "0.1.0"

_HOME = {
    "nn": "normlab.nn",
    "check": "normlab.checks.check",
    "diagnose": "normlab.diagnosis",
    "trial": "normlab.trials.trial",
    "transfer": "normlab.scaling.transfer",
    "watch": "normlab.watching.watch",
    "Setup": "normlab.trace.setup",
    "Trace": "normlab.trace.trace",
    "record": "normlab.trace.record",
    "read_structure": "normlab.diagnosis",
    "Finding": "normlab.diagnosis",
    "build": "normlab.training.recipes.build",
    "resolve": "normlab.training.recipes.grammar",
    "Config": "normlab.config.config",
    "train": "normlab.training.train",
    "compare": "normlab.comparison.compare",
    "CompareRequest": "normlab.comparison.result",
    "plan": "normlab.comparison.plan",
    "Runs": "normlab.runs",
    "RunFolder": "normlab.runs",
    "translate": "normlab.training.translate",
    "score": "normlab.tasks.scores",
    "fold": "normlab.training.fold",
    "sized": "normlab.training.sized",
    "load_plugins": "normlab.training.recipes.plugins",
    "UserError": "normlab.errors",
}
"""Each public name, with the module that defines it."""

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> object:
    """Import a public name from its home (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"normlab has no {name!r}; it has {', '.join(sorted(_HOME))}")
    home = import_module(_HOME[name])
    return home if _HOME[name] == f"normlab.{name}" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""For tests: assertions about a training step, and its setup from the source that a command line names."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch import nn

from normlab.checks.check import check
from normlab.checks.report import Report
from normlab.setups.setup import Setup

SEED: Final = 1
"""Seed of weights and data that nothing else sets, as in ``normlab check``."""


def assert_step(model: nn.Module | Setup, batch: Any = None, **arguments: Any) -> Report:
    """Return the report on a training step; raise AssertionError with it if a property fails that is not
    allowed to. Takes the arguments of ``normlab.check``.
    """
    report = check(model, batch, **arguments)
    if not report.ok:
        raise AssertionError(f"\n{report}")
    return report


@contextmanager
def setup_from_source(source: str, arguments: Sequence[str] = ()) -> Iterator[Setup]:
    """Yield the setup of a script (train.py), of a module that is run as one (package.train), of a function
    (train.py:setup, package.module:setup), or of a Hugging Face configuration (hf:FOLDER, hf:ORG/NAME).

    A script is given what stands after `` -- `` in the source, and then the arguments. Raises UserError for a
    source that shows no setup.
    """
    name, _, own = source.partition(" -- ")
    if name.startswith("hf:"):
        yield _of_configuration(name.removeprefix("hf:"))
    elif ":" in name:
        from normlab.setups.function import setup_from_file

        with setup_from_file(name, seed=SEED) as named:
            yield named.setup
    else:
        from normlab.setups.script import setup_from_script

        words, is_module = [*shlex.split(own), *arguments], not name.endswith(".py")
        with setup_from_script(name, words, module=is_module, seed=SEED) as named:
            yield named.setup


def _of_configuration(source: str) -> Setup:
    """The setup of a configuration, with what a normlab.toml beside it declares."""
    from normlab.checks.declared import declared
    from normlab.setups.huggingface import setup_from_configuration

    setup = setup_from_configuration(source, seed=SEED).setup
    beside = Path(source, "normlab.toml")
    return declared(str(beside), setup) if beside.is_file() else setup

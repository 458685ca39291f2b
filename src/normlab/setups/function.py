"""Setups from a function of the user's, in a file or a module that normlab runs, or registered for a word."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module, util
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from normlab.base.libraries import is_library
from normlab.errors import UserError
from normlab.setups.given import setup_in
from normlab.setups.named import NamedSetup
from normlab.setups.setup import Setup
from normlab.trace.restore import same_random_state

ARGUMENTS: Final = ("seed", "width", "depth")
"""What a ``setup`` function may take."""
SOURCES: Final[dict[str, Callable[..., Any]]] = {}
"""Functions that make a setup of what is typed after a word and a colon, by that word."""
SIZE_EXAMPLES: Final = {"width": (256, "n_embd"), "depth": (4, "n_layer")}
"""For each size that a function may take, the value and the argument that an example of one shows for it."""


def setup_source(word: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a way to get a setup: from ``WORD:NAME``, wherever a file and its
    function may be named.

    The function is called with what stands after the colon, and like every function of setups with those of
    the arguments ``seed``, ``width`` and ``depth`` that it declares; it returns a ``Setup``. Raises UserError
    if the word is taken.

    >>> @setup_source("gpt2")  # normlab check gpt2:small --import my_module
    ... def from_size(name, seed=0): ...
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if SOURCES.setdefault(word, function) is not function:
            raise UserError(f"the word {word!r} is taken; let your setups begin with another")
        return function

    return register


@contextmanager
def setup_from_file(reference: str, *, seed: int) -> Iterator[NamedSetup]:
    """Yield the setup that the function after the colon returns, see ``function_from_file``.

    The function may declare the arguments ``seed``, ``width`` and ``depth``; with ``seed`` the setup can draw
    its model anew. Raises UserError for a file that raises, and for a function that returns no setup.
    """
    with function_from_file(reference, seed=seed) as function:
        with redirect_stdout(sys.stderr), same_random_state(seed):
            setup = setup_from_function(function, reference, seed)
        yield NamedSetup(f"{type(setup.model).__name__} of {reference}", setup)


@contextmanager
def function_from_file(reference: str, *, seed: int) -> Iterator[Any]:
    """Run a file, or import a module, and yield what the name after the colon (default ``setup``) refers to;
    or yield the function that is registered for the word before the colon, of what stands after it.

    The file runs once, not as ``__main__``, with its own name as ``sys.argv`` and its folder, or the current
    one for a module, first on ``sys.path``; both are restored when the block ends. What it prints goes to
    standard error. Raises UserError for a file that raises.
    """
    where, colon, name = reference.partition(":")
    if where in SOURCES:
        yield partial(SOURCES[where], name)
        return
    path, arguments = list(sys.path), list(sys.argv)
    try:
        with redirect_stdout(sys.stderr), same_random_state(seed):
            module = _run_file(where) if where.endswith(".py") else _import(where)
            value = _attribute(module, where, name if colon else "setup")
        yield value
    finally:
        sys.path[:], sys.argv[:] = path, arguments


def _import(name: str) -> Any:
    """Import a module, of the current folder or installed."""
    sys.path.insert(0, str(Path.cwd()))
    return _guard(lambda: import_module(name), f"the module {name!r}")


def _run_file(where: str) -> Any:
    """Run a file as a module, and return that. It is not imported, for it may lie anywhere."""
    file = Path(where)
    if not file.is_file():
        raise UserError(f"there is no file {where}; give one that defines setup(), as in train.py:setup")
    # under its own name, unless another module has that, or Python could not import it
    is_free = file.stem.isidentifier() and file.stem not in sys.modules
    name = file.stem if is_free else f"normlab_{file.stem}"
    spec = util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise UserError(f"{where} cannot be run as Python")
    module = sys.modules[name] = util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    sys.argv[:] = [where]
    run = spec.loader.exec_module
    try:
        _guard(lambda: run(module), where)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _attribute(module: Any, where: str, name: str) -> Any:
    """Return what a name refers to. Raises UserError, with the functions that there are, if there is none."""
    if hasattr(module, name):
        return getattr(module, name)
    public = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
    others = f", or name another function: {', '.join(public[:8])}" if public else ""
    raise UserError(
        f"{where} has no {name!r}; define {name}(), which returns normlab.Setup(model, batches, …){others}"
    )


def setup_from_function(function: Any, reference: str, seed: int, **size: int) -> Setup:
    """Return the setup that a user's function returns; if it is no function, it may be the setup itself.

    If the function takes a seed, the setup can make its model anew.

    Args:
        function: The function, or what ``setup_in`` takes.
        reference: What to call it in errors, as in ``train.py:setup``.
        seed: For a function that takes one: the seed with which it makes its model.
        size: The ``width`` or ``depth`` that the function is to build.

    Raises UserError for anything else, and for a function that takes no such size.
    """
    if not callable(function) or isinstance(function, nn.Module):
        _require_sizes(size, {}, reference)
        return setup_in(cast("Any", function), reference)
    parameters: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):  # from functions written in C
        parameters = inspect.signature(function).parameters
    _require_sizes(size, parameters, reference)
    _require_no_others(parameters, {"seed", *size}, reference)
    takes_seed = "seed" in parameters
    seeds = {"seed": seed} if takes_seed else {}
    returned = _guard(lambda: function(**size, **seeds), reference)
    setup = setup_in(returned, f"{reference}()" if ":" in reference else f"{reference}:setup()")
    if not takes_seed or setup.make is not None:
        return setup
    return replace(setup, make=lambda: Setup.of(function(**size, seed=draw_seed())).model)


def _require_no_others(
    parameters: Mapping[str, inspect.Parameter], arguments: Collection[str], reference: str
) -> None:
    """Raise UserError if a function needs other arguments than these."""
    of_any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in of_any_number]
    missing = [name for name in needed if name not in arguments]
    if missing:
        advice = (
            "give them defaults"
            if set(missing) <= set(ARGUMENTS)
            else f"it may declare {', '.join(ARGUMENTS)}"
        )
        raise UserError(f"{reference} needs the arguments {', '.join(missing)}; {advice}")


def _require_sizes(sizes: Iterable[str], parameters: Iterable[str], reference: str) -> None:
    """Raise UserError, with what to write, if a function does not take a size by its name."""
    for name in set(sizes) - set(parameters):
        size, argument = SIZE_EXAMPLES[name]
        raise UserError(
            f"{reference} takes no {name}; it must build the model in any {name}, as in\n\n"
            f"  def setup({name}={size}, seed=0):\n"
            "      torch.manual_seed(seed)\n"
            f"      model = GPT({argument}={name})\n"
            "      optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
            "      return normlab.Setup(model, batches, optimizer=optimizer)"
        )


def _guard(run: Callable[[], Any], what: str) -> Any:
    """Run the user's own code. Raises UserError with the exception and the user's line that raised it."""
    try:
        return run()
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]
        at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        hint = ""
        if isinstance(error, SystemExit):
            hint = '; put the code that trains under if __name__ == "__main__":'
        elif isinstance(error, ImportError) and "relative import" in str(error):
            hint = "; name it as a module of its package, as in my_package.train:setup"
        raise UserError(f"{what} raised {type(error).__name__}: {error}{at}{hint}") from error


def draw_seed() -> int:
    """Return a seed that depends only on torch's random state, whatever the default device."""
    return int(torch.randint(2**31, (), device="cpu"))

"""Restore a model, everything attached to it, and all random states, bit for bit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from normlab.errors import UserError
from normlab.private_torch import KIND_OF_GLOBAL_HOOKS, TABLES_OF_GLOBAL_HOOKS
from normlab.setups.setup import Setup
from normlab.trace.functions import ReadOnly
from normlab.trace.kept import MOST_BYTES, Kept, put_back, set_state, state_of
from normlab.trace.patching import in_mode
from normlab.trace.reach import MOST_VALUES, generators_in
from normlab.trace.tensors import eager, tensors_in, unwrap

_GENERATORS: ContextVar[tuple[Any, ...] | None] = ContextVar("_GENERATORS", default=None)
"""Generators of random numbers that a setup leads to; None where nobody has looked for them."""


def generators_of_copies(*copies: Any) -> list[Any]:
    """Return the generators that copies of what a setup leads to hold: none if the setup leads to none."""
    return [] if _GENERATORS.get() == () else generators_in(*copies)


@contextmanager
def same_random_state(seed: int | None = None, generators: Sequence[Any] = ()) -> Iterator[None]:
    """Seed the generators of torch on every device, Python and numpy, and these; restore them after this
    block. Inside ``restored``, so are those that a setup's functions draw from.
    """
    accelerators, others = _accelerators(), [*(_GENERATORS.get() or ()), *generators]
    with ExitStack() as stack:
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        for device, *at in accelerators:
            stack.callback(device.set_rng_state, device.get_rng_state(*at), *at)
        stack.callback(random.setstate, random.getstate())
        stack.callback(numpy.random.set_state, numpy.random.get_state())  # noqa: NPY002
        for generator in others:
            stack.callback(set_state, generator, state_of(generator))
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed devices that start later
            for device, *at in accelerators:
                with device.device(*at) if at else nullcontext():
                    device.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed)  # noqa: NPY002
            seed_each(others, seed)
        yield


def random_states() -> list[Any]:
    """Return the states of the generators of torch on every device, Python and numpy, which can be compared:
    they stay the same as long as nothing is drawn.
    """
    states = [torch.get_rng_state(), *(device.get_rng_state(*at) for device, *at in _accelerators())]
    _, numbers, *position = numpy.random.get_state()  # noqa: NPY002
    return [
        *(state.tolist() for state in states),
        random.getstate(),
        numpy.asarray(numbers).tolist(),
        position,
    ]


def seed_each(generators: Sequence[Any], seed: int) -> None:
    """Seed generators of torch, Python and numpy, each with a number of its own."""
    draw = random.Random(seed)
    for generator in generators:
        number = draw.getrandbits(63)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(number)
        elif isinstance(generator, random.Random):
            generator.seed(number)
        elif isinstance(generator, numpy.random.RandomState):
            generator.seed(number % 2**32)  # it takes no more bits
        else:
            generator.bit_generator.state = type(generator.bit_generator)(number).state


def _accelerators() -> list[tuple[Any, ...]]:
    """Return the module of torch and the number of every initialized device; MPS has no number."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    if kind.type == "mps":
        return [(module,)]
    begun = getattr(module, "is_initialized", lambda: True)()
    return [(module, i) for i in range(module.device_count())] if begun else []


@contextmanager
def same_globals() -> Iterator[None]:
    """Restore torch's default dtype, gradient mode and hooks on all modules and optimizers after this block,
    in which warnings are silent.

    A surrounding inference mode is off in the block: what is made in it can have no gradient, ever.
    """
    with ExitStack() as stack, warnings.catch_warnings():
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        for hooks in TABLES_OF_GLOBAL_HOOKS:
            stack.callback(put_back, hooks, dict(hooks))
        variables, kind = KIND_OF_GLOBAL_HOOKS
        stack.callback(variables.__setitem__, kind, variables[kind])
        warnings.simplefilter("ignore")
        yield


@contextmanager
def same(*objects: Any, parameters: bool) -> Iterator[Kept]:
    """After this block, put back what these objects hold; with ``parameters``, the bits of parameters, too.
    Other tensors that are larger than ``MOST_BYTES`` and twice the parameters together are not copied.
    """
    modules = [unwrap(x) for x in objects if parameters and isinstance(x, nn.Module)]
    size = sum(p.nbytes for module in modules for p in module.parameters() if not is_lazy(p))
    with _putting_back(Kept(parameters=parameters, most_bytes=MOST_BYTES + 2 * size)) as kept:
        kept.walk(*(unwrap(x) if isinstance(x, nn.Module) else x for x in objects))
        yield kept


@contextmanager
def _putting_back(kept: Kept) -> Iterator[Kept]:
    """Put everything back that is kept inside this block, after it."""
    try:
        yield kept
    finally:
        kept.restore()


@contextmanager
def undisturbed(
    model: nn.Module, *others: Any, training: bool = False, seed: int | None = 0
) -> Iterator[None]:
    """Run passes of a model inside this block, in one mode and as ``eager`` runs it, from one random state.

    Modes, attributes, buffers, hooks, random states and global switches are restored afterwards, as is what
    ``others``, such as batches, hold. Parameters are not: ``restored`` copies them.
    """
    with (
        same_globals(),
        same(model, *others, parameters=False) as kept,
        in_mode(model, training=training),
        same_random_state(seed, kept.generators),
        eager(),
    ):
        yield


SEVERAL: Final = 8
"""How many batches of a list are copied; a pass looks after its own."""
_UNTOUCHED: ContextVar[tuple[nn.Module, ...]] = ContextVar("_UNTOUCHED", default=())
"""The models that ``restored`` blocks around this point put back already."""


@contextmanager
def restored(setup: Setup) -> Iterator[Mapping[str, str]]:
    """Restore a setup and all that its functions reach after this block, bit for bit, whatever is raised
    inside it: parameters, buffers, gradients, attributes, modes, hooks, the optimizer's and the scheduler's
    state, the batch, other models and objects of any class, variables, and all random states. Gradients are
    enabled inside it.

    What cannot be put back, such as an iterator or a file, raises UserError when it is used inside the block.
    Yields, as a fact for a report, what is too large to be copied or searched, and nothing otherwise: tensors
    and arrays of it can be read, but not written to.

    Inside such a block on the same model, it does nothing. Raises UserError for parameters without numbers,
    and for tensors that were made in inference mode.
    """
    model, around = unwrap(setup.model), _UNTOUCHED.get()
    if any(model is other for other in around):
        yield {}
        return
    refuse_hollow(model)
    batches = setup.batches[:SEVERAL] if isinstance(setup.batches, list) else setup.batches
    refuse_inference(model, batches)
    functions = setup.loss, setup.step, setup.make
    size = sum(p.nbytes for p in model.parameters())
    kept = Kept(parameters=True, functions=True, most=MOST_VALUES, most_bytes=MOST_BYTES + 2 * size)
    with ExitStack() as stack:
        stack.enter_context(same_globals())
        stack.enter_context(torch.enable_grad())  # an instrument may be called where a script evaluates
        stack.enter_context(same_random_state())
        stack.enter_context(_putting_back(kept))
        kept.walk_data(batches)
        kept.walk(model, setup.optimizer, setup.scheduler, *functions)
        stack.callback(_GENERATORS.reset, _GENERATORS.set((*(_GENERATORS.get() or ()), *kept.generators)))
        stack.callback(_UNTOUCHED.reset, _UNTOUCHED.set((*around, model)))
        if kept.read_only:
            stack.enter_context(ReadOnly(kept.read_only))
        yield kept.not_copied()


def refuse_hollow(model: nn.Module) -> None:
    """Raise UserError for parameters that hold no numbers yet."""
    name = type(model).__name__
    if lazy := [path for path, p in model.named_parameters() if is_lazy(p)]:
        raise UserError(
            f"{len(lazy)} parameters of {name} have no shape before the first pass, first {lazy[0]}; call "
            "the model on the batch once, then make the optimizer"
        )
    if hollow := [path for path, p in model.named_parameters() if p.is_meta]:
        raise UserError(
            f"{len(hollow)} parameters of {name} are on the device meta and hold no numbers, first "
            f'{hollow[0]}; build the model outside of torch.device("meta"), or give it weights: '
            'model.to_empty(device="cpu"), then model.load_state_dict(…)'
        )


def refuse_inference(model: nn.Module, batches: Any) -> None:
    """Raise UserError for parameters, or a batch, that were made in torch's inference mode."""
    frozen = [path for path, p in model.named_parameters() if not is_lazy(p) and p.is_inference()]
    if frozen:
        raise UserError(
            f"{len(frozen)} parameters of {type(model).__name__} were made in torch.inference_mode(), first "
            f"{frozen[0]}, so no backward pass can go through them: build the model outside of it"
        )
    if in_batch := [place for place, x in tensors_in(batches) if x.is_inference()]:
        where = ".".join(map(str, in_batch[0]))
        raise UserError(
            f"the batch{f' at {where}' if where else ''} was made in torch.inference_mode(), so no backward "
            "pass can use it: draw it outside of it"
        )

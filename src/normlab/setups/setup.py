"""``Setup``: what a training script holds just before its first step, which instruments examine.

What a person hands in is read strictly: an error says what was given, what is allowed, and what to type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from normlab.errors import UserError, nearest
from normlab.trace.tensors import PARALLEL, Call, call_model, copied_batch, tensors_in, unwrapped

Loss = Callable[[nn.Module, Any], Tensor]
"""``loss(model, batch)``: a scalar with its graph."""
StepFunction = Callable[[nn.Module, Any, Any, Any], Any]
"""``step(model, batch, optimizer, scheduler)``: the whole training step on one batch; returns the loss."""
Ability = Literal["loss", "gradient", "batch", "step", "rate"]
"""What may be impossible with a recorded step: computing its loss again (``loss``), computing its gradient
(``gradient``), computing either on another batch (``batch``), repeating what the script does with the
gradient until its optimizer has stepped (``step``), or stepping at the rate of the training (``rate``).
"""


@dataclass(frozen=True)
class Declaration:
    """What no step can show, so its author declares it; each word is checked against the model.

    ``documents`` says to which document each token of a packed batch belongs, as numbers `[B, T]`, or names
    the batch entry that holds these. ``positions`` and ``final_norm`` are False if there are none on purpose.
    ``frozen`` are globs of parameters that are frozen, or cut off from a part of the loss, on purpose, and
    ``detached`` are globs of modules that detach something on purpose. ``steps`` is the planned number of
    optimizer steps, ``peak_lr`` the largest rate on the way, ``max_grad_norm`` the norm that gradients are
    clipped to. ``init`` says how parameters start: "class", a recipe, a TOML file, or a mapping from kinds or
    globs to deviations; ``check`` turns it into a tuple of ``Start``. ``trained`` says whether the weights
    were trained before. ``parametrisation`` names the rule for rates, starts and multipliers, such as "mup"
    or "completep", and ``transfer`` checks that they follow it.
    """

    tied: bool | None = None
    causal: bool | None = None
    pad_id: int | None = None
    eos_id: int | None = None
    documents: Any = None
    positions: bool | None = None
    final_norm: bool | None = None
    frozen: Sequence[str] = ()
    detached: Sequence[str] = ()
    peak_lr: float | None = None
    steps: int | None = None
    max_grad_norm: float | None = None
    init: Any = None
    trained: bool | None = None
    parametrisation: str = ""

    def is_frozen(self, parameter: str) -> bool:
        """Return whether a parameter is frozen, or cut off from a part of the loss, on purpose."""
        return any(fnmatchcase(parameter, glob) for glob in self.frozen)

    def is_detached(self, module: str) -> bool:
        """Return whether a module detaches something on purpose."""
        return any(fnmatchcase(module, glob) for glob in self.detached)

    @classmethod
    def of(cls, value: Declaration | Mapping[str, Any] | None) -> Declaration:
        """Return a declaration; a mapping has the names of its fields, and None declares nothing.

        Raises UserError for an unknown word or a value of the wrong kind.
        """
        if isinstance(value, Declaration):
            return value
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise UserError(f"declare is {shown(value)}, and must be a dict, as in declare={{'tied': True}}")
        words = dict(value)
        for word in words:
            refuse_unknown(word, [f.name for f in fields(cls)], "declare")
        for word in ("frozen", "detached"):
            if isinstance(words.get(word), str):
                words[word] = (words[word],)
        for word, check in MUST_BE.items():
            value_of_word = words.get(word)
            if value_of_word is not None and not check.accepts(value_of_word):
                raise UserError(f"declare[{word!r}] is {shown(value_of_word)}, and must be {check.allowed}")
        return cls(**words)


def shown(value: Any) -> str:
    """Describe a value in a few words: the value itself if that is short, else its kind."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    text = repr(value)
    is_short = 0 < len(text) <= 40 and "\n" not in text and " at 0x" not in text
    return text if is_short else type(value).__name__


def _returned(value: Any) -> str:
    """Describe what a function returned in place of a setup."""
    if value is None:
        return "nothing"
    if isinstance(value, nn.Module):
        return f"a model, {type(value).__name__}, without its batches"
    if isinstance(value, (tuple, list)) and value:
        return f"a {type(value).__name__} of {', '.join(type(part).__name__ for part in value)}"
    return shown(value)


# -------------------------------------------------------------------------- what declared words may be


def _is_truth(x: Any) -> bool:
    return isinstance(x, bool)


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _is_whole_above_0(x: Any) -> bool:
    return _is_whole(x) and x > 0


def _are_documents(x: Any) -> bool:
    """Return whether a value is the name of an entry, or whole numbers in two dimensions."""
    if isinstance(x, str):
        return True
    try:
        numbers = torch.as_tensor(x)
    except Exception:  # of any kind of object
        return False
    return numbers.ndim == 2 and not (numbers.is_floating_point() or numbers.is_complex())


def _are_globs(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and all(isinstance(glob, str) for glob in x)


def _is_start(x: Any) -> bool:
    return isinstance(x, (str, Path, Mapping, tuple))


def positive(x: Any) -> bool:
    """Return whether a value is a finite number above 0."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < float("inf")


class Check(NamedTuple):
    """What the value of a word must be."""

    accepts: Callable[[Any], bool]
    allowed: str
    """The same in words."""


TRUTH: Final = Check(_is_truth, "True or False")
TOKEN: Final = Check(_is_whole, "a whole number, 0 or above")
POSITIVE: Final = Check(positive, "a number above 0")
MUST_BE: Final[dict[str, Check]] = {
    "tied": TRUTH,
    "causal": TRUTH,
    "positions": TRUTH,
    "final_norm": TRUTH,
    "trained": TRUTH,
    "pad_id": TOKEN,
    "eos_id": TOKEN,
    "frozen": Check(_are_globs, 'a glob of parameters or a list of them, as in "embed*"'),
    "detached": Check(_are_globs, 'a glob of modules or a list of them, as in "*.adapter"'),
    "documents": Check(
        _are_documents, "the document of each token `[B, T]` as a number, or the entry that holds that"
    ),
    "init": Check(
        _is_start, 'a recipe, a TOML file, or a dict of kinds or globs, as in {"ffn_out": 0.02}; or "class"'
    ),
    "peak_lr": POSITIVE,
    "max_grad_norm": POSITIVE,
    "steps": Check(_is_whole_above_0, "a whole number above 0"),
    "parametrisation": Check(_is_text, 'the name of one, as in "mup"'),
}
"""By the word of a declaration; the first one that is wrong is refused."""


def refuse_unknown(word: Any, allowed: Sequence[str], where: str) -> None:
    """Raise UserError for a word that does not exist, with the nearest one that does."""
    if word not in allowed:
        raise UserError(f"{where} has no {shown(word)}{nearest(str(word), allowed)}")


def output_loss(model: nn.Module, batch: Any, call: Call = call_model) -> Tensor:
    """Return the loss in the model's own output, where Hugging Face's models put it for batches with labels;
    for a tuple or a dict, the only number in it.

    Raises UserError, saying what to pass, if there is none.
    """
    output = call(model, batch)
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    numbers = [x for _, x in tensors_in(output) if x.numel() == 1 and x.is_floating_point()]
    if loss is None and len(numbers) == 1:
        loss = numbers[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UserError(
            f"{type(model).__name__} puts out no loss: give a batch with labels, or a function "
            "loss=lambda model, batch: … that returns a differentiable scalar"
        )
    return loss.reshape(())


class _Wrapped(nn.Module):
    """Stands in for a data-parallel wrapper in the user's functions, which may ask for what it wraps."""

    no_sync = nullcontext

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _of_wrapped_model(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, *arguments: function(_Wrapped(model), *arguments)


@dataclass(frozen=True)
class Setup:
    """A model, its data, loss and optimizer, as they are just before the first step.

    ``batches`` is one batch (a tensor, a tuple of arguments or a mapping of keywords) or an object that can
    be iterated over repeatedly. ``loss(model, batch)`` returns a scalar; without it, the model's output holds
    one. ``optimizer`` is one, a list of them, or a function of the model; ``scheduler`` has ``step()``, or is
    a function of the optimizer. ``step(model, batch, optimizer, scheduler)`` is a whole training step.
    ``make()`` draws the model afresh. ``lr`` is the intended rate. ``dev`` holds batches that are not trained
    on, in the form of ``batches``; models are compared by them. ``cannot`` says what a recorded step does not
    allow, and why. ``added`` are setups of the losses that a recorded one adds up, if each comes from other
    passes of the model.

    >>> setup = normlab.Setup(model, batch, loss=loss, optimizer=optimizer, declare={"pad_id": 0})
    >>> setup.batch is batch
    True
    """

    model: nn.Module
    batches: Any
    loss: Loss | None = None
    optimizer: Any = None
    scheduler: Any = None
    step: StepFunction | None = None
    lr: float | None = None
    declare: Declaration = field(default_factory=Declaration)
    make: Callable[[], nn.Module] | None = None
    dev: Any = None
    cannot: Mapping[Ability, str] = field(default_factory=dict)
    added: Sequence[Setup] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "declare", Declaration.of(self.declare))
        if not isinstance(self.model, nn.Module):
            raise UserError(f"the model is {shown(self.model)}, and must be a torch.nn.Module")
        for name in ("loss", "step", "make"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise UserError(f"{name} is {shown(value)}, and must be a function")
        if self.lr is not None and not positive(self.lr):
            raise UserError(f"lr is {shown(self.lr)}, and must be a number above 0, as in lr=3e-4")
        for optimizer in self.optimizers:
            is_optimizer = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
            if not is_optimizer and not callable(optimizer):
                raise UserError(
                    f"optimizer is {shown(optimizer)}, and must be a torch.optim.Optimizer, a list of them, "
                    "or a function of the model"
                )
        scheduler = self.scheduler
        if scheduler is not None and not hasattr(scheduler, "step") and not callable(scheduler):
            raise UserError(
                f"scheduler is {shown(scheduler)}, and must have step(), or be a function of the optimizer"
            )

    @classmethod
    def of(cls, value: Setup | Mapping[str, Any], where: str = "setup()") -> Setup:
        """Return a setup; a mapping has the names of the fields. Raises UserError for other names, and for
        anything else that the function ``where`` returned.
        """
        if isinstance(value, Setup):
            return value
        if not isinstance(value, Mapping):
            raise UserError(
                f"{where} returned {_returned(value)}; it must end with "
                "return normlab.Setup(model, batches, loss=…, optimizer=…)"
            )
        words = dict(value)
        if "batch" in words and "batches" not in words:
            words["batches"] = words.pop("batch")
        for word in words:
            refuse_unknown(word, [f.name for f in fields(cls)], where)
        missing = [name for name in ("model", "batches") if name not in words]
        if missing:
            raise UserError(f"{where} returned no {missing[0]!r}; it must hold a model and batches")
        return cls(**words)

    def require(self, *abilities: Ability) -> None:
        """Raise UserError with the reason if the step does not allow one of these."""
        for ability in abilities:
            if ability in self.cannot:
                raise UserError(self.cannot[ability])

    def by_wrapped(self) -> Setup:
        """Return the setup with functions that get a wrapped model if the user's own is data-parallel: they
        may ask it for ``module`` or ``no_sync()``.
        """
        if not any(isinstance(m, PARALLEL) for m in unwrapped(self.model)):
            return self
        wrapping: dict[str, Any] = {}
        for name in ("loss", "step", "optimizer"):
            function = getattr(self, name)
            if callable(function):
                wrapping[name] = _of_wrapped_model(function)
        return replace(self, **wrapping)

    @property
    def loss_of(self) -> Loss:
        """The function that returns the loss: without ``loss``, one that finds it in the model's output."""
        return output_loss if self.loss is None else self.loss

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers, or the function that makes them, or None, as a list."""
        return list(self.optimizer) if isinstance(self.optimizer, (list, tuple)) else [self.optimizer]

    @property
    def batch(self) -> Any:
        """The first batch. Raises UserError if there is none."""
        return self.batches if self.is_one_batch else next(self._pass())

    @property
    def is_one_batch(self) -> bool:
        """Whether ``batches`` is itself a batch: one tensor, arguments or keywords, or nothing iterable."""
        batches = self.batches
        if isinstance(batches, list):
            are_batches = all(isinstance(entry, (Mapping, tuple, list)) for entry in batches)
            return not batches or not are_batches
        is_batch = isinstance(batches, (Tensor, Mapping, tuple)) or hasattr(batches, "keys")
        return is_batch or not _iterable(batches)

    def stream(self) -> Iterator[Any]:
        """Yield batch after batch, without end: after the last one, ``batches`` is read again. What a loader
        yields is copied; a single batch and those of a list are yielded as they are.

        Raises UserError if there is none, and for an iterator, which can be read only once.
        """
        if self.is_one_batch:
            yield from repeat(self.batches)  # without end: what follows is for several batches
        if iter(self.batches) is self.batches:
            raise UserError(
                f"batches is {shown(self.batches)}, which can be read only once; give a list, a DataLoader, "
                "or an object whose __iter__ begins again"
            )
        while True:
            yield from self._pass()

    def held_out(self, most: int) -> list[Any]:
        """Return the first batches of ``dev``, at most ``most``; none without it."""
        if self.dev is None:
            return []
        of_dev = replace(self, batches=self.dev)
        return [of_dev.batches] if of_dev.is_one_batch else list(islice(of_dev._pass(), most))

    def _pass(self) -> Iterator[Any]:
        """Yield each batch once. Raises UserError if there is none."""
        batches = iter(self.batches)
        # a loader may fill the same tensors again, while batches that are stored stay as they are
        as_drawn = (lambda batch: batch) if isinstance(self.batches, (list, tuple)) else copied_batch
        try:
            yield as_drawn(next(batches))
        except StopIteration:
            raise UserError("batches holds no batch; give one, or a re-iterable of some") from None
        yield from map(as_drawn, batches)


def _iterable(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:
        return False
    return True

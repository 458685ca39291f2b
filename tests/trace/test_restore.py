"""A check, a diagnosis or a reading changes nothing of the user's, whatever the model does and raises."""

from __future__ import annotations

import contextlib
import copy
import importlib
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normlab
from cases import each, mostly_slow
from nasty.base import CASES, Batch, Case
from normlab.diagnosis import diagnose, read_structure
from normlab.errors import UserError
from normlab.trace.kept import put_back
from normlab.trace.patching import in_mode
from normlab.trace.restore import random_states, same_random_state

# ----------------------------------------------------------------------------------------------- what is same


def shown(value: Any, known: dict[int, str]) -> Any:
    """What can be seen of a value, with the identity of its tensors, modules and containers."""
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = f"<{len(known)}>"
    if isinstance(value, Tensor):
        hooks = [shown(h, known) for h in (value._backward_hooks, value._post_accumulate_grad_hooks) if h]
        about = id(value), type(value).__name__, value.dtype, value.requires_grad, value.is_leaf
        gradient = shown(value.grad, known) if value.is_leaf else None
        return (*about, bits(value), gradient, hooks, value.is_nested or shown(vars(value), known))
    if isinstance(value, (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, Batch)):
        return id(value), type(value).__name__, shown(vars(value), known)
    if isinstance(value, dict):
        return id(value), [(id(k) if isinstance(k, Tensor) else k, shown(v, known)) for k, v in value.items()]
    if isinstance(value, (list, tuple, deque, set)):
        return None if isinstance(value, tuple) else id(value), [shown(v, known) for v in value]
    return STATES[type(value)](value) if type(value) in STATES else repr(value)[:80]


STATES: dict[type, Callable[[Any], Any]] = {
    torch.Generator: lambda g: bits(g.get_state()),
    random.Random: lambda g: g.getstate(),
    np.random.Generator: lambda g: repr(g.bit_generator.state),
    np.random.RandomState: lambda g: repr(g.get_state()),
    np.ndarray: lambda x: x.tobytes(),
}


def bits(x: Tensor) -> Any:
    if x.is_meta or nn.parameter.is_lazy(x):
        return "no numbers"
    if x.is_nested:
        return [bits(row) for row in x.unbind()]
    if x.is_sparse:
        return bits(x._indices()), bits(x._values())
    return str(x.shape), x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def everything(case: Case) -> Any:
    held = [case.model, case.batch, case.optimizer, case.scheduler, *case.others]
    held = [one.module if isinstance(one, nn.parallel.DistributedDataParallel) else one for one in held]
    known: dict[int, str] = {}
    chance = torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    switches = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled()
    return [shown(one, known) for one in held], chance, switches


def difference(before: Any, after: Any, path: str = "") -> str:
    """The first place where two of these differ."""
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return next((d for i, (a, b) in pairs if (d := difference(a, b, f"{path}/{i}"))), "")
    return "" if before == after else f"{path}: {str(before)[:300]} -> {str(after)[:300]}"


# --------------------------------------------------------------------------------------------------- the test


def checked(case: Case) -> None:
    normlab.check(case.model, case.batch, loss=case.loss, optimizer=case.optimizer, scheduler=case.scheduler)


STUDIES = ["scales", "sublayer_gradients", "parameter_gradients", "updates", "output_change", "critical_lr"]


def diagnosed(case: Case) -> None:
    call = {"call": case.call} if case.call else {}
    diagnose(case.model, case.batch, loss=case.loss, optimizer=case.optimizer, studies=STUDIES, **call)


def read(case: Case) -> None:
    read_structure(case.model, case.batch, call=case.loss)


DOING = {"check": checked, "diagnose": diagnosed, "read_structure": read}


for home in ("models", "steps"):
    importlib.import_module(f"nasty.{home}")
UNTRAINED = {name for name in CASES if "raise" in name or "interrupt" in name} | {
    "switches_that_it_leaves", "meta_parameters", "lazy_modules",
    "modules_that_hold_themselves", "nested_tensors", "quantised",
}  # fmt: skip


def made(name: str) -> Case:
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    return CASES[name]()


QUICK = (
    "tied_weights", "batch_norm", "hooks_of_every_kind", "attributes_that_change", "a_loss_with_a_teacher",
    "modes_that_it_changes", "a_late_interrupt", "an_interrupt", "a_second_call_that_raises",
    "a_call_that_raises", "meta_parameters", "lazy_modules",
)  # fmt: skip
"""Cases that `make test` runs: all in which a call is broken off, and some of what a step may change."""


MEETING_THE_ERROR = {
    "a_call_that_raises": ("check", "diagnose", "read_structure"),
    "a_second_call_that_raises": ("check", "diagnose"),
    "a_late_call_that_raises": ("check",),
}
"""What calls each model so often that it raises; each model says that this is enough."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", mostly_slow(CASES, QUICK))
@each("what", DOING)
def test_nothing_changes(name: str, what: str) -> None:
    case = made(name)
    before, raised = everything(case), None
    try:
        DOING[what](case)
    except (Exception, KeyboardInterrupt) as error:
        raised = error
    try:
        assert difference(before, everything(case)) == ""
    finally:
        torch.set_default_dtype(torch.float32)
    if name in ("meta_parameters", "lazy_modules"):
        assert isinstance(raised, UserError)
        assert "parameters of" in str(raised)
    elif "interrupt" in name:
        assert isinstance(raised, KeyboardInterrupt) or what == "read_structure"
    elif what in MEETING_THE_ERROR.get(name, ()):
        assert isinstance(raised, UserError)
        assert "enough" in str(raised)
    elif what == "read_structure" or name == "generators_as_outputs":
        assert raised is None or isinstance(raised, UserError), repr(raised)
    else:
        assert raised is None, repr(raised)


# ----------------------------------------------------------------------------------------------------- watch


def stepped(name: str, *, watched: Any) -> tuple[list[float], Any]:
    """The losses of three steps of training, and everything after them, but for identities."""
    case = made(name)
    optimizer = case.optimizer or torch.optim.SGD(
        [p for p in case.model.parameters() if p.requires_grad], lr=0.1
    )
    case.optimizer = optimizer
    case.model.train()
    losses = []
    with (
        normlab.watch(case.model, optimizer, out=watched, every_steps=1)
        if watched
        else contextlib.nullcontext()
    ):
        for _ in range(3):
            optimizer.zero_grad()
            loss = case.loss(case.model, copy.deepcopy(case.batch))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    inner = getattr(case.model, "_orig_mod", getattr(case.model, "module", case.model))
    hooks = [len(h) for m in inner.modules() for n, h in vars(m).items() if n.endswith("hooks")]
    tensors = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
    chance = torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    attributes = [n for m in inner.modules() for n in vars(m)]
    return losses, ({n: bits(x) for n, x in tensors.items()}, hooks, chance, attributes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", [name for name in CASES if name not in UNTRAINED])
def test_a_training_that_is_watched_is_the_same(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the case that uses random numbers draws a page: a page knows records, and nothing of a model."""
    if name != "noise_of_every_kind":
        monkeypatch.setattr("normlab.report.watch.write_probes_page", lambda *args: None)
    assert stepped(name, watched=tmp_path) == stepped(name, watched=None)


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@contextlib.contextmanager
def evaluating() -> Any:
    with torch.no_grad(), torch.inference_mode():
        yield


@pytest.mark.slow
@each("mode", [torch.no_grad, torch.inference_mode, evaluating], ids=lambda mode: mode.__name__)
@each("instrument", [normlab.check, normlab.trial], ids=lambda f: f.__name__)
def test_an_instrument_may_be_called_where_gradients_are_off(mode, instrument) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 2)
    options = {"steps": 16, "rates": [0.1]} if instrument is normlab.trial else {"budget_s": 600}
    setup = normlab.Setup(model, x, loss=squared, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def answer() -> Any:
        result = instrument(setup, **options)
        return (result.holds, result.untestable) if instrument is normlab.check else result.rates[0].losses

    want = answer()
    with mode():
        assert answer() == want
        assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled() is (mode is not torch.no_grad)


@each("instrument", [normlab.check, normlab.trial, diagnose], ids=lambda f: f.__name__)
@each("of", ["model", "batch"])
def test_what_was_made_in_inference_mode_is_refused(of, instrument) -> None:
    model, x = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2)), torch.randn(3, 2)
    with torch.inference_mode():
        model, x = (copy.deepcopy(model), x) if of == "model" else (model, x + 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"torch\.inference_mode"):
        instrument(model, x, loss=squared, optimizer=optimizer)


def test_random_states_are_put_back() -> None:
    before = random_states()
    with same_random_state(3):
        torch.rand(1)
        random.random()
        np.random.rand()  # noqa: NPY002
    assert random_states() == before


def test_a_module_that_has_a_mode_of_its_own_gets_it_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with in_mode(model, training=False):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]


def test_containers_that_a_step_fills_are_emptied() -> None:
    model, counts, seen = nn.Linear(2, 2), {"steps": 0}, list[float]()

    def step(m: nn.Module, x: Any, optimizer: Any, _: Any) -> None:
        counts["steps"] += 1
        m(x).square().mean().backward()
        optimizer.step()
        seen.append(1.0)

    made = torch.optim.SGD(model.parameters())
    normlab.check(model, torch.randn(3, 2), loss=lambda m, x: m(x).square().mean(), optimizer=made, step=step)
    assert (counts, seen) == ({"steps": 0}, [])


class Computed(OrderedDict):
    """Shows an entry that it does not store, as a mapping does that imports what it is asked for."""

    def __iter__(self) -> Iterator[Any]:
        return iter(["computed", *super().__iter__()])

    def __len__(self) -> int:
        return super().__len__() + 1


def test_a_mapping_that_computes_entries_gets_back_what_it_stores():
    mapping = Computed(kept=1)
    before = dict(dict.items(mapping))
    put_back(mapping, before)
    mapping["new"] = 2
    put_back(mapping, before)
    assert dict(dict.items(mapping)) == {"kept": 1}

"""Nothing of the user's changes by a check, a diagnosis or a reading, whatever the model does and raises."""

from __future__ import annotations

import contextlib
import copy
import importlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import normlab
from normlab.diagnosis import diagnose, read_structure
from normlab.errors import UserError

IDS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(1))
BACKWARD = {"fail": False}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))


class Tiny(nn.Module):
    """Two residual blocks between an embedding and a head; subclasses misbehave before and in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.1)

    def before(self, ids: Tensor) -> None:
        """What happens as the model is called."""

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, ids: Tensor) -> Any:
        self.before(ids)
        x = self.middle(self.dropout(self.embedding(ids)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cross_entropy(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass
class Case:
    model: nn.Module
    batch: Any = field(default_factory=IDS.clone)
    loss: Callable[..., Tensor] = cross_entropy
    optimizer: Any = None
    scheduler: Any = None
    others: tuple[Any, ...] = ()
    """What the loss uses beside the model."""
    call: Callable[..., Any] | None = None


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def doing(**methods: Any) -> Tiny:
    """A model whose methods do something else."""
    return type("Nasty", (Tiny,), methods)()


# --------------------------------------------------------------------------------------- state and attributes


@case
def shared_blocks() -> Case:
    model = Tiny()
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)
    return Case(model)


@case
def tied_weights() -> Case:
    model = Tiny()
    model.head.weight = model.embedding.weight
    return Case(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@case
def buffers_that_count() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        self.calls += 1
        self.tokens = self.tokens + ids.numel()
        self.mean.lerp_(self.embedding.weight.detach().mean(0), 0.1)

    model = doing(before=before)
    model.register_buffer("calls", torch.zeros((), dtype=torch.long))
    model.register_buffer("tokens", torch.zeros(1))
    model.register_buffer("mean", torch.full((8,), float("nan")), persistent=False)
    return Case(model)


@case
def attributes_that_change() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        self.calls += 1
        self.history.append(ids.sum())
        self.stats["last"] = self.stats.get("last", 0) + 1
        self.seen.add(self.calls)
        self.recent.append(self.calls)
        self.array += 1
        self.plain.add_(1)
        self.nested[0]["deep"].append(1)
        self.last = self.embedding(ids)
        if hasattr(self, "first"):
            del self.first

    model = doing(before=before)
    model.calls, model.history, model.stats, model.seen = 0, [torch.ones(1)], {"a": 1}, {0}
    model.recent, model.array, model.plain = deque([0], maxlen=3), np.zeros(3), torch.zeros(2)
    model.nested, model.first = ({"deep": [0]},), 1
    return Case(model)


@case
def caches_that_are_made_lazily() -> Case:
    def middle(self: Any, x: Tensor) -> Tensor:
        if self.cos is None or self.cos.shape[0] < x.shape[1]:
            angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10.0
            self.cos = torch.cos(angle)
            self.register_buffer("sin", torch.sin(angle), persistent=False)
        return x * self.cos[: x.shape[1]] + self.sin[: x.shape[1]]

    model = doing(middle=middle)
    model.cos = None
    return Case(model)


@case
def parameters_that_it_changes() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        with torch.no_grad():
            self.head.weight.mul_(0.9)
            self.head.bias.data = self.head.bias.data + 1
            self.norm.weight = nn.Parameter(self.norm.weight * 2)

    return Case(doing(before=before))


@case
def modules_that_it_replaces() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        self.extra = nn.Linear(2, 2)
        self.dropout = nn.Identity()
        self.blocks[0].f[1] = nn.ReLU()

    return Case(doing(before=before))


@case
def modes_that_it_changes() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        self.blocks[0].train()
        self.blocks[1].eval()
        self.head.bias.requires_grad_(requires_grad=False)

    return Case(doing(before=before))


@case
def hooks_that_it_makes() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        self.norm.register_forward_hook(lambda *_: None)
        self.head.weight.register_hook(lambda g: g)
        self.head.bias.register_post_accumulate_grad_hook(lambda p: None)

    return Case(doing(before=before))


# --------------------------------------------------------------------------------------------- random numbers


@case
def noise_of_every_kind() -> Case:
    def middle(self: Any, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(8)).to(x) + random.random() + torch.randn(8).to(x)  # noqa: NPY002
        own = self.own.normal() + self.python.random() + self.old.randn()
        return x + 0.01 * (noise + own + torch.randn(8, generator=self.torch).to(x))

    model = doing(middle=middle)
    model.own, model.python, model.old = np.random.default_rng(0), random.Random(0), np.random.RandomState(0)
    model.torch = torch.Generator().manual_seed(0)
    return Case(model)


@case
def seeds_that_it_sets() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        print("called", end="\r")  # noqa: T201
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002

    return Case(doing(before=before))


@case
def switches_that_it_leaves() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        torch.set_default_dtype(torch.float64)

    return Case(doing(before=before))


# ---------------------------------------------------------------------------------------- kinds of parameters


@case
def float8_and_integer_parameters() -> Case:
    def middle(self: Any, x: Tensor) -> Tensor:
        return x + 0.01 * self.small.to(x.dtype) + 0.01 * self.whole.to(x.dtype)

    model = doing(middle=middle)
    model.small = nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn), requires_grad=False)
    model.whole = nn.Parameter(torch.arange(8), requires_grad=False)
    return Case(model)


@case
def complex_parameters() -> Case:
    def middle(self: Any, x: Tensor) -> Tensor:
        return x + 0.1 * (self.filter * x.to(self.filter.dtype)).real.to(x.dtype)

    model = doing(middle=middle)
    model.filter = nn.Parameter(torch.ones(8, dtype=torch.complex64))
    return Case(model)


@case
def parameters_that_are_views() -> Case:
    model, flat = Tiny(), torch.randn(2 * 8 * 16)
    model.flat = nn.Parameter(flat, requires_grad=False)
    for i, block in enumerate(model.blocks):
        block.f[0].weight = nn.Parameter(flat[i * 128 : (i + 1) * 128].view(16, 8))
    model.head.weight = nn.Parameter(torch.randn(8, 11).t())
    return Case(model)


@case
def low_precision() -> Case:
    return Case(Tiny().bfloat16())


@case
def nested_tensors() -> Case:
    def middle(self: Any, x: Tensor) -> Tensor:
        self.last = torch.nested.nested_tensor([x.detach()[0], x.detach()[1, :2]], layout=torch.jagged)
        return x

    model = doing(middle=middle)
    model.kept = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    model.old = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    return Case(model)


@case
def sparse_gradients() -> Case:
    model = Tiny()
    model.embedding = nn.Embedding(11, 8, sparse=True)
    return Case(model)


@case
def meta_parameters() -> Case:
    with torch.device("meta"):
        return Case(Tiny())


@case
def lazy_modules() -> Case:
    model = Tiny()
    model.blocks[0].f[0] = nn.LazyLinear(16)
    return Case(model)


@case
def no_requires_grad_here_and_there() -> Case:
    model = Tiny()
    model.embedding.requires_grad_(requires_grad=False)
    model.blocks[1].norm.requires_grad_(requires_grad=False)
    return Case(model)


# --------------------------------------------------------------------------------------------------- wrappers


@case
def data_parallel() -> Case:
    return Case(nn.parallel.DistributedDataParallel(Tiny()))


@case
def compiled() -> Case:
    return Case(torch.compile(Tiny(), backend="eager"))


@case
def compiled_inside() -> Case:
    model = Tiny()
    model.blocks[0].compile(backend="eager")
    return Case(model)


def checkpointed(*, reentrant: bool) -> Case:
    class Checkpointed(Tiny):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(self.dropout(x))

    return Case(Checkpointed())


CASES |= {
    "checkpoints": partial(checkpointed, reentrant=False),
    "reentrant_checkpoints": partial(checkpointed, reentrant=True),
}


@case
def adapters() -> Case:
    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 16)
            self.requires_grad_(requires_grad=False)
            self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(16, 2))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x @ self.a.T @ self.b.T

    model = Tiny().requires_grad_(requires_grad=False)
    for block in model.blocks:
        block.f[0] = Adapted()
    return Case(model)


@case
def quantised() -> Case:
    model = Tiny()
    linear = torch.ao.nn.quantized.dynamic.Linear(16, 8)
    model.blocks[1].f[2] = linear
    model.blocks[1].requires_grad_(requires_grad=False)
    model.embedding.requires_grad_(requires_grad=False)
    model.blocks[0].requires_grad_(requires_grad=False)
    return Case(model)


@case
def old_weight_norm() -> Case:
    model = Tiny()
    model.head = weight_norm(model.head)
    return Case(model)


@case
def old_spectral_norm() -> Case:
    model = Tiny()
    model.head = spectral_norm(model.head)
    return Case(model)


@case
def parametrized() -> Case:
    model = Tiny()
    parametrizations.weight_norm(model.blocks[0].f[0])
    parametrizations.spectral_norm(model.head)
    parametrizations.orthogonal(model.blocks[1].f[0])
    return Case(model)


@case
def batch_norm() -> Case:
    model = Tiny()
    model.blocks[0].norm = nn.BatchNorm1d(6)
    return Case(model)


# -------------------------------------------------------------------------------------- odd models and losses


@case
def modules_that_hold_themselves() -> Case:
    model = Tiny()
    model.blocks[0].parent = model
    model.blocks[1].friends = [model]
    return Case(model)


@case
def copies_that_raise() -> Case:
    def refuse(self: Any, memo: Any) -> Any:
        raise RuntimeError("no copies")

    return Case(doing(__deepcopy__=refuse))


@case
def generators_as_outputs() -> Case:
    class Yielding(Tiny):
        def forward(self, ids: Tensor) -> Any:
            yield super().forward(ids)

    return Case(Yielding(), loss=lambda model, ids: cross_entropy(lambda x: next(model(x)), ids))


@case
def a_loss_of_its_own_model() -> Case:
    model = Tiny()
    return Case(model, loss=lambda _, ids: cross_entropy(model, ids))


@case
def a_loss_with_a_teacher() -> Case:
    teacher = Tiny()
    teacher.blocks[0].norm = nn.BatchNorm1d(6)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.mse_loss(model(ids), teacher(ids).detach())

    return Case(Tiny(), loss=loss, others=(teacher,))


@case
def inputs_that_it_writes_to() -> Case:
    class Two(Tiny):
        def forward(self, ids: Tensor, factor: Tensor) -> Tensor:
            factor.mul_(1.5)
            ids.clamp_(max=5)
            return super().forward(ids) * factor

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        return F.cross_entropy(model(**batch).flatten(0, 1), labels.flatten())

    batch = {"ids": IDS.clone(), "factor": torch.ones(1), "labels": IDS.clone()}
    return Case(Two(), batch=batch, loss=loss, call=loss)


@dataclass
class Batch:
    ids: Tensor
    seen: int = 0


@case
def batches_of_a_class() -> Case:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        batch.seen += 1
        return cross_entropy(model, batch.ids)

    return Case(Tiny(), batch=Batch(IDS.clone()), loss=loss, call=loss)


# ------------------------------------------------------------------------------- hooks, gradients, optimizers


@case
def hooks_of_every_kind() -> Case:
    model = Tiny()
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda m, args: None)
    block.register_forward_hook(lambda m, args, out: out * 1.0)
    block.norm.register_full_backward_hook(lambda m, gi, go: None)
    block.norm.register_full_backward_pre_hook(lambda m, go: None)
    model.head.weight.register_hook(lambda g: g * 1.0)
    model.head.bias.register_post_accumulate_grad_hook(lambda p: [p.detach().add_(1.0)].clear())
    model.register_state_dict_pre_hook(lambda *_: None)
    return Case(model)


@case
def an_optimizer_in_backward() -> Case:
    model = Tiny()
    for p in model.parameters():
        one = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        p.register_post_accumulate_grad_hook(lambda p, one=one: one.step())
    return Case(model, loss=lambda _, ids: cross_entropy(model, ids))


@case
def gradients_and_an_optimizer_with_state() -> Case:
    model = Tiny().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)],
        [1],
    )
    for _ in range(2):
        cross_entropy(model, IDS).backward()
        optimizer.step()
        scheduler.step()
    return Case(model, optimizer=optimizer, scheduler=scheduler)


@case
def some_in_training_some_not() -> Case:
    model = Tiny().train()
    model.blocks[0].eval()
    model.blocks[1].norm.eval()
    model.eval_only = nn.BatchNorm1d(6).eval()
    return Case(model)


# ----------------------------------------------------------------------------------------------------- raises


def raising(error: type[BaseException], after: int) -> Case:
    calls = Counter[str]()

    def before(self: Any, ids: Tensor) -> None:
        calls["model"] += 1
        self.state += 1
        with torch.no_grad():
            self.head.weight.add_(1.0)
        if calls["model"] > after:
            raise error("enough")

    model = doing(before=before)
    model.register_buffer("state", torch.zeros(1))
    return Case(model)


CASES |= {
    "a_call_that_raises": partial(raising, RuntimeError, 0),
    "a_second_call_that_raises": partial(raising, RuntimeError, 1),
    "a_late_call_that_raises": partial(raising, ValueError, 4),
    "an_interrupt": partial(raising, KeyboardInterrupt, 1),
    "a_late_interrupt": partial(raising, KeyboardInterrupt, 5),
}


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("no way back")


@case
def a_backward_pass_that_raises() -> Case:
    return Case(doing(middle=lambda self, x: Failing.apply(x)))


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
        return [bits(one) for one in x.unbind()]
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


def difference(one: Any, other: Any, path: str = "") -> str:
    """The first place where two of these differ."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next((d for i, (a, b) in pairs if (d := difference(a, b, f"{path}/{i}"))), "")
    return "" if one == other else f"{path}: {str(one)[:300]} -> {str(other)[:300]}"


# --------------------------------------------------------------------------------------------------- the test


def checked(case: Case) -> None:
    normlab.check(case.model, case.batch, loss=case.loss, optimizer=case.optimizer, scheduler=case.scheduler)


STUDIES = [
    "scales",
    "weights",
    "sublayer_gradients",
    "parameter_gradients",
    "updates",
    "output_change",
    "critical_lr",
]


def diagnosed(case: Case) -> None:
    call = {"call": case.call} if case.call else {}
    diagnose(case.model, case.batch, loss=case.loss, optimiser=case.optimizer, studies=STUDIES, **call)


def read(case: Case) -> None:
    read_structure(case.model, case.batch, call=case.loss)


DOING = {"check": checked, "diagnose": diagnosed, "read_structure": read}
QUICK = ("finite", "evaluation_repeats", "causality", "gradients", "derivative", "step", "repeats")
"""Properties that stand for the rest: passes forward and backward, in both modes, and steps."""


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


UNTRAINED = {name for name in CASES if "raise" in name or "interrupt" in name} | {
    "switches_that_it_leaves", "meta_parameters", "lazy_modules",
    "modules_that_hold_themselves", "nested_tensors", "quantised",
}  # fmt: skip


def made(name: str) -> Case:
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    return CASES[name]()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("loopback", "alone")
@pytest.mark.parametrize("what", DOING)
@pytest.mark.parametrize("name", CASES)
def test_nothing_changes(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("normlab.checks.check")
    some = [p for p in module.properties() if p.name in QUICK]
    monkeypatch.setattr(module, "properties", lambda: some)
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
    elif "raises" not in name:
        assert raised is None or (what == "read_structure" and isinstance(raised, UserError)), repr(raised)


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
@pytest.mark.usefixtures("loopback", "alone")
@pytest.mark.parametrize("name", [name for name in CASES if name not in UNTRAINED])
def test_a_training_that_is_watched_is_the_same(name: str, tmp_path: Any) -> None:
    assert stepped(name, watched=tmp_path) == stepped(name, watched=None)

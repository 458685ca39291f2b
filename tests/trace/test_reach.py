"""What a step reaches is put back, or the step is not run and that is said; its generators are seeded."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import normlab
from cases import each
from nasty.base import IDS, Tiny, cross_entropy
from normlab.diagnosis import diagnose
from normlab.errors import UserError
from normlab.private_torch import TABLES_OF_GLOBAL_HOOKS
from normlab.setups.setup import Setup
from normlab.trace import kept, reach, restore
from normlab.trace.reach import deep_copy, generators_in
from normlab.trace.restore import restored

RATES = (1e-3, 3e-3, 1e-2)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(model: nn.Module, ids: Tensor, optimizer: Any) -> Tensor:
    """A usual step."""
    model.train()
    optimizer.zero_grad()
    loss = cross_entropy(model, ids)
    loss.backward()
    optimizer.step()
    return loss


def checked(setup: Setup) -> Any:
    return normlab.check(setup)


def tried(setup: Setup) -> Any:
    return normlab.trial(setup, steps=16, rates=RATES, budget_s=60)


def diagnosed(setup: Setup) -> Any:
    return diagnose(setup, studies=["scales", "updates"])


def failed(report: Any) -> set[str]:
    """What fails beside ``reach``: a tiny model mixes no tokens."""
    return {failure.property for failure in report.failures} - {"reach"}


INSTRUMENTS = {"check": checked, "trial": tried, "diagnose": diagnosed}

# ------------------------------------------------------------------------------------------ what is put back


class Average:
    """A moving average of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, p in model.named_parameters():
            self.weights[name].lerp_(p.to(self.weights[name].dtype), 0.1)


class Loop:
    """A training loop whose method is the step."""

    def __init__(self, model: nn.Module) -> None:
        self.average, self.steps, self.losses, self.tokens = Average(model), 0, list[float](), torch.zeros(())

    def step(self, model: nn.Module, ids: Tensor, optimizer: Any, _: Any) -> Tensor:
        loss = trained(model, ids, optimizer)
        self.steps += 1
        self.losses.append(loss.item())
        self.tokens += ids.numel()
        self.average.update(model)
        return loss

    def state(self) -> Any:
        weights = [x.clone() for x in self.average.weights.values()]
        return self.steps, list(self.losses), self.tokens.clone(), self.average.updates, weights


class Slots:
    __slots__ = ("count", "late", "seen")

    def __init__(self) -> None:
        self.count, self.seen = 0, np.zeros(3)


class Totals:
    steps = 0
    seen: list[int] = []  # noqa: RUF012


SLOTS, COUNT = Slots(), 0


def count_everywhere() -> None:
    """What the step calls: it writes to a global, an object with slots, and a class."""
    global COUNT
    COUNT += 1
    SLOTS.count += 1
    SLOTS.late = 1
    SLOTS.seen += 1
    Totals.steps += 1
    Totals.seen.append(1)
    Totals.late = 1


class Memory:
    def __init__(self) -> None:
        self.keys, self.total = list[Tensor](), torch.zeros(())


class Remembering(Tiny):
    """It keeps what it has seen in an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def before(self, ids: Tensor) -> None:
        self.memory.keys.append(self.embedding(ids).detach())
        self.memory.total += 1


Case = tuple[Setup, Callable[[], Any]]
"""A setup, and a function that returns a copy of what its step may change."""


def bound_method() -> Case:
    model = Tiny()
    loop = Loop(model)
    return Setup(model, IDS.clone(), cross_entropy, adamw, step=loop.step), loop.state


def closure() -> Case:
    model, calls = Tiny(), 0
    average = Average(model)

    def step(model: nn.Module, ids: Tensor, optimizer: Any, _: Any, seen: list[int] = []) -> Tensor:  # noqa: B006
        nonlocal calls
        calls += 1
        seen.append(1)
        step.calls = getattr(step, "calls", 0) + 1
        average.update(model)
        return trained(model, ids, optimizer)

    def state() -> Any:
        weights = [x.clone() for x in average.weights.values()]
        return calls, average.updates, weights, copy.deepcopy(step.__defaults__), dict(vars(step))

    return Setup(model, IDS.clone(), cross_entropy, adamw, step=step), state


def through_a_helper() -> Case:
    def step(model: nn.Module, ids: Tensor, optimizer: Any, _: Any) -> Tensor:
        count_everywhere()
        return trained(model, ids, optimizer)

    def state() -> Any:
        late = hasattr(SLOTS, "late"), hasattr(Totals, "late")
        return COUNT, SLOTS.count, SLOTS.seen.copy(), late, Totals.steps, list(Totals.seen)

    return Setup(Tiny(), IDS.clone(), cross_entropy, adamw, step=step), state


def loss_of_an_object() -> Case:
    class Loss:
        def __init__(self) -> None:
            self.calls, self.last = 0, {"loss": torch.zeros(())}

        def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
            loss = cross_entropy(model, ids)
            self.calls += 1
            self.last["loss"].copy_(loss.detach())
            return loss

    loss = Loss()
    return Setup(Tiny(), IDS.clone(), loss, adamw), lambda: (loss.calls, loss.last["loss"].clone())


def object_in_the_model() -> Case:
    model = Remembering()
    return Setup(model, IDS.clone(), cross_entropy, adamw), lambda: (
        len(model.memory.keys),
        model.memory.total.clone(),
    )


REACHED = (bound_method, closure, through_a_helper, loss_of_an_object, object_in_the_model)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b)) if isinstance(a, (Tensor, np.ndarray)) else a == b


@pytest.mark.slow
@pytest.mark.parametrize("case", REACHED)
@each("instrument", INSTRUMENTS)
def test_what_a_step_reaches_is_put_back(case: Callable[[], Case], instrument: str) -> None:
    setup, state = case()
    before = state()
    result = INSTRUMENTS[instrument](setup)
    assert same(before, state())
    if instrument == "check":
        assert not failed(result)
        assert "step" in result.holds or setup.step is None


@pytest.mark.slow
def test_the_step_of_a_trainer_of_a_library_changes_nothing_of_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **sizes))
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in IDS]
    options = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])

    class Trainer(transformers.Trainer):
        def training_step(self, model: nn.Module, inputs: Any, number: Any = None) -> Tensor:
            self.state.global_step += 1
            self.control.should_log = True
            return super().training_step(model, inputs, number)

    trainer = Trainer(model=model, args=options, train_dataset=rows)
    trainer.create_optimizer_and_scheduler(10)
    trainer.current_gradient_accumulation_steps = 1

    def step(model: nn.Module, batch: Any, optimizer: Any, scheduler: Any) -> Tensor:
        optimizer.zero_grad()
        loss = trainer.training_step(model, batch)
        optimizer.step()
        return loss

    batch = {"input_ids": IDS.clone(), "labels": IDS.clone()}
    report = normlab.check(model, batch, optimizer=trainer.optimizer, step=step)
    assert "step" in report.holds
    assert (trainer.state.global_step, trainer.control.should_log) == (0, False)


def test_hooks_on_all_modules_that_a_model_makes_are_gone() -> None:
    class Hooking(Tiny):
        def before(self, ids: Tensor) -> None:
            if not hasattr(self, "handle"):
                self.handle = register_module_forward_hook(lambda *_: None)
                self.head.weight.register_hook(lambda g: g)

    model, tables = Hooking(), TABLES_OF_GLOBAL_HOOKS
    before = [dict(table) for table in tables]
    normlab.check(model, IDS.clone(), loss=cross_entropy)
    diagnose(model, IDS.clone(), loss=cross_entropy, lr=1e-3, studies=["scales"])
    assert [dict(table) for table in tables] == before
    assert model.head.weight._backward_hooks is None


# ---------------------------------------------------------------------------------------- what cannot be


def numbers() -> Iterator[int]:
    yield from range(1_000)


class Fetching:
    """A thread of its own fetches batches."""

    def __init__(self) -> None:
        self.taken, self.ended = 0, threading.Event()
        self.thread = threading.Thread(target=self.ended.wait, daemon=True)
        self.thread.start()

    def __next__(self) -> int:
        self.taken += 1
        return self.taken


def taking(held: Any) -> Any:
    """A step that takes from something before it trains."""

    def step(model: nn.Module, ids: Tensor, optimizer: Any, _: Any) -> Tensor:
        next(held)
        return trained(model, ids, optimizer)

    return step


def writing(held: Any) -> Any:
    def step(model: nn.Module, ids: Tensor, optimizer: Any, _: Any) -> Tensor:
        held.write("step")
        held.flush()
        return trained(model, ids, optimizer)

    return step


@pytest.mark.slow
@each("kind", ["generator", "cycle", "loader", "thread", "file"])
def test_a_step_that_uses_what_cannot_be_put_back_is_not_run(kind: str, tmp_path: Path) -> None:
    fetching, path = Fetching(), tmp_path / "log"
    generator, cycle = numbers(), itertools.cycle(range(5))
    loader = iter(torch.utils.data.DataLoader(torch.arange(5)))
    with path.open("w", encoding="utf-8") as file:
        steps = {
            "generator": (taking(generator), lambda: next(generator) == 0),
            "cycle": (taking(cycle), lambda: next(cycle) == 0),
            "loader": (taking(loader), lambda: next(loader).item() == 0),
            "thread": (taking(fetching), lambda: fetching.taken == 0),
            "file": (writing(file), lambda: path.read_text(encoding="utf-8") == ""),
        }
        step, is_untouched = steps[kind]
        setup = Setup(Tiny(), IDS.clone(), cross_entropy, adamw, step=step)
        report = normlab.check(setup)
        with pytest.raises(UserError) as refused:
            tried(setup)
        assert is_untouched()
    fetching.ended.set()
    assert not failed(report)
    assert "held" in report.untestable["step"]
    assert "held" in str(refused.value)


@pytest.mark.slow
def test_what_is_not_used_is_in_nobodys_way(tmp_path: Path) -> None:
    class Loop:
        def __init__(self, file: Any) -> None:
            self.file, self.rest, self.count, self.lock = file, numbers(), itertools.count(), threading.Lock()

        def step(self, model: nn.Module, ids: Tensor, optimizer: Any, _: Any) -> Tensor:
            with self.lock:
                assert self.file is not None
                next(self.count)
                return trained(model, ids, optimizer)

    with (tmp_path / "log").open("w", encoding="utf-8") as file:
        loop = Loop(file)
        held = dict(vars(loop))
        report = normlab.check(Setup(Tiny(), IDS.clone(), cross_entropy, adamw, step=loop.step))
        assert "step" in report.holds
        assert all(vars(loop)[name] is value for name, value in held.items())
        assert next(loop.count) == 0


class Data:
    def __init__(self) -> None:
        self.tokens, self.table, self.steps = torch.zeros(1_000), np.zeros(1_000), 0


@pytest.mark.slow
@each("kind", ["tensor", "array"])
def test_what_is_too_large_to_copy_is_read_but_not_written_to(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "MOST_BYTES", -100_000)
    data, model = Data(), Tiny()

    def reads(model: nn.Module, ids: Tensor, optimizer: Any, _: Any) -> Tensor:
        data.steps += 1
        assert data.tokens.sum() + data.table.sum() == 0
        return trained(model, ids, optimizer)

    def writes(model: nn.Module, ids: Tensor, optimizer: Any, _: Any) -> Tensor:
        data.steps += 1
        (data.tokens if kind == "tensor" else data.table)[2:4] += 1
        return trained(model, ids, optimizer)

    report = normlab.check(Setup(model, IDS.clone(), cross_entropy, adamw, step=reads))
    assert "step" in report.holds
    assert all(name in report.facts["not copied"] for name in ("Data.tokens", "Data.table"))
    report = normlab.check(Setup(model, IDS.clone(), cross_entropy, adamw, step=writes))
    assert {"step", "repeats"} <= report.untestable.keys()
    refusal = {"tensor": "is too large for a copy to put back", "array": "output array is read-only"}[kind]
    with pytest.raises(UserError, match=refusal):
        tried(Setup(model, IDS.clone(), cross_entropy, adamw, step=writes))
    assert not data.tokens.any()
    assert not data.table.any()
    assert data.steps == 0
    data.table[0] = 1  # raises if the array can still not be written to


class Storing(Tiny):
    """Holds a store of data as a buffer."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.register_buffer("store", torch.zeros(10_000))

    def forward(self, ids: Tensor) -> Tensor:
        if self.writes:
            self.store[:4] = 1
        return super().forward(ids) + self.store[0]


@each("writes", [False, True])
def test_a_large_buffer_is_not_copied_either(*, writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Storing(writes=writes)
    most = 30_000
    monkeypatch.setattr(kept, "MOST_BYTES", most)
    monkeypatch.setattr(restore, "MOST_BYTES", most - 2 * sum(p.nbytes for p in model.parameters()))
    setup = Setup(model, IDS.clone(), cross_entropy, adamw)
    with restored(setup) as not_copied:
        assert "store" in not_copied["not copied"]
        if writes:
            with pytest.raises(UserError):
                model(IDS)
        else:
            model(IDS)
    assert not model.store.any()


def test_a_bound_on_what_is_searched_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data()
    data.tokens = [[i] for i in range(50)]  # type: ignore[assignment]
    setup = Setup(Tiny(), IDS.clone(), lambda m, x: cross_entropy(m, x) + 0 * data.steps)
    with restored(setup) as not_copied:
        assert not_copied == {}
    monkeypatch.setattr(reach, "LARGE", 40)
    with restored(setup) as not_copied:
        data.tokens.append([50])  # type: ignore[operator]
        assert not_copied == {"not copied": "Data.tokens (50 entries)"}
    assert len(data.tokens) == 50
    monkeypatch.setattr(reach, "LARGE", 10_000)
    monkeypatch.setattr(restore, "MOST_VALUES", 20)
    with restored(setup) as not_copied:
        assert "20 values" in not_copied["not copied"]


class Node:
    def __init__(self, before: Any) -> None:
        self.before, self.count = before, 0


def test_a_deep_graph_and_a_long_list_are_searched_only_so_far() -> None:
    node: Any = None
    for _ in range(50_000):
        node = Node(node)
    rows = [[i] for i in range(50_000)]
    keeping = kept.Kept(parameters=True, functions=True, most=1_000)
    keeping.walk(lambda: (node, rows))
    assert len(keeping.known) < 1_100
    assert not keeping.is_complete
    assert "rows (50,000 entries)" in keeping.not_copied()["not copied"]
    node.count = 1
    keeping.restore()
    assert node.count == 0


# ------------------------------------------------------------------------------------------- random numbers


class Drop(nn.Module):
    """Dropout with a generator of its own, which may be in an object."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.holder = Holder(generator)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        generator = self.holder.generator
        if isinstance(generator, torch.Generator):
            drawn = torch.rand(x.shape, generator=generator)
        elif isinstance(generator, random.Random):
            drawn = torch.tensor([generator.random() for _ in range(x.numel())]).view(x.shape)
        else:
            drawn = torch.from_numpy(generator.random(tuple(x.shape)))
        return x * (drawn >= 0.1).to(x) / 0.9


class Holder:
    def __init__(self, generator: Any) -> None:
        self.generator = generator


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "python": lambda: random.Random(3),
    "numpy": lambda: np.random.default_rng(3),
    "old_numpy": lambda: np.random.RandomState(3),
}


def state_of(generator: Any) -> str:
    return str(kept.state_of(generator))


@pytest.mark.slow
@each("kind", GENERATORS)
def test_dropout_from_a_generator_of_its_own_is_seeded_and_restored(kind: str) -> None:
    model = Tiny()
    model.dropout = Drop(GENERATORS[kind]())
    before = state_of(model.dropout.holder.generator)
    report = normlab.check(model, IDS.clone(), loss=cross_entropy, optimizer=adamw(model))
    assert not failed(report)
    assert "repeats" in report.holds
    assert "training_equals_evaluation" in report.untestable
    assert state_of(model.dropout.holder.generator) == before


@pytest.mark.slow
@each("kind", GENERATORS)
def test_so_are_generators_that_a_loss_or_a_step_holds(kind: str) -> None:
    of_model, other = Drop(GENERATORS[kind]()), Holder(GENERATORS[kind]())
    before = state_of(of_model.holder.generator), state_of(other.generator)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return cross_entropy(lambda x: of_model(model(x)), ids)

    def step(model: nn.Module, ids: Tensor, optimizer: Any, _: Any) -> Tensor:
        optimizer.zero_grad()
        model.train()
        value = loss(lambda x: Drop(other.generator)(model(x)), ids)
        value.backward()
        optimizer.step()
        return value

    report = normlab.check(Setup(Tiny(), IDS.clone(), loss, adamw, step=step))
    assert not failed(report)
    assert "repeats" in report.holds
    trials = [tried(Setup(model, IDS.clone(), loss, adamw, step=step)) for model in [Tiny()] * 2]
    assert trials[0].tried[0].losses == trials[1].tried[0].losses
    assert (state_of(of_model.holder.generator), state_of(other.generator)) == before


@pytest.mark.slow
def test_state_that_outlives_a_step_still_fails() -> None:
    class Growing:
        factor = 1.0

        def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
            self.factor *= 1.5
            return cross_entropy(model, ids) * self.factor

    model, loss = Tiny(), Growing()
    report = normlab.check(model, IDS.clone(), loss=loss, optimizer=adamw(model))
    assert any(failure.property == "repeats" for failure in report.failures)
    assert loss.factor == 1


def test_generators_have_states_of_their_own_under_one_seed() -> None:
    first, second = (torch.Generator() for _ in range(2))
    model = Tiny()
    with restored(Setup(model, IDS, lambda m, x: first.seed() + second.seed())):
        drawn = []
        for seed in (0, 0, 1):
            with restore.same_random_state(seed):
                generators = torch.default_generator, first, second
                drawn.append([torch.rand(1, generator=g).item() for g in generators])
    assert drawn[0] == drawn[1]
    assert len({*drawn[0], *drawn[2]}) == 6


def test_generators_are_found_wherever_functions_lead() -> None:
    held = {name: make() for name, make in GENERATORS.items()}

    def inner(x: Any, generator: Any = held["torch"]) -> Any:
        return generator, x

    class Callable_:
        def __init__(self) -> None:
            self.deep = [{"generator": held["python"]}]

        def __call__(self) -> Any:
            return inner(held["numpy"])

    generators = generators_in(Callable_(), lambda: held["old_numpy"])
    assert {*map(id, generators)} == {*map(id, held.values())}


# ------------------------------------------------------------------------------------------------- copies


@pytest.mark.slow
def test_locks_and_modules_of_python_are_shared_by_a_copy() -> None:
    model = Tiny()
    model.lock, model.functions = threading.Lock(), torch.nn.functional
    twin = deep_copy(model)
    assert (twin.lock, twin.functions) == (model.lock, model.functions)
    assert twin.head.weight is not model.head.weight
    report = normlab.check(model, IDS.clone(), loss=cross_entropy, optimizer=adamw(model))
    assert "overfit" in report.holds
    assert tried(Setup(model, IDS.clone(), cross_entropy, adamw)).tried

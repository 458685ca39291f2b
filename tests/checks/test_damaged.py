"""A damaged setup or declaration is refused in a sentence or checked; none ends in an error of ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normlab
from normlab.errors import UserError

CASES, QUICK = 500, 60


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t[:, None] for t in self.mix(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class LM(nn.Module):
    """A model whose n-th call raises, if it is told to."""

    def __init__(self, dim: int = 8, vocabulary: int = 11) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, dim), nn.Linear(dim, vocabulary)
        self.blocks = nn.ModuleList([Block(dim), Block(dim)])
        self.falls: Falls | None = None

    def forward(self, ids: Tensor) -> Tensor:
        if self.falls is not None:
            self.falls()
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Falls:
    """Raises an error of the user's from its n-th call on; copies share its count."""

    def __init__(self, error: type[Exception], at: int) -> None:
        self.error, self.at, self.calls = error, at, 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls >= self.at:
            raise self.error("an error of the user's own")

    def __deepcopy__(self, memo: Any) -> Falls:
        return self


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def step(model: nn.Module, ids: Tensor, optimizer: torch.optim.Optimizer, scheduler: Any) -> Tensor:
    optimizer.zero_grad()
    value = loss(model, ids)
    value.backward()
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return value


def setup() -> dict[str, Any]:
    torch.manual_seed(0)
    model = LM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {
        "model": model,
        "batch": torch.randint(0, 11, (3, 6)),
        "loss": loss,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1)),
        "step": step,
        "make": LM,
        "lr": 1e-3,
        "declare": {"causal": True, "steps": 100, "peak_lr": 1e-3},
    }


ODD: tuple[Any, ...] = (
    None, 0, -1, 3, 2.5, float("nan"), float("inf"), "", "class", "x", b"y", [], [3], (), {}, {"a": 1},
    {3: None}, object(), int, print, torch.tensor(float("nan")), torch.zeros(0), torch.zeros(2, 3),
    torch.zeros(3, 6).long(), torch.randint(0, 11, (3, 6)), torch.full((3, 6), 99), True, False,
    torch.zeros(3, 6, dtype=torch.complex64), nn.Linear(2, 2), nn.Module(), iter(()), [None], range(0),
    10**30, {"input": torch.zeros(3, 6).long()}, "out.toml", lambda *_: None, lambda *_: 1 / 0,
    lambda *_: torch.zeros(()), lambda *_: torch.ones(3),
)  # fmt: skip
WORDS = (
    "tied",
    "causal",
    "pad_id",
    "eos_id",
    "documents",
    "frozen",
    "peak_lr",
    "steps",
    "init",
    "trained",
    "tide",
    3,
)
ERRORS = (
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    AssertionError,
    MemoryError,
)


def replace_one(given: dict[str, Any], draw: random.Random) -> None:
    """Put something odd in the place of one argument."""
    given[draw.choice([*given, "optimizer", "batches"])] = draw.choice(ODD)


def drop_one(given: dict[str, Any], draw: random.Random) -> None:
    del given[draw.choice(list(given))]


def declare_oddly(given: dict[str, Any], draw: random.Random) -> None:
    words = setup()["declare"]
    for _ in range(draw.randint(1, 3)):
        words[draw.choice(WORDS)] = draw.choice(ODD)
    given["declare"] = words


def fall(given: dict[str, Any], draw: random.Random) -> None:
    """Let a function of the user's raise, at once or after some calls."""
    falls = Falls(draw.choice(ERRORS), draw.choice((1, 2, 3, 5, 9, 20)))
    name = draw.choice(("model", "loss", "optimizer", "scheduler", "step", "make"))
    if name == "model":
        given["model"] = setup()["model"]
        given["model"].falls = falls
        return
    own: dict[str, Callable[..., Any]] = {
        "loss": loss,
        "step": step,
        "make": LM,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0),
    }

    def falling(*args: Any) -> Any:
        falls()
        return own[name](*args)

    given[name] = falling


def spoil_weights(given: dict[str, Any], draw: random.Random) -> None:
    """Weights that are not numbers, frozen, on no device, of another type, or shared."""
    model = given["model"] = setup()["model"]
    with torch.no_grad():
        draw.choice(
            [
                lambda: model.head.weight.fill_(draw.choice((float("nan"), float("inf"), 0.0, 1e30))),
                lambda: model.requires_grad_(requires_grad=False),
                lambda: model.to("meta"),
                lambda: model.to(draw.choice((torch.float16, torch.bfloat16, torch.float64))),
                lambda: setattr(model.blocks[1], "mix", model.blocks[0].mix),
                lambda: model.blocks.append(nn.Identity()),
                lambda: model.register_buffer("odd", torch.full((3,), float("nan"))),
            ]
        )()


def spoil_batch(given: dict[str, Any], draw: random.Random) -> None:
    ids: Tensor = setup()["batch"]
    given["batch"] = draw.choice(
        [ids[:0], ids[:1], ids[:, :1], ids[:, :2], ids.float(), ids.to("meta"), ids * 0, (ids, ids), [ids],
         {"ids": ids}, {"wrong": ids}, ids[None], iter([ids]), [], {}, ids + 90, -ids, ids.T]
    )  # fmt: skip


DAMAGES = (
    replace_one,
    replace_one,
    drop_one,
    declare_oddly,
    declare_oddly,
    fall,
    fall,
    spoil_weights,
    spoil_batch,
)


def damaged(seed: int) -> dict[str, Any]:
    draw, damaged_setup = random.Random(seed), setup()
    for _ in range(draw.choice((1, 1, 2))):
        if damaged_setup:
            draw.choice(DAMAGES)(damaged_setup, draw)
    return damaged_setup


def checked(seed: int, budget_s: float = 0.25) -> str:
    """The sentence of a refusal, or the report. Any other exception is an error of ours."""
    arguments = damaged(seed)
    try:
        report = normlab.check(
            arguments.pop("model", None), arguments.pop("batch", None), **arguments, budget_s=budget_s
        )
    except UserError as refusal:
        sentence = str(refusal)
        assert len(sentence) > 10
        assert "Traceback" not in sentence
        return sentence
    assert report.holds or report.untestable or report.failures
    return str(report)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(QUICK))
def test_a_damaged_setup_is_refused_or_checked(seed):
    assert checked(seed)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_loss_that_raises_is_a_sentence_when_the_time_is_over_as_well(call):
    given, falls = setup(), Falls(AttributeError, call)

    def falling(model: nn.Module, ids: Tensor) -> Tensor:
        falls()
        return loss(model, ids)

    with pytest.raises(UserError, match=r"an error of the user's own|budget_s=1e-06 is too short"):
        normlab.check(**{**given, "loss": falling}, budget_s=1e-6)
    assert falls.calls <= 2  # nothing more of the user's runs for the sake of the sentence


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore")
def test_five_hundred_damaged_setups_are_refused_or_checked():
    for seed in range(QUICK, CASES):
        assert checked(seed), seed


@pytest.mark.slow
def test_the_same_damage_gives_the_same_answer():
    assert [checked(seed, 60) for seed in range(3)] == [checked(seed, 60) for seed in range(3)]

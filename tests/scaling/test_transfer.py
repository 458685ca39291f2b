"""Whether a rate carries, from real trainings whose answer is known, within a budget, and resumed."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import normlab
from normlab.base.locks import reserved
from normlab.errors import UserError, in_one_line
from normlab.lab.config import Config, ModelConfig
from normlab.lab.sized import resized, sized
from normlab.scaling import coordinates
from normlab.scaling.family import family_of
from normlab.scaling.result import Transfer
from normlab.trials import journal
from scaling.sums import STEPS, Sum, decaying, scaled, setup, slowly, squared

WIDTHS = (4, 8, 16)
RATES = tuple(0.1 / 8 * 2.0**k for k in range(-2, 3))


@pytest.fixture(autouse=True, scope="module")
def _without_coordinates() -> Iterator[None]:
    """Leave out the coordinate check, which has tests of its own and takes time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinates, "SHARE", 0.0)
        yield


def asked(what: Any = setup, **words: Any) -> Transfer:
    return normlab.transfer(what, **{"widths": WIDTHS, "steps": STEPS, **words})


def tried(found: Transfer) -> list[Any]:
    return [
        (size, key, t.rate, t.losses)
        for sweep in found.sweeps
        for size, own in sweep.trials.items()
        for key, t in own.items()
    ]


@pytest.fixture(scope="module")
def shifting() -> Transfer:
    return asked()


@pytest.mark.slow
def test_a_rate_that_goes_with_one_over_the_width_shifts_by_a_half_a_doubling(shifting: Transfer):
    assert shifting.verdict == "shifts"
    assert shifting.first.slope is not None
    assert shifting.first.slope.value == pytest.approx(0.5, abs=1e-3)


@pytest.mark.slow
def test_the_same_model_with_its_own_rule_carries():
    found = asked(scaled)
    assert found.verdict == "carries"
    assert found.first.shift is not None
    assert found.first.shift.value == pytest.approx(1.0, abs=1e-3)
    assert found.scales_itself


def test_each_size_has_five_rates_about_its_best_with_every_seed(shifting: Transfer):
    for size in WIDTHS:
        octaves = {seed: {x for x, s in shifting.first.trials[size] if s == seed} for seed in (0, 1)}
        best = shifting.first.optimum(size)
        assert best.closed
        assert {round(best.value or 0) + k for k in (-1, 0, 1)} <= octaves[0] & octaves[1]
        assert len(octaves[0] & octaves[1]) >= 5


def test_sizes_see_the_batches_of_the_smallest():
    """Rate times width being equal, models of two widths go the same way, on the same batches alone."""

    def others(width: int = 8, seed: int = 0) -> normlab.Setup:
        own = setup(width, seed)
        return replace(own, batches=[(x, y + width) for x, y in own.batches])

    narrow, wide = asked(others, widths=(4, 8)).first.trials.values()
    assert len(wide) >= 10  # five rates with two seeds
    for (octave, seed), trial in wide.items():
        at_twice_the_rate = narrow[octave + 1, seed]
        assert trial.losses == pytest.approx(at_twice_the_rate.losses, rel=1e-4)


@pytest.mark.slow
def test_independent_decay_falls_as_the_rate_rises_and_shares_what_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
):
    seen = list[tuple[float, float]]()
    step = torch.optim.SGD.step

    # in torch, since all that a setup reaches is put back
    def seeing(optimizer: torch.optim.SGD, closure: Any = None) -> Any:
        seen.extend((group["lr"], group["weight_decay"]) for group in optimizer.param_groups)
        return step(optimizer, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", seeing)

    def watched(width: int = 8, seed: int = 0) -> normlab.Setup:
        own = setup(width, seed)
        return replace(own, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1 / 8, weight_decay=0.4))

    found = asked(watched, widths=(4, 8), rates=RATES, decays=("independent",))
    products = {round(lr * decay, 12) for lr, decay in seen}
    assert products == {0.005}
    both = asked(watched, widths=(4, 8), rates=RATES, decays=("independent", 1, "independent:4"))
    assert both.sentence == found.sentence
    today = [sweep.trials[4][0.0, 0] for sweep in both.sweeps[:2]]
    assert today[0] is today[1]
    assert both.sweeps[2].trials[4][2.0, 0] is both.sweeps[1].trials[4][2.0, 0]  # 4x, less 2^-2


@pytest.mark.slow
def test_trials_that_are_kept_are_not_done_again_wherever_the_file_ends(tmp_path: Path):
    want = tried(asked(decaying, folder=tmp_path))
    file = tmp_path / "trials.jsonl"
    content, draw = file.read_bytes(), random.Random(0)
    for _ in range(3):
        file.write_bytes(content[: draw.randrange(len(content))])
        assert tried(asked(decaying, folder=tmp_path)) == want
    before = file.read_bytes()
    more = asked(decaying, folder=tmp_path, seeds=3)
    assert file.read_bytes().startswith(before)
    assert set(map(str, want)) <= set(map(str, tried(more)))
    with pytest.raises(UserError, match=rf"{tmp_path} .*: .*\boptimizer\b.* differ"):
        asked(scaled, folder=tmp_path)


SCALING = [f"scaling.{name}" for name in ("ladder", "coordinates", "one_model")]


class Clock:
    """Time that only steps take. It stands in torch, since all that a step reaches is put back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch, "time_of_test", 0.0, raising=False)
        here = SimpleNamespace(monotonic=lambda: self.now)
        for room in ("trials.journal", "trials.training", "trials.scale", *SCALING):
            monkeypatch.setattr(f"normlab.{room}.time", here)

    @property
    def now(self) -> float:
        return torch.time_of_test  # type: ignore[attr-defined]

    @staticmethod
    def go(seconds: float) -> None:
        torch.time_of_test += seconds  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_budget_is_kept_and_says_what_it_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    clock, plans, widths = Clock(monkeypatch), list[str](), (4, 8, 16, 32)
    words: dict[str, Any] = {"announce": plans.append, "folder": tmp_path, "widths": widths}
    whole = sum(6 * 2 * STEPS * 0.1 * width for width in widths)
    short = asked(slowly(clock.go), budget_s=0.6 * whole, **words)
    assert clock.now <= 0.6 * whole
    assert "widths 4, 8, 16 " in plans[0]
    assert "widths 32 " in plans[0]
    assert short.first.known == [4, 8, 16]
    assert short.first.optimum(32).lack == "trials"
    spent = clock.now
    assert tried(asked(slowly(clock.go), budget_s=0.6 * whole, **words)) == tried(short)
    assert clock.now == spent
    seeds = asked(slowly(clock.go), budget_s=0.6 * whole, seeds=4, **words)
    assert "not enough" in plans[2]
    assert "4 seeds" in plans[2]
    assert clock.now <= 0.6 * whole
    assert set(map(str, tried(short))) <= set(map(str, tried(seeds)))
    assert seeds.first.known == [4, 8, 16]
    full = asked(slowly(clock.go), budget_s=3 * whole, **words)
    assert clock.now <= 3 * whole
    assert full.first.known == list(widths)
    assert set(map(str, tried(short))) <= set(map(str, tried(full)))


@pytest.mark.slow
def test_what_comes_before_the_trials_and_what_a_killed_one_takes_is_spent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    clock, kill = Clock(monkeypatch), [650.0, 800.0, 950.0]

    class Killed(BaseException):
        """What no handler of a step's errors sees."""

    def go(seconds: float) -> None:
        clock.go(seconds)
        if kill and clock.now > kill[0]:
            raise Killed

    def built(width: int = 8, seed: int = 0) -> normlab.Setup:
        clock.go(20.0)
        return slowly(go)(width, seed)

    def once() -> Transfer:
        return asked(built, widths=(4, 16), budget_s=1200.0, rates=RATES, seeds=4, folder=tmp_path)

    kills = len(kill)
    while kill:
        with pytest.raises(Killed):
            once()
        kill.pop(0)
    assert "budget" in once().ended_by
    assert 1150 < clock.now <= 1200 + kills * (journal.MARK_S + 1.6)  # a step of the larger takes 1.6 s


@pytest.mark.slow
def test_a_call_again_says_what_is_kept_and_what_is_not(tmp_path: Path):
    plans = list[str]()
    words: dict[str, Any] = {"widths": (4, 8), "rates": RATES, "folder": tmp_path, "announce": plans.append}
    asked(**words)
    asked(**words)
    asked(**words, seeds=3)
    assert "20 trials" in plans[0]
    assert plans[1] == "all 20 trials of 16 steps at widths 4, 8 are kept: none is left to train"
    assert "10 trials" in plans[2]
    assert "the 20 " in plans[2]


@pytest.mark.slow
def test_sizes_are_added_to_a_folder_that_has_one_of_them(tmp_path: Path):
    asked(widths=(4, 16), folder=tmp_path)
    before = (tmp_path / "trials.jsonl").read_text()
    more = asked(widths=(4, 8, 16, 32), folder=tmp_path)
    after = (tmp_path / "trials.jsonl").read_text()
    assert after.startswith(before)
    trained = [json.loads(line) for line in after[len(before) :].splitlines() if line.startswith('{"trial"')]
    assert {row["trial"].partition(",")[0] for row in trained} == {"width 8", "width 32"}
    assert more.first.known == [4, 8, 16, 32]
    with pytest.raises(UserError, match=r"optimizer .*width 8"):
        asked(scaled, widths=(8, 64), folder=tmp_path)
    with pytest.raises(UserError, match=r"\b4, .*\b16, .*\b8, .*\b32\b"):
        asked(widths=(64, 128), folder=tmp_path)


@pytest.mark.slow
def test_the_coordinate_check_takes_a_tenth_of_the_budget_at_most(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(coordinates, "SHARE", 0.1)
    clock = Clock(monkeypatch)

    def watched(width: int = 8, seed: int = 0) -> normlab.Setup:
        def loss(model: Any, batch: Any) -> torch.Tensor:
            clock.go(0.1 * width)
            return squared(model, batch)

        return replace(setup(width, seed), loss=loss)

    def once(budget_s: float, name: str) -> tuple[Transfer, float]:
        start, plans = clock.now, list[str]()
        words: dict[str, Any] = {"budget_s": budget_s, "folder": tmp_path / name, "announce": plans.append}
        found = asked(watched, widths=(4, 16), rates=RATES, **words)
        assert clock.now - start <= budget_s
        rows = map(json.loads, (tmp_path / name / "trials.jsonl").read_text().splitlines())
        return found, next((row["seconds"] for row in rows if "check" in row), 0.0)

    whole, seconds = once(1e4, "ample")
    assert list(whole.coordinates["seeds"]) == [0, 1, 2]
    fewer, less = once(9 * seconds, "short")
    assert list(fewer.coordinates["seeds"]) == [0, 1]
    assert less == pytest.approx(seconds * 2 / 3)
    none, nothing = once(5 * seconds, "shorter")
    assert none.coordinates.keys() == {"left_out"}
    assert none.coordinates["left_out"] in str(none)
    assert nothing == 0.0
    assert tried(none)


@pytest.mark.slow
def test_a_check_that_fails_says_why_and_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fails(*_: Any) -> None:
        raise error

    error = RuntimeError("no such layer")
    monkeypatch.setattr(coordinates, "SHARE", 0.1)
    monkeypatch.setattr(coordinates.Check, "run", fails)
    found = asked(widths=(4, 8), rates=RATES, folder=tmp_path)
    left_out = found.coordinates["left_out"]
    assert in_one_line(error) in left_out
    assert left_out in str(found)
    assert left_out in found.page(tmp_path / "page.html").read_text(encoding="utf-8")
    assert str(error) not in (tmp_path / "trials.jsonl").read_text()


@pytest.mark.slow
def test_the_plan_says_that_the_weight_decay_is_not_swept():
    plans = list[str]()
    for what, words in ((decaying, {}), (decaying, {"decays": (1, 2)}), (setup, {})):
        asked(what, widths=(4, 8), rates=RATES, announce=plans.append, **words)
    assert plans[0].endswith("the weight decay is not swept: decays 1 independent would do that as well")
    assert not any("swept" in plan for plan in plans[1:])


def test_a_budget_that_holds_nothing_is_said_so_before_the_first_trial(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    found = asked(slowly(clock.go), budget_s=40.0)
    assert clock.now <= 40.0
    assert found.verdict == "cannot say"
    assert "short" in found.ended_by
    assert not tried(found)


@pytest.mark.slow
def test_fewer_steps_come_before_fewer_sizes(monkeypatch: pytest.MonkeyPatch):
    clock, plans = Clock(monkeypatch), list[str]()
    whole = sum(6 * 2 * 64 * 0.1 * width for width in WIDTHS)
    found = asked(slowly(clock.go), steps=64, budget_s=whole / 2, announce=plans.append)
    assert 16 <= found.steps < 64
    assert "64 steps " in plans[0]
    assert [size for size, own in found.first.trials.items() if len(own) >= 10] == list(WIDTHS)


def test_an_interrupt_gives_the_answer_so_far(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "calls_of_test", 0, raising=False)

    def stopping(width: int = 8, seed: int = 0) -> normlab.Setup:
        def clock(_: float) -> None:
            torch.calls_of_test += 1  # type: ignore[attr-defined]
            if torch.calls_of_test > 20 * STEPS:  # type: ignore[attr-defined]
                raise KeyboardInterrupt

        return slowly(clock)(width, seed)

    found = asked(stopping)
    assert found.interrupted
    assert 0 < len(tried(found)) <= 20


# ------------------------------------------------------------------------------------------- what is refused


def no_width(seed: int = 0) -> normlab.Setup:
    return setup(8, seed)


def same_size(width: int = 8, seed: int = 0) -> normlab.Setup:
    return setup(8, seed)


def same_seed(width: int = 8, seed: int = 0) -> normlab.Setup:
    return setup(width, 0)


def breaks_at_16(width: int = 8, seed: int = 0) -> normlab.Setup:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return squared(model, batch) if width < 16 else torch.ones(2) @ torch.ones(3)

    return replace(setup(width, seed), loss=loss)


def no_optimizer(width: int = 8, seed: int = 0) -> normlab.Setup:
    return setup(width, seed, optimizer=None)


@pytest.mark.parametrize(
    ("what", "words", "hint"),
    [
        (no_width, {}, "def setup(width=256, seed=0):"),
        (no_width, {"widths": (), "depths": (2, 4)}, "model = GPT(n_layer=depth)"),
        (setup(), {}, "normlab.sized(config)"),
        (same_size, {}, "use width where it makes the model"),
        (same_seed, {}, "declare seed"),
        (breaks_at_16, {}, "at width 16: loss raised RuntimeError"),
        (no_optimizer, {}, "optimizer="),
        (setup, {"widths": ()}, "give widths or depths"),
        (setup, {"widths": (8,)}, "two sizes"),
        (setup, {"widths": (8, 0.5)}, "whole numbers"),
        (setup, {"seeds": 1}, "2 at least"),
        (setup, {"factor": 1.0}, "above 1"),
        (setup, {"rates": (0.1, 0.2)}, "5 rates"),
        (setup, {"steps": 2}, "16"),
        (setup, {"decays": ("indepedent",)}, "independent"),
        (setup, {"decays": (0,)}, "weight decay"),
        (setup, {"facter": 2}, "factor"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_type(what: Any, words: dict[str, Any], hint: str):
    with pytest.raises(UserError) as raised:
        asked(what, **words)
    assert hint in str(raised.value)


# ------------------------------------------------------------------------------------------------- families


def test_a_recipe_grows_with_its_ratio_and_its_smallest_size_as_base():
    model = ModelConfig(dim=256, ffn_dim=1024, heads=4, head_dim=0)
    wide = resized(model, "width", 64, 32)
    assert (wide.dim, wide.ffn_dim, wide.heads, wide.head_width, wide.base_dim) == (64, 256, 4, 16, 32)
    fixed = resized(replace(model, head_dim=64), "width", 512, 128)
    assert (fixed.heads, fixed.head_width) == (8, 64)
    with pytest.raises(UserError, match=r"width 96 .*\b64\b"):
        resized(replace(model, head_dim=64), "width", 96, 64)
    with pytest.raises(UserError, match=r"width 192 .*\b128\b"):
        resized(replace(model, head_dim=64, kv_heads=2), "width", 192, 64)
    deep = resized(replace(model, encoder_layers=0, base_layers=3), "depth", 8, 2)
    assert (deep.encoder_layers, deep.decoder_layers, deep.base_layers) == (0, 8, 3)


def test_a_family_builds_a_configuration_in_each_size(tmp_path: Path):
    config = normlab.resolve("pre", Config(model=ModelConfig(dim=16, ffn_dim=32, heads=2)))
    config = replace(config, data=replace(config.data, builtin_pairs=50, vocab_size=150))
    family = family_of(sized(config, tmp_path), depths=(2, 1))
    assert family.sizes == (1, 2)
    counts = [sum(p.numel() for p in family.build(n, 0).model.parameters()) for n in family.sizes]
    assert counts[0] < counts[1]


def test_a_function_is_built_at_the_size_and_from_the_seed():
    family = family_of(setup, "setup", widths=WIDTHS)
    one, same, other = (family.build(8, seed).model for seed in (0, 0, 1))
    assert isinstance(one, Sum)
    assert one.weight.shape == (8,)
    assert torch.equal(one.weight, same.weight)  # type: ignore[attr-defined]
    assert not torch.equal(one.weight, other.weight)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_budget_without_limit_gives_the_same_answer_at_any_speed(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(coordinates, "SHARE", 0.1)

    def slower(seconds: float) -> None:
        clock.go(1e6 * seconds)

    answers = [asked(slowly(go), widths=(4, 8), budget_s=math.inf) for go in (clock.go, slower)]
    assert tried(answers[0]) == tried(answers[1])
    assert [one.ended_by for one in answers] == ["", ""]


def test_a_second_process_in_the_folder_is_refused(tmp_path: Path):
    with reserved(tmp_path), pytest.raises(UserError, match=re.escape(str(tmp_path))):
        asked(folder=tmp_path)

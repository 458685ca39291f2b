"""A run that is killed anywhere goes on to the same bits as one that is not."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cases import slow, wide
from faults.points import COUNTS, KINDS, SEED, Kill, points
from faults.runs import CASES, Case, Server, configuration, differences, outcome, serving, write_text
from normlab.base.io import to_json
from normlab.lab.config import Config
from normlab.lab.runs import RunFolder

KILLED = 9


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server") / "said.txt") as server:
        yield server


@pytest.fixture(scope="module")
def ready(server, tmp_path_factory):
    """Text, and a folder whose prepared data all runs share."""
    folder = tmp_path_factory.mktemp("ready")
    data = write_text(folder / "text")
    config = configuration(data, CASES[0])
    assert server.do("train", here=True, config=to_json(config), root=str(folder)) == 0
    return data, folder / "data"


@dataclass(frozen=True)
class Reference:
    """A run that nobody disturbs."""

    config: Config
    run: RunFolder
    operations: tuple[str, ...]
    """What it does on the disk: ``<what> <path below its root>``."""
    seconds: float

    def of_kind(self, kind: str) -> list[int]:
        """The numbers of the operations at which a kind of kill may happen."""
        return [i for i, o in enumerate(self.operations) if o.split("/", 1)[-1].startswith(KINDS[kind])]


def root_for(place: Path, data: Path) -> Path:
    place.mkdir()
    (place / "data").symlink_to(data)
    return place


def undisturbed(server: Server, config: Config, root: Path) -> Reference:
    log = root.with_suffix(".log")
    began = time.perf_counter()
    assert server.do("train", config=to_json(config), root=str(root), watch=str(root), log=str(log)) == 0
    seconds = time.perf_counter() - began
    (made,) = root.glob("*/config.json")
    return Reference(config, RunFolder(made.parent), tuple(log.read_text().splitlines()), seconds)


def killed(server: Server, reference: Reference, root: Path, kill: Kill) -> bool:
    """Train, and kill the training there; return whether it was still alive."""
    words = {"config": to_json(reference.config), "root": str(root)}
    if kill.kind == "time":
        return server.do("train", **words, seconds=kill.place * reference.seconds) == KILLED
    operations = reference.of_kind(kill.kind)
    at = operations[int(kill.place * len(operations))]
    answer = server.do("train", **words, watch=str(root), at=at, torn=kill.torn)
    assert answer in (0, KILLED), f"exit code {answer}"
    return answer == KILLED


SLOW = "post"
"""The recipe of which `make test-slow` kills runs."""


@pytest.mark.parametrize(
    "case",
    [slow(case) if case.recipe == SLOW else wide(case) for case in CASES],
    ids=[case.recipe for case in CASES],
)
def test_a_killed_run_ends_with_the_same_bits(server, ready, tmp_path, case: Case):
    data, prepared = ready
    config = configuration(data, case)
    reference = undisturbed(server, config, root_for(tmp_path / "whole", prepared))
    whole = outcome(reference.run)
    assert case.leaves in whole
    happened: Counter[str] = Counter()
    of_this = [point for point in points() if point.case == case]
    for number, point in enumerate(of_this):
        about = f"seed {SEED}, {point}"
        root = root_for(tmp_path / str(number), prepared)
        first, *others = point.kills
        while not killed(server, reference, root, first):  # the run had ended before
            shutil.rmtree(root)
            root_for(root, prepared)
            first = replace(first, place=first.place / 2)
        happened[first.kind] += 1
        happened.update(kill.kind for kill in others if killed(server, reference, root, kill))
        assert server.do("train", config=to_json(config), root=str(root)) == 0, about
        parts = RunFolder(root / reference.run.path.name)
        assert differences(whole, outcome(parts)) == [], about
        shutil.rmtree(root)
    kinds = ", ".join(f"{kind} {happened[kind]}" for kind in KINDS)
    sys.stdout.write(
        f"{case}: {len(of_this)} runs were killed {happened.total()} times ({kinds}), and all are identical\n"
    )


def test_there_are_a_hundred_points_of_all_kinds():
    drawn = list(points())
    assert len(drawn) == COUNTS["checkpoint"] + COUNTS["rows"] + COUNTS["anywhere"] + COUNTS["time"] == 100
    assert len({point.case.recipe for point in drawn}) == len(CASES)
    assert {case.grad_accum_steps for case in CASES} == {1, 2, 3}
    assert {case.precision for case in CASES} == {"fp32", "bf16"}
    assert sum(len(point.kills) > 1 for point in drawn) > 20

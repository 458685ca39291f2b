"""Scores by change and seed, from wherever they are kept."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from normlab.errors import UserError
from normlab.judging.folder import runs_in
from normlab.judging.kept import holds_experiments, kept_runs, options_of_last_answer
from normlab.judging.run import MISSING, ScoredRun, ScoreOptions
from normlab.judging.statistics import Array
from normlab.judging.table import read_csv, read_json_rows, rows_of_frame, table_of_rows
from normlab.judging.table_runs import runs_of, runs_of_lists


@dataclass(frozen=True)
class Scores:
    """A run, or nothing, for each change and seed."""

    changes: tuple[str, ...]
    seeds: tuple[str, ...]
    runs: Mapping[tuple[str, str], ScoredRun]
    source: str
    metric: str = ""
    """What the source calls the score; empty if that has no name."""
    seeds_named: bool = True
    """Whether the source names seeds. If it does not, runs are paired in their order."""
    higher_is_better: bool = False
    looked_at: bool = False
    """Whether these scores have decided how many seeds there are, as those of an experiment have."""

    def of(self, change: str) -> list[ScoredRun]:
        """The runs of a change in the order of ``seeds``."""
        return [self.runs.get((change, seed), ScoredRun(change, seed, None, MISSING)) for seed in self.seeds]

    def values(self, change: str) -> Array:
        """The scores of a change in the order of ``seeds``, NaN where there is none."""
        return np.array([np.nan if run.score is None else run.score for run in self.of(change)])


def read_scores(scores: Any, options: ScoreOptions) -> Scores:
    """Read scores from a file or a folder, a data frame, a list of rows, or a dict of lists by change.

    Raises UserError if nothing can be read from it, or if it is not clear what is what.
    """
    if isinstance(scores, (str, os.PathLike)):
        return _scores_at(Path(scores), options)
    return replace(_scores_of(scores, options), higher_is_better=options.higher_is_better)


def _scores_of(scores: Any, options: ScoreOptions) -> Scores:
    if isinstance(scores, Mapping):
        return _collected(runs_of_lists(scores, "the scores"), "a dict")
    if hasattr(scores, "to_dict") or hasattr(scores, "to_dicts"):
        return _collected(runs_of(table_of_rows(rows_of_frame(scores), "the table"), options), "a data frame")
    if isinstance(scores, Sequence):
        return _collected(runs_of(table_of_rows(scores, "the scores"), options), "a list of rows")
    raise UserError(
        f"scores are a {type(scores).__name__}, but must be a path, a data frame, a list of rows, or a dict "
        "of lists by change"
    )


def _scores_at(path: Path, options: ScoreOptions) -> Scores:
    looked_at = holds_experiments(path)
    if looked_at:
        options = options_of_last_answer(path, options)
        runs = kept_runs(path, options)
    else:
        runs = _runs_at(path, options)
    scores = _collected(runs, str(path))
    return replace(scores, higher_is_better=options.higher_is_better, looked_at=looked_at)


def _runs_at(path: Path, options: ScoreOptions) -> list[ScoredRun]:
    if path.is_dir():
        return runs_in(path, options)
    if not path.exists():
        raise UserError(f"there is no file or folder {path}; name one with scores")
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        return runs_of(read_json_rows(path), options)
    if path.suffix in (".csv", ".tsv", ".tab"):
        return runs_of(read_csv(path), options)
    raise UserError(
        f"{path} is not a table of a known kind: name a .csv, .tsv, .jsonl or .json file with a row for each "
        "run, or a folder with a log for each run"
    )


def _collected(runs: Sequence[ScoredRun], source: str) -> Scores:
    """Order runs by change and seed. Raises UserError if a change has a seed twice."""
    named = [run for run in runs if run.seed is not None]
    if named and len(named) < len(runs):
        without = next(run for run in runs if run.seed is None)
        raise UserError(f"{without.where} names no seed, but other runs do; add it, or leave the run out")
    if not named:
        runs = _numbered(runs)
    by_place: dict[tuple[str, str], ScoredRun] = {}
    for run in runs:
        place = (run.change, run.seed or "")
        if place in by_place:
            raise UserError(
                f"{by_place[place].where} and {run.where} are both seed {run.seed} of {run.change!r}; leave "
                "one out, or say with --by what else was changed"
            )
        by_place[place] = run
    seeds = sorted({seed for _, seed in by_place}, key=_seed_order)
    changes = tuple(dict.fromkeys(run.change for run in runs))
    metric = runs[0].metric if runs else ""
    return Scores(changes, tuple(seeds), by_place, source, metric, seeds_named=bool(named))


def _numbered(runs: Sequence[ScoredRun]) -> list[ScoredRun]:
    """Number the runs of each change in their order."""
    seen: Counter[str] = Counter()
    numbered = []
    for run in runs:
        seen[run.change] += 1
        numbered.append(replace(run, seed=str(seen[run.change])))
    return numbered


def _seed_order(seed: str) -> tuple[bool, int, str]:
    """Numbers by size, and before words."""
    return not seed.isdecimal(), int(seed) if seed.isdecimal() else 0, seed

"""``normlab fold``: a run's model rewritten exactly as a plain one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from normlab.cli.common import RUNS, Imports
from normlab.runs.folder import find_run


@dataclass(frozen=True)
class Fold:
    """Rewrite a trained model exactly as the plainest equal one, in a run folder of its own.

    Factors of the method (Admin's omega, ReZero's alpha, LayerScale's lambda ...) go into the weights beside
    them. Logits of dev batches and greedy translations of both models are compared first; a larger difference
    than rounding explains is refused.
    """

    run_folder: Annotated[Positional[str], arg(metavar="RUN")]
    """A run's folder, or the beginning of its id."""
    out: Path | None = None
    """Folder to write; by default plain-RUN beside the run."""
    weights: Literal["average", "best", "last"] | None = None
    """The weights to rewrite; by default those that were tested."""
    max_positions: int | None = None
    """Longest input of a plain model with a table of positions; by default that of the run's config."""
    runs: Path = RUNS
    """Folder of the run folders."""
    imports: Imports = ()

    def run(self) -> None:
        from normlab.training.fold import BOUND, fold
        from normlab.training.recipes.grammar import require_known

        folder = find_run(self.run_folder, self.runs)
        require_known(folder.config())
        out = self.out or folder.path.with_name(f"plain-{folder.path.name}")
        found = fold(folder, out, weights=self.weights or "", max_positions=self.max_positions)
        allowed = BOUND * found.largest_logit
        print(f"{found.run}: {found.before} is now {found.after}, from {found.weights}")
        for sentence in found.kept:
            print(f"  {sentence}")
        print(
            f"largest difference of logits on {found.batches} dev batches: {found.float32:.2g} in float32, "
            f"{found.float64:.2g} in float64 (largest logit {found.largest_logit:.3g}; allowed in float32: "
            f"{allowed:.2g})"
        )
        if found.outputs:
            print(f"greedy outputs on dev: {found.equal_outputs:,} of {found.outputs:,} are equal")
        print(f"parameters: {found.parameters_before:,} before, {found.parameters_after:,} after")
        if found.positions:
            print(f"longest input: {found.positions:,} positions")
        print(f"run: {out}")

"""Compare every number that two states of the code give, bit by bit: losses, scores, weights, diagnoses,
rows of watched loops, run ids, effects of the papers' findings.

    python tools/same_numbers.py BASE                 # the working tree against the commit BASE
    python tools/same_numbers.py BASE HEAD            # two commits
    python tools/same_numbers.py HEAD HEAD            # is everything drawn with a seed?
    python tools/same_numbers.py BASE --only post lm-rope

BASE and HEAD are commits, each run in a git worktree of its own that is removed afterwards, or folders that
hold ``src``. Every configuration of ``same_numbers_configurations.py`` gets a line: identical, or the first
difference. The exit code is 1 if any differs. Numbers differ between processors, so both sides run here; the
results of a BASE that is a commit are kept in the temporary folder for the next call.

Two diagnoses are compared by the tables, findings and studies that both have; those that only one of them has
are listed, so that a study may be deleted or added. Everything else must be there on both sides.

The global generators of random numbers start in an unknown state in every configuration. A number that is
drawn from them without a seed therefore differs between the two sides, even of one commit.

A change that renames something adds the name to ``RENAMES``; nothing else here has to change. Times are left
out of the comparison, and so are the sentences, and the ids and paths in a run folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import same_numbers_driver as driver
import same_numbers_foreign
import same_numbers_text
from same_numbers_comparing import Names, difference, load, shared
from same_numbers_configurations import CONFIGURATIONS, DiagnosisOf, Training

ROOT: Final = Path(__file__).resolve().parents[1]

# ================================================================================ the map of names: edit here
RENAMES: Final[dict[str, Any]] = {
    # what the driver uses -> where it is, newest place first: module:name
    "homes": {
        "Config": ["normlab.lab.config:Config", "normlab.config.config:Config"],
        "resolve": ["normlab.lab.recipes.grammar:resolve", "normlab.training.recipes.grammar:resolve"],
        "train": ["normlab.lab.training.train:train", "normlab.training.train:train"],
        "build": ["normlab.lab.tasks.task:build_model", "normlab.tasks.task:build_model"],
        "Seq2Seq": ["normlab.nn:Seq2Seq"],
        "Encoder": ["normlab.nn:Encoder"],
        "generate": ["normlab.lab.data.builtin:generate", "normlab.data.builtin:generate"],
        "case": ["normlab.lab.setups:setup_from_config", "normlab.training.setups:setup_from_config"],
        "diagnosed": [
            "normlab.diagnosis.diagnose:diagnose_named",
            "normlab.training.setups:NamedSetup.diagnosed",
        ],
        "diagnose": ["normlab.diagnosis:diagnose"],
        "read_structure": ["normlab.diagnosis:read_structure"],
        "watch": ["normlab.watching.watch:watch"],
        "presets": ["normlab.cli.presets:CONFIGS"],
        "run_id": ["normlab.lab.config:run_id", "normlab.config.config:run_id"],
        "artefacts": ["normlab.papers:ARTEFACTS"],
        "findings": ["normlab.papers.finding:known_findings"],
        "reviewed": ["normlab.papers.finding:reviewed"],
        "read_book": ["normlab.papers.regimes:read_book"],
    },
    # field of Config, as the configurations name it -> older names
    "fields": {
        "data.pretokenizer": ["data.words"],
        "machine.num_workers": ["machine.loader_workers"],
        "optim.max_grad_norm": ["optim.clip_norm_l2"],
        "train.dev_decode_sentences": ["train.dev_bleu_sentences"],
        "train.early_stopping_patience": ["train.stop_patience"],
        "train.grad_accum_steps": ["train.accumulation"],
        "train.init_from": ["train.start_from"],
    },
    # table or set of tensors -> files in a run folder, newest name first
    "files": {
        "metrics": ["metrics.jsonl"],
        "status": ["status.json"],
        "scores": ["scores.json"],
        "scores-best": ["scores-best.json"],
        "test": ["test.hyp.txt"],
        "test-best": ["test-best.hyp.txt"],
        "test.examples": ["test.examples.safetensors"],
        "test-best.examples": ["test-best.examples.safetensors"],
        "probes": ["probes.jsonl"],
        "flight": ["flight.json"],
        "watch": ["watch.jsonl"],
        "watch.flight": ["watch.flight.json"],
        "last.model": ["last/model.safetensors"],
        "last.optimizer": ["last/optimizer.safetensors", "last/optimiser.safetensors"],
        "best.model": ["best/model.safetensors"],
        "average.model": ["average/model.safetensors"],
    },
    # table -> older names; "metrics.train" are the rows of metrics.jsonl whose kind is "train"
    "tables": {"residual_dependency": ["dependency_own"]},
    # column, or table.column where a name has another meaning elsewhere -> older names
    "columns": {
        "metrics.train.padded_tokens": ["metrics.train.positions"],
        "signatures.bleu": ["signature"],
        "signatures.bleu_tokenised": ["signature_tokenised"],
        "signatures.chrf": ["signature_chrf"],
        "residual_dependency.beta_sq": ["residual_dependency.own"],
        "findings.mean_beta_sq": ["findings.mean_own"],
        "findings.sum_beta_sq": ["findings.sum_own"],
    },
    # text in a cell -> older texts
    "words": {"residual_dependency": ["own_branch", "dependency_own"]},
    # regular expression over old names of tensors, "<file>.<name>" -> what replaces the match
    "tensors": {r"\bpositions\.weight": "position_encoding.weight"},
    # columns that older commits do not have: they are compared where both sides do
    "added": ["nll_exchanged", "repeated_share"],
    # columns that are never compared
    "left_out": ["seconds"],
}
# ================================================================================ the end of the map of names

VARIABLES: Final = ("ATEN_", "DNNL_", "MKL_", "OMP_", "ONEDNN_", "TORCH_")
"""Environment variables that may change how a sum is rounded begin with these."""
PACKAGES: Final = (
    *("torch", "numpy", "scipy", "tokenizers", "sentencepiece", "transformers"),
    *("sacrebleu", "sacremoses", "num2words", "Babel"),
)
"""Those whose version may change a number."""
LIMIT_SECONDS: Final = 600


@dataclass(frozen=True)
class Side:
    """One of the two states of the code."""

    label: str
    source: Path
    """The folder that holds the package."""
    results: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run and compare; return 1 if any configuration differs, else 0."""
    given = _parsed(argv)
    start = time.perf_counter()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="same-numbers-")))
        head = Side("HEAD", _source(given.head, scratch / "head", stack), scratch / "results")
        kept = scratch / "base-results" if _is_folder(given.base) else kept_results(commit(given.base))
        missing = [name for name in given.only if not (kept / name / driver.TABLES).exists()]
        base = Side("BASE", ROOT, kept)
        if missing:
            base = Side("BASE", _source(given.base, scratch / "base", stack), kept)
        run([(base, missing), (head, given.only)], scratch, workers=given.workers)
        names = Names(RENAMES)
        differing = sum(not _report(name, (base, head), names) for name in given.only)
    seconds = time.perf_counter() - start
    print(f"{len(given.only) - differing} of {len(given.only)} identical, {seconds:.0f} s")
    return min(differing, 1)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=f"configurations: {', '.join(CONFIGURATIONS)}",
    )
    parser.add_argument("base", help="commit, or a folder that holds src")
    parser.add_argument("head", nargs="?", default=str(ROOT), help="the same; without it the working tree")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=CONFIGURATIONS, default=[*CONFIGURATIONS]
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at a time")
    return parser.parse_args(argv)


def _report(name: str, sides: Sequence[Side], names: Names) -> bool:
    """Print a configuration's line, and return whether it is identical."""
    try:
        base, head = (load(_given(name, side), names) for side in sides)
    except LookupError as failure:
        print(f"{name:20} FAILED     {failure}")
        return False
    alone = ""
    if isinstance(CONFIGURATIONS[name], DiagnosisOf):
        base, head, alone = shared(base, head)
    problem = difference(base, head, RENAMES["added"])
    if not base.cells and not base.tensors:
        problem = problem or "the two have nothing in common"
    size = f"{base.cells:,} cells, {len(base.tensors)} tensors"
    print(f"{name:20} {f'DIFFERENT  {problem}' if problem else f'identical  {size}'}")
    if alone:
        print(f"{'':20} not compared: {alone}")
    return not problem


def _given(name: str, side: Side) -> Path:
    """The folder of a result. Raises LookupError with the reason why there is none."""
    folder = side.results / name
    if not (folder / driver.TABLES).exists():
        error = folder / driver.ERROR
        why = error.read_text(encoding="utf-8") if error.exists() else "its process died"
        raise LookupError(f"at {side.label}: {why}")
    return folder


# ------------------------------------------------------------------------------------------------ commits


def _is_folder(state: str) -> bool:
    return (Path(state) / "src").is_dir()


def commit(name: str) -> str:
    """The full hash of a commit. Raises SystemExit with git's words where there is none."""
    return _git("rev-parse", "--verify", f"{name}^{{commit}}")


def _source(state: str, place: Path, stack: ExitStack) -> Path:
    """The folder of a commit's or a folder's package."""
    if _is_folder(state):
        return Path(state).resolve() / "src"
    return stack.enter_context(worktree(commit(state), place)) / "src"


@contextmanager
def worktree(hashed: str, place: Path) -> Iterator[Path]:
    """A commit checked out in a folder, which is gone afterwards."""
    _git("worktree", "add", "--detach", "--quiet", str(place), hashed)
    try:
        yield place
    finally:
        _git("worktree", "remove", "--force", str(place))


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def kept_results(hashed: str) -> Path:
    """The folder in which the results of a commit are kept, for this machine and this tool.

    New places and names in ``RENAMES`` keep it: they say nothing new of a commit that was understood before.
    """
    environment = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(VARIABLES))
    packages = [f"{name} {version(name)}" for name in PACKAGES]
    told_of = json.dumps([told()["configurations"], [*RENAMES["files"]]])
    modules = driver, same_numbers_foreign, same_numbers_text
    code = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules]
    content = [hashed, sys.version, _processor(), *environment, *packages, told_of, *code]
    key = hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"same-numbers-kept-{os.getuid()}" / key


def _processor() -> str:
    """What tells the kind of processor, on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name"))}))


# --------------------------------------------------------------------------------------------------- jobs


def told() -> dict[str, Any]:
    """All that the driver is told, beside which configurations to run."""
    names = {kind: RENAMES[kind] for kind in ("homes", "fields", "files")}
    content = {
        name: {"kind": type(given).__name__, **asdict(given)} for name, given in CONFIGURATIONS.items()
    }
    return {**names, "configurations": content}


def run(wanted: Sequence[tuple[Side, Sequence[str]]], scratch: Path, *, workers: int) -> None:
    """Run configurations of both sides, several processes at a time."""
    jobs = [(side, names) for side, missing in wanted for names in parts(missing, workers)]
    jobs.sort(key=lambda job: -len(job[1]))
    with ThreadPoolExecutor(workers) as pool:
        works = [scratch / f"job-{number}" for number in range(len(jobs))]
        for done in [pool.submit(_drive, *job, work) for job, work in zip(jobs, works, strict=True)]:
            done.result()


def parts(names: Sequence[str], count: int) -> list[list[str]]:
    """Names to run in one process each: trainings on several ranks alone, the others in ``count`` groups, a
    run in the group of the one it starts from.
    """
    configurations = {name: CONFIGURATIONS[name] for name in names}
    trainings = {name: given for name, given in configurations.items() if isinstance(given, Training)}
    on_ranks = [name for name, training in trainings.items() if training.ranks > 1]
    others = [name for name in names if name not in on_ranks]
    starts = {name: training.init_from for name, training in trainings.items()}
    leading = [name for name in others if starts.get(name, "") not in others]
    groups = [leading[i::count] for i in range(count)]
    for group in groups:
        group += [name for name in others if starts.get(name, "") in group]
    return [group for group in (*([name] for name in on_ranks), *groups) if group]


def _drive(side: Side, names: Sequence[str], work: Path) -> None:
    """Let the driver run some configurations, and put what came out in its place."""
    work.mkdir()
    job = {**told(), "source": str(side.source), "names": names}
    (work / "job.json").write_text(json.dumps(job), encoding="utf-8")
    ranks = max(getattr(CONFIGURATIONS[name], "ranks", 1) for name in names)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    words = [sys.executable, "-W", "ignore", *(torchrun if ranks > 1 else ()), driver.__file__, str(work)]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment = os.environ | one_thread | {"PYTHONPATH": str(side.source)}
    errors = _standard_error(words, environment)
    side.results.mkdir(parents=True, exist_ok=True)
    for name in names:
        out, place = work / name, side.results / name
        out.mkdir(exist_ok=True)
        if not any((out / file).exists() for file in (driver.TABLES, driver.ERROR)):
            (out / driver.ERROR).write_text(errors[-2000:], encoding="utf-8")
        if not (place / driver.TABLES).exists():
            shutil.rmtree(place, ignore_errors=True)
            out.rename(place)


def _standard_error(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a command to its end, or stop it if it hangs; return what it wrote to standard error."""
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            return process.communicate(timeout=LIMIT_SECONDS)[1]
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then stops its ranks
            return f"{process.communicate()[1]}\nstopped after {LIMIT_SECONDS} s"


if __name__ == "__main__":
    sys.exit(main())

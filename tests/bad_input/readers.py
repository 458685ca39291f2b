"""Every kind of file that normlab reads: how a good one is made, how it is broken, and who reads it."""

from __future__ import annotations

import io
import json
import os
import shutil
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, Final

import numpy as np
import torch

import normlab
from bad_input import mutations
from bad_input.prompt import GOOD
from cli.test_own_paper import PAPER, REGIME
from judging.test_experiment import BASE, METRIC, SCRIPT
from lab.data.libraries import library
from lab.training.tiny import write_text
from normlab import papers
from normlab.checks.allowed import allowed_here
from normlab.checks.baseline import changed_parameters, parameters_of, read_baseline
from normlab.checks.declared import declared
from normlab.cli.main import main
from normlab.errors import UserError
from normlab.judging.experiment import Request
from normlab.judging.experimenter import experiment
from normlab.lab.config import DataConfig
from normlab.lab.data.plain import prepare_text
from normlab.lab.data.sources import open_text
from normlab.lab.data.vocabulary import vocabulary
from normlab.lab.runs import RunFolder
from normlab.lab.runs.examples import read_examples
from normlab.papers import regimes
from normlab.papers.finding import FILES as finding_files
from normlab.papers.finding import read_findings, reviewed
from normlab.papers.regimes import read_book
from normlab.papers.results import KEPT, read_reproduction
from normlab.report.watch import write_probes_page
from normlab.watching.record_file import RecordFile
from report.test_flight import REPORT
from scaling import sums
from trials.tiny import setup

TRIAL: Final[dict[str, Any]] = {"steps": 16, "rates": (0.02, 0.04), "budget_s": 20.0, "folder": "trials"}
TRANSFER: Final[dict[str, Any]] = {
    "widths": (4, 8),
    "steps": sums.STEPS,
    "rates": (0.01, 0.02, 0.04, 0.08, 0.16),
    "budget_s": 20.0,
    "folder": "trials",
}
JUDGE: Final = ["judge", "--baseline", BASE, "--candidate", f"{BASE} --gain=0.05", "--metric", METRIC]
DATA: Final = Path(__file__).parents[1] / "judging" / "data"
DECLARED: Final = """
parametrisation = "mup"
truncated_at = 3.0
causal = true

[embedding]
std = 0.02

["*.weight"]
std = 0.02
depth = "total"
"""
PROJECT: Final = '[tool.normlab.check]\nallow = ["groups", "reach"]\n'


@dataclass(frozen=True)
class Reader:
    """A file of one kind, and a way to read it."""

    name: str
    made: Callable[[Path], None]
    """Makes a good file, with all that belongs to it, in an empty folder."""
    file: str
    """Where the file then is; a pattern, of whose files the first is meant."""
    change: Callable[[bytes, Random], bytes]
    read: Callable[[Path], object]
    """Reads the file, in its folder. A sentence is a UserError or an error of the operating system."""


# ------------------------------------------------------------------------------------------------ places


def _trials(folder: Path) -> None:
    normlab.trial(setup(0.02), **{**TRIAL, "folder": folder / "trials"})


def _transfer(folder: Path) -> None:
    normlab.transfer(sums.setup, **{**TRANSFER, "folder": folder / "trials"})


def _run(folder: Path) -> None:
    """A run whose folder holds all that a run can leave, and a comparison beside it."""
    write_text(folder)
    typed([*GOOD, "--probes", "standard"])
    (config,) = Path("runs").glob("*/config.json")
    run = RunFolder(config.parent)
    run.set_status(replace(run.status(), state="interrupted"))
    run.add_flight(REPORT)
    words = [*GOOD[1 : GOOD.index("--recipe")], "--recipes", "pre", "post", "--lrs", "1e-3", "--seeds", "2"]
    typed(["compare", *words, "--out", "compared"])


def _baseline(folder: Path) -> None:
    parameters = parameters_of(setup(0.02).model)
    (folder / "baseline.json").write_text(json.dumps({"parameters": parameters}))


def _judged(folder: Path) -> None:
    shutil.copy(SCRIPT, folder)
    request = Request(BASE, f"{BASE} --gain=0.05", METRIC, folder=Path("ledger"), ledger=True, fresh_seeds=1)
    experiment(request)
    shutil.copytree(folder / "ledger", folder / "runs" / "judge")
    shutil.copytree(DATA, folder / "data")


def _declarations(folder: Path) -> None:
    (folder / "init.toml").write_text(DECLARED)
    (folder / "pyproject.toml").write_text(PROJECT)


def _paper(folder: Path) -> None:
    (folder / "doe2026.toml").write_text(PAPER.replace('"mean_bleu"', '"score"'))
    (folder / "runs" / "toy").mkdir(parents=True)
    (folder / "runs" / "toy" / "regime.toml").write_text(REGIME)
    rows = [
        {"cell": cell, "seed": seed, "run": f"{cell}{seed}", "outcome": "trained", "dev": [[1, 3.0, 2.0]],
         "train": [[1, 2.0, 1.0]], "test": {"bleu": 30.0 + seed, "nll": 3.0}}
        for cell in ("pre", "post")
        for seed in (1, 2, 3)
    ]  # fmt: skip
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "runs" / "toy" / "runs.jsonl").write_text(lines)
    shutil.copy(KEPT / "liu2020.fig4.json", folder)


def _shards(folder: Path) -> None:
    library().save(str(folder / "tokenizer.json"))
    ids = np.random.default_rng(0).integers(4, 40, 600)
    ids[::20] = 0
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    (folder / "gpt2.bin").write_bytes(header.tobytes() + ids.astype("<u2").tobytes())
    (folder / "raw.bin").write_bytes(ids.astype("<u2").tobytes())
    np.save(folder / "tokens.npy", ids.astype(np.uint16))
    np.save(folder / "tokens.idx.npy", np.arange(0, 600, 20, dtype=np.int64))
    (folder / "dev.bin").write_bytes(ids[:60].astype("<u2").tobytes())
    (folder / "mega.bin").write_bytes(ids.astype("<i4").tobytes())
    ends = np.arange(0, 600, 20)
    index = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\4" + b"".join(
        number.to_bytes(8, "little") for number in (len(ends), len(ends) + 1)
    )  # fmt: skip
    lists = (np.full(len(ends), 20, "<i4"), (4 * ends).astype("<i8"), np.arange(len(ends) + 1, dtype="<i8"))
    (folder / "mega.idx").write_bytes(index + b"".join(part.tobytes() for part in lists))
    (folder / "pairs.tsv").write_text("en\tde\none\teins\ntwo\tzwei\n")
    shards(folder / "gpt2.bin")


def _watched(folder: Path) -> None:
    torch.manual_seed(0)
    given = setup(0.02)
    with normlab.watch(given.model, given.optimizer, out=folder / "watch", every_steps=1) as watch:
        for ids in list(given.batches)[:4]:
            given.optimizer.zero_grad()
            loss = given.loss(given.model, ids)
            loss.backward()
            given.optimizer.step()
    assert watch.page.is_file()


# --------------------------------------------------------------------------------------------- readers


def typed(words: Sequence[str]) -> None:
    """Type a command. Raises UserError with its answer if it refuses, and AssertionError if it shows a
    traceback.
    """
    told = io.StringIO()
    with redirect_stdout(told), redirect_stderr(told):
        try:
            code = main(words)
        except SystemExit as stopped:  # a verdict
            code = stopped.code if isinstance(stopped.code, int) else 2
    if code == 1 or "Traceback" in told.getvalue():
        raise AssertionError(f"normlab {' '.join(words)}: {told.getvalue()[-3000:]}")
    if code == 2:
        raise UserError(told.getvalue())


def command(*words: str) -> Callable[[Path], None]:
    """A command line, in which {run} stands for the run's folder."""

    def read(folder: Path) -> None:
        run = next(iter(Path("runs").glob("*/config.json")), Path("none/config.json")).parent
        typed([word.replace("{run}", str(run)) for word in words])

    return read


def _compared(path: Path) -> None:
    list(changed_parameters(setup(0.02).model, read_baseline(path)))


def shards(file: Path) -> None:
    texts = {"train_text": str(file), "dev_text": str(file.with_name("dev.bin"))}
    config = DataConfig(**texts, tokenizer=str(file.with_name("tokenizer.json")), block_len=16)
    _, corpus = prepare_text(config, file.with_name("data"))
    corpus.train.tokens[0 : len(corpus.train.tokens)]


def _of_paper(file: Path) -> None:
    """Read a paper in process and by a command, which leaves it among those that are known."""
    book = read_book(file, roots=(Path("runs"),))
    for name in book.regimes:
        book.regime(name)
    for finding in read_findings(file):
        reviewed(finding, book)
    known = [dict(papers.PAPERS), [*finding_files], [*regimes.FILES]]
    try:
        typed(["papers", "show", "E1", "--paper", str(file)])
    finally:
        papers.PAPERS.clear()
        papers.PAPERS.update(known[0])
        finding_files[:], regimes.FILES[:] = known[1:]


def _of_run(path: Path) -> None:
    run = RunFolder(path.parent)
    if path.name == "test.examples.safetensors":
        read_examples(path)
    for read in (run.status, run.config, run.metrics, run.probes, run.flights, run.task_metrics):
        read()


def _recorded(path: Path) -> None:
    RecordFile(path).begin(2)


JSON, ROWS, TOML = mutations.of_json, mutations.of_rows, mutations.of_toml
TABLE, HEADER = mutations.of_table, mutations.of_header
OF_RUN: Final = {
    "report": command("run", "report", "{run}"),
    "list": command("run", "list"),
    "translate": command("run", "translate", "{run}", "dev_src.txt"),
    "go on": command(*GOOD),
    "in process": _of_run,
}
"""The readers of a run's folder."""
RUN_FILES: Final = {
    "metrics.jsonl": (ROWS, "report", "go on", "in process"),
    "probes.jsonl": (ROWS, "report", "go on", "in process"),
    "flight.json": (JSON, "report", "go on", "in process"),
    "status.json": (JSON, "report", "list", "go on", "in process"),
    "config.json": (JSON, "report", "list", "translate", "in process"),
    "scores.json": (JSON, "report", "list", "in process"),
    "tokenizer.json": (JSON, "translate", "go on"),
    "last/state.json": (JSON, "report", "go on"),
    "best/state.json": (JSON, "report", "translate", "go on"),
    "last/model.safetensors": (HEADER, "go on"),
    "best/model.safetensors": (HEADER, "translate", "go on"),
    "last/optimizer.safetensors": (HEADER, "go on"),
    "test.examples.safetensors": (HEADER, "in process"),
    "target_vocab.npy": (HEADER, "translate", "go on"),
}
"""What a run leaves, how it is broken, and who reads it."""
SCORES: Final = {
    "long.csv": (TABLE,),
    "wide_by_change.tsv": (TABLE,),
    "wide_by_seed.csv": (TABLE,),
    "wandb_chart.csv": (TABLE,),
    "wandb_runs.csv": (TABLE, "--metric", "val_loss"),
    "scores.jsonl": (ROWS, "--metric", "eval.loss"),
    "wandb_runs.json": (JSON, "--metric", "val/loss", "--by", "config.qk_norm"),
    "huggingface/**/trainer_state.json": (JSON,),
    "lightning/**/metrics.csv": (TABLE, "--metric", "val_loss"),
    "tensorboard_json/*.json": (JSON,),
}
"""Tables and folders of scores, how they are broken, and what is typed after them."""


def _readers() -> Iterator[Reader]:
    journal = "trials/trials.jsonl"
    yield Reader("a trial's journal", _trials, journal, ROWS, _try_again)
    yield Reader("a trial's journal: page", _trials, journal, ROWS, _try_again_with_page)
    yield Reader("a transfer's journal", _transfer, journal, ROWS, _transfer_again)
    yield Reader("a transfer's journal: page", _transfer, journal, ROWS, _transfer_again_with_page)
    for file, (change, *readers) in RUN_FILES.items():
        for name in readers:
            yield Reader(f"a run's {file}: {name}", _run, f"runs/*/{file}", change, OF_RUN[name])
    compared = command("run", "report", "compared/comparison.json")
    yield Reader("a comparison", _run, "compared/comparison.json", JSON, compared)
    yield Reader("a baseline of check", _baseline, "baseline.json", JSON, _compared)
    yield Reader("a declaration", _declarations, "init.toml", TOML, _declared)
    yield Reader("a project's file", _declarations, "pyproject.toml", TOML, _allowed)
    yield from _of_judge()
    yield Reader("a paper", _paper, "doe2026.toml", TOML, _of_paper)
    for file, change in {"regime.toml": TOML, "runs.jsonl": ROWS}.items():
        yield Reader(f"a paper's {file}", _paper, f"runs/toy/{file}", change, _of_its_paper)
    yield Reader("a result of a paper", _paper, "liu2020.fig4.json", JSON, read_reproduction)
    for file in ("gpt2.bin", "raw.bin", "tokens.npy"):
        yield Reader(f"the shard {file}", _shards, file, HEADER, shards)
    yield Reader("the starts of a shard", _shards, "tokens.idx.npy", HEADER, _shard_of_starts)
    yield Reader("the index of a shard", _shards, "mega.idx", HEADER, _shard_of_index)
    yield Reader("a tokenizer of others", _shards, "tokenizer.json", JSON, _tokenizer)
    yield Reader("a table of pairs", _shards, "pairs.tsv", TABLE, _pairs)
    for file in ("manifest.json", "tokenizer.json"):
        yield Reader(f"prepared data: {file}", _shards, f"data/*/{file}", JSON, _prepared)
    yield Reader("prepared data: documents", _shards, "data/*/test.documents.npy", HEADER, _prepared)
    yield Reader("probes of another trainer", _watched, "watch/watch.jsonl", ROWS, _page_of_probes)
    flight = "watch/watch.flight.json"
    yield Reader("reports of another trainer", _watched, flight, JSON, _page_of_reports)
    yield Reader("a resumed training's probes", _watched, "watch/watch.jsonl", ROWS, _recorded)


def _of_judge() -> Iterator[Reader]:
    for file, change in {"judge.json": JSON, "*/command.json": JSON, "*/seed-1/run.json": JSON}.items():
        place = f"runs/judge/{file}"
        yield Reader(f"judge's {file}: read", _judged, place, change, command("judge", "runs/judge"))
        yield Reader(f"judge's {file}: go on", _judged, place, change, command(*JUDGE))
    shown = command("judge", "--ledger", "ledger", "--json")
    yield Reader("a ledger: shown", _judged, "ledger/ledger.json", JSON, shown)
    propose = command(*JUDGE, "--ledger", "ledger", "--fresh-seeds", "1")
    yield Reader("a ledger: gone on", _judged, "ledger/ledger.json", JSON, propose)
    for file, (change, *flags) in SCORES.items():
        read = partial(_scores, f"data/{file.partition('/')[0]}", flags)
        yield Reader(f"the scores {file}", _judged, f"data/{file}", change, read)


def _try_again(file: Path) -> None:
    str(normlab.trial(setup(0.02), **TRIAL))


def _try_again_with_page(file: Path) -> None:
    normlab.trial(setup(0.02), **TRIAL).page("trial.html")


def _transfer_again(file: Path) -> None:
    str(normlab.transfer(sums.setup, **TRANSFER))


def _transfer_again_with_page(file: Path) -> None:
    normlab.transfer(sums.setup, **TRANSFER).page("transfer.html")


def _declared(file: Path) -> None:
    declared(str(file), setup(0.02))


def _allowed(file: Path) -> None:
    allowed_here(file.parent)


def _of_its_paper(file: Path) -> None:
    _of_paper(Path("doe2026.toml"))


def _shard_of_starts(file: Path) -> None:
    shards(Path("tokens.npy"))


def _shard_of_index(file: Path) -> None:
    shards(Path("mega.bin"))


def _prepared(file: Path) -> None:
    shards(Path("gpt2.bin"))


def _tokenizer(file: Path) -> None:
    vocabulary(DataConfig(tokenizer=str(file)), (), ())


def _pairs(file: Path) -> None:
    list(open_text(f"{file}#en"))
    list(open_text(f"{file}#2"))


def _page_of_probes(file: Path) -> None:
    write_probes_page(file, file.with_suffix(".html"))


def _page_of_reports(file: Path) -> None:
    write_probes_page(file.with_name("watch.jsonl"), file.with_name("again.html"))


def _scores(source: str, flags: Sequence[str], file: Path) -> None:
    typed(["judge", source, *flags])
    typed(["judge", source, *flags, "--json"])


READERS: Final = tuple(_readers())


@cache
def _place(made: Callable[[Path], None]) -> Path:
    """A folder with good files, which nobody changes."""
    folder = Path(mkdtemp(prefix="normlab-good-"))
    with working_in(folder):
        made(folder)
    return folder


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Work in a folder: contextlib's ``chdir``, whose former folder may be gone."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def copied(reader: Reader, folder: Path) -> Path:
    """Copy a reader's good files into a new folder; return the path of the one that it reads, from there."""
    shutil.copytree(_place(reader.made), folder)
    file = next(path for path in sorted(folder.glob(reader.file)) if path.is_file())
    return file.relative_to(folder)


def broken(reader: Reader, seed: int, folder: Path) -> str:
    """Break a reader's file as the seed says, in a new folder, and read it; return the traceback, or nothing
    if it was read or refused with a sentence.
    """
    draw = Random(f"{reader.name} {seed}")
    file = copied(reader, folder)
    change = reader.change if seed % 3 else mutations.of_bytes
    with working_in(folder):
        file.write_bytes(change(file.read_bytes(), draw))
        try:
            reader.read(file)
        except (UserError, OSError):
            return ""
        except Exception:
            return traceback.format_exc()
    return ""

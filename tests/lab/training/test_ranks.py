"""Ranks: each one's micro-batches, what is refused, and one gradient however a global batch is spread."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

from lab.training.ranked import command, environment, finish, folder_of
from lab.training.tiny import tiny, tiny_language_model, write_plain
from normlab.lab.runs import RunFolder
from normlab.lab.tasks.language_model import LanguageModel
from normlab.lab.tasks.task import build_model
from normlab.lab.tasks.translation import Translation
from normlab.lab.training.ranks import SINGLE_PROCESS, OtherRankError, Ranks, check_share, join_processes
from normlab.lab.training.replay import examine
from normlab.lab.training.train import train
from normlab.lab.training.trainer import Trainer
from normlab.nn import Decoder

STEPS, EACH = 20, 2048
"""Steps of whole runs; positions of a rank's micro-batches in a step."""


# ---------------------------------------------------------------------------------------- one process


def test_every_micro_batch_has_one_rank_and_one_place():
    assert list(SINGLE_PROCESS.share(3)) == [0, 1, 2]
    shares = [list(Ranks(index, 3).share(6)) for index in range(3)]
    assert shares == [[0, 3], [1, 4], [2, 5]]
    assert [Ranks(index, 3).main for index in range(3)] == [True, False, False]


def test_alone_everything_is_as_it_is_given():
    values = torch.tensor([1.0, 2.0])
    assert SINGLE_PROCESS.sum(values) is values
    assert SINGLE_PROCESS.total(3, 4) == [3, 4]
    assert (SINGLE_PROCESS.any(True), SINGLE_PROCESS.any(False)) == (True, False)
    assert SINGLE_PROCESS.from_main(lambda: {"nll": 1.5}) == {"nll": 1.5}
    with SINGLE_PROCESS.main_first(), join_processes(torch.device("cpu")) as (ranks, device):
        assert (ranks, device) == (SINGLE_PROCESS, torch.device("cpu"))


@pytest.mark.parametrize(
    ("grad_accum_steps", "count", "typed"),
    [
        (1, 2, "--grad-accum-steps 2, or torchrun --nproc-per-node 1"),
        (6, 4, "--grad-accum-steps 8, or torchrun --nproc-per-node 3"),
    ],
)
def test_micro_batches_that_the_ranks_cannot_share_are_refused(monkeypatch, grad_accum_steps, count, typed):
    check_share(grad_accum_steps)
    monkeypatch.setenv("WORLD_SIZE", str(count))
    with pytest.raises(ValueError, match="grad_accum_steps is") as refused:
        check_share(grad_accum_steps)
    assert str(refused.value) == (
        f"grad_accum_steps is {grad_accum_steps}, and {count} processes cannot share the micro-batches of "
        f"a step equally; type {typed}"
    )


def test_ranks_need_a_gpu_each_and_no_number_of_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="cuda:1") as refused, join_processes(torch.device("cuda:1")):
        pass
    assert str(refused.value) == (
        "the device cuda:1 was asked for, and each of 2 processes needs one of its own; type --device cuda"
    )
    with pytest.raises(ValueError, match="no GPU") as refused, join_processes(torch.device("cuda")):
        pass
    assert str(refused.value) == (
        "process 2 on this machine has no GPU of its own, since there are 1; type torchrun --nproc-per-node 1"
    )


@pytest.mark.slow
def test_loader_workers_change_no_number(text, tmp_path):
    rows = []
    for workers in (0, 1, 3):
        config = tiny(replace(text, word_dropout=0.1), steps=6, grad_accum_steps=2)
        config = replace(config, machine=replace(config.machine, num_workers=workers))
        rows.append([{k: v for k, v in row.items() if k != "seconds"} for row in _rows(config, tmp_path)])
    assert rows[0] == rows[1] == rows[2]
    assert [row["step"] for row in rows[0]] == [1, 2, 4, 6, 6]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def _rows(config, root: Path) -> list[dict]:
    workers = config.machine.num_workers
    return train(config, root / str(workers)).metrics()


# ------------------------------------------------------------------------- one gradient, spread three ways


def gradients(
    config, root: Path, ranks: Ranks = SINGLE_PROCESS
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Loss, likelihood and norm of the first step, and the whole gradient that the optimizer is given."""
    data, corpus = Translation.prepare(config.data, root / "data")
    trainer = Trainer(Translation(replace(config, data=data), corpus, torch.device("cpu")), ranks)
    seen: dict[str, torch.Tensor] = {}

    def look() -> None:
        for name, part in trainer.parallel.parts.items():
            seen[name] = trainer.parallel.whole(name, part.grad).clone()

    trainer.optimizer.step = look
    return trainer.step().values.tolist(), seen


def config_of(text, placement: str, grad_accum_steps: int):
    config = tiny(text, placement, max_tokens=2 * EACH // grad_accum_steps, grad_accum_steps=grad_accum_steps)
    return replace(config, model=replace(config.model, dropout=0.0, encoder_layers=2, decoder_layers=2))


def differences(found, wanted) -> dict[str, float]:
    """By parameter: L2 norm of the difference, relative to the gradient's. The bias of keys, whose gradient
    is truly zero, is part of a packed one and so weighs nothing.
    """
    smallest = torch.finfo(torch.float32).tiny
    return {n: float((found[n] - g).norm() / g.norm().clamp(min=smallest)) for n, g in wanted.items()}


@contextmanager
def one_of_two(rank: int, folder: str, path: list[str]) -> Generator[Ranks]:
    """The ranks of this process, which meets another in a folder."""
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank)}
    distributed.init_process_group(
        "gloo", f"file://{folder}/meeting", timedelta(seconds=60), world_size=2, rank=rank
    )
    with join_processes(torch.device("cpu")) as (ranks, _):
        yield ranks
    distributed.barrier()  # gloo may abort a rank whose partner has left while it still tidies up
    distributed.destroy_process_group()


def work(rank: int, folder: str, path: list[str], configs: dict) -> None:
    """One rank: write the gradient of each configuration to a file."""
    with one_of_two(rank, folder, path) as ranks:
        assert ranks.total(rank, 1) == [1, 2]
        assert ranks.any(rank == 1)
        assert not ranks.any(False)
        assert ranks.from_main(lambda: {"rank": rank, "nll": 0.1}) == {"rank": 0, "nll": 0.1}
        for name, config in configs.items():
            found = gradients(config, Path(folder, name), ranks)
            torch.save(found, Path(folder, f"{name}.{rank}"))
        refused = ValueError if rank == 0 else OtherRankError
        with pytest.raises(refused):
            ranks.from_main(lambda: int("no number"))


def together(batches):
    """One batch of all their rows, padded to the widest."""

    def rows(name):
        rows = [row for batch in batches for row in getattr(batch, name)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    tokens = sum(batch.tokens for batch in batches)
    sides = {name: rows(name) for name in ("source", "target_in", "target_out")}
    return replace(batches[0], **sides, tokens=tokens)


SPREAD = {
    f"{placement}-{'FSDP' if shard else 'DDP'}": (placement, grad_accum_steps, shard)
    for placement, grad_accum_steps in (("post", 2), ("admin", 4), ("rezero", 2))
    for shard in (False, True)
}
"""Placement, micro-batches a step, and whether the model is sharded; each of two ranks has half of them."""


@pytest.mark.slow
@pytest.mark.usefixtures("loopback")
def test_one_batch_its_micro_batches_and_two_ranks_have_one_gradient(text, tmp_path):
    configs = {}
    for name, (placement, grad_accum_steps, shard) in SPREAD.items():
        config = config_of(text, placement, grad_accum_steps)
        configs[name] = replace(config, machine=replace(config.machine, shard=shard, probes=""))
    torch.multiprocessing.spawn(work, args=(str(tmp_path), sys.path, configs), nprocs=2)
    for name, config in configs.items():
        values, accumulated = gradients(config, tmp_path / f"{name}.one")
        _, corpus = Translation.prepare(config.data, tmp_path / "data")
        whole = Translation(config, corpus, torch.device("cpu"))
        parts = [whole.batch(i) for i in range(config.train.grad_accum_steps)]
        model, batch = whole.build(), together(parts)
        loss = whole.loss(model.train(), batch).loss / batch.tokens
        loss.backward()
        assert loss.item() == pytest.approx(values[0], rel=1e-6)
        assert batch.tokens == sum(part.tokens for part in parts)
        wanted = {n: p.grad for n, p in model.named_parameters()}
        assert max(differences(accumulated, wanted).values()) < 1e-5, name
        for rank in range(2):
            spread, seen = torch.load(tmp_path / f"{name}.{rank}", weights_only=True)
            assert spread == pytest.approx(values, rel=1e-6), name
            assert max(differences(seen, wanted).values()) < 1e-5, name
        averaged = {n: g / 2 for n, g in seen.items()}
        assert max(differences(averaged, wanted).values()) > 0.4, "a mean would be seen"


def weights_after(config, root: Path, ranks: Ranks = SINGLE_PROCESS) -> dict[str, torch.Tensor]:
    """The weights of a language model after three steps."""
    data, corpus = LanguageModel.prepare(config.data, root / "data")
    task = LanguageModel(replace(config, data=data), corpus, torch.device("cpu"))
    trainer = Trainer(task, ranks)
    for _ in range(3):
        trainer.step()
    return {name: part.detach().clone() for name, part in trainer.parallel.parts.items()}


def train_on_rank(rank: int, folder: str, path: list[str], config) -> None:
    with one_of_two(rank, folder, path) as ranks:
        torch.save(weights_after(config, Path(folder), ranks), Path(folder, str(rank)))


@pytest.mark.slow
@pytest.mark.usefixtures("loopback")
def test_muon_steps_two_ranks_alike_and_as_one(tmp_path):
    recipe = "pre+rmsnorm+nobias+swiglu+rope+muon"
    config = tiny_language_model(write_plain(tmp_path / "text"), recipe, grad_accum_steps=2, max_tokens=256)
    torch.multiprocessing.spawn(train_on_rank, args=(str(tmp_path), sys.path, config), nprocs=2)
    first, second = (torch.load(tmp_path / str(rank), weights_only=True) for rank in range(2))
    alone = weights_after(config, tmp_path / "alone")
    assert all(torch.equal(first[name], second[name]) for name in alone)
    assert max(differences(first, alone).values()) < 1e-5
    start = build_model(Decoder, config.model, len(alone["embedding.weight"]), config.seeds.init)
    assert min(differences(alone, start.state_dict()).values()) > 1e-3


# ------------------------------------------------------------------------------------------- whole runs


def rows_of(folder: RunFolder) -> list[dict]:
    """Numbers alone; other names still tell a validation from a step."""
    return [{k: v for k, v in r.items() if k not in ("kind", "seconds", "ranks")} for r in folder.metrics()]


def assert_alike(found: RunFolder, wanted: RunFolder) -> None:
    """The same run but for rounding."""
    assert found.path.name == wanted.path.name
    assert found.status().step == wanted.status().step == STEPS
    for row, other in zip(rows_of(found), rows_of(wanted), strict=True):
        assert row == pytest.approx(other, rel=1e-5)
    measured, expected = found.probes(), wanted.probes()
    assert [(r["step"], r["module"], r["signal"], r["statistic"]) for r in measured] == [
        (r["step"], r["module"], r["signal"], r["statistic"]) for r in expected
    ]
    assert [r["value"] for r in measured] == pytest.approx([r["value"] for r in expected], rel=1e-3, abs=1e-6)


def whole_run(text, **machine):
    train = {"steps": STEPS, "grad_accum_steps": 2, "validate_every_steps": 10}
    config = tiny(replace(text, word_dropout=0.1), "admin", **train)
    optim = replace(config.optim, max_grad_norm=0.5)
    machine = replace(config.machine, probes="full", probe_every_steps=4, **machine)
    return replace(config, optim=optim, machine=machine)


@pytest.mark.slow
@pytest.mark.usefixtures("loopback")
def test_a_run_is_the_same_with_one_rank_two_and_two_sharded(text, tmp_path):
    config = whole_run(text)
    alone = finish(config, tmp_path / "alone", 1)
    for name, flags in (("DDP", ()), ("FSDP", ("--shard",))):
        spread = finish(config, tmp_path / name, 2, *flags)
        assert_alike(spread, alone)
        assert {row.get("ranks") for row in spread.metrics() if row["kind"] == "train"} == {2}
        assert ", 2 ranks" in spread.status().hardware
        assert spread.scores.exists()
        report = examine(spread.path, watched=2)
        assert report["replay"].get("agrees") is None, "one process rounds otherwise, and blames nobody"


STOPPING = """
import os, signal
from normlab.lab.training.trainer import Trainer

whole = Trainer.step

def step(self, *watch):
    record = whole(self, *watch)
    if self.progress.step == int(os.environ["STOP_AT"]) and self.ranks.index == self.ranks.count - 1:
        os.kill(os.getpid(), getattr(signal, os.environ["STOP_BY"]))
    return record

Trainer.step = step
"""
"""A signal for the last rank alone, after a step."""


def stop(words: list[str], root: Path, until: int, by: str = "SIGTERM") -> str:
    """Run a command whose last rank gets a signal after a step; return what it says on standard error."""
    (root / "stopping.py").write_text(STOPPING)
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    where = {"PYTHONPATH": path, "STOP_AT": str(until), "STOP_BY": by}
    stopped = subprocess.run(
        [*words, "--import", "stopping"],
        env=environment() | where,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert stopped.returncode != 0
    return stopped.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("loopback")
def test_a_run_goes_on_with_other_ranks_and_back(text, tmp_path):
    """Steps 1 to 6 alone, 7 to 12 on two ranks, 13 to 17 on two sharded ones, the rest alone."""
    config = whole_run(text, checkpoint_every_steps=3)
    wanted = finish(config, tmp_path / "whole", 1)
    root = tmp_path / "parts"
    for until, ranks, flags in ((6, 1, ()), (12, 2, ()), (17, 2, ("--shard",))):
        said = stop(command(config, root, ranks, *flags), root, until)
        status = folder_of(root).status()
        assert (status.state, status.step) == ("interrupted", until), said
    parts = finish(config, root, 1)
    assert_alike(parts, wanted)
    seen = [row.get("ranks", 1) for row in parts.metrics() if row["kind"] == "train"]
    assert [r for i, r in enumerate(seen) if not i or seen[i - 1] != r] == [1, 2, 1]


@pytest.mark.wide
@pytest.mark.usefixtures("loopback")
def test_a_rank_that_is_killed_takes_the_others_with_it(text, tmp_path):
    config = whole_run(text, checkpoint_every_steps=3)
    began = time.monotonic()
    stop(command(config, tmp_path, 2), tmp_path, 8, "SIGKILL")
    assert time.monotonic() - began < 60
    folder = folder_of(tmp_path)
    assert folder.status().state in ("interrupted", "failed")
    assert json.loads((folder.last / "state.json").read_text())["progress"]["step"] == 6
    assert_alike(finish(config, tmp_path, 2), finish(config, tmp_path / "whole", 1))


@pytest.mark.slow
@pytest.mark.usefixtures("loopback")
def test_what_the_ranks_cannot_do_is_said_at_once(text, tmp_path):
    words = command(tiny(text, steps=3), tmp_path, 2)
    refused = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120)
    assert re.search(r"grad_accum_steps .*1, .*\b2 processes\b", refused.stderr)
    words = [*words[: words.index("normlab") + 1], "compare"]
    refused = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120)
    for fact in ("torchrun", "2 processes", "normlab compare", "train"):
        assert fact in refused.stderr

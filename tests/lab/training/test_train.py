import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from lab.training.tiny import PowerCutError, tiny
from normlab.base.io import to_json
from normlab.errors import UserError
from normlab.lab.config import run_id
from normlab.lab.runs import RunBusyError, RunFolder, Status
from normlab.lab.tasks.translation import Translation
from normlab.lab.training import train as module
from normlab.lab.training.train import train
from normlab.lab.training.trainer import Trainer


def without_seconds(folder):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in folder.metrics()]


def files(folder):
    """Contents that must not depend on where a run was interrupted."""
    tensors = [path for kind in ("last", "best") for path in (folder.path / kind).glob("*.safetensors")]
    assert {"model.safetensors"} <= {path.name for path in tensors}
    kept = [*tensors, folder.path / "test.hyp.txt", folder.path / "scores.json"]
    return {str(path.relative_to(folder.path)): path.read_bytes() for path in kept}


def interrupt_at(monkeypatch, step):
    """Ctrl-C while that step is computed, once."""
    whole = Trainer.step
    left = [step]

    def interrupted(self, *watch):
        record = whole(self, *watch)
        if left and self.progress.step == left[0]:
            left.clear()
            os.kill(os.getpid(), signal.SIGINT)
        return record

    monkeypatch.setattr(Trainer, "step", interrupted)


# ------------------------------------------------------------------------------------------- it learns


@pytest.mark.slow
def test_a_run_learns_and_leaves_a_whole_folder(text, tmp_path):
    config = tiny(text, steps=60, validate_every_steps=30)
    rows = []
    folder = train(config, tmp_path, rows.append)
    assert rows == folder.metrics()
    learning = [row for row in rows if row["kind"] == "train"]
    dev = [row for row in rows if row["kind"] == "dev"]
    assert [row["step"] for row in learning] == [1, *range(2, 61, 2)]
    assert [row["step"] for row in dev] == [30, 60]
    assert learning[-1]["nll"] < learning[0]["nll"] - 1.5
    assert dev[1]["nll"] < dev[0]["nll"] < learning[0]["nll"]
    for name in ("tokens", "padded_tokens", "seconds"):
        counts = [row[name] for row in learning]
        assert counts == sorted(counts)
    assert all(row["tokens"] < row["padded_tokens"] for row in learning)
    assert all(row["loss"] > row["nll"] for row in learning[-5:]), "label smoothing costs something"

    filled = replace(config, data=replace(text, digest=folder.config().data.digest))
    assert folder.path == tmp_path / run_id(filled)
    assert folder.config() == filled
    status = folder.status()
    assert (status.state, status.step, status.error) == ("done", 60, "")
    best = max(dev, key=lambda row: (row["bleu"], -row["nll"]))
    assert (status.best_step, status.best_dev) == (
        best["step"],
        {name: best[name] for name in ("nll", "bleu", "nll_exchanged", "repeated_share")},
    )
    assert status.outcome is not None
    assert (status.outcome.state, status.outcome.step) == ("ignores its source", 60), "it has barely begun"
    assert status.train_seconds >= rows[-1]["seconds"]
    assert status.hardware
    assert len(folder.outputs.read_text().splitlines()) == 30
    assert json.loads(folder.scores.read_text())["signatures"]["bleu"].startswith("nrefs:1")


@pytest.mark.slow
def test_the_same_run_is_never_done_twice_and_the_data_is_prepared_once(text, tmp_path, monkeypatch):
    first = train(tiny(text), tmp_path)
    before = {p: p.stat().st_mtime_ns for p in first.path.rglob("*")}
    monkeypatch.setattr(module, "Run", lambda *args: pytest.fail("trained again"))
    elsewhere = replace(tiny(text, "pre+layernorm"), machine=replace(tiny(text).machine, log_every_steps=3))
    assert train(elsewhere, tmp_path).path == first.path, "another name and cadence, the same numbers"
    assert {p: p.stat().st_mtime_ns for p in first.path.rglob("*")} == before
    monkeypatch.undo()
    other = train(tiny(text, lr=1e-3), tmp_path)
    assert other.path != first.path
    assert len(list((tmp_path / "data").iterdir())) == 1


@pytest.mark.slow
def test_checkpoints_keep_the_best_and_the_last(text, tmp_path, monkeypatch):
    bleus = iter([1.0, 3.0, 2.0])
    monkeypatch.setattr(Translation, "dev_bleu", lambda self, model: next(bleus))
    folder = train(tiny(text, steps=6, validate_every_steps=2), tmp_path)
    assert json.loads((folder.best / "state.json").read_text())["progress"]["step"] == 4
    assert json.loads((folder.last / "state.json").read_text())["progress"]["step"] == 6
    best, last = (load_file(f / "model.safetensors") for f in (folder.best, folder.last))
    assert any(not torch.equal(best[name], last[name]) for name in best)
    assert not (folder.best / "optimizer.safetensors").exists()
    assert folder.status().best_dev["bleu"] == 3.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("best_by", "bleus", "nlls", "best"),
    [
        ("bleu", [1.0, 1.0, 1.0], [3.0, 2.0, 2.5], 4),
        ("nll", [1.0, 3.0, 2.0], [3.0, 2.0, 1.5], 6),
        ("nll", [1.0, 3.0, 2.0], [3.0, 2.0, 2.0], 4),
    ],
)
def test_which_checkpoint_is_best(text, tmp_path, monkeypatch, best_by, bleus, nlls, best):
    scores, losses = iter(bleus), iter(nlls)
    monkeypatch.setattr(Translation, "dev_bleu", lambda self, model: next(scores))
    monkeypatch.setattr(Translation, "dev_nlls", lambda self, model: (next(losses), 1.0))
    folder = train(tiny(text, steps=6, validate_every_steps=2, best_by=best_by), tmp_path)
    assert folder.status().best_step == best


# ---------------------------------------------------------------------------------- interrupt and resume


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grad_accum_steps", "precision", "step"), [(1, "fp32", 5), (2, "bf16", 11), (1, "fp32", 12)]
)
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
    text, tmp_path, monkeypatch, grad_accum_steps, precision, step
):
    data = replace(text, word_dropout=0.1)
    config = tiny(
        data, "admin+warmup", grad_accum_steps=grad_accum_steps, precision=precision, max_tokens=300
    )
    machine = replace(config.machine, log_every_steps=4, probes="standard", probe_every_steps=1)
    config = replace(config, machine=machine)
    whole = train(config, tmp_path / "whole")

    interrupt_at(monkeypatch, step)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts")
    parts = RunFolder(tmp_path / "parts" / whole.path.name)
    assert (parts.status().state, parts.status().step) == ("interrupted", step)
    assert not parts.outputs.exists()
    train(config, tmp_path / "parts")

    assert without_seconds(parts) == without_seconds(whole)
    assert files(parts) == files(whole)
    assert parts.probes() == whole.probes(), "in the same order, too"
    assert replace(parts.status(), train_seconds=0.0) == replace(whole.status(), train_seconds=0.0)


def test_the_configuration_is_the_last_that_a_new_folder_is_given(text, tmp_path, monkeypatch):
    """A folder without it, of a run that was killed, is given everything again."""
    create, there = RunFolder.create, []

    def noted(path, *parts):
        there.append({p.name for p in path.iterdir()})
        return create(path, *parts)

    monkeypatch.setattr(RunFolder, "create", noted)
    train(tiny(text, steps=2), tmp_path)
    assert there[0] >= {"tokenizer.json", "target_vocab.npy"}


def test_a_killed_run_goes_on_from_its_last_checkpoint(text, tmp_path):
    """Rows after the checkpoint are written anew; a torn last line does not matter."""
    config = tiny(text)
    config = replace(config, machine=replace(config.machine, checkpoint_every_steps=5))
    whole = train(config, tmp_path / "whole")

    def cut(row):
        if row["step"] == 8:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        train(config, tmp_path / "parts", cut)
    parts = RunFolder(tmp_path / "parts" / whole.path.name)
    assert parts.status().state == "interrupted", "nobody is in it any more"
    assert parts.metrics()[-1]["step"] == 8
    with (parts.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')
    again = []
    train(config, tmp_path / "parts", again.append)
    assert again[0]["step"] == 6, "from the checkpoint of step 5"
    assert without_seconds(parts) == without_seconds(whole)
    assert files(parts) == files(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", [".", "config.json"])
def test_a_folder_that_is_removed_during_training_is_said_and_trained_anew(text, tmp_path, name):
    config = tiny(text, validate_every_steps=3)

    def remove(row):
        for config_file in tmp_path.glob("*/config.json"):
            shutil.rmtree(config_file.parent) if name == "." else config_file.unlink()

    with pytest.raises(UserError, match=r"config\.json was removed") as refusal:
        train(config, tmp_path, remove)
    (rest,) = (path for path in tmp_path.glob("*/") if path.name != "data") if name != "." else (None,)
    assert (f"-r {rest}" in str(refusal.value)) == (name != ".")
    assert [path.name for path in tmp_path.glob("*/best")] == []
    folder = train(config, tmp_path)
    assert files(folder) == files(train(config, tmp_path / "undisturbed"))


@pytest.mark.slow
def test_a_folder_with_checkpoints_and_no_configuration_is_not_touched(text, tmp_path):
    folder = train(tiny(text), tmp_path)
    (folder.path / "config.json").unlink()
    before = sorted(folder.path.rglob("*"))
    with pytest.raises(UserError, match=f"-r {folder.path};"):
        train(tiny(text), tmp_path)
    assert [path for path in sorted(folder.path.rglob("*")) if path.name != "lock"] == [
        path for path in before if path.name != "lock"
    ]


@pytest.mark.slow
def test_a_run_that_lost_its_scores_is_scored_again(text, tmp_path, monkeypatch):
    config = tiny(text, average_last=2)
    folder = train(config, tmp_path)
    before, status = files(folder), folder.status()
    folder.scores.unlink()
    shutil.rmtree(folder.last)
    monkeypatch.setattr(Trainer, "step", lambda *given: pytest.fail("it is trained already"))
    train(config, tmp_path)
    assert folder.scores.read_bytes() == before["scores.json"]
    assert folder.status() == status
    folder.scores.unlink()
    shutil.rmtree(folder.best)
    with pytest.raises(UserError, match=r"scores\.json.*train --config"):
        train(config, tmp_path)
    assert folder.status() == status


@pytest.mark.slow
def test_a_run_killed_while_it_translates_trains_no_further(text, tmp_path, monkeypatch):
    config = tiny(text, steps=60, lr=300.0)

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "score_test", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path)
    monkeypatch.undo()
    (folder,) = (RunFolder(p.parent) for p in tmp_path.glob("*/config.json"))
    stopped = folder.status()
    assert stopped.state == "interrupted"
    assert stopped.step < 60
    rows = folder.metrics()
    train(config, tmp_path, lambda row: pytest.fail("it had been stopped early"))
    assert folder.metrics() == rows
    assert replace(folder.status(), train_seconds=0) == replace(stopped, state="done", train_seconds=0)


@pytest.mark.slow
def test_a_second_process_in_the_same_run_is_told(text, tmp_path):
    folder = train(tiny(text), tmp_path)
    folder.set_status(Status("interrupted"))
    with folder.lock(), pytest.raises(RunBusyError, match=folder.path.name):
        train(tiny(text), tmp_path)


@pytest.mark.slow
def test_learning_rates_follow_the_schedule(text, tmp_path):
    config = tiny(text, "pre+warmup", steps=8, lr=0.008)
    config = replace(config, machine=replace(config.machine, log_every_steps=1))
    rates = [row["lr"] for row in train(config, tmp_path).metrics() if row["kind"] == "train"]
    assert rates == pytest.approx([0.002, 0.004, 0.006, *[0.008] * 5])


# ----------------------------------------------------------------------------------- stopping and failing


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "evidence"), [(300.0, "above the"), (1e38, "is (nan|inf)")])
def test_a_diverging_run_is_stopped_and_says_why(text, tmp_path, lr, evidence):
    folder = train(tiny(text, steps=100, lr=lr), tmp_path)
    status = folder.status()
    assert (status.state, status.outcome.state) == ("done", "diverged")
    assert status.step == status.outcome.step < 100
    assert re.search(evidence, status.outcome.evidence)
    assert status.best_step is not None, "a stopped run is validated, so that it can be compared"
    assert json.loads(folder.scores.read_text())["bleu"] < 5
    assert len(folder.outputs.read_text().splitlines()) == 30


@pytest.mark.slow
def test_a_diverging_run_goes_to_its_end_when_asked_to(text, tmp_path):
    folder = train(tiny(text, steps=30, lr=300.0, stop_early=False), tmp_path)
    assert folder.status().step == 30
    assert folder.status().outcome.state == "diverged"


@pytest.mark.slow
def test_a_stuck_run_is_stopped_half_way(text, tmp_path):
    folder = train(tiny(text, steps=40, lr=1e-7), tmp_path)
    status = folder.status()
    assert status.outcome.state == "stuck"
    assert 20 <= status.step < 40


@pytest.mark.slow
@pytest.mark.parametrize("place", ["loss", "build"])
def test_a_failed_run_is_recorded_and_can_be_tried_again(text, tmp_path, monkeypatch, place):
    def broken(self, *args):
        raise error

    error = RuntimeError("out of memory")
    monkeypatch.setattr(Translation, place, broken)
    with pytest.raises(RuntimeError) as raised:
        train(tiny(text), tmp_path)
    assert raised.value is error
    (folder,) = (RunFolder(p.parent) for p in tmp_path.glob("*/config.json"))
    assert folder.status().state == "failed"
    assert folder.status().error == "RuntimeError: out of memory"
    monkeypatch.undo()
    train(tiny(text), tmp_path)
    assert (folder.status().state, folder.status().error) == ("done", "")


# ----------------------------------------------------------------------------------------------- Ctrl-C


def test_the_second_ctrl_c_is_at_once(text, tmp_path, monkeypatch):
    steps = []

    def hit(self, *watch):
        self.progress.step += 1
        steps.append(self.progress.step)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "step", hit)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(text), tmp_path)
    assert steps == [1]
    assert signal.getsignal(signal.SIGINT) is before
    (folder,) = (RunFolder(p.parent) for p in tmp_path.glob("*/config.json"))
    assert folder.status().state == "interrupted"


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_saves_and_says_how_to_go_on(text, tmp_path):
    config = tiny(text, steps=100_000, validate_every_steps=50_000)
    (tmp_path / "mine.json").write_text(to_json(config))
    code = "import sys; from normlab.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "train", "--config", "mine.json", "--out", "runs"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 60
        while process.poll() is None and not any(
            '"train"' in path.read_text() for path in tmp_path.glob("runs/*/metrics.jsonl")
        ):
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "same command" in said
    (folder,) = (RunFolder(p.parent) for p in tmp_path.glob("runs/*/config.json"))
    status = folder.status()
    assert status.state == "interrupted"
    assert status.step >= 1
    assert json.loads((folder.last / "state.json").read_text())["progress"]["step"] == status.step

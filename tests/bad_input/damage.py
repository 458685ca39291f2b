"""Ways in which a run's folder is damaged, edited or mixed up, each with the facts of the answer."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bad_input.cases import TRAIN_ANEW
from bad_input.prompt import GOOD
from normlab.base.files import read_json, write_json_atomic
from normlab.lab.data.tokenizer import BytePairs
from normlab.lab.runs import manifest
from normlab.lab.runs.manifest import commit, read_state

Damage = Callable[[Path], object]
TRANSLATE = ["run", "translate", "{run}", "dev_src.txt"]


def content(name: str, text: str | bytes) -> Damage:
    """The file holds something else."""
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def before(name: str, line: str) -> Damage:
    """A line stands before all others."""
    return lambda folder: (folder / name).write_text(line + "\n" + (folder / name).read_text())


def cut(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-10])


def gone(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def edited(name: str, edit: Callable[[dict[str, Tensor]], object]) -> Damage:
    """Somebody changed the tensors of a file."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / name)
        edit(tensors)
        save_file(tensors, folder / name)

    return damage


def changed(name: str) -> Damage:
    """One bit of the last number is flipped: it is still a number."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[-3] ^= 1
        (folder / name).write_bytes(content)

    return damage


def recommitted(damage: Damage) -> Damage:
    """Do the damage and write a valid manifest for it: the content is checked, too."""

    def both(folder: Path) -> None:
        damage(folder)
        for path in folder.glob("*/state.json"):
            write_again(path)

    return both


def write_again(path: Path, **changed: dict[str, object]) -> None:
    """Write a ``state.json`` for the files that lie beside it now, in which fields of some parts are others;
    None takes a field out.
    """
    state = json.loads(path.read_text())
    run = state.pop("manifest")["run"]
    for part, fields in changed.items():
        content = state.get(part, {}) | fields
        state[part] = {k: v for k, v in content.items() if v is not None}
    path.unlink()
    manifest._write_state(path.parent, state, run)


def states(**changed: dict[str, object]) -> Damage:
    """The last checkpoint's state says something else; None takes a field out."""
    return lambda folder: write_again(folder / STATE, **changed)


def without(part: str) -> Damage:
    """The last checkpoint's state has a null in place of a part."""

    def damage(folder: Path) -> None:
        state = json.loads((folder / STATE).read_text())
        (folder / STATE).write_text(json.dumps(state | {part: None}))
        write_again(folder / STATE)

    return damage


def foreign(name: str) -> Damage:
    """A whole checkpoint that another run wrote."""

    def damage(folder: Path) -> None:
        kept = folder / name
        state = read_state(kept)
        with commit(kept, state, run="0123456789ab") as new:
            for path in kept.glob("*.safetensors"):
                shutil.copy(path, new)

    return damage


def counted(folder: Path) -> None:
    """Somebody changed a number of the state."""
    content = json.loads((folder / STATE).read_text())
    content["progress"]["tokens"] += 1
    (folder / STATE).write_text(json.dumps(content))


class Payload:
    """Makes a file, ``executed``, when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(Path("executed").resolve()), "w")


def pickled(name: str) -> Damage:
    """A file that executes code where it is loaded as PyTorch can load files."""
    return lambda folder: torch.save({"a": Payload()}, folder / name)


EDITED = "was edited: it no longer has the SHA-256 that state.json gives"
SHORT = "is shorter than it was written: cut off, or another file"
MODEL, ADAM, STATE = "last/model.safetensors", "last/optimizer.safetensors", "last/state.json"
BEST = "best/model.safetensors"
FIRST = "decoder.end.bias"
DAMAGED: dict[str, tuple[list[str], Damage, str]] = {
    "status is no JSON": (
        GOOD,
        content("status.json", "{"),
        "{run}/status.json | not JSON | line 1 | column 2",
    ),
    "status is a list": (GOOD, content("status.json", "[]"), "{run}/status.json | an object | []"),
    "status of an unknown state": (
        GOOD,
        content("status.json", '{"state": "dnoe"}'),
        "{run}/status.json | state | interrupted | did you mean 'done' | 'dnoe'",
    ),
    "metrics with a damaged line": (
        GOOD,
        before("metrics.jsonl", "rubbish"),
        "{run}/metrics.jsonl | damaged | line 1",
    ),
    "metrics with a line that is no object": (
        GOOD,
        before("metrics.jsonl", "[1]"),
        "{run}/metrics.jsonl | damaged | line 1",
    ),
    "metrics with a line without its step": (
        GOOD,
        before("metrics.jsonl", '{"loss": 1}'),
        "{run}/metrics.jsonl | damaged | line 1",
    ),
    "weights cut off": (GOOD, cut(MODEL), f"{{run}}/last/model.safetensors | shorter | {TRAIN_ANEW}"),
    "weights with a number edited": (
        GOOD,
        changed(MODEL),
        f"{{run}}/last/model.safetensors | edited | SHA-256 | state.json | {TRAIN_ANEW}",
    ),
    "weights that are missing": (
        GOOD,
        gone(MODEL),
        f"{{run}}/last/model.safetensors | missing | {TRAIN_ANEW}",
    ),
    "moments with a number edited": (
        GOOD,
        changed(ADAM),
        f"{{run}}/last/optimizer.safetensors | edited | SHA-256 | state.json | {TRAIN_ANEW}",
    ),
    "moments that are a pickle": (
        GOOD,
        pickled(ADAM),
        f"{{run}}/last/optimizer.safetensors | shorter | {TRAIN_ANEW}",
    ),
    "a checkpoint of another run": (
        GOOD,
        foreign("last"),
        f"{{run}}/last | 0123456789ab | {{id}} | {TRAIN_ANEW}",
    ),
    "state with a number edited": (
        GOOD,
        counted,
        f"{{run}}/last/state.json | edited | SHA-256 | {TRAIN_ANEW}",
    ),
    "state that is missing": (GOOD, gone(STATE), f"{{run}}/last/state.json | missing | {TRAIN_ANEW}"),
    "old weights cut off": (
        GOOD,
        recommitted(cut(MODEL)),
        f"{{run}}/last/model.safetensors | damaged | {TRAIN_ANEW}",
    ),
    "old weights of nothing": (
        GOOD,
        recommitted(content(MODEL, b"")),
        f"{{run}}/last/model.safetensors | damaged | {TRAIN_ANEW}",
    ),
    "old weights that are a pickle": (
        GOOD,
        recommitted(pickled(MODEL)),
        f"{{run}}/last/model.safetensors | damaged | {TRAIN_ANEW}",
    ),
    "weights with a tensor less": (
        GOOD,
        recommitted(edited(MODEL, lambda tensors: tensors.pop(FIRST))),
        "{run}/last | another model | decoder.end.bias | config.json | tokenizer.json",
    ),
    "weights of another width": (
        GOOD,
        recommitted(edited(MODEL, lambda tensors: tensors.update({FIRST: torch.zeros(8)}))),
        "{run}/last | decoder.end.bias | [8] | [16] | config.json | tokenizer.json",
    ),
    "no optimizer": (
        GOOD,
        recommitted(gone(ADAM)),
        f"{{run}}/last/optimizer.safetensors | missing | {TRAIN_ANEW}",
    ),
    "optimizer of another model": (
        GOOD,
        recommitted(edited(ADAM, lambda tensors: tensors.update({"foo/step": torch.zeros(1)}))),
        f"{{run}}/last/optimizer.safetensors | another model | foo/step | {TRAIN_ANEW}",
    ),
    "optimizer of another width": (
        GOOD,
        recommitted(edited(ADAM, lambda tensors: tensors.update({f"{FIRST}/exp_avg": torch.zeros(3)}))),
        f"{{run}}/last/optimizer.safetensors | another model | decoder.end.bias/exp_avg | {TRAIN_ANEW}",
    ),
    "optimizer with a tensor less": (
        GOOD,
        recommitted(edited(ADAM, lambda tensors: tensors.pop(f"{FIRST}/exp_avg"))),
        f"{{run}}/last/optimizer.safetensors | damaged | decoder.end.bias | exp_avg | {TRAIN_ANEW}",
    ),
    "state cut off": (
        GOOD,
        content(STATE, '{"step": 4'),
        f"{{run}}/last/state.json | damaged | ',' | line 1 | column 11 | {TRAIN_ANEW}",
    ),
    "state without an optimizer's tensors": (
        GOOD,
        recommitted(edited(ADAM, lambda tensors: tensors.clear())),
        f"{{run}}/last/state.json | optimizer's tensors | 4 steps | {TRAIN_ANEW}",
    ),
    "weights that are whole numbers": (
        GOOD,
        recommitted(edited(MODEL, lambda tensors: tensors.update({FIRST: tensors[FIRST].to(torch.int8)}))),
        "{run}/last | decoder.end.bias | int8 | floating-point | config.json",
    ),
    "state of more steps than the run": (
        GOOD,
        states(progress={"step": 5}),
        f"{{run}}/last/state.json | progress.step is 5 | 4 steps | {TRAIN_ANEW}",
    ),
    "state whose progress is none": (
        ["run", "translate", "{run}", "dev_src.txt", "--weights", "last"],
        without("progress"),
        f"{{run}}/last/state.json | progress | None | {TRAIN_ANEW}",
    ),
    "best weights that are not finite": (
        TRANSLATE,
        recommitted(edited(BEST, lambda tensors: tensors[FIRST][:2].fill_(math.nan))),
        "2 values of decoder.end.bias | {run}/best | not a number | --weights | --step",
    ),
    "state that is a list": (GOOD, content(STATE, "[]"), f"{{run}}/last/state.json | damaged | {TRAIN_ANEW}"),
    "state without a step": (
        GOOD,
        states(progress={"step": None}),
        f"{{run}}/last/state.json | step is missing | {TRAIN_ANEW}",
    ),
    "state of another type": (
        GOOD,
        states(progress={"step": "four"}),
        f"{{run}}/last/state.json | a whole number | 'four' | {TRAIN_ANEW}",
    ),
    "state with an unknown key": (
        GOOD,
        states(progress={"tokns": 3}),
        f"{{run}}/last/state.json | unknown key 'progress.tokns' | did you mean 'tokens' | {TRAIN_ANEW}",
    ),
    "state with steps that are none": (
        GOOD,
        states(rows={"pending": [[1]]}),
        f"{{run}}/last/state.json | pending[0] lacks [1] | {TRAIN_ANEW}",
    ),
    "state without a step, diagnosed": (
        ["diagnose", "{run}", "--checkpoints", "last"],
        states(progress={"step": None}),
        f"{{run}}/last/state.json | step is missing | {TRAIN_ANEW}",
    ),
    "best weights without a step": (
        ["run", "translate", "{run}", "dev_src.txt", "--weights", "best"],
        lambda folder: write_again(folder / "best/state.json", progress={"step": None}),
        f"{{run}}/best/state.json | step is missing | {TRAIN_ANEW}",
    ),
    "best weights that are none": (
        TRANSLATE,
        content(BEST, b"abc"),
        f"{{run}}/best/model.safetensors | shorter | {TRAIN_ANEW}",
    ),
    "best weights with a number edited": (
        TRANSLATE,
        changed(BEST),
        f"{{run}}/best/model.safetensors | edited | SHA-256 | state.json | {TRAIN_ANEW}",
    ),
    "best weights that are a pickle": (
        TRANSLATE,
        pickled(BEST),
        f"{{run}}/best/model.safetensors | shorter | {TRAIN_ANEW}",
    ),
    "best weights of another run": (
        TRANSLATE,
        foreign("best"),
        f"{{run}}/best | 0123456789ab | {{id}} | {TRAIN_ANEW}",
    ),
    "best weights that are edited, diagnosed": (
        ["diagnose", "{run}", "--checkpoints", "best"],
        changed(BEST),
        f"{{run}}/best/model.safetensors | edited | SHA-256 | state.json | {TRAIN_ANEW}",
    ),
    "the last weights of another run, diagnosed": (
        ["diagnose", "{run}", "--checkpoints", "last"],
        foreign("last"),
        f"{{run}}/last | 0123456789ab | {{id}} | {TRAIN_ANEW}",
    ),
    "best weights that are missing": (
        TRANSLATE,
        gone(BEST),
        f"{{run}}/best/model.safetensors | missing | {TRAIN_ANEW}",
    ),
    "no best weights": (
        TRANSLATE,
        lambda folder: shutil.rmtree(folder / "best"),
        "no checkpoint | 'best' | normlab train --config {run}/config.json",
    ),
    "a vocabulary that does not match": (
        TRANSLATE,
        lambda folder: BytePairs.train(["a b c d e"], 60).save(folder / "tokenizer.json"),
        "{run}/best | embedding.weight | [100, 16] | [15, 16] | config.json | tokenizer.json",
    ),
    "a vocabulary that is none": (
        TRANSLATE,
        content("tokenizer.json", "{"),
        "{run}/tokenizer.json | not a tokenizer | line 1 | bring back",
    ),
    "a run's configuration that was edited": (
        TRANSLATE,
        content("config.json", '{"config": {"modle": 1}}'),
        "{run}/config.json | unknown | 'modle' | did you mean | 'model'",
    ),
    "metrics of another type in the configuration": (
        ["run", "report", "{run}"],
        lambda folder: write_json_atomic(
            folder / "config.json", read_json(folder / "config.json") | {"metrics": "bleu"}
        ),
        "{run}/config.json | metrics | must be a list | 'bleu'",
    ),
    "output into a folder that is not there": (
        [*TRANSLATE, "--output", "no/such.txt"],
        lambda folder: None,
        "--output | not a folder | mkdir -p no",
    ),
}
"""A command, the damage done to the run's folder before it, and the facts of the answer."""

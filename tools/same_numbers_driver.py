"""Runs the configurations of one job with the normlab of one commit; ``tools/same_numbers.py`` starts it.

    PYTHONPATH=<checkout>/src python tools/same_numbers_driver.py FOLDER

``FOLDER/job.json`` says what to run, and where modules, fields and files of normlab are: the driver knows
none by name. ``FOLDER/<configuration>`` then holds the result: ``tables.json``, tables of rows by name, and
files of weights; or ``error.txt``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import same_numbers_foreign as foreign
from same_numbers_text import PAIRS, written

BATCH_TOKENS: Final = 256
PRESET: Final = "full"
TABLES: Final = "tables.json"
ERROR: Final = "error.txt"
STATUS: Final = ("step", "best_step", "outcome.state", "outcome.step")
"""The parts of a run's status that are compared."""
REQUIRED: Final = ("metrics", "scores", "last.model", "best.model")
"""Every run has these; without the check, two commits whose files are not found would look identical."""
REQUIRED_OF_WATCH: Final = ("watch", "watch.flight")
WARMUP: Final = "+warmup"
NUMBER: Final = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")
Row = dict[str, Any]
Tables = dict[str, list[Row]]


class Driver:
    """Trains and diagnoses with the normlab that this process imports."""

    def __init__(self, job: Mapping[str, Any], runs: Path, text: Path) -> None:
        self.homes, self.files = job["homes"], job["files"]
        self.older, self.configurations = job["fields"], job["configurations"]
        self.runs = runs
        self.text = written(self.home("generate")("mixed-de-en", pairs=PAIRS, seed=0), text)
        self._folders: dict[str, Path] = {}

    def give(self, name: str, out: Path) -> Tables:
        """The tables of one configuration; files of weights go to ``out``."""
        spec = self.configurations[name]
        return {
            "Training": lambda: collected(self.trained(name), self.files, out),
            "Starts": lambda: self.started(spec, out),
            "DiagnosisOf": lambda: self.diagnosed(spec),
            "Watched": lambda: self.watched(spec, out),
            "Identities": lambda: self.identities(spec),
        }[spec["kind"]]()

    def trained(self, name: str) -> Path:
        """The run folder of a training, which is done once."""
        if name not in self._folders:
            spec = self.configurations[name]
            source = {"train.init_from": str(self.trained(spec["init_from"]))} if spec["init_from"] else {}
            config = self.config(spec["recipe"], spec["fields"] | source)
            self._folders[name] = Path(self.home("train")(config, self.runs).path)
        return self._folders[name]

    def started(self, spec: Mapping[str, Any], out: Path) -> Tables:
        """Weights at the start, and logits and gradients of one batch, of some recipes: no table."""
        import torch
        from safetensors.torch import save_file

        torch.set_num_threads(1)
        kind, ids = self.home(spec["model"]), torch.arange(2, 34).reshape(2, 16)
        for recipe in spec["recipes"]:
            config = self.config(recipe, spec["fields"])
            model = self.home("build")(kind, config.model, 40, seed=1).eval()
            given = model(ids, ids.flip(1)) if config.model.decoder_layers else model(ids)
            logits = given if isinstance(given, torch.Tensor) else given[0]
            logits.square().mean().backward()
            tensors = {"logits": logits.detach().contiguous()}
            for name, weight in model.named_parameters():
                tensors[name] = weight.detach()
                if weight.grad is not None:
                    tensors[f"{name}.grad"] = weight.grad
            save_file(tensors, out / f"{recipe.replace('/', '-')}.safetensors")
        return {}

    def diagnosed(self, spec: Mapping[str, Any]) -> Tables:
        """What was measured, which studies applied, the findings, and what was read of a foreign model."""
        diagnosis, tables = self.of_ours(spec) if spec["recipe"] else self.of_foreign(spec)
        applied = set(diagnosis.applied)
        tables |= {f"study.{one.name}": [{"applied": one.name in applied}] for one in diagnosis.studies}
        tables |= {name: [dict(row) for row in rows] for name, rows in diagnosis.tables.items()}
        tables["findings"] = [
            {"name": f.name, "severity": f.severity, "table": f.table, **f.numbers}
            for f in diagnosis.findings
        ]
        return {
            name: [{column: without_prose(value) for column, value in row.items()} for row in rows]
            for name, rows in tables.items()
        }

    def of_ours(self, spec: Mapping[str, Any]) -> tuple[Any, Tables]:
        """A diagnosis of a recipe at its start."""
        config = self.config(spec["recipe"], spec["fields"])
        case = self.home("case")(config, self.runs, tokens=BATCH_TOKENS)
        return self.home("diagnosed")(case, PRESET), {}

    def of_foreign(self, spec: Mapping[str, Any]) -> tuple[Any, Tables]:
        """A diagnosis of a foreign model on a fixed batch, and its residual stream as it is read."""
        one, tables = foreign.made(spec["model"]), Tables()
        read = self.home("read_structure")(one.model, one.batch)
        for table, content in foreign.structure_rows(read):
            tables.setdefault(table, []).append(dict(flat(content)))
        diagnose = self.home("diagnose")
        shuffle_generators()
        return diagnose(one.model, one.batch, loss=one.loss, lr=1e-3, preset=PRESET), tables

    def watched(self, spec: Mapping[str, Any], out: Path) -> Tables:
        """Rows and reports of a watched loop, its losses and the weights at its end."""
        one = foreign.made(spec["model"])
        with tempfile.TemporaryDirectory() as folder:
            options = {"out": folder, "every_steps": spec["every_steps"], "probes": spec["probes"]}
            losses = foreign.train_watched(one, self.home("watch"), spec["lrs"], **options)
            tables = collected(Path(folder), self.files, out, REQUIRED_OF_WATCH)
        foreign.save_weights(one.model, out / "last.model.safetensors")
        return {**tables, "losses": [{"step": i, "loss": loss} for i, loss in enumerate(losses)]}

    def identities(self, spec: Mapping[str, Any]) -> Tables:
        """The run ids of presets, also with the warm-up that their recipe may leave out, and of the papers'
        cells, and the effects of the findings, in tables of one row with a column for each of these.
        """
        artefacts = self.home("artefacts")
        presets = Row()
        for name, make in self.home("presets").items():
            config = make()
            recipes = dict.fromkeys((config.recipe, f"{config.recipe.removesuffix(WARMUP)}{WARMUP}"))
            presets |= {f"{name} {recipe}": self.run_id(recipe, config) for recipe in recipes}
        tables: Tables = {"run_ids": [presets], "effects": [self.effects()]}
        for scale in spec["scales"]:
            trained = {
                name: one.trainings[scale] for name, one in artefacts.items() if scale in one.trainings
            }
            first = {
                f"{name} {cell}": config
                for name, trainings in trained.items()
                for cell, _, config in reversed(list(trainings.configs()))
            }
            cells = {cell: self.run_id(config.recipe, config) for cell, config in first.items()}
            tables[f"run_ids.{scale}"] = [cells]
        return tables

    def effects(self) -> Row:
        """The value of each effect that counts for a finding."""
        book, values = self.home("read_book")(), Row()
        for id_, finding in self.home("findings")().items():
            for place, piece in enumerate(self.home("reviewed")(finding, book).evidence):
                values[f"{id_} {place}"] = piece.estimate.value
        return values

    def run_id(self, recipe: str, config: Any) -> str:
        """The id of a recipe on a configuration, in float32 where its machine would choose."""
        if config.train.precision == "auto":
            config = configured(config, {"train.precision": "fp32"}, self.older)
        return self.home("run_id")(self.home("resolve")(recipe, config, force=True))

    def home(self, what: str) -> Any:
        """A function, class or registry of normlab, from the first of its places that there is.

        Raises LookupError where there is none, and what its module raises when it cannot be imported.
        """
        for place in self.homes[what]:
            module, _, attribute = place.partition(":")
            try:
                found: Any = import_module(module)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                    raise
                continue
            for part in attribute.split("."):
                found = getattr(found, part, None)
            if callable(found) or isinstance(found, Mapping):  # a module is neither
                return found
        raise LookupError(
            f"{what!r} is in none of {', '.join(self.homes[what])}; add its new place to RENAMES"
        )

    def config(self, recipe: str, wanted: Mapping[str, Any]) -> Any:
        """The resolved configuration with these fields."""
        kind = wanted.get("task", "translation")
        default, fields = self.home("Config")(), {**wanted, **self.text[kind]}
        return self.home("resolve")(recipe, configured(default, fields, self.older))


def configured(default: Any, wanted: Mapping[str, Any], older: Mapping[str, list[str]]) -> Any:
    """A dataclass of dataclasses with fields at dotted paths changed, each under the first of its names that
    there is.

    Raises LookupError for a field with none of its names there.
    """
    known, placed = set(paths(default)), dict[str, Any]()
    for path, value in wanted.items():
        names = [name for name in (path, *older.get(path, ())) if name in known]
        if not names:
            tried = ", ".join((path, *older.get(path, ())))
            raise LookupError(f"no field {tried} in {type(default).__name__}; add its name there to RENAMES")
        placed[names[0]] = value
    return _filled(default, placed)


def paths(section: Any) -> Iterator[str]:
    """Dotted paths of the fields that are no dataclasses."""
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        inner = paths(value) if dataclasses.is_dataclass(value) else ("",)
        yield from (f"{f.name}.{path}".rstrip(".") for path in inner)


def _filled(section: Any, placed: Mapping[str, Any]) -> Any:
    changes: dict[str, Any] = {}
    for f in dataclasses.fields(section):
        inside = {p.partition(".")[2]: v for p, v in placed.items() if p.partition(".")[0] == f.name}
        if "" in inside:
            changes[f.name] = inside[""]
        elif inside:
            changes[f.name] = _filled(getattr(section, f.name), inside)
    return dataclasses.replace(section, **changes)


def collected(
    folder: Path, files: Mapping[str, list[str]], out: Path, required: Collection[str] = REQUIRED
) -> Tables:
    """The tables of a run folder's files, each under the first of its names; files of weights are copied.

    Raises LookupError where a file that every such folder has is not found.
    """
    tables: Tables = {}
    for name, places in files.items():
        path = next((folder / place for place in places if (folder / place).exists()), None)
        if path is None and name in required:
            raise LookupError(f"no {' or '.join(places)} in the folder; add the new name to RENAMES")
        if path is None:
            continue
        if path.suffix == ".safetensors":
            shutil.copy(path, out / f"{name}.safetensors")
        else:
            for table, row in _rows(name, path.read_text(encoding="utf-8"), path.suffix):
                tables.setdefault(table, []).append(row)
    return tables


def _rows(name: str, text: str, suffix: str) -> Iterator[tuple[str, Row]]:
    """Table and row of everything in a file."""
    if suffix == ".txt":
        yield from ((name, {"line": line}) for line in text.split("\n"))
    elif suffix == ".json":
        leaves = dict(flat(json.loads(text)))
        kept = STATUS if name == "status" else [key for key in leaves if not _is_prose(leaves[key])]
        yield name, {key: leaves.get(key) for key in kept}
    else:
        rows = [json.loads(line) for line in text.splitlines()]
        if name == "probes":  # names of probes change, their values do not
            rows = [{"step": row["step"], "value": row["value"]} for row in rows]
            rows.sort(key=lambda row: (row["step"], str(row["value"])))
        yield from ((f"{name}.{row['kind']}" if "kind" in row else name, row) for row in rows)


def without_prose(value: Any) -> Any:
    """A sentence's numbers alone, since its words may improve; any other value as it is."""
    return " ".join(NUMBER.findall(value)) if _is_prose(value) else value


def _is_prose(value: Any) -> bool:
    return isinstance(value, str) and " " in value


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything in nested dicts and lists that is neither."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def shuffle_generators() -> None:
    """Put the global generators of random numbers into an unknown state: what is drawn from them without a
    seed then differs between any two runs, so that no code that draws so is identical to itself.
    """
    import numpy as np
    import torch

    random.seed()
    np.random.seed()  # noqa: NPY002
    torch.seed()


def main(work: Path) -> None:
    """Run each configuration of a job; under torchrun the first rank writes."""
    import normlab

    job = json.loads((work / "job.json").read_text(encoding="utf-8"))
    imported = Path(normlab.__file__).resolve()
    if not imported.is_relative_to(job["source"]):
        raise RuntimeError(f"normlab was imported from {imported}, not from {job['source']}")
    with tempfile.TemporaryDirectory() as scratch:
        driver = Driver(job, work / "runs", Path(scratch))
        for name in job["names"]:
            out = work / name if os.environ.get("RANK", "0") == "0" else Path(scratch) / name
            out.mkdir()
            shuffle_generators()
            try:
                tables = driver.give(name, out)
                (out / TABLES).write_text(json.dumps(tables), encoding="utf-8")
            except Exception as error:
                (out / ERROR).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
                if "RANK" in os.environ:  # or the other ranks would wait for this one
                    raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))

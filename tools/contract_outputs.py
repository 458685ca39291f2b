"""Hold what ``normlab check --json`` prints in more than 200 cases to its schema.

    PYTHONPATH=tests python tools/contract_outputs.py               # about half an hour on one core
    PYTHONPATH=tests python tools/contract_outputs.py --most 10     # of each kind

Steps of the corpus, training scripts, configurations and wrong input are checked with budgets of several
sizes, some with failures that are allowed, so that there are failures, skips, refusals and checks that judge
too little.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib.resources import files
from io import StringIO
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import jsonschema

import normlab
from corpus.collected import CASES
from normlab.base.io import to_plain
from normlab.cli.main import main as normlab_main
from normlab.report import contract

HOME: Final = Path(__file__).resolve().parent.parent
BUDGETS: Final = (6.0, 2.0, 0.5, 0.05)
"""Seconds, from enough for small models to too little for any."""
ALLOWED: Final = ((), (), ("causality", "gradients", "step"))
SCRIPTS: Final = HOME / "tests" / "setups" / "scripts"
COMMON: Final = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGURATIONS: Final[dict[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64},
    "LlamaForCausalLM": {"model_type": "llama", **COMMON},
    "Qwen3ForCausalLM": {"model_type": "qwen3", **COMMON, "head_dim": 16, "num_key_value_heads": 1},
    "BertForMaskedLM": {"model_type": "bert", **COMMON},
    "BertForSequenceClassification": {"model_type": "bert", **COMMON},
    "NoSuchModel": {"model_type": "gpt2"},
}
WRONG: Final = (
    "nothing",
    "nothing.py",
    "nothing.py:setup",
    "hf:nowhere",
    "hf:",
    "plain.py --budget-s 0",
    "plain.py --budget-s -1",
    "plain.py --allow causalty",
    "plain.py:nothing",
    "plain.py --checkpoints last",
    "plain.py --trust-remote-code",
    "plain.py --recipe pre",
    "plain.py --declared nothing",
    "plain.py --baseline nothing.json",
    "-m plain.py",
    "-m nothing.train",
    "models.py",
    "untrained.py",
    "strengths.txt",
    "--recipe nothing",
    "--recipe pre --dim 33",
)


class Output(NamedTuple):
    """What was printed, and of what."""

    kind: str
    name: str
    document: Any


def of_corpus() -> Iterator[Output]:
    """Check the corpus from Python; what is printed is made of the report as on the command line."""
    for number, case in enumerate(CASES.values()):
        budget, allow = BUDGETS[number % len(BUDGETS)], ALLOWED[number % len(ALLOWED)]
        try:
            report = normlab.check(**case.build(), budget_s=budget, allow=allow)
        except normlab.UserError as error:
            document = contract.error_document(str(error), 2)
        else:
            document = contract.document(to_plain(report.to_dict()))
        yield Output("step of the corpus", case.name, document)


def of_scripts() -> Iterator[Output]:
    """Check training scripts."""
    for number, script in enumerate(sorted(SCRIPTS.glob("*.py"))):
        yield typed("script", f"{script.name} --budget-s {BUDGETS[number % len(BUDGETS)]}")


def of_configurations() -> Iterator[Output]:
    """Check configurations of Hugging Face's, each at every budget."""
    with TemporaryDirectory() as folder:
        for architecture, values in CONFIGURATIONS.items():
            place = Path(folder, architecture)
            place.mkdir()
            content = {"architectures": [architecture], "vocab_size": 60, **values}
            (place / "config.json").write_text(json.dumps(content), encoding="utf-8")
            for budget in BUDGETS:
                yield typed("configuration", f"hf:{place} --budget-s {budget}")


def of_wrong_input() -> Iterator[Output]:
    """Type what cannot be checked."""
    for words in WRONG:
        yield typed("wrong input", words)


def typed(kind: str, words: str) -> Output:
    """Type a command, and return what it prints."""
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(StringIO()):
        try:
            code = normlab_main(["check", "--json", *words.split()])
        except SystemExit as stopped:
            code = stopped.code
    document = json.loads(printed.getvalue())
    if document["exit_code"] != code:
        raise SystemExit(f"check {words} ended with {code}, and said {document['exit_code']}")
    return Output(kind, words, document)


def main() -> None:
    """Check everything, print how many outputs there are of each kind, and end with 1 if one is not valid."""
    parser = argparse.ArgumentParser(description="Hold the JSON of checks to its schema.")
    parser.add_argument("--most", type=int, default=125, help="outputs of each kind")
    most = parser.parse_args().most
    schema = json.loads(files("normlab.report").joinpath(contract.SCHEMA).read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    os.chdir(SCRIPTS)
    counts, errors, start = Counter[str](), list[str](), time.monotonic()
    unfit = 0
    for source in (of_wrong_input, of_configurations, of_scripts, of_corpus):
        for output in islice(source(), most):
            counts[output.kind] += 1
            counts[f"verdict {output.document['verdict']}"] += 1
            counts["with skips"] += bool(output.document.get("skipped"))
            errors_here = [f"{output.name}: {e.message}" for e in validator.iter_errors(output.document)]
            unfit += bool(errors_here)
            errors += errors_here
    for name, number in counts.items():
        print(f"{name}: {number}")
    total = sum(number for name, number in counts.items() if name.startswith("verdict"))
    print(f"{total - unfit} of {total} outputs fit the schema, in {time.monotonic() - start:.0f} s")
    if errors:
        raise SystemExit("\n".join(errors))


if __name__ == "__main__":
    main()

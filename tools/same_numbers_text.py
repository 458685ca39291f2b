"""The small texts that the trainings of ``tools/same_numbers.py`` read: pairs, plain text, labelled pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

PAIRS, HELD_OUT = 300, 24
LABELLED, LABELLED_HELD_OUT = 96, 32
DOCUMENT_LINES: Final = 6
SPLITS: Final = {"train": PAIRS, "dev": HELD_OUT, "test": HELD_OUT}
COLUMNS: Final = "first,second,label"


def written(splits: Any, folder: Path) -> dict[str, dict[str, str]]:
    """Task to the fields that name its text: a built-in corpus, its target side as plain text and as
    documents, and pairs of its lines.
    """
    pairs, plain, documents = (dict[str, str]() for _ in range(3))
    for name, count in SPLITS.items():
        corpus = getattr(splits, name)
        for side, lines in {"src": corpus.source, "tgt": corpus.target}.items():
            pairs[f"data.{name}_{side}"] = _write(folder / f"{name}.{side}", lines[:count])
        plain[f"data.{name}_text"] = pairs[f"data.{name}_tgt"]
        parted = _documents(corpus.target[:count])
        documents[f"data.{name}_text"] = _write(folder / f"{name}.documents", parted)
    labelled = _labelled(splits.train.target, folder)
    return {
        "translation": pairs,
        "language_model": plain,
        "bert_pretraining": documents,
        "classification": labelled,
    }


def _documents(lines: Sequence[str]) -> list[str]:
    """Lines with a blank one between documents."""
    blank = [[""] if i and i % DOCUMENT_LINES == 0 else [] for i in range(len(lines))]
    return [line for before, own in zip(blank, lines, strict=True) for line in (*before, own)]


def _labelled(lines: Sequence[str], folder: Path) -> dict[str, str]:
    """Tables of two lines each, which are the same, or one and the one after it."""
    rows = []
    for number in range(LABELLED + LABELLED_HELD_OUT):
        same = number % 3 > 0
        other = lines[number] if same else lines[number + 1]
        rows.append(f"{lines[number]}\t{other}\t{'same' if same else 'other'}")
    tables: Mapping[str, list[str]] = {"train": rows[:LABELLED], "test": rows[LABELLED:]}
    header = COLUMNS.replace(",", "\t")
    return {
        f"data.{name}_pairs": f"{_write(folder / f'{name}.tsv', [header, *part])}#{COLUMNS}"
        for name, part in tables.items()
    }


def _write(path: Path, lines: Sequence[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)

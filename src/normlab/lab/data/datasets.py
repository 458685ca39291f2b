"""Find data sets by name, and which of their texts are train, dev and test."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from normlab.errors import UserError
from normlab.lab.config import DataConfig
from normlab.lab.data.sources import HUB, HubSet

SIDES = ("src", "tgt")
_NAMES = {
    "train": re.compile(r"train([._-].*)?"),
    "dev": re.compile(r"(dev|val|valid|validation)([._-].*|\d.*)?"),
    "test": re.compile(r"test([._-].*|\d.*)?"),
}
_DATED = re.compile(r"tst\d*")
"""Names of IWSLT's test sets by year; with two years, the earlier is for development."""
_BOTH_SIDES = "translation"
"""The column with both sides in iwslt2017, wmt14 and similar data sets."""


def by_name(config: DataConfig) -> tuple[DataConfig, dict[str, str]]:
    """Fill the texts of a named data set into the configuration where none were given, and describe them.

    The name is a folder in ``$NORMLAB_DATA``, or a folder's path, with files ``<split>.<language>``, plain,
    ``.gz`` or ``.xz``; else a Hugging Face data set (``wmt14:de-en``; a prefix ``hf:`` skips the folders)
    with a column ``translation`` or one for each language. Raises UserError or FileNotFoundError for an
    unknown data set, language or split, and if several texts could be meant, with those that were found.
    """
    if not config.dataset:
        return config, {}
    roles = [role for role in _NAMES if not _given(config, role)]
    languages = _languages(config)
    root = os.environ.get("NORMLAB_DATA", "")
    folder = _folder(config.dataset, languages, root)
    if folder:
        where, starts = folder, _starts_of_folder(folder, languages)
    else:
        where, starts = _starts_of_hub(config, languages, root)
    texts: dict[str, Any] = {}
    for role, start in _choose(where, starts, roles, languages).items():
        for side, language in zip(SIDES, languages, strict=True):
            texts[f"{role}_{side}"] = start + language
    origin = {"Data set": f"{Path(config.dataset).name}, {languages[0]} to {languages[1]}"}
    return replace(config, **texts, dataset=""), origin


def _folder(name: str, languages: tuple[str, str], root: str) -> str:
    """Return the folder that a name refers to, as its texts' paths begin; empty if there is none."""
    path = Path(name)
    if name.startswith(HUB):
        return ""
    if root and not path.is_absolute() and (root / path).is_dir():
        return f"$NORMLAB_DATA/{path.as_posix()}"
    if path.is_file():
        raise UserError(
            f"--dataset {name} is a file; name a folder with <split>.<language> in it, or give texts one by "
            f"one with --train-src, --train-tgt and so on"
        )
    has_both = path.is_dir() and set(languages) <= _splits(path).keys()
    return path.as_posix() if has_both else ""


def _splits(folder: Path) -> dict[str, set[str]]:
    """Return the splits that a folder has in each language."""
    splits: dict[str, set[str]] = {}
    for file in filter(Path.is_file, folder.iterdir()):
        split, _, language = re.sub(r"\.(gz|xz)$", "", file.name).rpartition(".")
        splits.setdefault(language, set()).add(split)
    return splits


def _given(config: DataConfig, role: str) -> bool:
    """Whether both sides were given. Raises UserError if only one was."""
    given = [side for side in SIDES if getattr(config, f"{role}_{side}")]
    if len(given) == 1:
        other = "tgt" if given == ["src"] else "src"
        raise UserError(
            f"--{role}-{given[0]} came with --dataset {config.dataset}; give --{role}-{other} too, or neither"
        )
    return bool(given)


def _languages(config: DataConfig) -> tuple[str, str]:
    missing = [f"--{side}-lang" for side in ("source", "target") if not getattr(config, f"{side}_lang")]
    if missing:
        raise UserError(
            f"--dataset {config.dataset} was given without {' and '.join(missing)}; type --dataset "
            f"{config.dataset} --source-lang de --target-lang en, for example"
        )
    if config.source_lang == config.target_lang:
        raise UserError(
            f"--source-lang and --target-lang are both {config.source_lang!r}, so both sides of --dataset "
            f"{config.dataset} would be the same text; name two languages"
        )
    return config.source_lang, config.target_lang


def _starts_of_folder(folder: str, languages: tuple[str, str]) -> dict[str, str]:
    """Return for each split the path of its texts up to the language."""
    by_language = _splits(Path(os.path.expandvars(folder)))
    _require_languages(folder, languages, sorted(by_language))
    splits = sorted(by_language[languages[0]] & by_language[languages[1]])
    return {split: f"{folder}/{split}." for split in splits}


def _starts_of_hub(config: DataConfig, languages: tuple[str, str], root: str) -> tuple[str, dict[str, str]]:
    """Return the data set, and for each split the path of its texts up to the language."""
    try:
        of_set = _configured(HubSet.of(config.dataset), languages)
        splits = of_set.splits()
    except OSError as error:
        if config.dataset.startswith(HUB):
            raise
        raise FileNotFoundError(f"{_no_folder(config.dataset, languages, root)}; {error}") from error
    table = of_set.table(splits[0])
    if _BOTH_SIDES in table.column_names:
        both = table.features[_BOTH_SIDES]
        prefix = f"{_BOTH_SIDES}."
        known = list(getattr(both, "languages", None) or both)  # a Translation, or a dict of texts
    else:
        prefix, known = "", list(table.column_names)
    _require_languages(str(of_set), languages, known)
    return str(of_set), {split: f"{of_set}#{split}.{prefix}" for split in splits}


def _configured(of_set: HubSet, languages: tuple[str, str]) -> HubSet:
    """Return the data set with its only configuration, or with the one for the two languages."""
    if of_set.config:
        return of_set
    configs = of_set.configs()
    for ending in ("-".join(languages), "-".join(reversed(languages)), ""):
        suiting = [name for name in configs if name.endswith(ending)]
        if len(suiting) == 1:
            return replace(of_set, config=suiting[0])
    raise UserError(
        f"{of_set} has the configurations {', '.join(configs)}, and none or several fit {languages[0]} "
        f"and {languages[1]}; type --dataset {of_set}:{configs[0]}, for example"
    )


def _choose(
    where: str, starts: Mapping[str, str], roles: Sequence[str], languages: tuple[str, str]
) -> dict[str, str]:
    """Return the start of the paths of each role's texts. Raises UserError unless exactly one split fits each
    role.
    """
    candidates = _candidates(sorted(starts))
    for role in roles:
        if len(candidates[role]) == 1:
            continue
        if candidates[role]:
            wrong = f"several {role} texts, {', '.join(candidates[role])}"
            start = starts[candidates[role][0]]
        else:
            wrong = f"no {role} text"
            if starts:
                wrong += f"; in both languages it has {', '.join(sorted(starts))}"
            start = next(iter(starts.values()), "FILE.")
        raise UserError(
            f"{where} has {wrong}; say which, for example --{role}-src {start}{languages[0]} "
            f"--{role}-tgt {start}{languages[1]}"
        )
    return {role: starts[candidates[role][0]] for role in roles}


def _candidates(splits: Sequence[str]) -> dict[str, list[str]]:
    """Return the splits that could be train, dev and test; an exact ``train`` or ``test`` excludes others."""
    candidates = {role: [s for s in splits if name.fullmatch(s)] for role, name in _NAMES.items()}
    for role in ("train", "test"):
        if role in candidates[role]:
            candidates[role] = [role]
    dated = [split for split in splits if _DATED.fullmatch(split)]
    if not candidates["dev"] and not candidates["test"] and len(dated) == 2:
        candidates["dev"], candidates["test"] = [[split] for split in dated]
    for role in ("dev", "test"):
        candidates[role] = candidates[role] or dated
    return candidates


def _require_languages(where: str, languages: tuple[str, str], known: Sequence[str]) -> None:
    for language in languages:
        if language not in known:
            raise UserError(
                f"{where} has no text in {language!r}; it has {', '.join(known)}; name two of these with "
                f"--source-lang and --target-lang"
            )


def _no_folder(name: str, languages: tuple[str, str], root: str) -> str:
    if Path(name).is_dir():
        known = ", ".join(sorted(_splits(Path(name))))
        there = f"there is text in {known}" if known else "no file is called <split>.<language>"
        return f"the folder {name} does not have both {languages[0]} and {languages[1]}, {there}"
    if not root:
        return "NORMLAB_DATA is not set (type: export NORMLAB_DATA=/folder/of/data/sets)"
    if not Path(root).is_dir():
        return f"NORMLAB_DATA is {root}, and there is no such folder"
    folders = sorted(path.name for path in Path(root).iterdir() if path.is_dir())
    close = difflib.get_close_matches(name, folders, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"$NORMLAB_DATA has no folder {name!r}{hint}, only {', '.join(folders) or 'nothing'}"

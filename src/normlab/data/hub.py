"""Columns of Hugging Face data sets, read by the library ``datasets``; no code of a data set is executed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self, final

from normlab.data.text import filled_in
from normlab.errors import UserError

HUB = "hf:"
_ROWS_AT_A_TIME = 1000
_EXAMPLE = "hf:wmt14:de-en#train.translation.de"


@final
@dataclass(frozen=True)
class HubSet:
    """A data set of the Hub, or a folder of parquet, JSON lines or CSV files in the same layout."""

    path: str
    """``wmt14``, ``IWSLT/iwslt2017``, ``./folder``, ``$NORMLAB_DATA/folder``."""
    config: str = ""

    @classmethod
    def of(cls, spec: str) -> Self:
        """Parse ``[hf:]name[:config]``. Raises UserError if there is no name."""
        path, _, config = spec.removeprefix(HUB).partition(":")
        if not path:
            raise UserError(f"{spec} names no data set; type {HUB}NAME or {HUB}NAME:CONFIG")
        return cls(path, config)

    def __str__(self) -> str:
        return f"{HUB}{self.path}" + (f":{self.config}" if self.config else "")

    def configs(self) -> list[str]:
        """Return the configurations of the data set; raises as ``table``."""
        with _in_words(self) as datasets:
            return list(datasets.get_dataset_config_names(self._where))

    def splits(self) -> list[str]:
        try:
            with _in_words(self) as datasets:
                return list(datasets.get_dataset_split_names(self._where, self.config or None))
        except UserError:
            self._require_config()
            raise

    def table(self, split: str) -> Any:
        """Return the rows of a split, memory-mapped. Raises UserError or OSError with one sentence."""
        try:
            with _in_words(self) as datasets:
                return datasets.load_dataset(self._where, self.config or None, split=split)
        except UserError:
            self._require_config()
            self._require_split(split)
            raise

    @property
    def _where(self) -> str:
        where = filled_in(self.path)
        if where.startswith("~"):
            where = str(Path(where).expanduser())
        if where.startswith((".", "/", "$")) and not Path(where).exists():
            raise FileNotFoundError(f"there is no folder {where}")
        return where

    def _require_config(self) -> None:
        configs = self.configs()
        if self.config not in (configs if len(configs) > 1 else ["", *configs]):
            said = f"has no configuration {self.config!r}" if self.config else "has several configurations"
            raise UserError(
                f"{HUB}{self.path} {said}; it has {', '.join(configs)}; type {HUB}{self.path}:{configs[0]}#…"
            )

    def _require_split(self, split: str) -> None:
        splits = self.splits()
        if split.partition("[")[0] not in splits:
            raise UserError(
                f"{self} has no split {split!r}; it has {', '.join(splits)}; type {self}#{splits[0]}.…"
            )


@final
@dataclass(frozen=True)
class HubColumn:
    """``hf:NAME[:CONFIG]#SPLIT.COLUMN[.KEY]``: the texts of one column, in order.

    A line end inside a text becomes a space; numbers, such as labels, are written in decimals.
    """

    of_set: HubSet
    split: str
    """A split or a part of one: ``train[:1000]``."""
    keys: tuple[str, ...]
    """The column, and the language in it if it holds a translation."""

    @classmethod
    def of(cls, spec: str) -> Self:
        """Parse a path of this form. Raises UserError for any other."""
        name, _, place = spec.removeprefix(HUB).partition("#")
        split, *keys = place.split(".")
        if not name or not split or not keys or not all(keys):
            raise UserError(
                f"{spec} names no column of a data set; type hf:NAME#SPLIT.COLUMN or "
                f"hf:NAME:CONFIG#SPLIT.COLUMN, for example {_EXAMPLE}"
            )
        return cls(HubSet.of(name), split, tuple(keys))

    @property
    def name(self) -> str:
        return f"{self.of_set}#{self.split}.{'.'.join(self.keys)}"

    def __iter__(self) -> Iterator[str]:
        """Yield the texts. Raises UserError if the column does not exist or a row holds no text."""
        table = self.of_set.table(self.split)
        self._require_key(self.keys[0], table.column_names, f"{self.of_set}#{self.split}.")
        parts = table.select_columns([self.keys[0]]).with_format("arrow").iter(batch_size=_ROWS_AT_A_TIME)
        row = 0
        for part in parts:
            for value in part.column(0).to_pylist():
                row += 1
                yield self._text(value, row)

    def _text(self, value: Any, row: int) -> str:
        before = f"{self.of_set}#{self.split}.{self.keys[0]}."
        for key in self.keys[1:]:
            self._require_key(key, list(value) if isinstance(value, dict) else [], before)
            value = value[key]
            before += f"{key}."
        if isinstance(value, dict):
            self._require_key("", list(value), before)
        if value is None or isinstance(value, (list, bytes)):
            what = "nothing" if value is None else f"a {type(value).__name__}"
            raise UserError(
                f"row {row} of {self.name} has {what} where a text is needed; name another column"
            )
        text = value if isinstance(value, str) else str(value)
        return text.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")

    def _require_key(self, key: str, known: Sequence[str], before: str) -> None:
        if key in known:
            return
        if not known:
            raise UserError(f"{self.name} does not exist, {before[:-1]} is a text; type {before[:-1]}")
        said = f"has no {key!r}" if key else "is no text"
        raise UserError(f"{before[:-1]} {said}; it has {', '.join(known)}; type {before}{known[0]}")


@contextmanager
def _in_words(of_set: HubSet) -> Iterator[ModuleType]:
    """Yield the library without progress bars, and turn its errors into one sentence each."""
    try:
        import datasets
    except ImportError as error:
        raise FileNotFoundError(
            f"{of_set} is a Hugging Face data set, and those need the package datasets; type: pip install "
            f"'normlab[hf]'"
        ) from error
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        raise UserError(
            f"{of_set} is a script, and no code of a data set is executed; save its tables as parquet, JSON "
            f"lines or CSV in a folder, and type hf:./folder#SPLIT.COLUMN"
        ) from error
    except ValueError as error:
        raise UserError(
            f"{of_set} cannot be read ({' '.join(str(error).split())}); check its name and the part of "
            f"its split, such as train[:1000]"
        ) from error
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise FileNotFoundError(
            f"{of_set} was not found or cannot be read ({' '.join(str(error).split())}); check the name and "
            f"the network, or give the folder of its files: hf:./folder#SPLIT.COLUMN"
        ) from error
    finally:
        if bars:
            datasets.enable_progress_bars()

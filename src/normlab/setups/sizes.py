"""The numbers of a Hugging Face configuration: which of them measure the same thing, and shrink together.

transformers spells what a number measures in the words of its name (``num_key_value_heads``,
``mamba_d_head``, ``moe_intermediate_size``), so a kind is read off these words. Numbers of one kind are
divided by one divisor, which keeps every ratio among them; and a number of heads times the size of a head is
a width, so the divisors of both multiply to that of widths, which keeps the ratios among these, too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

Path = tuple[str | int, ...]
"""Where a number is: names of entries, and places in lists."""
NARROWEST: Final = 64
"""The hidden size is not lowered below this: narrower ones leave too few numbers to compare."""
FEWEST: Final = 8
"""No other width, and no size of a head, is lowered below this: a rotation needs several frequencies."""
ALIGNED: Final = 8
"""Numbers of two bytes in 16 bytes, the unit in which processors load them."""
FEWEST_HEADS: Final = 4
"""Heads that are left where there is a choice."""
SMALL: Final = 16
"""Sizes up to this, such as those of convolution kernels, cost nothing, and stay as they are."""
VOCABULARY: Final = 256
WINDOW: Final = 8
"""Positions in the shortest window, which rows of a check then exceed."""
CONTEXT: Final = 32
"""Positions in the shortest context."""


class Kind(Enum):
    """What a number of a configuration measures."""

    LAYERS = "layers"
    HEADS = "heads"
    HEAD_SIZE = "size of a head"
    WIDTH = "width"
    STATE = "size of a state"
    EXPERTS = "experts"
    CHOSEN = "experts that a token is sent to"
    VOCABULARY = "vocabulary"
    SPECIAL = "id of a special token"
    CONTEXT = "positions"
    WINDOW = "positions in a window"


COUNTS: Final = "num n number"
SIZES: Final = "size sizes dim dims d channels headdim"


class Rule(NamedTuple):
    """Which words make a name one of a kind."""

    kind: Kind
    words: tuple[str, ...]
    """Lists of words; the name has a word of each of them."""
    but: str = ""
    """None of these is a word of the name."""

    def holds(self, name: set[str]) -> bool:
        """Return whether these words of a name make it one of the kind."""
        return all(name & set(each.split()) for each in self.words) and not name & set(self.but.split())


RULES: Final = (
    Rule(Kind.SPECIAL, ("token tokens", "id ids index")),
    Rule(Kind.VOCABULARY, ("vocab",), but="type"),
    Rule(Kind.CHOSEN, ("expert experts moe", "tok token topk top k selected"), but="group"),
    Rule(Kind.EXPERTS, ("expert experts", COUNTS), but="shared group"),
    Rule(Kind.STATE, ("state", SIZES)),
    Rule(Kind.HEAD_SIZE, ("head headdim kv rotary", SIZES), but="hidden"),
    Rule(Kind.HEADS, ("heads",)),
    Rule(Kind.HEADS, ("query", "groups")),
    Rule(Kind.HEADS, ("head", COUNTS)),
    Rule(
        Kind.LAYERS,
        ("layer layers",),
        but="per period offset interval freq frequency step every group start end",
    ),
    Rule(Kind.WINDOW, ("window chunk local",), but="rope theta"),
    Rule(Kind.WINDOW, ("index", "topk"), but="block blocks"),
    Rule(Kind.CONTEXT, ("position positions ctx context seq length len",)),
    Rule(
        Kind.WIDTH,
        (f"{SIZES} model embd ff ffn dff inner rank width",),
        but="kernel conv patch image block group type codebook",
    ),
)
"""What names mean, in transformers' spelling; the first rule that holds decides."""
OF_ANY_HEADS: Final = {*f"{COUNTS} {SIZES} attention heads head key value kv qk v nope rope rotary".split()}
"""Words that do not tell one kind of heads from another, as ``mamba`` and ``linear`` do."""


def words_of(name: str) -> list[str]:
    """Return the words of an entry's name."""
    return name.lower().strip("_").split("_")


def kind_of(name: str) -> Kind | None:
    """Return what a number of this name measures; None for what has no size, such as a rate or a period."""
    words = set(words_of(name))
    return next((rule.kind for rule in RULES if rule.holds(words)), None)


class Number(NamedTuple):
    """A number of a configuration."""

    path: Path
    value: float
    kind: Kind
    system: str
    """Which heads it belongs to, as ``mamba``; empty for those of attention."""

    @property
    def name(self) -> str:
        """The name of its entry."""
        return next(str(part) for part in reversed(self.path) if isinstance(part, str))

    def __str__(self) -> str:
        return f"{self.name} {self.value:g}" if self.value < 1e6 else f"{self.name} {self.value:.3g}"


def entries(content: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each entry of a configuration that holds no other configuration, with where it is."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            if not name.endswith(("2id", "2label")):  # names of classes are no sizes
                yield from entries(value, (*above, name))
        else:
            yield (*above, name), value


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


class Sizes:
    """The numbers of a configuration by kind.

    Args:
        content: The configuration as plain data.
        width: The hidden size, if it is known; else it is the largest width.
    """

    def __init__(self, content: Mapping[str, Any], width: int | None) -> None:
        self.content = _with_lists(content)
        self.numbers = [*_numbers(self.content)]
        self.width = width or max((int(n.value) for n in self.of(Kind.WIDTH)), default=0)
        self.numbers += self._equal_to_known()

    def of(self, *kinds: Kind) -> list[Number]:
        """Return the numbers of these kinds."""
        return [number for number in self.numbers if number.kind in kinds]

    @property
    def systems(self) -> list[str]:
        """Which kinds of heads there are."""
        return list(dict.fromkeys(n.system for n in self.of(Kind.HEADS, Kind.HEAD_SIZE)))

    @property
    def labels(self) -> int:
        """How many labels a classifier tells apart; they stay."""
        return self.content.get("num_labels") or len(self.content.get("id2label") or ())

    def heads(self, system: str) -> list[int]:
        """Return the numbers of heads of a kind."""
        return [int(n.value) for n in self.of(Kind.HEADS) if n.system == system]

    def head_sizes(self, system: str) -> list[int]:
        """Return the sizes of a kind of heads; if none is named, what the hidden size leaves to each."""
        sizes = [int(n.value) for n in self.of(Kind.HEAD_SIZE) if n.system == system]
        most = max(self.heads(system), default=0)
        if sizes or not most or self.width % most != 0:
            return sizes
        return [self.width // most]

    def _equal_to_known(self) -> Iterator[Number]:
        """Yield numbers whose names say nothing, but which equal one that is known.

        A scale of attention, for instance, is often written as the size of a head.
        """
        known = {number.path for number in self.numbers}
        head_sizes = {size for size in self.head_sizes("") if size > SMALL}
        if (most := max(self.heads(""), default=0)) and self.width % most == 0:
            head_sizes.add(self.width // most)
        contexts = {n.value for n in self.of(Kind.CONTEXT, Kind.WINDOW)}
        for path, value in entries(self.content):
            if is_whole(value) and path not in known and value > SMALL:
                if value in head_sizes:
                    yield Number(path, value, Kind.HEAD_SIZE, "")
                elif value in contexts:
                    yield Number(path, value, Kind.CONTEXT, "")


def _with_lists(value: Any) -> Any:
    """Return a configuration whose tuples are lists."""
    if isinstance(value, Mapping):
        return {name: _with_lists(entry) for name, entry in value.items()}
    return [_with_lists(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _numbers(content: Mapping[str, Any]) -> Iterator[Number]:
    """Yield the numbers whose names say what they measure, those in lists as well."""
    for path, value in entries(content):
        name = str(path[-1])
        kind = kind_of(name)
        if kind is None:
            continue
        system = ""
        if kind in (Kind.HEADS, Kind.HEAD_SIZE):
            system = "_".join(word for word in words_of(name) if word not in OF_ANY_HEADS)
        if is_whole(value) and value > 0:
            stays = value <= SMALL and kind in (Kind.WIDTH, Kind.STATE, Kind.WINDOW)
            if not stays:
                yield Number(path, value, kind, system)
        elif isinstance(value, (list, tuple)) and kind is not Kind.LAYERS:
            for place, entry in enumerate(value):
                if is_whole(entry) and entry > 0:
                    yield Number((*path, place), entry, kind, system)


# ------------------------------------------------------------------------------------------------- divisors


@dataclass(frozen=True)
class Divisors:
    """What numbers are divided by."""

    width: int = 1
    heads: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """For each kind of heads: the divisors of their number, and of their size."""
    experts: int = 1
    positions: int = 1

    @property
    def largest(self) -> int:
        """The largest divisor of a number that is no vocabulary."""
        return max(self.width, self.experts, self.positions)

    def of(self, number: Number) -> int:
        """Return the divisor of a number."""
        heads, size = self.heads.get(number.system, (1, 1))
        return {
            Kind.WIDTH: self.width,
            Kind.HEADS: heads,
            Kind.HEAD_SIZE: size,
            Kind.EXPERTS: self.experts,
            Kind.CHOSEN: self.experts,
            Kind.STATE: _of_state(int(number.value)),
        }.get(number.kind, 1)


def divisors_of(sizes: Sizes) -> Iterator[Divisors]:
    """Yield divisors that leave whole numbers, those of the narrowest model first, but those that leave whole
    units of memory before others.
    """
    experts = _of_experts(sizes)
    positions = _of_positions(sizes)
    for width in _widths(sizes.of(Kind.WIDTH), sizes.width):
        heads = {system: _of_heads(sizes, system, width) for system in sizes.systems}
        if all(heads.values()):
            pairs = {system: pair for system, pair in heads.items() if pair is not None}
            yield Divisors(width, pairs, experts, positions)
    yield Divisors(1, {}, experts, positions)


def in_the_way(sizes: Sizes) -> list[Number]:
    """Return the numbers that keep a model from being narrower: without all those of one value, it could be.
    Empty if it can be narrower anyway.
    """

    def largest_divisor(numbers: Sequence[Number]) -> int:
        with_numbers = copy.copy(sizes)
        with_numbers.numbers = list(numbers)
        return next(divisors_of(with_numbers)).width

    with_all = largest_divisor(sizes.numbers)
    if with_all > 1:
        return []
    without = {
        number: largest_divisor([other for other in sizes.numbers if other.value != number.value])
        for number in sizes.numbers
    }
    return [number for number, divisor in without.items() if divisor > with_all]


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first; of an absurd number, those that are soon found."""
    low = [i for i in range(1, min(math.isqrt(number), 10**6) + 1) if number % i == 0]
    return sorted({*low, *(number // i for i in low)}, reverse=True)


def _widths(numbers: Sequence[Number], width: int) -> Iterator[int]:
    """Yield the divisors of all these widths that leave enough of each, the largest first; but those that
    leave whole units of memory before others.
    """
    common = math.gcd(*(int(number.value) for number in numbers), width)
    wide = [
        divisor
        for divisor in (_divisors(common) if common else [])
        if divisor > 1
        and width // divisor >= NARROWEST
        and all(number.value // divisor >= FEWEST for number in numbers)
    ]
    aligned = [divisor for divisor in wide if all(_aligned(int(n.value), divisor) for n in numbers)]
    yield from aligned
    yield from (divisor for divisor in wide if divisor not in aligned)


def _aligned(size: int, divisor: int) -> bool:
    """Return whether a size has whole units of memory once it is divided, as fast products of matrices ask
    for, if it has them now.
    """
    return size // divisor % ALIGNED == 0 or size % ALIGNED != 0


def _of_heads(sizes: Sizes, system: str, width: int) -> tuple[int, int] | None:
    """Return the divisors of the number and of the size of heads; None if nothing fits.

    Their product is ``width``, the divisor of widths. They leave sizes that rotations can use, and four
    heads or the next number above, if there are as many.
    """
    pairs = list[tuple[int, int]]()
    heads, head_sizes = sizes.heads(system) or [1], sizes.head_sizes(system)
    for of_heads in _divisors(math.gcd(*heads)):
        of_size, remainder = divmod(width, of_heads)
        if remainder:
            continue
        left = [number // of_heads for number in heads]
        smaller_sizes = [size / of_size for size in head_sizes]
        fit = max(left) >= min(2, max(heads)) and _in_groups(sizes, heads, left)
        if fit and all(_rotates(sizes, size) for size in smaller_sizes):
            pairs.append((of_heads, of_size))
    # the first pair leaves the fewest heads
    enough = [pair for pair in pairs if max(heads) // pair[0] >= FEWEST_HEADS]
    return next(iter(enough or reversed(pairs)), None)


def _in_groups(sizes: Sizes, heads: Sequence[int], left: Sequence[int]) -> bool:
    """Return whether the heads that are left fall into groups of one size where they all do, as those of a
    recurrence that shares its states within each group.
    """
    for path, number in entries(sizes.content):
        is_of_groups = not {"groups", "ngroups"}.isdisjoint(words_of(str(path[-1])))
        if not is_of_groups or not is_whole(number) or number <= 0:
            continue
        for before, after in zip(heads, left, strict=True):
            if before % number == 0 and after % number != 0:
                return False
    return True


def _rotates(sizes: Sizes, head_size: float) -> bool:
    """Return whether a head has enough features, and the part of it that is rotated has pairs of them."""
    parts = [head_size * share for share in _rotated(sizes)]
    return head_size >= FEWEST and head_size % 2 == 0 and all(part >= 2 and part % 2 == 0 for part in parts)


def _of_experts(sizes: Sizes) -> int:
    """Return the largest divisor that leaves two experts to a token and, where experts are in groups, groups
    of one size. Two, because the weight of a single one is constant where weights are normalized.
    """
    chosen = [int(n.value) for n in sizes.of(Kind.CHOSEN)]
    experts = [int(n.value) for n in sizes.of(Kind.EXPERTS)]
    if not chosen or not experts:
        return 1
    groups = list[int]()
    for path, value in entries(sizes.content):
        words = set(words_of(str(path[-1])))
        if "group" in words and words & set(COUNTS.split()) and is_whole(value):
            groups.append(value)
    for divisor in _divisors(math.gcd(*chosen, *experts)):
        in_groups = all(number // divisor % max(each, 1) == 0 for number in experts for each in groups)
        if in_groups and min(chosen) // divisor >= min(2, min(chosen)):
            return divisor
    return 1


def _of_positions(sizes: Sizes) -> int:
    """Return the largest divisor that leaves each window ``WINDOW`` positions or more, so that the rows of a
    check exceed it, and each longer context ``CONTEXT`` or more.
    """
    windows = [int(n.value) // WINDOW for n in sizes.of(Kind.WINDOW)]
    contexts = [int(n.value) // CONTEXT for n in sizes.of(Kind.CONTEXT) if n.value > CONTEXT]
    return max(1, min([*windows, *contexts], default=1))


def _of_state(size: int) -> int:
    """Return the largest power of two that leaves a state of ``SMALL`` or more."""
    divisor = 1
    while size % (2 * divisor) == 0 and size // (2 * divisor) >= SMALL:
        divisor *= 2
    return divisor


# ---------------------------------------------------------------------------------------------- a smaller one


def depths_of(content: Mapping[str, Any]) -> list[int]:
    """Return the numbers of layers that a configuration names, or for each of which it lists something."""
    depths = list[int]()
    for path, value in entries(content):
        if is_whole(value) and kind_of(str(path[-1])) is Kind.LAYERS:
            depths.append(value)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
            depths.append(len(value))
    return list(dict.fromkeys(depths))


def options_of_layers(content: Mapping[str, Any], depth: int) -> list[Sequence[Any]]:
    """Return the lists with an entry for each layer, but for those that just hold the layers' own numbers."""
    lists = [(path, value) for path, value in entries(content) if isinstance(value, (list, tuple))]
    return [v for path, v in lists if len(v) == depth and not _is_list_of_layers(path, v)]


def with_first_layers(content: Mapping[str, Any], layers: Mapping[int, int]) -> dict[str, Any]:
    """Return the configuration with other numbers of layers (old ones to new ones), and what is left for
    these of lists that have an entry for each layer, or that name some of them.
    """
    fewer = copy.deepcopy(dict(content))
    for path, value in entries(content):
        if is_whole(value) and value in layers and kind_of(str(path[-1])) is Kind.LAYERS:
            _put(fewer, path, layers[value])
        elif _is_list_of_layers(path, value):
            _put(fewer, path, [layer for layer in value if layer < max(layers.values(), default=math.inf)])
        elif isinstance(value, (list, tuple)) and len(value) in layers and not _is_of_rotation(path):
            _put(fewer, path, list(value[: layers[len(value)]]))
    return fewer


def _is_of_rotation(path: Path) -> bool:
    """Return whether an entry is one of a rotation of positions, as ``mrope_section`` is."""
    return any(word.endswith("rope") for part in path for word in words_of(str(part)))


def _is_list_of_layers(path: Path, values: Any) -> bool:
    """Return whether an entry lists the numbers of some layers, as in ``mlp_only_layers``."""
    if not isinstance(values, (list, tuple)) or not values or not all(map(is_whole, values)):
        return False
    named = {"layer", "layers", "idxs", "ids", "indices", "indexes"} & set(words_of(str(path[-1])))
    return bool(named) and list(values) == sorted(set(values)) and kind_of(str(path[-1])) is not Kind.SPECIAL


def with_count(content: Mapping[str, Any], kind: Kind, before: int, after: int) -> dict[str, Any]:
    """Return the configuration with another number wherever it has this one of this kind."""
    if kind is Kind.LAYERS:
        return with_first_layers(content, {before: after})
    changed = copy.deepcopy(dict(content))
    for path, value in entries(content):
        if value == before and kind_of(str(path[-1])) is kind:
            _put(changed, path, after)
    return changed


def smaller(sizes: Sizes, divisors: Divisors) -> dict[str, Any]:
    """Return the configuration with divided numbers and a small vocabulary."""
    content = copy.deepcopy(dict(sizes.content))
    ids = renumbered(sizes)
    for number in sizes.numbers:
        value = int(number.value)
        match number.kind:
            case Kind.VOCABULARY:
                new = min(value, VOCABULARY)
            case Kind.SPECIAL:
                new = ids.get(value, value)
            case Kind.CONTEXT | Kind.WINDOW:
                new = max(value // divisors.positions, min(value, WINDOW))
            case _:
                new = value // divisors.of(number)
        _put(content, number.path, new)
    for path, value in entries(sizes.content):
        if isinstance(value, (list, tuple)) and _is_of_rotation(path):
            _put(content, path, _of_smaller_heads(sizes, divisors, _get(content, path)))
        elif isinstance(value, float):
            _put(content, path, value * _of_scale(sizes, divisors, str(path[-1]), value))
    return content


def renumbered(sizes: Sizes) -> dict[int, int]:
    """Return new ids of the special tokens: those that the small vocabulary lacks become its last ones."""
    if all(n.value <= VOCABULARY for n in sizes.of(Kind.VOCABULARY)):
        return {}
    ids = sorted({int(n.value) for n in sizes.of(Kind.SPECIAL)})
    last = range(VOCABULARY - len(ids), VOCABULARY)
    return {old: old if old < last.start else new for old, new in zip(ids, last, strict=True)}


def _of_smaller_heads(sizes: Sizes, divisors: Divisors, values: Sequence[Any]) -> list[Any]:
    """Return what smaller heads leave of a list: if it has one entry per frequency of the rotation, as many
    as there are frequencies now; if it divides the frequencies into parts, smaller parts.
    """
    _, of_size = divisors.heads.get("", (1, 1))
    frequencies = {size / 2 * share for size in sizes.head_sizes("") for share in (1.0, *_rotated(sizes))}
    if len(values) in frequencies and all(isinstance(value, (int, float)) for value in values):
        return list(values[::of_size])
    if len(values) > 1 and all(map(is_whole, values)) and sum(values) in frequencies:
        return _parts(values, sum(values) // of_size)
    return list(values)


def _rotated(sizes: Sizes) -> list[float]:
    """Return the shares of a head that are rotated, where the configuration names some."""
    shares = (value for path, value in entries(sizes.content) if "rotary" in words_of(str(path[-1])))
    return [share for share in shares if isinstance(share, float) and 0 < share <= 1]


def _parts(values: Sequence[int], total: int) -> list[int]:
    """Share out a total as these numbers do, in whole numbers: the last takes what is left."""
    parts = [max(1, value * total // sum(values)) for value in values[:-1]]
    return [*parts, total - sum(parts)]


def _of_scale(sizes: Sizes, divisors: Divisors, name: str, value: float) -> float:
    """Return the factor of a scale of attention that is written as a power of a head's size."""
    _, of_size = divisors.heads.get("", (1, 1))
    if not {"attention", "attn", "query", "softmax"} & set(words_of(name)):
        return 1.0
    for size in sizes.head_sizes(""):
        for power in (-1.0, -0.5):
            if math.isclose(value, size**power, rel_tol=1e-6):
                return of_size**-power
    return 1.0


def _get(content: Any, path: Path) -> Any:
    for part in path:
        content = content[part]
    return content


def _put(content: Any, path: Path, value: Any) -> None:
    _get(content, path[:-1])[path[-1]] = value

"""Filter of the list: `attn dtype:bf16 size>1MB nan>0 !bias` as a test of tensors. All words must match."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Kind, Stats, TensorInfo
from statecli.core.selection import Selection, glob_names, matches_any

#: Test of the tensor at a position.
Test = Callable[[int], bool]

_SIZE = compile_on_use(r"size:?(?P<sign><=|>=|<|>|=)?(?P<number>\d+(?:\.\d+)?)(?P<unit>[kmgt]?)b?", re.IGNORECASE)
_SHAPE = compile_on_use(r"[\[(](?:\d+(?:[x,]\d+)*,?)?[\])]|(?:\d+|\*)(?:[x,](?:\d+|\*))+")
_NUMBER = compile_on_use(
    r"(?P<name>nan|inf|zeros|min|max|mean|std)(?P<sign><=|>=|<|>|=|:)(?P<number>-?[\d.]+(?:e-?\d+)?)", re.I
)
#: A word that is meant as a field: letters, then a sign.
_MEANT_AS_FIELD = compile_on_use(r"(?P<field>[A-Za-z]+)(?::|[<>=]).*")
_BRACES = compile_on_use(r"\{(?P<items>[^{}]*)\}")
_RANGE = compile_on_use(r"(?P<first>\d{1,6})\.\.(?P<last>\d{1,6})")
#: Names that braces may stand for.
_MAX_NAMES = 2000
_STATISTICS = ("nan", "inf", "zeros", "min", "max", "mean", "std")
_FIELDS = ("name", "dtype", "kind", "shape")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}
_GLOB_CHARACTERS = frozenset("*?[")


class Filter:
    """Filter of the tensors of one state; the texts of the names are kept for the next key."""

    def __init__(self, tensors: Sequence[TensorInfo], stats: Mapping[int, Stats], *, by_section: bool) -> None:
        self._tensors = tensors
        self._stats = stats
        self._by_section = by_section
        self._names: list[str] | None = None
        self._dtypes: tuple[TensorInfo, ...] | None = None

    def find(self, text: str) -> list[int]:
        """Return the positions of the tensors that match all words of the text, in order."""
        positions: Sequence[int] = range(len(self._tensors))
        for word in text.split():
            test = self._build_test(word)
            positions = [position for position in positions if test(position)]
        return list(positions)

    def _build_test(self, word: str) -> Test:
        if word[0] in "!-" and len(word) > 1:
            test = self._build_test(word[1:])
            return lambda position: not test(position)
        size = _SIZE.fullmatch(word)
        if size is not None:
            return self._test_size(size)
        number = _NUMBER.fullmatch(word)
        if number is not None:
            return self._test_number(number)
        field, colon, value = word.partition(":")
        if colon and field in _FIELDS:
            return self._test_field(field, value) if value else _accept_all
        if word.rstrip("<>=:") == "size" and word != "size":
            return _accept_all  # the number is still to be typed
        return self._test_any(word)

    def _test_field(self, field: str, value: str) -> Test:
        if field == "name":
            return self._test_name(value)
        if field == "kind":
            kinds = {kind for kind in Kind if kind.value.startswith(value.lower())}
            return lambda position: self._tensors[position].kind in kinds
        return self._test_layout(Selection(dtype=(value,)) if field == "dtype" else Selection(shape=(value,)))

    def _test_any(self, word: str) -> Test:
        """Return the test of a bare word: a part of the name, a glob, or exactly a dtype, a kind or a shape."""
        tests = [self._test_name(word)]
        by_dtype = Selection(dtype=(word,))
        if any(by_dtype.selects_layout(tensor) for tensor in self._list_dtypes()):
            tests.append(self._test_layout(by_dtype))
        if word in [kind.value for kind in Kind]:
            tests.append(self._test_field("kind", word))
        if _SHAPE.fullmatch(word):
            tests.append(self._test_layout(Selection(shape=(word,))))
        return tests[0] if len(tests) == 1 else lambda position: any(test(position) for test in tests)

    def _list_dtypes(self) -> Sequence[TensorInfo]:
        """Return a tensor of each dtype."""
        if self._dtypes is None:
            self._dtypes = tuple({tensor.dtype: tensor for tensor in self._tensors}.values())
        return self._dtypes

    def _test_name(self, word: str) -> Test:
        if "{" in word and (alternatives := expand_braces(word)) != [word]:
            tests = [self._test_name(alternative) for alternative in alternatives]
            return lambda position: any(test(position) for test in tests)
        lower, names = word.lower(), self._list_names()
        if not _GLOB_CHARACTERS & set(word):
            return lambda position: lower in names[position]
        tensors, by_section = self._tensors, self._by_section

        def matches(position: int) -> bool:
            tensor = tensors[position]
            texts = glob_names(tensor.fqn, tensor.section, by_section=by_section)
            return matches_any(texts, (word,)) or lower in names[position]

        return matches

    def _list_names(self) -> list[str]:
        if self._names is None:
            self._names = [
                glob_names(tensor.fqn, tensor.section, by_section=self._by_section)[-1].lower()
                for tensor in self._tensors
            ]
        return self._names

    def _test_layout(self, selection: Selection) -> Test:
        """Return a test by dtype or shape, decided once for each dtype and shape."""
        known: dict[object, bool] = {}
        tensors, by_dtype = self._tensors, bool(selection.dtype)

        def matches(position: int) -> bool:
            tensor = tensors[position]
            key = tensor.dtype if by_dtype else tensor.shape
            if key not in known:
                known[key] = selection.selects_layout(tensor)
            return known[key]

        return matches

    def _test_size(self, match: re.Match[str]) -> Test:
        limit = float(match["number"]) * _UNITS[match["unit"].lower()]
        tensors, compare = self._tensors, _COMPARISONS[match["sign"] or ">="]
        return lambda position: compare(tensors[position].nbytes, limit)

    def _test_number(self, match: re.Match[str]) -> Test:
        """Return the test of a statistic; a tensor whose statistics were not read does not match."""
        name, limit = match["name"].lower(), float(match["number"])
        compare = _COMPARISONS["=" if match["sign"] == ":" else match["sign"]]

        def matches(position: int) -> bool:
            stats = self._stats.get(position)
            value = getattr(stats, name) if stats is not None else None
            return value is not None and compare(value, limit)

        return matches

    def explain_nothing(self, text: str) -> str:
        """Return why a filter may match nothing: an unknown field, or statistics that were not read."""
        for word in text.split():
            meant = _MEANT_AS_FIELD.fullmatch(word.lstrip("!-"))
            field = meant["field"].lower() if meant is not None else None
            if field in _STATISTICS and len(self._stats) < len(self._tensors):
                read = f"{len(self._stats):,} of {len(self._tensors):,}"
                return f"{word}: the statistics of {read} tensors were read; press esc, then S"
            if field is not None and field not in (*_FIELDS, *_STATISTICS, "size"):
                return f"{word}: no field {field}; fields are {', '.join((*_FIELDS, 'size', *_STATISTICS))}"
            if field == "dtype" and not self.find(word):
                return f"{word}: no tensor has this dtype; there are {', '.join(sorted(self._list_dtype_names()))}"
        return ""

    def _list_dtype_names(self) -> Iterator[str]:
        return (tensor.dtype for tensor in self._list_dtypes())


def expand_braces(word: str) -> list[str]:
    """Return the names that `layers.{3,4}` and `layers.{0..3}` stand for, as the list writes them; at most 2,000."""
    return list(islice(_iter_names(word), _MAX_NAMES))


def _iter_names(word: str) -> Iterator[str]:
    match = _BRACES.search(word)
    if match is None:
        yield word
        return
    for item in match["items"].split(","):
        numbers = _RANGE.fullmatch(item)
        texts = [item] if numbers is None else map(str, range(int(numbers["first"]), int(numbers["last"]) + 1))
        for text in texts:
            yield from _iter_names(f"{word[: match.start()]}{text}{word[match.end() :]}")


def _accept_all(_: int) -> bool:
    return True

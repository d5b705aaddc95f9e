"""Turn a filter such as `attn dtype:bf16 size>1MB nan>0 !bias` into tests of tensors. All words must match.

The words are defined in `core/filter_language.py`, the same as on the page of `statecli report` (`render/filter.js`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence, Set
from functools import cached_property

import msgspec
from msgspec.structs import replace

from statecli.browse.unusual import UnusualValues
from statecli.core.filter_language import LANGUAGE, MAX_VALUES_OF_ANSWER
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Kind, ModelState, TensorInfo
from statecli.core.name_pattern import compile_name_pattern, has_braces
from statecli.core.selection import Selection, glob_names, matches_any, split_sizes
from statecli.core.units import format_section, join_names
from statecli.report import RowView
from statecli.report.tensor_remarks import PROBLEM_WORDS, describe_list_remark, list_problem_words

#: Function that tests the tensor at a position.
Test = Callable[[int], bool]

_FIELD = compile_on_use(r"(?P<field>[A-Za-z_]+)(?P<sign><=|>=|<|>|=|:(?:<=|>=|<|>|=)?)(?P<value>.*)", re.DOTALL)
#: Signs of alternatives in other filter languages.
_ALTERNATIVES = compile_on_use(r"[|,]|\[[0-9]+-[0-9]+\]")
_NUMBER = compile_on_use(
    r"(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?P<unit>[a-z]*)", re.IGNORECASE | re.ASCII
)
_SIZE = compile_on_use(r"\*|\d{1,19}", re.ASCII)
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}
_GLOB_CHARACTERS = frozenset("*?[")


class Found(msgspec.Struct, frozen=True):
    """Tensors that match a filter.

    Attributes:
        positions: Positions of the matching tensors, in order.
        problem: The first wrong word, which was ignored, or why no tensor matches; "" otherwise.
    """

    positions: Sequence[int]
    problem: str = ""


class WrongWord(Exception):
    """Raised for a word of the filter that is not valid."""


class Filter:
    """Find the tensors of a state that match a text. Names in lower case are cached between keystrokes.

    `unusual` has the statistics read so far, and `marked` the positions that the user marked.
    """

    def __init__(self, state: ModelState, unusual: UnusualValues, marked: Set[int]) -> None:
        self._tensors, self._unusual, self._marked = state.tensors, unusual, marked
        self._by_section = len(state.sections) > 1
        self._is_class = state.traits.is_class

    def find(self, text: str) -> Found:
        """Return the tensors that match all words of the text. A wrong word is ignored, and reported as the problem."""
        positions: Sequence[int] = range(len(self._tensors))
        problems, words = [], []
        for word in text.split():
            try:
                test = self._build_test(word)
            except WrongWord as error:
                problems.append(str(error))
                continue
            positions = [position for position in positions if test(position)]
            words.append(word)
        if not positions and not problems and self._tensors:
            problems.append(self._explain_nothing(words))
        return Found(list(positions), problems[0] if problems else "")

    def _build_test(self, word: str) -> Test:
        if word[0] in "!-" and len(word) > 1:
            test = self._build_test(word[1:])
            return lambda position: not test(position)
        parts = _FIELD.fullmatch(word)
        if parts is None:
            return self._test_any(word)
        field, sign, value = _find_field(parts), parts["sign"], parts["value"]
        if field in LANGUAGE.numbers:
            return self._test_number(word, field, sign, value)
        if field in LANGUAGE.texts and sign in ":=":
            if not value:
                raise WrongWord(_format_answer("value", word=word, sign=sign))
            return self._test_field(field, value)
        if any(word.lower() in name for name in self._names):
            return self._test_any(word)
        if field in LANGUAGE.texts:
            raise WrongWord(_format_answer("text", word=word, field=field))
        raise WrongWord(
            _format_answer("field", word=word, field=field, fields=", ".join(LANGUAGE.texts + LANGUAGE.numbers))
        )

    def _test_field(self, field: str, value: str) -> Test:
        if field == "name":
            return self._test_name(value)
        if field == "kind":
            kinds = {kind for kind in Kind if kind.value.startswith(value.lower())}
            return lambda position: self._tensors[position].kind in kinds
        if field in ("section", "device", "remark"):
            return self._test_text(field, value)
        return self._test_layout(Selection(dtype=(value,)) if field == "dtype" else Selection(shape=(value,)))

    def _test_text(self, field: str, value: str) -> Test:
        pattern = compile_name_pattern(value, ignores_case=True)
        match = pattern.fullmatch if _GLOB_CHARACTERS & set(value) else pattern.search
        return lambda position: match(self._get_text(field, position)) is not None

    def _get_text(self, field: str, position: int) -> str:
        tensor = self._tensors[position]
        if field == "dtype":
            return tensor.dtype
        if field == "kind":
            return tensor.kind.value
        if field == "section":
            return format_section(tensor.section)
        if field == "device":
            return tensor.device or "-"
        tensor = replace(tensor, stats=self._unusual.stats.get(position))
        outlier = self._unusual.outliers.get(position, "")
        return describe_list_remark(tensor, outlier, RowView(), is_live=self._is_class, is_reported=False)

    def _test_any(self, word: str) -> Test:
        """Return a test function for a word without a field: part of a name, glob, dtype, kind, shape or problem."""
        tests = [self._test_name(word)]
        lower = word.lower()
        by_dtype = Selection(dtype=(word,))
        if any(by_dtype.selects_layout(tensor) for tensor in self._dtypes):
            tests.append(self._test_layout(by_dtype))
        if lower in [kind.value for kind in Kind]:
            tests.append(self._test_field("kind", word))
        if _is_shape(word):
            tests.append(self._test_layout(Selection(shape=(word,))))
        if lower == "problem":
            tests.append(lambda position: bool(self._list_problems(position)))
        elif lower in map(str.lower, PROBLEM_WORDS):
            tests.append(lambda position: lower in map(str.lower, self._list_problems(position)))
        if lower == "marked":
            tests.append(lambda position: position in self._marked)
        return tests[0] if len(tests) == 1 else lambda position: any(test(position) for test in tests)

    def _list_problems(self, position: int) -> tuple[str, ...]:
        tensor = replace(self._tensors[position], stats=self._unusual.stats.get(position))
        return list_problem_words(tensor, is_outlier=position in self._unusual.outliers)

    @cached_property
    def _dtypes(self) -> Sequence[TensorInfo]:
        """One tensor for each dtype, to test each dtype once and not for every tensor."""
        return tuple({tensor.dtype: tensor for tensor in self._tensors}.values())

    def _test_name(self, word: str) -> Test:
        lower, names = word.lower(), self._names
        is_glob = bool(_GLOB_CHARACTERS & set(word))
        if not is_glob and not has_braces(word):
            return lambda position: lower in names[position]
        if not is_glob:
            search = compile_name_pattern(lower).search
            return lambda position: search(names[position]) is not None or lower in names[position]
        tensors, by_section = self._tensors, self._by_section

        def matches(position: int) -> bool:
            tensor = tensors[position]
            texts = glob_names(tensor.fqn, tensor.section, by_section=by_section)
            return matches_any((*texts, *tensor.aliases), (word,)) or lower in names[position]

        return matches

    @cached_property
    def _names(self) -> list[str]:
        """Names by which the filter finds each tensor, in lower case."""
        names = (glob_names(tensor.fqn, tensor.section, by_section=self._by_section)[-1] for tensor in self._tensors)
        return ["\n".join((name, *tensor.aliases)).lower() for name, tensor in zip(names, self._tensors, strict=True)]

    def _test_layout(self, selection: Selection) -> Test:
        """Return a function that tests the dtype or shape of a tensor. It tests each dtype or shape only once."""
        result_by_layout: dict[object, bool] = {}
        tensors, by_dtype = self._tensors, bool(selection.dtype)

        def matches(position: int) -> bool:
            tensor = tensors[position]
            key = tensor.dtype if by_dtype else tensor.shape
            if key not in result_by_layout:
                result_by_layout[key] = selection.selects_layout(tensor)
            return result_by_layout[key]

        return matches

    def _test_number(self, word: str, field: str, sign: str, value: str) -> Test:
        """Return a function that tests a number of a tensor. A number that was not read does not match."""
        match = _NUMBER.fullmatch(value)
        if match is None or match["unit"].lower() not in LANGUAGE.units:
            sign = sign[1:] or ">" if sign[0] == ":" else sign
            example = "1MB" if field == "size" else "0" if field in ("nan", "inf") else "1000"
            raise WrongWord(_format_answer("number", word=word, sign=sign, field=field, example=example))
        limit = float(match["number"]) * LANGUAGE.units[match["unit"].lower()]
        at_least = ">=" if field in LANGUAGE.at_least else "="
        compare = _COMPARISONS[(sign[1:] or at_least) if sign[0] == ":" else sign]

        def matches(position: int) -> bool:
            number = self._get_number(field, position)
            return number is not None and compare(number, limit)

        return matches

    def _get_number(self, field: str, position: int) -> float | None:
        if field == "size":
            return self._tensors[position].nbytes
        if field == "elements":
            return self._tensors[position].elements
        number: float | None = getattr(self._unusual.stats.get(position), field, None)
        return number

    # --- why nothing matches ------------------------------------------------------------------------------------

    def _explain_nothing(self, words: Sequence[str]) -> str:
        """Return why no tensor matches: one of the words matches no tensor, or no tensor matches all words together."""
        for word in words:
            test = self._build_test(word)
            if not any(map(test, range(len(self._tensors)))):
                return self._explain_word(word)
        return LANGUAGE.answers["all"]

    def _explain_word(self, word: str) -> str:
        parts = _FIELD.fullmatch(word.lstrip("!-"))
        field = _find_field(parts) if parts is not None else ""
        plain_word = word.lstrip("!-").lower()
        if field in LANGUAGE.spectra:
            return f"{word}: browse does not compute singular values; use statecli report --spectra"
        by_values = field in LANGUAGE.statistics or plain_word in ("problem", "nan", "inf", "outlier")
        if by_values and len(self._unusual.stats) < len(self._tensors):
            count_text = f"{len(self._unusual.stats):,} of {len(self._tensors):,}"
            return f"{word}: only {count_text} tensors have statistics; press esc, then S to read all statistics"
        if field in LANGUAGE.choices:
            values = sorted({self._get_text(field, position) for position in range(len(self._tensors))})
            return _format_answer("choice", word=word, field=field, values=join_names(values, MAX_VALUES_OF_ANSWER))
        return _format_answer("alternatives" if _ALTERNATIVES.search(plain_word) else "word", word=word)


def _find_field(parts: re.Match[str]) -> str:
    """Return the standard name of the field in a word. A field name may have several spellings."""
    field = parts["field"].lower()
    return LANGUAGE.field_spellings.get(field, field)


def _format_answer(key: str, **values: str) -> str:
    return LANGUAGE.answers[key].format(**values)


def _is_shape(word: str) -> bool:
    """Return True for `[8,8]`, `(3,)`, `8x*` and `[]`, but not for a single number or `*`."""
    if word[0] + word[-1] not in ("[]", "()") and not any(character in word for character in "x,"):
        return False
    return all(_SIZE.fullmatch(size) for size in split_sizes(word))

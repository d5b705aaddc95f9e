"""Language in which users filter tensors: the fields, their synonyms, and the messages about unknown words.

`browse/filter.py` and `render/filter.js` read filters; the page gets this table as data. `tests/filter_cases.py` has
cases on which both must agree.
"""

from __future__ import annotations

import msgspec

from statecli.core.selection import DTYPE_SPELLINGS


class FilterLanguage(msgspec.Struct, frozen=True):
    """Words of the language in which users filter tensors.

    Attributes:
        texts: Fields with a text, written `field:text`.
        choices: Text fields with few different values, so that an answer can list them.
        numbers: Fields with a number, written `field>number`.
        statistics: Numbers of the values, which may not have been read.
        spectra: Numbers of the singular values, which may not have been computed.
        at_least: Numbers for which `field:number` means at least this number; for other fields, exactly this number.
        field_spellings: Other spellings of fields.
        dtype_spellings: Other spellings of dtypes.
        units: Factors by the unit behind a number, in lower case.
        answers: Texts about a wrong word or a word without a match, with names in braces; "all" has no names.
    """

    texts: tuple[str, ...]
    choices: tuple[str, ...]
    numbers: tuple[str, ...]
    statistics: tuple[str, ...]
    spectra: tuple[str, ...]
    at_least: tuple[str, ...]
    field_spellings: dict[str, str]
    dtype_spellings: dict[str, str]
    units: dict[str, float]
    answers: dict[str, str]


_STATISTICS = ("nan", "inf", "zeros", "min", "max", "mean", "std")
_SPECTRA = ("rank", "stable_rank", "sigma")

LANGUAGE = FilterLanguage(
    texts=("name", "dtype", "kind", "shape", "section", "device", "remark"),
    choices=("dtype", "kind", "section", "device"),
    numbers=("size", "elements", *_STATISTICS, *_SPECTRA),
    statistics=_STATISTICS,
    spectra=_SPECTRA,
    at_least=("size",),
    field_spellings={"bytes": "size", "numel": "elements"},
    dtype_spellings=DTYPE_SPELLINGS,
    units={"": 1, "b": 1}
    | {f"{prefix}{suffix}": 1000.0**n for n, prefix in enumerate("kmgt", 1) for suffix in ("", "b")}
    | {f"{prefix}ib": 1024.0**n for n, prefix in enumerate("kmgt", 1)},
    answers={
        "field": "{word}: unknown field {field}; the fields are {fields}",
        "number": "{word}: write a number after {sign}, such as {field}{sign}{example}",
        "value": "{word}: write a value after {sign}",
        "text": "{word}: {field} is not a number; write {field}:VALUE",
        "choice": "{word}: no tensor has this {field}; the tensors have {values}",
        "word": "{word}: no tensor matches",
        "alternatives": "{word}: no tensor matches; for alternatives write {{3,7,11}}",
        "all": "no tensor matches all words; for alternatives write {3,7,11}",
    },
)

#: Largest number of values of a field in an answer.
MAX_VALUES_OF_ANSWER = 12

"""Check the numbers in the source locations of a TorchScript archive (`code/….py.debug_pkl`).

torch.jit.load takes the texts of a location from a table by their numbers, without a check, when printing an error of
the code. Source: torch/csrc/jit/serialization/source_range_serialization.cpp of torch 2.13.
"""

from __future__ import annotations

from statecli.pickle_scan.packed_weights import strip_tags
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.nodes import Value

_TABLE_FORMAT = "FORMAT_WITH_STRING_TABLE"


def has_wrong_number(root: Value, steps: Steps) -> bool:
    """Return True if a source location is malformed, or refers to a text that is not in the table of texts.

    `root`: the tuple ("FORMAT_WITH_STRING_TABLE", texts, locations). A location is (offset, ((numbers of the texts,
    number of the file name, line), start, end), tag). Other formats do not number texts. Raises OutOfSteps.
    """
    if type(root) is not tuple or not root or root[0] != _TABLE_FORMAT:
        return False
    if len(root) != 3:
        return True
    texts, locations = strip_tags(root[1]), strip_tags(root[2])
    if type(texts) not in (tuple, list) or type(locations) not in (tuple, list):
        return True
    return any(not _is_location(strip_tags(location), len(texts), steps) for location in locations)


def _is_location(location: Value, count: int, steps: Steps) -> bool:
    source = location[1] if type(location) is tuple and len(location) >= 2 else None
    where = source[0] if type(source) is tuple and source else None
    if type(where) is not tuple or len(where) < 2:
        return False
    numbers = strip_tags(where[0])
    if type(numbers) not in (tuple, list):
        return False
    steps.take(Budget.FLOW, 1 + len(numbers))
    return all(type(number) is int and 0 <= number < count for number in (*numbers, where[1]))

"""Check tensors that store the name of a dtype as text, because HQQ passes this text to Python's `eval`.

HQQ saves the dtypes of a quantized layer as letters in integer tensors, `*.compute_dtype` and `*.unpack_view_dtype`,
and evaluates them from load_state_dict, for any format of the file. HQQ iterates over the tensor, and so reads letters
in a sparse or nested tensor too. Source: hqq/core/utils.py and quantize.py of 0.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from statecli import values
from statecli.commands.audit.extra_states import locate_storage
from statecli.core import quoting
from statecli.core.model_state import Hazard, ModelState, Place, ScannedPickle, TensorInfo
from statecli.pickle_scan import texts_as_code

#: Largest number of letters in the name of a dtype.
_MAX_LETTERS = 64
_INTEGERS = ("int", "uint", "bool")


def check_dtype_texts(state: ModelState) -> Iterator[ScannedPickle]:
    """Yield a hazard for each dtype tensor of HQQ whose text is not the name of a dtype. Raises UnreadableError."""
    for tensor in state.tensors:
        if texts_as_code.is_dtype_key(tensor.fqn) and (reason := _explain_unsafe(tensor)):
            text = f"{quoting.name(tensor.fqn)} {reason}; HQQ runs this string as Python code when HQQ loads the file"
            hazard = Hazard(text, help="do not load the file with HQQ; quantize the original layer again")
            place = locate_storage(tensor, state) if tensor.data is not None else Place(state.target, 0, 0)
            yield ScannedPickle(f"the tensor {quoting.name(tensor.fqn)}", place, hazards=(hazard,))


def _explain_unsafe(tensor: TensorInfo) -> str | None:
    """Return why the tensor's text may be code, or None if the text names a dtype or the elements are not integers."""
    if tensor.data is None:
        return (
            "stores a string as character codes, which statecli cannot read, because the tensor is not a plain dense "
            "tensor"
        )
    if not tensor.elements or not tensor.dtype.startswith(_INTEGERS):
        return None
    is_dtype = tensor.elements <= _MAX_LETTERS and texts_as_code.is_dtype(_read_letters(tensor))
    return None if is_dtype else "stores a string as character codes, but the string is not the name of a dtype"


def _read_letters(tensor: TensorInfo) -> str:
    """Return the elements as text, as HQQ does. A number that is not a character code becomes `?`."""
    assert tensor.data is not None  # noqa: S101 - the caller has looked
    with values.read.open_view(tensor.data, tensor.fqn) as view:
        numbers = [int(number) for items in values.read.read_items(view) for number in items.tolist()]
    return "".join(chr(number) if 0 <= number < 0x110000 else "?" for number in numbers)

"""Find data in a pickle that makes a loader do harm. The harm depends on the archive and on the record."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from statecli.core import quoting
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Hazard
from statecli.file_scan.storage_records import ArchiveRecords, find_misfits, is_of_script
from statecli.pickle_scan.imported_names import Scanner
from statecli.pickle_scan.step_budget import Budget, OutOfSteps, Steps
from statecli.pickles.nodes import Persistent

#: Patterns of the names of records, by the use of their pickles. The names with `serialized_` are from torch 2.7 and
#: older.
_EXAMPLE_INPUTS = compile_on_use(r"(?i)\bdata/sample_inputs/|\bserialized_example_inputs\b")
_CONSTANTS = compile_on_use(r"(?i)\bdata/constants/|\bserialized_constants\.")
_TENSORS = compile_on_use(r"(?i)\bdata/(?:weights|constants)/|\bserialized_(?:state_dict|constants)\.")
_OBJECTS = compile_on_use(r"(?i)\b(?:custom|opaque)_obj_")
_LOCATIONS = compile_on_use(r"(?i)\.debug_pkl\b")
#: Words of these patterns: each match of a pattern contains one of them.
_ANY_USE = compile_on_use(r"(?i)sample_inputs|serialized_|constants|weights|_obj_|debug_pkl")
_USED_BY_CODE = (
    "a constant of the program is a Python object; the program may call methods and read attributes of this object"
)
_TENSOR_AS_OBJECT = (
    "the program declares a tensor as an object, so torch.export.load does not compare the tensor's size with the "
    "size in the program; the program may read memory outside the tensor"
)
_ATTRIBUTE_OF_TENSOR = "a tensor has a Python object as an attribute, and the exported program may call this object"
_MISFIT = (
    "the pickle claims that the storage {} has {:,} bytes, but its record has {:,}; torch.jit.load may read memory "
    "outside the record"
)
_OTHER_CLASS = (
    "the storage {} has a class that is not a storage class of torch; a load in C++, such as torch.jit.load, may "
    "read the bytes as any dtype"
)
_WRONG_LOCATION = (
    "a source location of the code refers to a string outside the table of strings; torch reads memory outside this "
    "table when it prints an error"
)
_CONFUSED_NAMES = (
    "the pickle calls _rebuild_from_type_v2; after this call, a load in C++ may use other classes than the pickle names"
)
DO_NOT_LOAD = "do not load the file; contact its publisher"
_EXPORT_AGAIN = "export the program again without Python objects, or contact the publisher of the file"


class RecordUse(msgspec.Struct, frozen=True):
    """How a program uses a pickle, according to the names of its record and of the archives around it.

    In a program of torch.export, the pickle holds the example inputs, the constants, the tensors, or an object (never a
    tensor). The constants may be Python objects that the program uses. In TorchScript, the pickle holds source
    locations of the code.
    """

    is_example: bool
    is_constant: bool
    is_tensor: bool
    is_object: bool
    is_locations: bool

    @classmethod
    def from_place(cls, where: str) -> RecordUse:
        """Return how a program uses the pickle. `where` consists of the names of its record and archives."""
        if not _ANY_USE.search(where):
            return _NO_USE
        names = (_EXAMPLE_INPUTS, _CONSTANTS, _TENSORS, _OBJECTS, _LOCATIONS)
        return cls(*(name.search(where) is not None for name in names))


_NO_USE = RecordUse(False, False, False, False, False)


def find_hazards(scanner: Scanner, use: RecordUse, records: ArchiveRecords | None) -> tuple[Hazard, ...]:
    """Return the data in a pickle that makes loaders do harm. Some data does harm only in certain archives."""
    hazards = list(scanner.find_hazards(keys_are_source=use.is_example))
    is_read_in_cpp = use.is_object or (records is not None and is_of_script(records))
    if records is not None:
        try:
            misfit = find_misfit(scanner.persistent, use, records, scanner.flow.steps)
        except OutOfSteps as error:
            misfit, scanner.unfollowed = None, scanner.unfollowed or error
        hazards += [misfit] if misfit is not None else []
        mismatch = scanner.find_script_mismatch(records.types) if records.types is not None else None
        if mismatch is not None:
            hazards.append(Hazard(mismatch, help=DO_NOT_LOAD))
    if use.is_locations and scanner.has_wrong_location():
        hazards.append(Hazard(_WRONG_LOCATION, help=DO_NOT_LOAD))
    if is_read_in_cpp and scanner.rebuilds_from_type():
        hazards.append(Hazard(_CONFUSED_NAMES, help=DO_NOT_LOAD))
    if use.is_constant and scanner.makes_object():
        hazards.append(Hazard(_USED_BY_CODE, help=_EXPORT_AGAIN))
    if use.is_object and scanner.makes_tensor():
        hazards.append(Hazard(_TENSOR_AS_OBJECT, help=DO_NOT_LOAD))
    if use.is_tensor and scanner.gives_tensor_objects():
        hazards.append(Hazard(_ATTRIBUTE_OF_TENSOR, help=_EXPORT_AGAIN))
    return tuple(hazards)


def find_misfit(storages: Sequence[Persistent], use: RecordUse, records: ArchiveRecords, steps: Steps) -> Hazard | None:
    """Return the hazard of the first storage whose claimed size differs from its record's. Raises OutOfSteps."""
    steps.take(Budget.FLOW, len(storages))
    misfit = next(find_misfits(storages, records, in_cpp=use.is_object or is_of_script(records)), None)
    if misfit is None:
        return None
    text = _OTHER_CLASS if misfit.claimed < 0 else _MISFIT
    return Hazard(text.format(quoting.quote(misfit.record), misfit.claimed, misfit.recorded), help=DO_NOT_LOAD)

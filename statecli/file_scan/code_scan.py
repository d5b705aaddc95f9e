"""Scan the code in a file: TorchScript, bytecode, programs of torch.export, compiled libraries, Python modules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from msgspec import structs

from statecli.core import quoting
from statecli.core.errors import MalformedError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Hazard, Mention, ScannedPickle
from statecli.file_scan.record_hazards import DO_NOT_LOAD
from statecli.file_scan.scan_result import Piece, ScanResult
from statecli.pickle_scan import script_code, script_nesting
from statecli.pickle_scan.export_expressions import UnknownText, find_program_calls
from statecli.pickle_scan.one_pickle import Region
from statecli.pickle_scan.script_casts import find_unchecked_casts
from statecli.pickle_scan.script_enumerations import find_invalid_numbers
from statecli.pickle_scan.script_types import ScriptTypes, read_types
from statecli.pickle_scan.step_budget import Budget
from statecli.storage import json_object

#: Names of records with code that torch writes, whose classes are below `__torch__`.
_OWN_CODE = compile_on_use(r"(?i)(?:\A|/)code/__torch__(?:/.*)?\.py\Z", re.DOTALL)
_OTHER_CODE = (
    "the code defines a class outside of code/__torch__, so torch.jit.load may take this class for a class of torch"
)
_UNCHECKED_CAST = (
    "the code uses a value as an object or a tuple of another type, and torch does not check this; the code may read "
    "or write memory outside the value"
)
_UNKNOWN_TEXT = "the program has text under the unknown key {}, and a loader may compile this text as code"
_UNKNOWN_TEXT_HELP = "update statecli, or export the program again with an older torch"
#: Largest program of torch.export that is read whole, in bytes.
_MAX_PROGRAM_BYTES = 128 * 2**20
#: Largest number of texts whose position in a program is searched for the report.
_MAX_LOCATED_TEXTS = 100
MAX_CODE_BYTES = 64 * 2**20
_LIBRARY = compile_on_use(r"\.(?:so|dll|dylib|pyd)\Z", re.IGNORECASE)
_UNCHECKED_BYTECODE = (
    "torch's lite interpreter for mobile devices does not check all numbers in this bytecode; wrong numbers make the "
    "interpreter read or write memory outside its data"
)
_BYTECODE_HELP = (
    "use torch.jit.load, which does not read the bytecode; use the lite interpreter only for files that you created"
)


class CodeScan:
    """Scanner of the code records of a file; findings go to `result`."""

    def __init__(self, result: ScanResult) -> None:
        self.result = result
        self.steps = result.steps

    def scan_scripts(self, scripts: list[tuple[Region, str]]) -> ScriptTypes | None:
        """Scan the source texts of a TorchScript archive and return their classes; None if no text can be read."""
        readable: list[tuple[Region, str, bytes]] = []
        for region, where in scripts:
            if region.size > MAX_CODE_BYTES:
                why = f"the code has more than {MAX_CODE_BYTES:,} bytes, the limit of statecli"
                self.report_unread_code(region, where, why)
                continue
            self.steps.take(Budget.BYTES, region.size)
            code = region.read(0, region.size)
            if script_nesting.has_deep_statement(code, self.steps):
                why = (
                    f"a statement of the code has more than {script_nesting.MAX_LINKS:,} operators, which crashes "
                    "torch.jit.load"
                )
                self.report_unread_code(region, where, why)
            readable.append((region, where, code))
        codes = [code for *_, code in readable]
        defined_names = script_code.list_functions(codes)
        for region, where, code in readable:
            self._add_calls(region, where, script_code.find_calls(code, self.steps, defined_names))
            self._add_calls(region, where, find_invalid_numbers(code, self.steps))
        for region, where, _ in readable:
            if not _OWN_CODE.search(where):
                self._report_hazard(region, where, Hazard(_OTHER_CODE, help=DO_NOT_LOAD))
        # Calls that torch.jit.load itself runs.
        records = [where for _, where, _ in readable]
        for number, call in script_code.find_calls_on_load(codes, self.steps, records):
            self._add_calls(*readable[number][:2], [call])
        if not readable:
            return None
        types = read_types([(where, code) for _, where, code in readable], self.steps)
        is_run_on_load = any(b"__setstate__" in code for code in codes)
        for cast in find_unchecked_casts(codes, types, self.steps):
            region, where, _ = readable[cast.number]
            hazard = Hazard(_UNCHECKED_CAST, is_run_on_load, True, DO_NOT_LOAD)
            self._report_hazard(region, f"{where}, line {cast.line}", hazard)
            break
        return types

    def scan_bytecode(self, region: Region, where: str) -> None:
        """Scan the bytecode of TorchScript's lite interpreter."""
        if region.size > MAX_CODE_BYTES:
            why = f"the bytecode has more than {MAX_CODE_BYTES:,} bytes, the limit of statecli"
            self.report_unread_code(region, where, why)
        else:
            data = region.read(0, region.size)
            self.steps.take(Budget.BYTES, len(data))
            if script_nesting.has_deep_type(data.decode("latin-1")):
                why = (
                    f"a type in the bytecode has more than {script_nesting.MAX_TYPE_DEPTH} nested brackets, which "
                    "crashes torch"
                )
                self.report_unread_code(region, where, why)
            self._add_calls(region, where, script_code.find_bytecode_calls(data, self.steps))
        # torch 2.13 checks registers and operators, but not the number of an attribute (GET_ATTR).
        hazard = Hazard(_UNCHECKED_BYTECODE, False, True, _BYTECODE_HELP)
        self._report_hazard(region, where, hazard)

    def _report_hazard(self, region: Region, where: str, hazard: Hazard) -> None:
        """Report harmful data in a record that is not a pickle."""
        digest, exact = self.result.compute_digest([region]), region.base is not None
        self.result.add(ScannedPickle(where, region.span, exact=exact, hazards=(hazard,), digest=digest))

    def report_compiled(self, folder: str, pieces: list[Piece]) -> None:
        """Report files of AOTInductor, whose loader opens the library, or builds it with commands from the files."""
        escaping = [piece for piece in pieces if ".." in piece.where.split("/")]
        libraries = [piece for piece in pieces if _LIBRARY.search(piece.where)]
        sources = [piece for piece in pieces if piece.where.lower().endswith(".cpp")]
        main = (escaping or libraries or sources or pieces)[0]
        why = None if libraries else "the AOTInductor loader runs compiler commands from the file"
        why = "the AOTInductor loader unpacks to a path outside its temporary folder" if escaping else why
        path, dot, suffix = main.where.rpartition(".")
        self._add_code(main, Mention(path if dot else folder, suffix, 0, called=True, misuse=why), pieces)

    def report_modules(self, pieces: list[Piece]) -> None:
        """Report Python files of torch.package. They replace installed modules that pickles of the archive import."""
        module, why = pieces[0].where.removesuffix(".py"), "torch.package runs as Python code"
        self._add_code(pieces[0], Mention(module, "py", 0, called=True, misuse=why), pieces)

    def _add_code(self, main: Piece, name: Mention, pieces: Sequence[Piece]) -> None:
        """Report code that runs when the file is loaded, with the main file's position and a digest of all files."""
        digest = self.result.compute_digest([piece.region for piece in pieces], [piece.where for piece in pieces])
        exact, doer = main.region.base is not None, "loading the file"
        self.result.add(ScannedPickle(main.where, main.region.span, (name,), exact=exact, doer=doer, digest=digest))

    def _add_calls(self, region: Region, where: str, calls: Iterable[script_code.Call]) -> None:
        digest, exact = self.result.compute_digest([region]), region.base is not None
        for call in calls:
            line = f"{where}, line {call.line}" if call.line else where
            doer = "loading the file" if call.on_load else "the code of the file"
            names = (Mention(call.module, call.name, call.at, called=True, misuse=call.why),)
            code = ScannedPickle(line, region.span, names, exact=exact, doer=doer, uses_storages=True, digest=digest)
            self.result.add(code)

    def scan_program(self, region: Region, where: str) -> None:
        """Scan a torch.export program. A load evaluates its sizes as code, compiles its names, imports its classes."""
        data = region.read(0, min(region.size, _MAX_PROGRAM_BYTES))
        self.steps.take(Budget.BYTES, len(data))
        try:
            document = json_object.parse_object(data, where).document
        except MalformedError as error:
            self.result.add_unread(Piece(region, where, 0), str(error))
            return
        digest, exact = self.result.compute_digest([region]), region.base is not None
        for number, call in enumerate(find_program_calls(document, self.steps)):
            code = ScannedPickle(where, region.span, exact=exact, uses_storages=True, digest=digest)
            if isinstance(call, UnknownText):
                hazard = Hazard(_UNKNOWN_TEXT.format(quoting.quote(call.key)), False, True, _UNKNOWN_TEXT_HELP)
                self.result.add(structs.replace(code, hazards=(hazard,)))
                continue
            at = max(data.find(json.dumps(call.text).encode()), 0) if number < _MAX_LOCATED_TEXTS else 0
            name = Mention(call.module, call.name, at, called=call.called, misuse=call.why)
            self.result.add(structs.replace(code, names=(name,), doer=call.doer))

    def report_unread_code(self, region: Region, where: str, why: str) -> None:
        """Report a record of code that was not read to its end."""
        self.result.add_unread(Piece(region, where, 0, hidden=False), why)

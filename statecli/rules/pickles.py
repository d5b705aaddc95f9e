"""Rules about the code run by loading a checkpoint's pickles. Pickles are read and never executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec import structs

from statecli.core import quoting
from statecli.core.errors import TRUNCATED, strip_copy_advice
from statecli.core.finding import Severity
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Bomb, Hazard, Mention, Place, ScannedPickle
from statecli.pickle_scan import known_names, program_operators
from statecli.pickles import safe_globals
from statecli.pickles.python2_names import rename_python2
from statecli.rules.audit_rule import Issue, compute_text_digest, rule
from statecli.rules.audit_subject import Subject, needs_file, needs_pickles
from statecli.storage import files

_NAME_BYTES = 1
#: Remedy for a file that runs code or exhausts the machine.
_DO_NOT_LOAD = "do not load the file; contact its publisher"
#: Largest number of issues of a rule for a file; a last issue counts the rest.
_MAX_ISSUES_PER_FILE = 100


def _locate_byte(pickle: ScannedPickle, position: int) -> Place:
    """Return the file position of a byte of the pickle; for a compressed pickle, the position of the whole pickle."""
    if not pickle.exact:
        return pickle.place
    return Place(pickle.place.path, pickle.place.offset + position, _NAME_BYTES)


def _find_foreign_names(pickle: ScannedPickle, of_script: bool = False) -> list[tuple[Mention, str | None]]:
    """Return each name that is not known as harmless, with its harm (None if unknown). For code, return all names."""
    if pickle.doer:
        return [(mention, mention.misuse) for mention in pickle.names]
    names = [name if of_script else _mark_foreign_script_class(name) for name in pickle.names]
    return [(mention, known_names.find_harm(mention)) for mention in names if not _is_clean(mention)]


def _find_all_foreign_names(subject: Subject) -> Iterator[tuple[ScannedPickle, Mention, str | None]]:
    """Yield each name in a pickle that is not known as harmless, with its pickle and its harm (None if unknown)."""
    listed_members = {(pickle.place.path, pickle.where) for pickle in subject.pickles if not pickle.hidden}
    for pickle in subject.pickles:
        folder = pickle.where.rpartition("/")[0]
        of_script = not pickle.hidden and (pickle.place.path, f"{folder}/constants.pkl".lstrip("/")) in listed_members
        for mention, harm in _find_foreign_names(pickle, of_script):
            yield pickle, mention, harm


def _mark_foreign_script_class(mention: Mention) -> Mention:
    """Mark a `__torch__` class outside of TorchScript as harmful, because Python would import a module of this name."""
    if mention.misuse or mention.module.partition(".")[0] != "__torch__":
        return mention
    reason = "is a TorchScript class, but the file has no TorchScript, so Python would import a module of this name"
    return structs.replace(mention, misuse=reason)


def _is_clean(mention: Mention) -> bool:
    return not mention.misuse and not mention.local_file and known_names.is_clean_mention(mention)


def _describe_load(pickle: ScannedPickle) -> str:
    return "loading the nested pickle" if pickle.hidden else "loading the file"


def _describe_place(subject: Subject, pickle: ScannedPickle, *, says_record: bool = False) -> str:
    """Return text with the name of the pickle's file in the target, and of the pickle in this file.

    With `says_record`, the word `record` precedes a record of an archive, whose name looks like the path of a file.
    """
    file = subject.member(pickle.place)
    within = pickle.where.removeprefix("the file").removeprefix(", ") if file else pickle.where
    if says_record and "/" in within.partition(",")[0]:
        within = f"record {within}"
    return quoting.name(": ".join(filter(None, (file, within))))


def _describe_byte(subject: Subject, pickle: ScannedPickle, position: int) -> str:
    return f"{_describe_place(subject, pickle, says_record=True)}, byte {position}"


def _build_name_issue(subject: Subject, pickle: ScannedPickle, mention: Mention, reason: str, help: str) -> Issue:
    name = quoting.name(mention.qualified.replace("__builtin__.", "builtins.", 1))
    byte_text = _describe_byte(subject, pickle, mention.position)
    doer = pickle.doer or _describe_load(pickle)
    message = f"{doer} {'calls' if mention.called else 'imports'} {name}, which {reason} ({byte_text})"
    place = _locate_byte(pickle, mention.position)
    return Issue(message, help=help, place=place, about=mention.qualified, content=pickle.digest)


def _explain_unknown_name(pickle: ScannedPickle, mention: Mention) -> tuple[str, str]:
    if not pickle.doer:
        return "is not on the allow-list of torch and plain-data types", "save plain data instead"
    if program_operators.is_shipped(_name_operator(mention)):
        reason = "is not on the list of operators that torch writes into programs"
        return reason, "export the program again without this operator"
    reason = "belongs to a library outside torch, torchvision and torchaudio"
    return reason, "review this library before you call the model"


def _name_operator(mention: Mention) -> str:
    """Return the operator's qualified name: `quantized::add` for `add` of `torch.ops.quantized`."""
    namespace = "aten" if mention.module == "torch" else mention.module.removeprefix("torch.ops.")
    return f"{namespace}::{mention.name}"


def _limit_per_file(issues: Iterable[Issue]) -> Iterator[Issue]:
    """Yield the first issues of each file and a count of the rest, because hostile files can cause a million issues."""
    counts: Counter[str] = Counter()
    contents: dict[str, set[str]] = {}
    for issue in issues:
        path = issue.place.path if issue.place else ""
        counts[path] += 1
        contents.setdefault(path, set()).add(f"{issue.about} {issue.content}")
        if counts[path] <= _MAX_ISSUES_PER_FILE:
            yield issue
    for path, count in counts.items():
        if count > _MAX_ISSUES_PER_FILE:
            message = f"and {count - _MAX_ISSUES_PER_FILE:,} more findings of this rule in the file"
            about = f"more than {_MAX_ISSUES_PER_FILE}"
            yield Issue(
                message,
                place=Place(path, 0, 0),
                about=about,
                content=compute_text_digest("\0".join(sorted(contents[path]))),
            )


@rule(Severity.ERROR, needs_file, needs_pickles, commands=("inspect", "audit"))
def unsafe_global(subject: Subject) -> Iterator[Issue]:
    """Loading the file imports or calls a function used in attacks, such as `os.system`.

    Why: unpickling imports and calls the functions named in the file, before you can check the contents. So the author
    of the file can run any code on the machine of everyone who loads the file. Names accepted by torch's restricted
    unpickler, and names that build plain data, are not reported. The rule reports other names with a known harm:
    Python's own functions, functions of torch and numpy that do not build data, and packages that run code.
    The rule also reports an allowed name in an unusual use: the file changes the object for the whole process, calls
    the function through another name, or passes arguments that make the function call or overwrite something. In
    TorchScript code and torch.export programs, the rule reports calls that reach files or Python.

    Example: `data.pkl` calls `os.system` with a shell command, after the tensors of an ordinary state_dict.

    Fix: do not load the file, and contact its publisher. If the file is yours, save the state_dict without the object
    of this name.
    """
    yield from _limit_per_file(
        _build_name_issue(subject, pickle, mention, harm, _DO_NOT_LOAD)
        for pickle, mention, harm in _find_all_foreign_names(subject)
        if harm
    )


@rule(Severity.ERROR, needs_file, needs_pickles)
def local_module(subject: Subject) -> Iterator[Issue]:
    """Loading the file may run a Python file that lies next to the checkpoint or in a parent folder.

    Why: a pickle names its classes by module, and Python looks for modules in the working directory first. So a
    download with a pickle and a Python file can run any code, also under the name of a known package: an import of
    `omegaconf` may run the file `omegaconf.py`. `torch.load` refuses unknown names by default, but `weights_only=False`
    and other loaders accept them. In a git repository, code above the audited folder counts as your own: the rule
    `unknown-global` reports its classes.

    Example: `model.pt` stores an object of the class `net.Net`, and its folder contains `net.py`.

    Fix: read the Python file before you load the checkpoint. If the code is yours, save the state_dict and plain data
    instead of the object, or accept the finding with a reason.
    """
    yield from _limit_per_file(
        _build_name_issue(subject, pickle, mention, *_explain_local_file(mention.local_file))
        for pickle, mention, harm in _find_all_foreign_names(subject)
        if not harm and mention.local_file
    )


def _explain_local_file(file: str) -> tuple[str, str]:
    name = quoting.quote(file)
    return (
        f"Python may import from {name}, a file in the folder of the checkpoint or in a parent folder",
        f"read {name} before you load the file; if the code is yours, save the state_dict and plain data instead",
    )


@rule(Severity.WARNING, needs_file, needs_pickles)
def unknown_global(subject: Subject) -> Iterator[Issue]:
    """Loading the file imports a class or function outside statecli's list of harmless names.

    Why: statecli does not know whether the class or function is safe. Loading the file imports the package and runs the
    code of the name, and fails if the package is missing or has another version. `torch.load` refuses the file by
    default; with `weights_only=False` every name is accepted.

    Example: `my_project.config.TrainConfig`, an object stored next to the weights.

    Fix: save plain dicts, numbers and text next to the tensors; or accept the finding with a reason.
    """
    yield from _limit_per_file(
        _build_name_issue(subject, pickle, mention, *_explain_unknown_name(pickle, mention))
        for pickle, mention, harm in _find_all_foreign_names(subject)
        if not harm and not mention.local_file and mention.qualified not in pickle.modules
    )


@rule(Severity.WARNING, needs_file, needs_pickles)
def whole_module_pickle(subject: Subject) -> Iterator[Issue]:
    """A whole module is pickled as an object, although its state_dict would be enough.

    Why: `torch.load` needs `weights_only=False` for the file, and then the file can run any code. The load also needs
    the class under the same name in the same module: if the code moves or changes, the weights cannot be loaded.

    Example: `torch.save(model, "net.pt")`.

    Fix: save `model.state_dict()`, and build the class before loading.
    """
    classes = dict.fromkeys(name for pickle in subject.pickles for name in pickle.modules)
    if classes:
        place = next(pickle.place for pickle in subject.pickles if pickle.modules)
        needs = f"weights_only=False and the code of {quoting.names(list(classes))}"
        message = f"a whole module is pickled, so loading needs {needs}"
        help = "save model.state_dict() instead of the module"
        yield Issue(message, help=help, place=place, content=", ".join(classes))


@rule(Severity.WARNING, needs_file, needs_pickles, cases={"plain data": Severity.NOTE})
def nested_pickle(subject: Subject) -> Iterator[Issue]:
    """A pickle is hidden in a string of another pickle, or in a record without tensors.

    Why: `torch.load` does not run the hidden pickle, but another program may unpickle it later and run its code.
    Scanners that stop at `data.pkl` do not see the hidden pickle. statecli scans the hidden pickle too, and the other
    rules check its imports.

    Example: `extra/hook.pkl` next to `data.pkl` in the archive; bytes in a state_dict that begin with `\\x80\\x04`.

    Fix: find the program that reads the pickle; replace it with plain data, or accept the finding with a reason.
    """
    yield from _limit_per_file(
        _build_nested_issue(subject, pickle)
        for pickle in subject.pickles
        if pickle.hidden and (pickle.names or not pickle.unread)
    )


def _build_nested_issue(subject: Subject, pickle: ScannedPickle) -> Issue:
    clean = not _find_foreign_names(pickle)
    content = "imports only plain data" if clean else "imports more than plain data"
    message = f"nested pickle: {_describe_place(subject, pickle)}; {content}"
    help = "find out which program reads this pickle"
    severity = nested_pickle.cases["plain data"] if clean else None
    return Issue(message, None, None, help, severity, None, pickle.place, pickle.where, pickle.digest)


@rule(Severity.ERROR, needs_file, needs_pickles)
def unscanned_pickle(subject: Subject) -> Iterator[Issue]:
    """A pickle, or an archive of pickles, could not be scanned to its end.

    Why: the unscanned part may run code when the file is loaded. Attackers write pickles that end too early, decompress
    without end or give wrong offsets, so that scanners give up and report nothing. Some pickles have forged frames: two
    unpicklers read different opcodes from the same bytes.

    Example: a `data.pkl` of 200 KB that inflates to 200 MB; a pickle that calls a function and then ends in the middle.

    Fix: do not load the file. If the file is yours, the file is damaged: download or save the file again.
    """
    yield from _limit_per_file(
        _build_unread_issue(subject, pickle, pickle.unread) for pickle in subject.pickles if pickle.unread
    )


@rule(Severity.ERROR, needs_file, needs_pickles)
def allocation_bomb(subject: Subject) -> Iterator[Issue]:
    """Loading the file takes far more memory or time than its size explains.

    Why: a few bytes of a pickle can request any amount of memory. A dictionary key, or a value in an error message, can
    take forever to hash or to write out. The loading process is killed or hangs, even with `weights_only=True`.
    torch.save and pickle do not write such a file, because they write the data itself.

    Example: `bytearray(2**36)` next to the tensors; tuples nested 64 levels deep as a dictionary key, where each
    tuple contains the next tuple twice; such lists as the state of a parameter; a memo entry with the number 2**28;
    compressed records that inflate 1,000 times.

    Fix: do not load the file. If the file is yours, save the data itself instead of a call that computes it.
    """
    yield from _limit_per_file(
        _build_bomb_issue(subject, pickle, bomb) for pickle in subject.pickles for bomb in pickle.bombs
    )


@rule(Severity.ERROR, needs_file, needs_pickles, cases={"needs review": Severity.WARNING, "usual": Severity.NOTE})
def unsafe_data(subject: Subject) -> Iterator[Issue]:
    """The file has numbers or texts that make common programs read other memory, delete files or run code.

    Why: `torch.load(weights_only=True)` returns numbers and texts without a check, and other programs trust the values.
    Code: LightningCLI calls the name at a `class_path` in the hyperparameters. MMEngine runs its saved configuration.
    HQQ evaluates the name of a dtype, fairseq evaluates texts of its configuration, and Composer evaluates the `repr`
    of an algorithm. Composer also calls the class of a transformers model. `torch.compiler.load_cache_artifacts`
    unpickles a file that begins like a cache of compiled code.
    Files: Lightning downloads, unpickles and deletes the paths in the state of a ModelCheckpoint. MMEngine and MMCV 1
    delete the path of the best checkpoint. Composer writes the files of a tokenizer to the paths in the checkpoint.
    Memory and time: a wrong position in the state of a random generator makes numpy or torch read other memory at the
    next random number. A text in the state of Python's generator can fill the memory. Optimizers and schedulers
    compute powers of integers exactly, so a large exponent takes hours.
    Training: with `assign_to_params_buffers` in `_metadata`, `load_state_dict` replaces the parameters, and an existing
    optimizer keeps training the old parameters.
    The finding is a warning for the bytecode of a TorchScript archive, because the lite interpreter trusts the numbers
    in the bytecode. The finding is a warning for a name unknown to statecli: a `class_path`, a `type` or scope of
    MMEngine, or the class of a model of Composer. The finding is also a warning for Python files in a tokenizer of
    Composer, and for possible names of a class or a configuration file in the hyperparameters of LightningCLI (if they
    have an `_instantiator`). The finding is a note for a path in a store such as s3, for a path with a usual name of
    MMEngine and MMCV (`best_*.pth`), and for a key of `_metadata` that torch does not write.

    Example: `("MT19937", key, 2**30, 0, 0.0)` in `rng_state.pth`; a `best_model_path` of `http://host/best.ckpt`;
    a `conv_feature_layers` of `[exit()]`.

    Fix: do not resume from the file, and contact its publisher. If the file is yours, save the file again without the
    value.
    """
    yield from _limit_per_file(
        _build_hazard_issue(subject, pickle, hazard) for pickle in subject.pickles for hazard in pickle.hazards
    )


def _build_hazard_issue(subject: Subject, pickle: ScannedPickle, hazard: Hazard) -> Issue:
    place_text = _describe_place(subject, pickle)
    message = f"{hazard.text} ({place_text})" if place_text else hazard.text
    help = hazard.help or ("do not resume from the file; contact its publisher" if hazard.is_error else None)
    severity = None if hazard.is_error else unsafe_data.cases["needs review" if hazard.needs_review else "usual"]
    return Issue(message, help=help, severity=severity, place=pickle.place, about=hazard.text, content=pickle.digest)


def _build_bomb_issue(subject: Subject, pickle: ScannedPickle, bomb: Bomb) -> Issue:
    place = _locate_byte(pickle, bomb.position) if bomb.position else pickle.place
    place_text = _describe_byte(subject, pickle, bomb.position) if bomb.position else _describe_place(subject, pickle)
    message = f"{_describe_load(pickle)} {quoting.name(bomb.text)}" + (f" ({place_text})" if place_text else "")
    return Issue(message, help=_DO_NOT_LOAD, place=place, about=bomb.text)


def _build_unread_issue(subject: Subject, pickle: ScannedPickle, reason: str) -> Issue:
    reason = reason.removeprefix(pickle.where).lstrip(": ")
    reason, place = strip_copy_advice(reason), _describe_place(subject, pickle)
    if reason.startswith(TRUNCATED):
        message = f"the {reason}" if place == "the file" else f"{place}: {reason}"
    else:
        message = f"{place}: not scanned to the end: {reason}"
    help = "do not load the file; copy the file from its source again, or save the checkpoint again"
    return Issue(message, help=help, place=pickle.place, about=pickle.where, content=pickle.digest)


#: First protocol with opcodes that torch's unpickler does not know (FRAME, torch 2.13).
_REFUSED_PROTOCOL = 4
#: Files that the Trainer and Accelerate save next to the weights, and load with their own list of allowed names. A file
#: with another name was named by somebody else.
_TRAINER_FILES = compile_on_use(
    r"(?:optimizer|scheduler)(?:_\d+)?\.(?:pt|bin)|scaler\.pt|(?:sampler|dl_state_dict)(?:_\d+)?\.bin"
    r"|training_args\.bin|rng_state(?:_\d+)?\.pth|(?:random_states|custom_checkpoint)_\d+\.pkl"
)
#: Remedy for unknown opcodes in a pickle of an earlier protocol.
_SAVE_AGAIN = "save the file again with torch.save, which writes opcodes that torch.load knows"
#: Remedy for imported names: plain data in place of the objects that are most often saved.
_SAVE_PLAIN_DATA = (
    "save plain data instead: state_dict() of a module, an optimizer or a scheduler, vars(namespace), str(path), "
    "value.item(), array.tolist(), dict(mapping)"
)


@rule(Severity.WARNING, needs_file, needs_pickles, cases={"own loader": Severity.NOTE})
def needs_weights_only_false(subject: Subject) -> Iterator[Issue]:
    """`torch.load(path)` refuses the file, because the file imports a name outside torch's allow-list.

    Why: since torch 2.6, `torch.load` sets `weights_only=True` and refuses every name outside its allow-list. To load
    the file, everyone must pass `weights_only=False`, which lets the file run any code, or call `add_safe_globals` for
    each name. statecli uses the allow-list of torch 2.13. torch.load also refuses a call of a class such as
    torch.FloatStorage, and opcodes that torch.save does not write, such as the opcodes of pickle protocol 4.
    Training libraries load their own files with their own allow-list. So the finding is a note for the states of
    DeepSpeed and Megatron, and for a single file such as `training_args.bin` or `rng_state.pth`. In the audit of a
    training folder, files with such names are not reported.

    Example: `torch.save({"model": model.state_dict(), "args": args}, path)`, where `args` is an `argparse.Namespace`.

    Fix: save only tensors, dicts, lists, numbers and text: `vars(args)`, `str(path)`, `value.item()`, `dict(mapping)`.
    For a module, save its `state_dict()`.
    """
    reported: set[tuple[str, str]] = set()
    for pickle in subject.pickles:
        is_companion = _TRAINER_FILES.fullmatch(files.get_name(pickle.place.path)) is not None
        if not pickle.by_torch_load or (is_companion and subject.member(pickle.place)):
            continue
        names = safe_globals.find_refused_names(
            ".".join(rename_python2(mention.module, mention.name)) for mention in pickle.names
        )
        storages = [
            mention.qualified
            for mention in pickle.names
            if mention.called and safe_globals.is_storage_class(mention.qualified)
        ]
        if pickle.protocol >= _REFUSED_PROTOCOL:
            names = []
            reason = f"is a pickle of protocol {pickle.protocol}"
            help = "save the file without the argument pickle_protocol"
        elif pickle.refused_opcode is not None:
            names = []
            reason, help = f"has the {_describe_opcode(pickle.refused_opcode)}", _SAVE_AGAIN
        elif names:
            reason, help = f"imports {', '.join(map(quoting.name, names))}", _suggest_replacements(names, pickle)
        elif storages:
            reason, help = f"calls {quoting.name(storages[0])}", "save a tensor instead of a storage"
        else:
            continue
        # A legacy file has five pickles, all of one protocol.
        if (pickle.place.path, reason) in reported:
            continue
        reported.add((pickle.place.path, reason))
        message = f"torch.load refuses the file by default: {_describe_place(subject, pickle)} {reason}"
        has_own_loader = is_companion or subject.state.traits.has_own_loader
        severity = needs_weights_only_false.cases["own loader"] if has_own_loader else None
        yield Issue(message, help=help, severity=severity, place=pickle.place, about=", ".join(names))


def _describe_opcode(code: int) -> str:
    import pickletools  # pickletools has long texts about each opcode, which no other code needs

    names = (f"opcode {opcode.name}" for opcode in pickletools.opcodes if opcode.code == chr(code))
    return next(names, f"unknown opcode 0x{code:02x}")


def _suggest_replacements(names: list[str], pickle: ScannedPickle) -> str:
    """Return advice for a refused file: imports, plain data, or a warning not to load the file."""
    if any(known_names.find_harm(mention) for mention in pickle.names if not _is_clean(mention)):
        return "do not load the file with weights_only=False; contact its publisher"
    if any(mention.local_file for mention in pickle.names):
        return "read the Python files next to the checkpoint before you load it with weights_only=False"
    imports = dict.fromkeys(map(safe_globals.find_admitting_module, names))
    if None not in imports:
        return f"import {' and '.join(filter(None, imports))} before torch.load"
    return _SAVE_PLAIN_DATA


RULES = (
    unsafe_global,
    local_module,
    unknown_global,
    whole_module_pickle,
    needs_weights_only_false,
    nested_pickle,
    unscanned_pickle,
    allocation_bomb,
    unsafe_data,
)

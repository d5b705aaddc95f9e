"""What loading a checkpoint's pickles would run: every pickle of the file, read and not executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec import structs

from statecli.auditing.rule import Found, rule
from statecli.auditing.subject import Subject, a_file, the_pickles
from statecli.finding import Severity
from statecli.formats import _gadgets, _shown
from statecli.state import Mention, Place, ScannedPickle

_LENGTH = 1
#: Findings of one rule in one file; of the rest the number is told.
_MOST = 100


def _at(pickle: ScannedPickle, mention: Mention) -> Place:
    """The byte of the file where the name is; of a compressed pickle, the pickle."""
    if not pickle.exact:
        return pickle.place
    return Place(pickle.place.path, pickle.place.offset + mention.position, _LENGTH)


def _foreign(pickle: ScannedPickle, of_script: bool = False) -> list[tuple[Mention, str | None]]:
    """The names that are not clean, each with what it is known for, if it is. Of code, none that is clean is there."""
    if pickle.doer:
        return [(mention, mention.misuse) for mention in pickle.names]
    names = [one if of_script else _as_python(one) for one in pickle.names]
    return [(mention, _harm(mention)) for mention in names if not _is_clean(mention)]


def _all_foreign(subject: Subject) -> Iterator[tuple[ScannedPickle, Mention, str | None]]:
    """The same of every pickle."""
    seen = {(one.place.path, one.where) for one in subject.pickles if not one.hidden}
    for pickle in subject.pickles:
        folder = pickle.where.rpartition("/")[0]
        of_script = not pickle.hidden and (pickle.place.path, f"{folder}/constants.pkl".lstrip("/")) in seen
        for mention, harm in _foreign(pickle, of_script):
            yield pickle, mention, harm


def _as_python(mention: Mention) -> Mention:
    """Classes of TorchScript are of the archive's own code where torch reads it so, which is where constants are."""
    if mention.misuse or mention.module.partition(".")[0] != "__torch__":
        return mention
    why = "is TorchScript's, and no TorchScript is here: Python imports a file of that name where it runs"
    return structs.replace(mention, misuse=why)


def _is_clean(mention: Mention) -> bool:
    return not mention.misuse and _is_data(mention)


def _is_data(mention: Mention) -> bool:
    module, name = _gadgets.renamed(mention.module, mention.name)
    return _gadgets.is_clean(module, name, called=mention.called)


def _harm(mention: Mention) -> str | None:
    """What a name that is not clean is known for."""
    harm = None
    if not _is_data(mention):
        for module, name in (_gadgets.renamed(mention.module, mention.name), (mention.module, mention.name)):
            harm = harm or _gadgets.harm(module, name, called=mention.called)
    return harm or mention.misuse


def _does(mention: Mention) -> str:
    return "calls" if mention.called else "imports"


def _where(subject: Subject, pickle: ScannedPickle) -> str:
    """Which pickle of which of the target's files."""
    file = subject.member(pickle.place)
    within = pickle.where.removeprefix("the file").removeprefix(", ") if file else pickle.where
    return _shown.name(": ".join(filter(None, (file, within))))


def _told(subject: Subject, pickle: ScannedPickle, mention: Mention, why: str, help: str) -> Found:
    name = _shown.name(mention.qualified.replace("__builtin__.", "builtins.", 1))
    where = f"{_where(subject, pickle)}, byte {mention.position}"
    message = f"{pickle.doer or 'loading it'} {_does(mention)} {name}, which {why} ({where})"
    return Found(message, help=help, place=_at(pickle, mention), about=mention.qualified)


def _unknown(pickle: ScannedPickle) -> tuple[str, str]:
    if pickle.doer:
        return "is of a library that neither torch, torchvision nor torchaudio has", "look at that library"
    return "is neither torch's own nor plain data", "save plain data in its place"


def _most(found: Iterable[Found]) -> Iterator[Found]:
    """The first hundred of each file, and how many more there are: a hostile file can have a million."""
    counts: Counter[str] = Counter()
    for one in found:
        path = one.place.path if one.place else ""
        counts[path] += 1
        if counts[path] <= _MOST:
            yield one
    for path, count in counts.items():
        if count > _MOST:
            yield Found(f"and {count - _MOST} more like these", place=Place(path, 0, 0), about=f"more than {_MOST}")


@rule(Severity.ERROR, a_file, the_pickles)
def unsafe_global(subject: Subject) -> Iterator[Found]:
    """A pickle of the file imports what an attack is made of.

    Why: unpickling imports and calls whatever the file names, before anything of the file can be checked: the one who
    wrote it has the machine of everyone who loads it. Clean is what torch's restricted unpickler admits and what builds
    plain data; of the rest, this is what is known for harm: Python's own functions, those of torch and numpy that
    build no data, packages that run code. A clean name is harm too where it is used as no pickler uses it: changed for
    the whole process, called by way of another, given what makes it call or overwrite something.
    Code of TorchScript and programs of torch.export are searched as well, for what touches files or Python.

    Example: `os.system`, called with a line of shell from `data.pkl`, behind the tensors of an ordinary state_dict.

    Fix: do not load it, and ask whoever published it. If it is yours, save the state_dict, without what needs the name.
    """
    yield from _most(
        _told(subject, pickle, mention, harm, "do not load it; ask who published it")
        for pickle, mention, harm in _all_foreign(subject)
        if harm
    )


@rule(Severity.WARNING, a_file, the_pickles)
def unknown_global(subject: Subject) -> Iterator[Found]:
    """A pickle of the file imports a name that is neither torch's own nor plain data.

    Why: loading it needs that package at the right version and runs its code; torch.load refuses it unless
    weights_only=False allows everything. Nothing is known against the name, and nothing for it.

    Example: `my_project.config.TrainConfig`, an object kept beside the weights.

    Fix: save plain dicts, numbers and text beside the tensors; or accept it with a reason.
    """
    yield from _most(
        _told(subject, pickle, mention, *_unknown(pickle))
        for pickle, mention, harm in _all_foreign(subject)
        if not harm and mention.qualified not in pickle.modules
    )


@rule(Severity.WARNING, a_file, the_pickles)
def whole_module_pickle(subject: Subject) -> Iterator[Found]:
    """A module is pickled whole, as an object, where its state_dict would do.

    Why: torch.load needs weights_only=False for it, which lets the file run anything, and the class under the same
    name at the same place: when the code moves or changes, the weights cannot be loaded.

    Example: `torch.save(model, "net.pt")`.

    Fix: save `model.state_dict()`, and build the class where it is loaded.
    """
    classes = dict.fromkeys(name for pickle in subject.pickles for name in pickle.modules)
    if classes:
        place = next(pickle.place for pickle in subject.pickles if pickle.modules)
        message = f"a module is pickled whole: loading it needs weights_only=False and {_shown.names(list(classes))}"
        yield Found(message, help="save model.state_dict() instead", place=place)


@rule(Severity.WARNING, a_file, the_pickles)
def nested_pickle(subject: Subject) -> Iterator[Found]:
    """A pickle lies where no reader of tensors looks: in a string of another pickle, or in a record of its own.

    Why: it runs when whatever knows of it unpickles it, and scanners that stop at `data.pkl` never see it. It was read
    like the others, and the names it imports are judged by the other rules.

    Example: `extra/hook.pkl` beside `data.pkl` in the archive; bytes in a state_dict that begin with `\\x80\\x04`.

    Fix: find out what reads it; keep plain data in its place, or accept it with a reason.
    """
    yield from _most(
        _inside(subject, pickle) for pickle in subject.pickles if pickle.hidden and (pickle.names or not pickle.unread)
    )


def _inside(subject: Subject, pickle: ScannedPickle) -> Found:
    clean = not _foreign(pickle)
    said = "it names nothing but plain data" if clean else "it names more than plain data"
    message = f"a pickle inside: {_where(subject, pickle)}; {said}"
    help = "find out what reads it"
    return Found(message, None, None, help, Severity.NOTE if clean else None, place=pickle.place, about=pickle.where)


@rule(Severity.ERROR, a_file, the_pickles)
def unscanned_pickle(subject: Subject) -> Iterator[Found]:
    """A pickle, or an archive of them, could not be read to its end.

    Why: what loading it would run is known up to there and no further. Pickles are made to break off, to inflate
    without end or to lie about where they are, so that scanners give up and say nothing.

    Example: a `data.pkl` of 200 KB that inflates to 200 MB; one that calls a function and then ends in the middle.

    Fix: do not load it. If it is yours, the file is damaged: fetch it again, or save it again.
    """
    yield from _most(_broken(subject, pickle, pickle.unread) for pickle in subject.pickles if pickle.unread)


def _broken(subject: Subject, pickle: ScannedPickle, unread: str) -> Found:
    unread = unread.removeprefix(pickle.where).lstrip(": ")
    message = f"{_where(subject, pickle)}: not read to its end: {unread}"
    help = "do not load it; copy or save it again"
    return Found(message, help=help, place=pickle.place, about=pickle.where)


RULES = (unsafe_global, unknown_global, whole_module_pickle, nested_pickle, unscanned_pickle)

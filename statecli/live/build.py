"""A spec -> a live `nn.Module`, and one line about whatever went wrong on the way.

Naming `net.py:Net` runs that code: the user asked for it. What it prints goes to stderr, what it raises becomes one
ModelError with the line of its own that failed. torch is imported when `build` is called, not before.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import io
import itertools
import os
import pkgutil
import re
import sys
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from statecli.core.errors import MissingDependency, ModelError, StateError, UsageError
from statecli.live import hf_auto, search_path, torchscript_errors
from statecli.live.spec import Spec
from statecli.storage import files

if TYPE_CHECKING:
    from torch import nn

    from statecli.live.origin import Origins
    from statecli.live.torch_settings import Settings

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_numbers = itertools.count()
#: Top-level names that importing a spec's file brought from that file's own folder, by folder.
_siblings: dict[str, set[str]] = {}


@dataclass(frozen=True)
class Built:
    """A model that is ours alone: `read` and `move` overwrite its values.

    `origins` knows the line of each assignment; `values` says whether large random initial values were drawn. `left` is
    what the constructor made of torch's settings (see `settings`); None where no constructor was run. `original` is the
    live model that `module` is a copy of: its tensors are listed, and only the copy is moved.
    """

    spec: Spec
    module: nn.Module
    origins: Origins
    init_device: str
    values: bool
    _make: Callable[[bool, int], nn.Module]
    left: Settings | None = field(default=None, kw_only=True)
    original: nn.Module | None = field(default=None, kw_only=True)

    @property
    def listed(self) -> nn.Module:
        """The model whose tensors are listed; nothing may be written to it if it is not `module`."""
        return self.module if self.original is None else self.original

    def again(self, *, values: bool | None = None, seed: int = 0) -> nn.Module:
        """A second instance, built afresh, as the first was or with other values of the random generator.

        Raises ModelError where the spec names an object that exists only once.
        """
        from statecli.live import torch_settings

        with torch_settings.building():
            other = self._make(self.values if values is None else values, seed)
        if other is self.module:
            raise ModelError(f"{self.spec.text}: it is always the same object, so there is no second one to try on")
        return other

    @contextmanager
    def user_code(self, doing: str) -> Iterator[None]:
        """Run code of the model's: prints to stderr, sys.path as at import, exceptions as one ModelError line.

        torch's settings are as the constructor left them. Its `__torch_function__` counts again, where the caller has
        shut it off to look at tensors.
        """
        import torch

        from statecli.live import torch_settings

        with (
            torch_settings.kept(self.left),
            _guarded(self.spec),
            _one_line(self.spec, doing),
            torch._C._EnableTorchFunction(),
        ):
            yield


def build(spec: Spec, *, init_device: str = "cpu", values: bool = False) -> Built:
    """Import what `spec` names, call it, and hand back the module.

    With `values` False the large random initial values are not drawn (see `drawing`). Raises MissingDependency without
    torch, UsageError for a device torch does not know, ModelError for whatever the user's code did.
    """
    torch = _torch()
    from statecli.live import torch_settings
    from statecli.live.origin import Origins

    _check_device(torch, init_device)
    origins = Origins(_typed(spec))
    found = load(spec)
    make = functools.partial(_make, spec, found, init_device, None)
    with torch_settings.building():
        module = _make(spec, found, init_device, origins, values)
        left = torch_settings.now()
    return Built(spec, module, origins, init_device, values, make, left=left)


def load(spec: Spec) -> Any:
    """Import what `spec` names, and do not call it. Raises ModelError for whatever the user's code did."""
    with _guarded(spec), _one_line(spec, "importing it"):
        return _lookup(spec, _import(spec))


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        if "torch" not in (getattr(error, "name", "") or "torch"):
            raise
        raise MissingDependency(
            f"a model class needs torch, which does not import here ({_text(error)}): pip install torch"
        ) from error
    return torch


def _check_device(torch: Any, text: str) -> None:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"cannot build on device {text!r}: use cpu or meta") from error


def _typed(spec: Spec) -> dict[str, str]:
    return {os.path.abspath(spec.module): spec.module} if spec.is_file else {}


# --- importing ----------------------------------------------------------------------------------------------


@contextmanager
def _on_path(spec: Spec) -> Iterator[None]:
    if hf_auto.is_auto(spec):
        # The user has typed no code: a folder with a config.json may hold a transformers.py as well.
        with search_path.installed_only(*map(files.get_folder, spec.args)):
            yield
        return
    with search_path.including(os.path.dirname(os.path.abspath(spec.module)) if spec.is_file else os.getcwd()):
        yield


def _import(spec: Spec) -> types.ModuleType:
    return _import_file(spec) if spec.is_file else _import_dotted(spec)


def _import_file(spec: Spec) -> types.ModuleType:
    path = os.path.abspath(spec.module)
    if not os.path.isfile(path):
        what = "it is a folder" if os.path.isdir(path) else f"no such file{_near_files(path)}"
        raise ModelError(f"{spec.module}: {what}")
    folder, stem = os.path.split(path[: -len(".py")])
    level = _relative_level(path)
    if level:
        return _import_in_package(spec, path, level)
    _forget_siblings_of_others(folder)
    # A name of its own: two files called net.py can be open at once, and neither shadows an installed package.
    name = f"_statecli_{next(_numbers)}_{stem}"
    loader_spec = importlib.util.spec_from_file_location(name, path)
    if loader_spec is None or loader_spec.loader is None:
        raise ModelError(f"{spec.module}: Python cannot import it as a module")
    module = importlib.util.module_from_spec(loader_spec)
    sys.modules[name] = module  # dataclasses and pickle look the module of a class up there
    before = set(sys.modules)
    try:
        loader_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _siblings.setdefault(folder, set()).update(_from_folder(folder, set(sys.modules) - before))
    return module


def _relative_level(path: str) -> int:
    """How many dots the file's relative imports have at most; 0 where it has none."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, ValueError, SyntaxError):
        return 0  # importing it says what is wrong with it
    return max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)


def _import_in_package(spec: Spec, path: str, level: int) -> types.ModuleType:
    """A file that imports from its own package is imported as the package's module, from its topmost folder down."""
    top, names = os.path.dirname(path), [os.path.basename(path)[: -len(".py")]]
    while len(names) <= level or os.path.isfile(os.path.join(top, "__init__.py")):
        top, folder = os.path.split(top)
        if not folder:
            raise ModelError(f"{spec.module}: its relative imports lead above every folder")
        names.insert(0, folder)
    dotted = ".".join(names)
    package = os.path.join(top, names[0])
    _forget_siblings_of_others(package)
    before = set(sys.modules)
    sys.path.insert(0, top)
    try:
        module = importlib.import_module(dotted)
    finally:
        with suppress(ValueError):
            sys.path.remove(top)
        _siblings.setdefault(package, set()).update(_from_folder(package, set(sys.modules) - before))
    if os.path.abspath(module.__file__ or "") != path:
        raise ModelError(
            f"{spec.module}: it imports from its package {names[0]}, and another one is loaded by that name"
        )
    return module


def _from_folder(folder: str, names: set[str]) -> Iterator[str]:
    for name in names:
        module = sys.modules.get(name)
        origin = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
        if isinstance(origin, str) and (os.path.abspath(origin) + os.sep).startswith(folder + os.sep):
            yield name


def _forget_siblings_of_others(folder: str) -> None:
    """`a/net.py` and `b/net.py` may both `import layers`: the second must not get the first one's."""
    for other in [known for known in _siblings if known != folder]:
        for name in _siblings.pop(other):
            sys.modules.pop(name, None)


def _near_files(path: str) -> str:
    folder, name = os.path.split(path)
    if not os.path.isdir(folder):
        return f" (there is no folder {os.path.basename(folder)})"
    return _did_you_mean(name, [entry for entry in os.listdir(folder) if entry.endswith(".py")])


def _import_dotted(spec: Spec) -> types.ModuleType:
    try:
        return importlib.import_module(spec.module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if spec.module != missing and not spec.module.startswith(missing + "."):
            raise
        raise ModelError(f"{spec.text}: there is no module {missing}{_near_modules(missing)}") from error


def _near_modules(missing: str) -> str:
    parent, _, name = missing.rpartition(".")
    path = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else None
    names = [found.name for found in pkgutil.iter_modules(path)]
    if os.path.isfile(f"{missing}.py"):
        return f"; to import the file write {missing}.py:…"
    return _did_you_mean(name, names)


def _did_you_mean(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 3, 0.6) or [n for n in names if n.lower() == name.lower()]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _lookup(spec: Spec, module: types.ModuleType) -> Any:
    found: Any = module
    done: list[str] = []
    for name in spec.attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            where = ".".join([spec.module, *done]) if not spec.is_file else ":".join([spec.module, *done])
            raise ModelError(f"{where} has no {name}{_near_attributes(found, name)}") from error
        done.append(name)
    return found


def _near_attributes(found: Any, name: str) -> str:
    from torch import nn

    public = [known for known in dir(found) if not known.startswith("__")]
    near = _did_you_mean(name, public)
    if near:
        return near
    models = [n for n in public if isinstance(v := vars(found).get(n), type) and issubclass(v, nn.Module)]
    more = f" and {len(models) - 8} more" if len(models) > 8 else ""
    return f"; its model classes are {', '.join(models[:8])}{more}" if models else "; it defines no model class"


# --- building -----------------------------------------------------------------------------------------------


def _make(spec: Spec, found: Any, init_device: str, origins: Origins | None, values: bool, seed: int = 0) -> nn.Module:
    """One instance. Where not drawing the initial values made the constructor fail, it is run again with them."""
    from statecli.live import torch_settings
    from statecli.live.skip_random_init import Skipped, skipping

    skipped = Skipped()
    doing = "building it on meta" if init_device == "meta" else "building it"
    with _guarded(spec), _one_line(spec, doing, found=found):
        if not values:
            start = torch_settings.now()
            try:
                with skipping(skipped):
                    return _instance(spec, found, init_device, origins, seed)
            except Exception:  # whatever it was, it may be for want of the values
                if not skipped.count:
                    raise
                torch_settings.put(start)
        return _instance(spec, found, init_device, origins, seed)


def _instance(spec: Spec, found: Any, init_device: str, origins: Origins | None, seed: int) -> nn.Module:
    import torch
    from torch import nn

    if isinstance(found, nn.Module):
        if spec.called:
            raise ModelError(f"{spec.text}: {spec.attribute} is a model already; write it without parentheses")
        return found
    if not callable(found):
        raise ModelError(
            f"{spec.text}: {spec.attribute} is {_a(found)}, not a model class or a function that gives one"
        )
    torch.manual_seed(seed)
    # No device mode for the cpu: it would override a default device that the user's own code sets.
    device = nullcontext() if init_device == "cpu" else torch.device(init_device)
    with device, origins.recording() if origins else nullcontext():
        made = found(*spec.args, **spec.kwargs)
    if isinstance(made, types.CoroutineType):
        made.close()  # one that nobody awaits is warned about when it is freed
        raise ModelError(f"{spec.text}: {spec.attribute} is async and gave a coroutine, not an nn.Module")
    if not isinstance(made, nn.Module):
        raise ModelError(f"{spec.text}: {spec.attribute} gave {_a(made)}, not an nn.Module")
    return made


def _a(thing: Any) -> str:
    if thing is None:
        return "None"
    if isinstance(thing, types.ModuleType):
        return "a Python module"
    name = type(thing).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


# --- what the user's code does to the process ---------------------------------------------------------------


@contextmanager
def _guarded(spec: Spec) -> Iterator[None]:
    """The user's code may import its siblings and do to the process what it likes: afterwards it is as it was."""
    supervisor = sys.modules.get("statecli.cli.supervisor")
    parent = supervisor.connection() if supervisor else None
    if parent is not None:
        parent.name_model(spec.text)
    with _restored(), _on_path(spec), _prints_to_stderr(), _cannot_end_us():
        yield


@contextmanager
def _cannot_end_us() -> Iterator[None]:
    """`os._exit(0)` would end the process as if all were well; it raises what sys.exit does. Forked children may go."""
    ours, before = os.getpid(), os._exit

    def exit(status: int) -> NoReturn:
        if os.getpid() == ours:
            raise SystemExit(status)
        before(status)

    os._exit = exit
    try:
        yield
    finally:
        os._exit = before


@contextmanager
def _restored() -> Iterator[None]:
    """Puts back the current directory, sys.argv and the standard streams."""
    streams, arguments = (sys.stdin, sys.stdout, sys.stderr), list(sys.argv)
    try:
        folder: str | None = os.getcwd()
    except OSError:  # it has been deleted, and there is no way back to it
        folder = None
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
        sys.argv[:] = arguments
        if folder is not None:
            with suppress(OSError):
                os.chdir(folder)


@contextmanager
def _prints_to_stderr() -> Iterator[None]:
    """stdout holds the result and nothing else: print(), os.write(1, …) and C libraries all go to stderr."""
    stderr = sys.stderr
    with redirect_stdout(stderr):
        try:
            sys.__stdout__.flush() if sys.__stdout__ else None
            kept = os.dup(1)
            os.dup2(2, 1)
        except (OSError, ValueError, io.UnsupportedOperation):  # stdout or stderr is closed: nothing to protect
            yield
            return
        try:
            yield
        finally:
            with suppress(OSError, ValueError):
                stderr.flush() if stderr else None
            os.dup2(kept, 1)
            os.close(kept)


@contextmanager
def _one_line(spec: Spec, doing: str, found: Any = None) -> Iterator[None]:
    """Whatever the user's code raises, SystemExit included, as one ModelError line; KeyboardInterrupt passes."""
    try:
        yield
    except (StateError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ModelError(_describe(spec, doing, found, error)) from error


def _describe(spec: Spec, doing: str, found: Any, error: BaseException) -> str:
    needed = _missing_arguments(spec, found, error)
    if needed:
        return needed
    hint = "; try --init-device cpu" if doing.endswith("on meta") and not hf_auto.is_auto(spec) else ""
    scripted = torchscript_errors.raised(error, _installed)
    what = _cut(scripted.text) if scripted else f"{type(error).__name__}: {_text(error)}".rstrip(": ")
    place = scripted.place if scripted else _raised_at(error)
    return f"{spec.text}: {doing} raised {what}{_shown(spec, place)}{hint}"


def _text(error: BaseException) -> str:
    return str(error.msg) if isinstance(error, SyntaxError) else _cut(" ".join(text_of(error).split()))


def text_of(error: BaseException | None) -> str:
    """What an exception of anybody's says; a `__str__` of its own may do anything, exit included."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 see above
        return "(its message cannot be shown)"


def _cut(text: str) -> str:
    text = _shortened(text)
    return text if len(text) <= 400 else text[:397] + "…"


def _shortened(text: str) -> str:
    """`text` with each absolute path below the current directory or sys.path cut to what is below it."""
    entries = sorted({os.path.abspath(entry) for entry in sys.path if entry}, key=len, reverse=True)
    with suppress(OSError):
        entries.insert(0, os.getcwd())
    for entry in entries:
        if entry.strip(os.sep):
            text = re.sub(r"(?<![\w./\\-])" + re.escape(entry + os.sep), "", text)
    return text


def _raised_at(error: BaseException) -> tuple[str, int] | None:
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 1
    return _deepest(error)


def describe_model_error(error: BaseException) -> str | None:
    """`TypeError: message (net.py:3)` where code of neither statecli nor torch was running; None otherwise."""
    place = _deepest(error)
    if place is None:
        return None
    from statecli.live.origin import display

    return f"{type(error).__name__}: {_text(error)} ({display(place[0], {})}:{place[1]})"


def _shown(spec: Spec, place: tuple[str, int] | None) -> str:
    if place is None or place[0].startswith("<"):
        return ""
    from statecli.live.origin import display

    return f" ({display(place[0], _typed(spec))}:{place[1]})"


def _deepest(error: BaseException) -> tuple[str, int] | None:
    """The deepest line that is the user's own; where none is, the deepest that is neither ours nor torch's.

    Of an endless recursion it is the line that recurses.
    """
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((_PACKAGE, "<frozen"))
    ]
    own = [place for place in frames if not _installed(place[0])]
    others = [place for place in frames if f"{os.sep}torch{os.sep}" not in place[0]]
    found = own or others
    if found and isinstance(error, RecursionError):
        return Counter(found).most_common(1)[0][0]  # where it ran out is anywhere
    return found[-1] if found else None


def _installed(filename: str) -> bool:
    library = os.path.dirname(os.__file__) + os.sep
    return filename.startswith(library) or f"{os.sep}site-packages{os.sep}" in filename


def _missing_arguments(spec: Spec, found: Any, error: BaseException) -> str | None:
    """How to pass what the signature asks for, where the call itself did not fit it."""
    if found is None or not isinstance(error, TypeError) or _deepest(error) is not None:
        return None
    try:
        signature = inspect.signature(found)
        signature.bind(*spec.args, **spec.kwargs)
    except (TypeError, ValueError) as misfit:
        missing = _required(found, spec)
        base = f"{spec.module}:{spec.attribute}"
        if missing:
            given = ", ".join([*map(repr, spec.args), *(f"{k}={v!r}" for k, v in spec.kwargs.items())])
            wanted = ", ".join(filter(None, [given, *(f"{name}=..." for name in missing)]))
            return f"{spec.text}: it needs {', '.join(missing)}: write '{base}({wanted})'"
        return f"{spec.text}: {_text(misfit)}; its signature is {spec.attribute}{_signature(found)}"
    return None


def _required(found: Any, spec: Spec) -> list[str]:
    try:
        signature = inspect.signature(found)
        bound = signature.bind_partial(*spec.args, **spec.kwargs).arguments
    except (TypeError, ValueError):
        return []
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in bound
    ]


def _signature(found: Any) -> str:
    with suppress(TypeError, ValueError):
        return " ".join(str(inspect.signature(found)).split())
    return "(…)"

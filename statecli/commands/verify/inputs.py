"""What forward is called with: as the user says, or as the model carries it.

In order: `--input` (texts such as `int64:2x16<30522`), `--inputs` (a function that makes them), what the model carries
(`dummy_inputs` of transformers, `example_input_array` of Lightning), and what a transformers config tells of shapes.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statecli.core.errors import ModelError, UsageError
from statecli.live import build
from statecli.live import spec as specs
from statecli.live.build import Built, load

if TYPE_CHECKING:
    import torch
    from torch import nn

    Call = tuple[tuple[Any, ...], dict[str, Any]]

NONE_GIVEN = "no input given: --input 2x3 or --inputs file.py:make"

_FLOATS = ("float32", "float16", "bfloat16", "float64")
_COMPLEX = ("complex64", "complex128")
#: Integer dtypes and the largest value that they hold.
_INTEGERS = {"int64": 2**63 - 1, "int32": 2**31 - 1, "int16": 2**15 - 1, "int8": 2**7 - 1, "uint8": 2**8 - 1}
_DTYPES = (*_FLOATS, *_COMPLEX, *_INTEGERS, "bool")
#: What torch also calls them.
_ALIASES = {
    "float": "float32",
    "half": "float16",
    "double": "float64",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "long": "int64",
    "int": "int32",
    "short": "int16",
}
#: Integers without a bound are 0 and 1: every table has these two rows.
_FEWEST = 2
_SHAPE = re.compile(r"[0-9]+([x×][0-9]+)*")
#: Elements of one input; 8 GB of float32. A slip of the finger is told, not tried.
_MOST = 2**31
_EXAMPLES = "2x3, 'int64:2x16<30522' or name=2x3"
#: What nobody would pass to forward as a text.
_CLEARLY = re.compile(r"(\w+=)?([\w.]+:)?[0-9]+([x×][0-9]+)+(<[0-9]+)?")


@dataclass(frozen=True)
class Inputs:
    """`make(seed=0)` gives (args, kwargs), new tensors on the CPU each time, the same values for the same seed.

    `text` says in a few words what they are: "int64 2×16 below 30522". `given`: whoever wrote the model or the command
    chose them, so that forward is called as they mean it; otherwise they are what just gets through it.
    """

    text: str
    make: Callable[..., Call]
    given: bool = True


@dataclass(frozen=True)
class InputSpec:
    """One `--input`: a tensor of `shape` (in elements, () for a scalar) and `dtype` (torch's word for it).

    `name` is that of the keyword argument, None for a positional one. Integers are 0 ≤ i < `bound`; the rest has none.
    """

    name: str | None
    dtype: str
    shape: tuple[int, ...]
    bound: int | None

    @property
    def text(self) -> str:
        """In a few words: "ids int64 2×16 below 30522"."""
        size = "×".join(map(str, self.shape)) or "scalar"
        below = f"below {self.bound}" if self.bound is not None else None
        return " ".join(filter(None, [self.name, self.dtype, size, below]))

    def tensor(self, generator: torch.Generator) -> torch.Tensor:
        """Standard normal numbers, integers below the bound, or coin tosses."""
        import torch

        dtype = getattr(torch, self.dtype)
        if self.dtype in _INTEGERS or self.dtype == "bool":
            drawn = torch.randint(0, self.bound or _FEWEST, self.shape, generator=generator, device="cpu")
            return drawn.to(dtype)
        # Drawn in one precision, so that a seed means the same numbers in each.
        wide = torch.complex64 if self.dtype in _COMPLEX else torch.float32
        return torch.randn(self.shape, generator=generator, dtype=wide, device="cpu").to(dtype)


# --- reading --input ----------------------------------------------------------------------------------------


def parse(text: str) -> InputSpec:
    """The grammar `[NAME=][DTYPE:][SHAPE][<BOUND]`; a bound alone means int64. Raises UsageError, one line."""
    name, equals, rest = text.rpartition("=")
    if equals and not name.strip().isidentifier():
        raise UsageError(f"--input {text}: {name!r} is no argument's name; write name=2x3")
    rest, less, limit = rest.partition("<")
    dtype, colon, shape = rest.rpartition(":")
    kind = _dtype(text, dtype.strip()) if colon else ("int64" if less else "float32")
    sizes = _shape(text, shape.strip(), scalar=bool(colon))
    bound = _bound(text, kind, limit.strip()) if less else (_FEWEST if kind in _INTEGERS else None)
    return InputSpec(name.strip() or None, kind, sizes, bound)


def is_one(value: object) -> bool:
    """Whether it is plainly a text that `parse` reads: with a shape of two dimensions or more."""
    return isinstance(value, str) and _CLEARLY.fullmatch(value) is not None


def _dtype(text: str, name: str) -> str:
    plain = name.removeprefix("torch.")
    known = _ALIASES.get(plain, plain)
    if known in _DTYPES:
        return known
    near = difflib.get_close_matches(plain, [*_DTYPES, *_ALIASES], 1)
    hint = f"did you mean {near[0]}?" if near else f"write one of {', '.join(_DTYPES)}"
    raise UsageError(f"--input {text}: {name!r} is no dtype; {hint}")


def _shape(text: str, written: str, *, scalar: bool) -> tuple[int, ...]:
    if not written and scalar:
        return ()
    if not _SHAPE.fullmatch(written):
        what = f"{written!r} is no shape" if written else "it has no shape"
        raise UsageError(f"--input {text}: {what}; write {_EXAMPLES}")
    sizes = tuple(map(int, re.split("[x×]", written)))
    elements = 1
    for size in sizes:
        elements *= size
    if elements > _MOST:
        raise UsageError(f"--input {text}: that is {elements:,} elements; an input has at most {_MOST:,}")
    return sizes


def _bound(text: str, dtype: str, written: str) -> int:
    if dtype not in _INTEGERS:
        raise UsageError(f"--input {text}: only integers have a bound, {dtype} has none; write int64:2x16<{written}")
    if not (written.isascii() and written.isdecimal()) or int(written) == 0:
        raise UsageError(f"--input {text}: the bound {written!r} is no number above 0; write int64:2x16<30522")
    if int(written) - 1 > _INTEGERS[dtype]:
        raise UsageError(f"--input {text}: {dtype} holds nothing above {_INTEGERS[dtype]}; write int64 for {dtype}")
    return int(written)


def _of_texts(texts: Sequence[str]) -> Inputs:
    wanted = [parse(text) for text in texts]
    named = [one.name for one in wanted if one.name]
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice:
        raise UsageError(f"--input: the argument {twice} is given twice")

    def make(seed: int = 0) -> Call:
        import torch

        generator = torch.Generator("cpu").manual_seed(seed)
        tensors = [(one.name, one.tensor(generator)) for one in wanted]
        return tuple(t for name, t in tensors if not name), {name: t for name, t in tensors if name}

    return Inputs(", ".join(one.text for one in wanted), make)


# --- finding them -------------------------------------------------------------------------------------------


def find(input: Sequence[str], inputs: str | None, built: Built) -> tuple[Inputs | None, str]:
    """The inputs that `--input` and `--inputs` ask for, else those that the model carries; or None and why.

    Raises UsageError for what cannot be read, ModelError where the function of `--inputs` raises or gives no inputs.
    """
    if input and inputs is not None:
        raise UsageError("--input and --inputs both say what forward is called with; give one of them")
    if input:
        return _of_texts(input), ""
    if inputs is not None:
        return _of_function(inputs, built), ""
    return _carried(built)


def _of_function(text: str, built: Built) -> Inputs:
    spec = specs.parse(text)
    if spec is None:
        raise UsageError(f"--inputs {text}: names no function; write file.py:make or package.module:make")
    found = _load_beside(spec)
    if not callable(found):
        raise UsageError(f"--inputs {text}: it is {type(found).__name__}, not a function that makes inputs")
    # The model's own guard with another name: what the function raises is told as that of --inputs.
    guard = dataclasses.replace(built, spec=spec)

    def make(seed: int = 0) -> Call:
        with guard.user_code("calling it"), seeded(seed):
            return _as_call(text, found(*spec.args, **spec.kwargs))

    return Inputs(described(make()), make)


def _load_beside(spec: specs.Spec) -> Any:
    """Import what `spec` names and keep the model's own modules: a spec of another folder makes them forgotten."""
    before = dict(sys.modules)
    try:
        return load(spec)
    finally:
        for name, module in before.items():
            sys.modules.setdefault(name, module)


def _as_call(text: str, made: Any, is_or_gave: str = "it gave") -> Call:
    """What a function gave, as (args, kwargs), its tensors copied: it may give the same ones each time."""
    import torch

    args, kwargs = _split(made)
    if not args and not kwargs:
        what = "nothing" if made is None else f"an empty {type(made).__name__}"
        raise ModelError(
            f"{text}: {is_or_gave} {what}; give a tensor, a tuple of arguments, a dict of keyword arguments"
        )
    if not any(issubclass(type(one), torch.Tensor) for one in leaves((args, kwargs))):
        raise ModelError(f"{text}: {is_or_gave} {build._a(made)}, in which there is no tensor")
    odd = next((key for key in kwargs if type(key) is not str), None)
    if odd is not None:
        raise ModelError(f"{text}: {odd!r} is no name of a keyword argument; give a dict with names")
    copied: Call = mapped((args, kwargs), _copied)
    return copied


def _split(made: Any) -> Call:
    if made is None:
        return (), {}
    if isinstance(made, Mapping):
        return (), dict(made)
    if _is_both(made):
        return tuple(made[0]), dict(made[1])
    if isinstance(made, (tuple, list)) and not hasattr(made, "_fields"):
        return tuple(made), {}
    return (made,), {}


def _is_both(made: Any) -> bool:
    """(args, kwargs): a tuple of a tuple or list and of a dict by names."""
    if type(made) is not tuple or len(made) != 2:
        return False
    return isinstance(made[0], (tuple, list)) and isinstance(made[1], dict) and all(type(k) is str for k in made[1])


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def described(call: Call) -> str:
    """The tensors of a call in a few words, its keyword arguments by name; the first four."""
    args, kwargs = call
    texts = [_described(value) for value in args] + [f"{name} {_described(value)}" for name, value in kwargs.items()]
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def _described(value: Any) -> str:
    import torch

    if not issubclass(type(value), torch.Tensor):
        return type(value).__name__
    size = "nested" if value.is_nested else "×".join(map(str, value.shape)) or "scalar"
    return f"{str(value.dtype).removeprefix('torch.')} {size}"


# --- what the model carries ---------------------------------------------------------------------------------


def _carried(built: Built) -> tuple[Inputs | None, str]:
    """`dummy_inputs`, `example_input_array`, or made for the config; the first that forward takes."""
    try:
        with built.user_code("asking it for inputs"):
            for name in ("dummy_inputs", "example_input_array"):
                made = _read(built, name)
                if made is not None and _is_taken(built, made):
                    made = _with_decoder(built, made)
                    # Every class of transformers inherits `dummy_inputs`.
                    own = not _is_of_transformers(built)
                    return _constant(f"{described(made)} (its {name})", made, given=own), ""
            return _of_config(built)
    except ModelError as error:
        return None, f"{NONE_GIVEN} ({str(error).removeprefix(f'{built.spec.text}: ')})"


def _read(built: Built, name: str) -> Call | None:
    import torch

    if not hasattr(type(built.module), name) and name not in vars(built.module):
        return None
    with torch.no_grad():
        held = getattr(built.module, name)
        made = held() if callable(held) and not issubclass(type(held), torch.Tensor) else held
    if made is None:
        return None
    args, kwargs = _split(made)
    return args, {key: value for key, value in kwargs.items() if value is not None}


def _constant(text: str, call: Call, *, given: bool) -> Inputs:
    """The same values for each seed, in new tensors."""
    return Inputs(text, lambda seed=0: mapped(call, _copied), given)  # noqa: ARG005 - the values are the model's own


def _is_of_transformers(built: Built) -> bool:
    return hasattr(built.module, "config") and hasattr(type(built.module), "main_input_name")


def _with_decoder(built: Built, call: Call) -> Call:
    """Some decoders start from the encoder's ids by themselves, some do not; giving them is right for both."""
    args, kwargs = call
    signature = _signature(built)
    ids = kwargs.get("input_ids")
    wanted = signature is not None and "decoder_input_ids" in signature.parameters
    if not wanted or ids is None or not getattr(built.module.config, "is_encoder_decoder", False):
        return call
    return args, {"decoder_input_ids": ids, **kwargs}


def _is_taken(built: Built, call: Call) -> bool:
    """Whether forward takes these arguments, and the ids among them fit the vocabulary.

    Every class of transformers has `dummy_inputs`: token ids up to 7, also where it sees or hears.
    """
    signature = _signature(built)
    config = getattr(built.module, "config", None)
    words = getattr(config, "vocab_size", None)
    ids = call[1].get("input_ids")
    if isinstance(words, int) and ids is not None and int(ids.max()) >= words:
        return False
    wanted = getattr(built.module, "main_input_name", None)
    if config is not None and isinstance(wanted, str) and wanted not in call[1]:
        return False
    if _wants_images_too(signature, config):
        return False
    return _fits(signature, call)


def _signature(built: Built) -> inspect.Signature | None:
    try:
        return inspect.signature(built.module.forward)
    except (TypeError, ValueError):
        return None


def _fits(signature: inspect.Signature | None, call: Call) -> bool:
    try:
        if signature is not None:
            signature.bind(*call[0], **call[1])
    except TypeError:
        return False
    return True


def _wants_images_too(signature: inspect.Signature | None, config: Any) -> bool:
    """A model of text and images, such as CLIP."""
    return (
        hasattr(config, "vision_config")
        and hasattr(config, "text_config")
        and signature is not None
        and {"input_ids", "pixel_values"} <= set(signature.parameters)
    )


def _of_config(built: Built) -> tuple[Inputs | None, str]:
    """Images and token ids of the sizes in a transformers config; nothing for what hears, or sees in its own way."""
    config, signature = getattr(built.module, "config", None), _signature(built)
    if not _is_of_transformers(built) or signature is None:
        return None, NONE_GIVEN
    texts = [_ids(config, signature), _pixels(config, signature)]
    found = [text for text in texts if text]
    made = _of_texts(found) if found else None
    wanted = str(built.module.main_input_name)
    if made is None or not _fits(signature, made.make()) or wanted not in made.make()[1]:
        return None, f"{NONE_GIVEN}; it wants {wanted}"
    return Inputs(f"{made.text} (for its config)", made.make, given=False), ""


def _ids(config: Any, signature: inspect.Signature) -> str | None:
    words = getattr(getattr(config, "text_config", config), "vocab_size", None)
    if "input_ids" not in signature.parameters or not isinstance(words, int) or words < 1:
        return None
    return f"input_ids=int64:2x8<{words}"


def _pixels(config: Any, signature: inspect.Signature) -> str | None:
    seen = getattr(config, "vision_config", config)
    size, channels = getattr(seen, "image_size", None), getattr(seen, "num_channels", 3)
    if isinstance(size, int):
        size = (size, size)
    if "pixel_values" not in signature.parameters or not isinstance(size, (tuple, list)) or len(size) != 2:
        return None
    return f"pixel_values=2x{channels}x{size[0]}x{size[1]}"


# --- nested containers --------------------------------------------------------------------------------------


def mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with each tensor in it replaced: through tuples, lists, dicts and dataclasses, which are made anew.

    Anything else is handed back as it is.
    """
    import torch

    if issubclass(type(value), torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        changed = {key: mapped(item, function) for key, item in value.items()}
        return changed if type(value) is dict else _remade(value, changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        known = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
        return dataclasses.replace(value, **{name: mapped(item, function) for name, item in known.items()})
    return value


def _remade(value: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the same class; the plain dict where its constructor takes none."""
    try:
        return type(value)(items)
    except Exception:  # noqa: BLE001 - a constructor of anybody's; a dict serves forward as well
        return items


def leaves(value: Any) -> Iterator[Any]:
    """What lies in tuples, lists, dicts and dataclasses, at any depth."""
    pending, seen = [value], set()
    while pending:
        one = pending.pop()
        held = _held(one)
        if held is None:
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            pending += reversed(held)


def _held(value: Any) -> list[Any] | None:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, one.name, None) for one in dataclasses.fields(value)]
    return None


def _generators(module: nn.Module) -> Iterator[torch.Generator]:
    import torch

    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, torch.Generator))


@contextmanager
def seeded(seed: int, module: nn.Module | None = None) -> Iterator[None]:
    """Random generators start from `seed`, and afterwards are as they were: torch's, Python's and numpy's.

    Torch's are those of the CPU and, where CUDA is in use, of each GPU, and generators that are attributes of `module`.
    """
    import torch

    numpy: Any = sys.modules.get("numpy")
    kept = random.getstate(), numpy.random.get_state() if numpy else None
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    owned = {id(one): one for one in _generators(module)} if module is not None else {}
    states = [(one, one.get_state()) for one in owned.values()]
    with torch.random.fork_rng(devices=list(gpus)):
        try:
            for one in owned.values():
                one.manual_seed(seed)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would have CUDA seeded when it starts
            if gpus:
                torch.cuda.manual_seed_all(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed % 2**32)
            yield
        finally:
            for one, state in states:
                one.set_state(state)
            random.setstate(kept[0])
            if numpy:
                numpy.random.set_state(kept[1])

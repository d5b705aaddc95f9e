"""Settings of a training checkpoint: epoch, step, lr and hyper-parameters, as numbers and words.

Nothing is left out: a value too long, too deep or too strange for one line is described by its type and a digest of its
content, so that two values can be compared. No text of the file can look like a description: similar texts are quoted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Scalar, Settings
from statecli.core.setting_paths import MORE, format_path, read
from statecli.formats.torch.reading import Reading
from statecli.formats.torch.sections import MAX_SECTION_DEPTH
from statecli.formats.torch.settings_digest import (
    SCALARS,
    Digests,
    compute_text_digest,
    decode_numpy_scalar,
    describe_kind,
    get_unusual_state,
    select_own_arguments,
    select_own_attributes,
)
from statecli.pickles.graph import as_mapping, as_sequence, is_module, is_optimizer, read_raw_bytes
from statecli.pickles.nodes import Global, Key, Obj

#: Maximum length of a settings container's path in characters.
MAX_PATH_CHARS = 1_000
#: Maximum number of settings that are listed, and of containers that are opened for them.
MAX_SETTINGS = 20_000
#: Maximum number of entries of a list that is listed entry by entry.
MAX_LISTED = 64
#: Limits for a value that is reported whole: its characters, and its bits.
MAX_TEXT_CHARS = 1_000
MAX_BITS = 1_024
#: Maximum number of container entries that are visited (entries of a shared container count each time).
MAX_VISITED_ENTRIES = 500_000

#: Path, letters of the types of its keys, and described value.
_Setting = tuple[str, str, Scalar]
_DIGEST = "sha256 [0-9a-f]{32}"
#: Descriptions of values other than texts: a number without a JSON form, an empty container, a digest, a name, a call.
_DESCRIPTION = compile_on_use(
    rf"nan|-?inf|-?[0-9]{{19,}}|\[\]|\{{\}}|.*, {_DIGEST}|[0-9]+ characters, {_DIGEST}: .*|<[^.]*\..*>|<{_DIGEST}>"
    r"|(?=\w*\.)[\w.]+\(.*\)",
    re.DOTALL,
)
#: Letter for each type of keys; a key of any other type is written in brackets.
_LETTERS = {str: "t", int: "i", bool: "b", type(None): "n"}


def collect_settings(root: object, reading: Reading) -> Settings:
    """Collect settings by dotted path. If a limit is exceeded, the setting `MORE` has a digest of the whole file."""
    collected: list[_Setting] = []
    kinds: dict[str, set[str]] = {}
    digests = Digests(reading)
    entry_count = 0
    root = _replace_tensor(root, digests)
    stack: list[tuple[str, str, Any, tuple[Any, ...]]] = [] if root is None else [("", "", root, (root,))]
    while stack:
        path, types, node, ancestors = stack.pop()
        kinds.setdefault(path, set()).add(describe_kind(node))
        children = []
        for step, letter, entry in _list_entries(node, digests):
            child = _replace_tensor(entry, digests)
            if child is None and entry is not None:
                continue
            entry_count += 1
            if len(path) > MAX_PATH_CHARS or len(collected) == MAX_SETTINGS or entry_count > MAX_VISITED_ENTRIES:
                # Use a digest for the rest, because containers may contain each other and be shared without limit.
                return _build_settings(collected, kinds, digests.of(root, "the file"))
            child_path, letters = (
                (f"{path}.{step}", f"{types}.{letter * len(step)}") if path else (step, letter * len(step))
            )
            if (
                _is_listed(child)
                and len(ancestors) <= MAX_SECTION_DEPTH
                and not any(child is parent for parent in ancestors)
            ):
                children.append((child_path, letters, child, (*ancestors, child)))
            else:
                collected.append((child_path, letters, _describe_value(child, child_path, digests)))
        stack.extend(reversed(children))
    return _build_settings(collected, kinds)


def _replace_tensor(node: object, digests: Digests) -> Any:
    """Replace a tensor by its Python attributes (None without attributes). Return other values unchanged."""
    if not digests.is_tensor(node):
        return node
    attributes = digests.decoder.get_attributes(node)
    return digests.keep(attributes) if attributes else None


def _build_settings(collected: list[_Setting], kinds: dict[str, set[str]], digest: str | None = None) -> Settings:
    """Build the settings by path. If two paths look the same, write them with the types of their keys."""
    values: dict[str, Scalar] = {}
    spelled_types: dict[str, str] = {}
    count = Counter(path for path, _, _ in collected)
    values_by_key: dict[str, list[Scalar]] = {}
    for path, types, value in collected:
        key = path if count[path] == 1 else format_path(path, types)
        if key == path and types != read(path):
            spelled_types[key] = types
        values_by_key.setdefault(key, []).append(value)
    for key, same_key in values_by_key.items():
        # Two keys may have equal text but differ in Python: two NaNs.
        for n, value in enumerate(sorted(same_key, key=repr)):
            values[f"{key} ({n + 1})" if len(same_key) > 1 else key] = value
    if digest is not None:
        values[MORE] = digest
    return Settings(values, spelled_types, {path: " and ".join(sorted(of_path)) for path, of_path in kinds.items()})


def _list_entries(node: object, digests: Digests) -> Iterator[tuple[str, str, Any]]:
    """Yield the path step, the letter of the key's type and the value of each entry, except plain tensors."""
    items = as_mapping(node)
    if items is not None:
        skip = {"state"} if is_optimizer(node) and _is_empty(items["state"]) else ()
        entries = (item for item in items.items() if not digests.decoder.is_plain(item[1]) and item[0] not in skip)
        yield from ((*_format_step(key, digests), value) for key, value in entries)
    elif (elements := as_sequence(node)) is not None:
        yield from ((str(index), "i", value) for index, value in enumerate(elements))
    if type(node) is Obj:
        yield from _list_object_entries(node, digests)


def _list_object_entries(node: Obj, digests: Digests) -> Iterator[tuple[str, str, Any]]:
    attributes = select_own_attributes(node)
    if as_mapping(node) is not None:
        if attributes:
            yield "__dict__", "k", digests.keep(attributes)
    else:
        skip = _list_bare_names(node, attributes)
        yield from ((*_format_step(name, digests), value) for name, value in attributes.items() if name not in skip)
    arguments = select_own_arguments(node)
    if arguments:
        yield "__args__", "k", digests.keep(arguments)
    if node.kwargs:
        yield "__kwargs__", "k", node.kwargs
    if get_unusual_state(node) is not None:
        yield "__state__", "k", node.state


def _list_bare_names(node: Obj, attributes: dict[str, Any]) -> set[str]:
    """Return the names of empty containers, such as hooks, that torch adds to every module and optimizer."""
    if not is_module(node) and not is_optimizer(node):
        return set()
    return {
        name for name, value in attributes.items() if (name.startswith("_") or name == "state") and _is_empty(value)
    }


def _format_step(key: Any, digests: Digests) -> tuple[str, str]:
    """Format a key as a step of a path, and return the letter of its type. The keys 1 and 1.0 have the same step."""
    if type(key) is str and key not in ("", MORE):
        return key, "t"
    value = key.value if type(key) is Key else key
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) in (int, bool) or value is None:
        is_short = type(value) is not int or abs(value) < 2**63
        return (str(value), _LETTERS[type(value)]) if is_short else (f"[{_describe_number(value, digests)}]", "k")
    parts = value if type(value) is tuple else (value,)
    if len(parts) <= 8 and all(map(_is_short, parts)):
        normalized_parts = tuple(int(part) if type(part) is float and part.is_integer() else part for part in parts)
        return f"[{normalized_parts if type(value) is tuple else normalized_parts[0]!r}]", "k"
    return f"[{describe_kind(value)}, {digests.of(value, 'a key')}]", "k"


def _is_short(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < 2**63
    return value is None or type(value) in (float, bool) or (type(value) in (str, bytes) and len(value) <= 200)


def _is_empty(node: Any) -> bool:
    items = as_mapping(node)
    items_below = as_sequence(node) if items is None else items
    return items_below is not None and not items_below and not (type(node) is Obj and select_own_attributes(node))


def _is_listed(node: Any) -> bool:
    if type(node) in (list, tuple):
        return 0 < len(node) <= MAX_LISTED
    if as_mapping(node) is not None:
        return not _is_empty(node)
    return type(node) is Obj and as_sequence(node) is None and bool(select_own_attributes(node))


def _describe_value(node: object, path: str, digests: Digests) -> Scalar:
    """Format a scalar, a name or a short call as it is. Describe any other value by its kind, length and digest."""
    if type(node) in SCALARS:
        return _describe_scalar(node, digests)
    if type(node) is Global:
        return _name(node, digests)
    if type(node) in (list, tuple) and not node:
        return "[]"
    if as_mapping(node) is not None and _is_empty(node):
        return "{}"
    raw = read_raw_bytes(node)
    if raw is not None:
        return f"{len(raw)} bytes, {digests.of(node, path)}"
    if type(node) is Obj:
        number = decode_numpy_scalar(node)
        call_text = _describe_call(node) if number is None else None
        if number is not None or call_text is not None:
            return _describe_scalar(number, digests) if call_text is None else call_text
    items = as_sequence(node)
    count = "" if items is None else f" of {len(items)}"
    return f"{describe_kind(node)[:MAX_TEXT_CHARS]}{count}, {digests.of(node, path)}"


def _describe_scalar(value: Any, digests: Digests) -> Scalar:
    """Return a scalar as a setting. A number that JSON cannot hold becomes text, and a long text is shortened."""
    if type(value) is str:
        return describe_text(value, digests.of)
    if type(value) is float and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    return _describe_number(value, digests) if type(value) is int and abs(value) >= 2**63 else value


def _describe_number(value: int, digests: Digests) -> str:
    bits = value.bit_length()
    return str(value) if bits <= MAX_BITS else f"an integer of {bits} bits, {digests.of(value, 'an integer')}"


def describe_text(text: str, digest: Callable[[str, str], str] | None = None) -> str:
    """Format a text setting: as it is, or shortened with a digest. A text that looks like a description gets quotes.

    A text that already has such quotes gets one more pair, so that no two texts look the same.
    """
    if len(text) > MAX_TEXT_CHARS:
        digest_text = (digest or compute_text_digest)(text, "a text")
        return f"{len(text)} characters, {digest_text}: {text[: MAX_TEXT_CHARS - 80]}..."
    pairs = min(len(text) - len(text.lstrip("'")), len(text) - len(text.rstrip("'")), len(text) // 2)
    return f"'{text}'" if _DESCRIPTION.fullmatch(text, pairs, len(text) - pairs) else text


def _name(node: Global, digests: Digests) -> str:
    name = node.qualified
    return f"<{name if len(name) <= MAX_TEXT_CHARS else digests.of(node, 'a name')}>"


def _describe_call(node: Obj) -> str | None:
    """Format the short call that builds an object: `torch.device('cuda', 0)`. Return None for other objects."""
    has_scalars_only = all(type(arg) in SCALARS for arg in node.args)
    if (
        not has_scalars_only
        or node.state is not None
        or node.items is not None
        or node.elems is not None
        or node.kwargs
    ):
        return None
    name = describe_kind(node)
    text = f"{name}({', '.join(map(_truncate_text, node.args))})" if re.fullmatch(r"[\w.]+", name) else " " * 201
    return text if len(text) <= 200 else None


def _truncate_text(value: object) -> str:
    if type(value) is float:
        return repr(value + 0.0)  # turns -0.0 into 0.0
    is_long = (type(value) is str and len(value) > 200) or (type(value) is int and value.bit_length() > MAX_BITS)
    return " " * 201 if is_long else repr(value)

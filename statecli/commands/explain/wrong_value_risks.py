"""Find reasons why code that loads without an error may load wrong values, such as transposed tensors."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from statecli.commands.explain.align import Shape
from statecli.commands.explain.certainty import Matching
from statecli.commands.explain.name_words import split_meaningful_words
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.units import plural

#: Part of the names of embeddings that an output layer may share: `embed_tokens`, `wte`, `shared`.
_EMBEDDING = compile_on_use(r"emb|\bwte\b|\bshared\b|\btok")


def list_doubts_about_rest(matching: Matching) -> Iterable[str]:
    """Yield reasons why the loaded values may be wrong, at most one reason from each check."""
    yield from _find_possible_pair(matching)
    yield from _find_possible_join(matching)
    yield from _find_possible_tie(matching)
    yield from _find_transposed_kernels(matching)
    yield from _find_square_weights(matching)
    yield from _find_permuted_tensors(matching)


def _find_possible_pair(matching: Matching) -> Iterable[str]:
    """Yield a warning if an unused tensor of the file may belong to a name that keeps its initial value.

    The dimensions are equal, perhaps in another order, and the last component of one name shares a word with the other
    name.
    """
    by_last_word: dict[tuple[str, Shape], str] = {}
    by_word: dict[tuple[str, Shape], str] = {}
    for name in reversed(matching.unexpected):
        dimensions = _sort_dimensions(matching.own_shapes[name])
        by_last_word |= {(word, dimensions): name for word in _split_last_part(name)}
        by_word |= {(word, dimensions): name for word in _split_name(name)}
    for name in matching.missing:
        dimensions = _sort_dimensions(matching.shapes[name])
        candidates = [by_word.get((word, dimensions)) for word in _split_last_part(name)]
        candidates += [by_last_word.get((word, dimensions)) for word in _split_name(name)]
        unused_name = next(filter(None, candidates), None)
        if unused_name is not None:
            has_same_shape = matching.own_shapes[unused_name] == matching.shapes[name]
            reason = "both have the same shape" if has_same_shape else "the dimensions are in another order"
            yield f"the unused tensor {unused_name} may be the missing {name}: {reason}"
            return


def _sort_dimensions(shape: Shape) -> Shape:
    return None if shape is None else tuple(sorted(shape))


def _split_name(name: str) -> set[str]:
    return {word for word in split_meaningful_words(name) if not word.isdigit()} | {_get_last_part(name)}


def _split_last_part(name: str) -> set[str]:
    return _split_name(_get_last_part(name))


def _find_possible_join(matching: Matching) -> Iterable[str]:
    """Yield a warning if unused tensors may hold the rows of missing tensors: q, k and v instead of a fused `qkv`."""
    rows: dict[tuple[str, str, Shape], tuple[list[str], list[str]]] = {}
    for side, (names, shapes) in enumerate(
        ((matching.unexpected, matching.own_shapes), (matching.missing, matching.shapes))
    ):
        for name in names:
            shape = shapes[name]
            if shape:
                key = ".".join(name.split(".")[:-2]), _get_last_part(name), shape[1:]
                rows.setdefault(key, ([], []))[side].append(name)
    for unused, unfilled in rows.values():
        counts = [
            sum((shapes[name] or (0,))[0] for name in names)
            for names, shapes in ((unused, matching.own_shapes), (unfilled, matching.shapes))
        ]
        if unused and unfilled and len(unused) != len(unfilled) and counts[0] == counts[1]:
            noun = "tensors" if unused[1:] else "tensor"
            yield (
                f"the unused {noun} {', '.join(unused[:4])} may contain the rows of {', '.join(unfilled[:4])}, which "
                "the file does not have"
            )
            return


def _find_possible_tie(matching: Matching) -> Iterable[str]:
    """Yield a warning if a missing tensor has the shape of an embedding: it may be a tied output layer."""
    embeddings: dict[Shape, str] = {
        shape: name
        for name, registered_name in matching.pairs.items()
        if _EMBEDDING.search(registered_name.lower())
        and (shape := matching.shapes.get(registered_name))
        and len(shape) == 2
    }
    for name in matching.missing:
        embedding = embeddings.get(matching.shapes[name])
        if embedding is not None:
            yield f"{name} keeps its initial values and may be tied to {embedding}: both have the same shape"
            return


def _find_transposed_kernels(matching: Matching) -> Iterable[str]:
    kernels = [
        name
        for name, registered_name in matching.pairs.items()
        if _get_last_part(name) == "kernel" != _get_last_part(registered_name)
        and len(matching.shapes.get(registered_name) or ()) > 1
    ]
    if kernels:
        yield (
            f"{plural(len(kernels), 'kernel')}, such as {kernels[0]}, may be transposed: TensorFlow and Flax store "
            "[in, out], torch stores [out, in]"
        )


def _find_square_weights(matching: Matching) -> Iterable[str]:
    """If other weights of the file are transposed, yield a warning that its square weights may be transposed too."""
    square = [
        name
        for name in matching.pairs.values()
        if len(shape := matching.shapes[name] or ()) == 2 and len(set(shape)) == 1
    ]
    if matching.transposed and square:
        name = next(iter(matching.transposed.values()))
        yield f"{plural(len(square), 'square weight')}, such as {square[0]}, may be transposed like {name}"


def _find_permuted_tensors(matching: Matching) -> Iterable[str]:
    """Yield a warning if a tensor that is left out may be the class's tensor with its dimensions permuted."""
    for name, registered_name in matching.mismatched.items():
        shapes = matching.own_shapes[name] or (), matching.shapes[registered_name] or ()
        if prod(shapes[0]) == prod(shapes[1]) > 1 or sorted(shapes[0]) == sorted(shapes[1]):
            yield (
                f"{name} of shape {list(shapes[0])} is left out, and may be {registered_name} of shape "
                f"{list(shapes[1])} with its dimensions in another order"
            )
            return


def _get_last_part(name: str) -> str:
    return name.rpartition(".")[2]

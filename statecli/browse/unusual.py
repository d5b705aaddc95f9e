"""Find tensors with unusual values in the statistics read so far: NaN, infinity, and outliers among the layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from msgspec.structs import replace

from statecli.browse.outline import NodeKey
from statecli.core.model_state import Stats, TensorInfo
from statecli.core.units import format_fqn, plural
from statecli.report import NamedTensors
from statecli.report.layer_roles import Role, list_roles
from statecli.report.tensor_remarks import INF, NAN, OUTLIER

#: Verb phrases about one tensor, and about several tensors.
_VERBS = {
    "nan": ("contains NaN", "contain NaN"),
    "inf": ("contains infinity", "contain infinity"),
    "outlier": ("is an outlier", "are outliers"),
}
#: Word that the list shows for each kind.
_WORDS = {"nan": NAN, "inf": INF, "outlier": OUTLIER}


def describe_count(kind: str, count: int) -> str:
    """Return `2 NaN` or `1 outlier` for a number of tensors."""
    return plural(count, OUTLIER) if kind == OUTLIER else f"{count:,} {_WORDS[kind]}"


class UnusualValues:
    """Positions of the tensors with unusual values: with NaN, with infinity, or an outlier among the layers.

    Attributes:
        stats: Statistics that were read, by position.
        outliers: Text of each outlier, `outlier: RMS 4.1, the median of 12 layers is 0.02`, by position.
    """

    def __init__(self, tensors: Sequence[TensorInfo], stats: Mapping[int, Stats]) -> None:
        self._tensors, self.stats = tensors, stats
        self._positions: dict[str, set[int]] = {"nan": set(), "inf": set()}
        self.outliers: dict[int, str] = {}
        self._signs: dict[NodeKey, str] = {}

    def add(self, position: int) -> None:
        """Record whether the tensor has NaN or infinity. `find_outliers` finds the outliers."""
        for kind, positions in self._positions.items():
            if getattr(self.stats[position], kind):
                positions.add(position)
                self._signs.clear()

    def find_outliers(self) -> None:
        """Find the outliers among all layers whose statistics were read."""
        positions = {(self._tensors[n].section, self._tensors[n].fqn): n for n in self.stats}
        texts = (role.describe_outliers() for role in self.list_roles())
        self.outliers = {positions[key]: text for role in texts for key, text in role.items()}
        self._signs.clear()

    def list_roles(self) -> tuple[Role, ...]:
        """Return the roles (tensors that each layer has) whose statistics were read."""
        return list_roles(replace(self._tensors[n], stats=self.stats[n]) for n in sorted(self.stats))

    def list_kinds(self, positions: Collection[int]) -> dict[str, list[int]]:
        """Map `nan`, `inf` and `outlier` each to the sorted list of the given positions with such values."""
        listed_positions = set(positions)
        kinds: dict[str, Set[int]] = {**self._positions, "outlier": self.outliers.keys()}
        return {kind: sorted(listed_positions & unusual) for kind, unusual in kinds.items()}

    def list_sentences(self, positions: Collection[int]) -> Iterator[NamedTensors]:
        """Yield sentences about the unusual tensors at `positions`, as on the page of `inspect --stats`."""
        for kind, unusual in self.list_kinds(positions).items() if self._has_any() else ():
            names = tuple(format_fqn(self._tensors[position].fqn) for position in unusual)
            if names:
                verb = _VERBS[kind][len(names) > 1]
                yield NamedTensors(f"{plural(len(names), 'tensor')} {verb}", names, "")

    def sign(self, key: NodeKey | None, positions: Collection[int]) -> str:
        """Return the unusual values of a row as `! NaN, outlier`, or "" if all are usual. Cache the text by `key`."""
        if not self._has_any():
            return ""
        if key is not None and key in self._signs:
            return self._signs[key]
        words = [_WORDS[kind] for kind, unusual in self.list_kinds(positions).items() if unusual]
        sign = f"! {', '.join(words)}" if words else ""
        if key is not None:
            self._signs[key] = sign
        return sign

    def _has_any(self) -> bool:
        return bool(self.outliers) or any(self._positions.values())

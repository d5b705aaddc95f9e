"""Compare the values of paired tensors, and check tensors without a partner for damage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from statecli import core, values
from statecli.commands.diff import changed_fields
from statecli.commands.diff.pairing import Match, MatchedBy
from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Field
from statecli.commands.diff.snapshot import SnapshotDigests
from statecli.core.errors import StateError
from statecli.core.model_state import NoteKind, TensorInfo
from statecli.core.progress import Progress
from statecli.storage.file_version import FileChanged, FileVersion, find_changed, read_versions
from statecli.values.delta import Delta
from statecli.values.plain_pairs import compare_plain_pairs
from statecli.workers import pool

#: Number of pairs whose values are compared together, because their tasks and results take a kilobyte per pair.
PAIRS_PER_BATCH = 1 << 15


class PairResult(msgspec.Struct, frozen=True, gc=False):
    """Outcome of comparing the values of a pair. The outcome is empty if the values are equal or were not compared.

    `reshaped`: the shapes of a nested tensor's inner tensors differ, as only reading shows. `has_codes`: one side holds
    codes and scales, so that it may be compared after dequantizing. `differs`: the digests of the values differ.
    `changed_file`: the file that changed during the run, if `error` reports this change. `inconclusive`: why it is
    unknown whether the values differ.
    """

    delta: Delta | None = None
    not_compared: str | None = None
    error: str | None = None
    inconclusive: str | None = None
    reshaped: bool = False
    has_codes: bool = False
    differs: bool = False
    changed_file: str | None = None


_EQUAL = PairResult()


class ValueComparison:
    """Comparison of the values of all pairs of a diff.

    `targets`: both targets, for messages. `initial_versions`: versions of the files before they were read.
    `inconclusive`: by `id`, tensors that may be renamed, and the reason why that is unknown.
    """

    def __init__(
        self,
        request: Request,
        targets: tuple[str, str],
        initial_versions: Mapping[str, FileVersion | None],
        digests: SnapshotDigests,
        inconclusive: Mapping[int, StateError],
    ) -> None:
        self._request, self._targets, self._initial_versions = request, targets, initial_versions
        self._digests, self._inconclusive = digests, inconclusive

    def compare(self, matches: Sequence[Match], progress: Progress | None) -> list[PairResult]:
        """Compare the values of each match. `progress` reports the compared bytes of the old tensors."""
        outcomes = [_EQUAL] * len(matches)
        to_compare: list[int] = []
        unpaired_rows: list[tuple[int, TensorInfo]] = []
        for n, match in enumerate(matches):
            if match.before is None or match.after is None:
                unpaired_rows.append((n, match.output_row))
            elif changed_fields.get_effective_shape(match.before) != changed_fields.get_effective_shape(match.after):
                outcomes[n] = self._build_shape_result(match.output_row)
                unpaired_rows += [(n, match.before), (n, match.after)]
            elif match.matched_by is MatchedBy.BYTES:
                continue  # paired because their bytes are equal
            elif _has_no_values(match.before) and _has_no_values(match.after):
                outcomes[n] = PairResult(not_compared="neither side has values")
            else:
                to_compare.append(n)
        if self._digests:
            self._compare_digests(to_compare, matches, outcomes)
            return outcomes
        if to_compare:
            self._compare_values(to_compare, matches, outcomes, progress)
        if unpaired_rows:
            self._check(unpaired_rows, outcomes)
        return outcomes

    def _compare_values(
        self,
        to_compare: Sequence[int],
        matches: Sequence[Match],
        outcomes: list[PairResult],
        progress: Progress | None,
    ) -> None:
        deltas = self._compare_without_numpy([matches[n] for n in to_compare])
        if deltas is not None:
            for n, delta in zip(to_compare, deltas, strict=True):
                outcomes[n] = PairResult(delta) if delta.changed else _EQUAL
            return
        total = sum(before.nbytes for n in to_compare if (before := matches[n].before))
        advance = progress(total) if progress else None
        for start in range(0, len(to_compare), PAIRS_PER_BATCH):
            numbers = to_compare[start : start + PAIRS_PER_BATCH]
            pairs = [
                values.pair_plan.Pair(old, new)
                for n in numbers
                if (old := matches[n].before) and (new := matches[n].after)
            ]
            request, initial_versions = self._request, self._initial_versions
            results = values.compare.compare_pairs(
                pairs, request.how, jobs=request.jobs, progress=advance, header_versions=initial_versions
            )
            for n, pair, result in zip(numbers, pairs, results, strict=True):
                outcomes[n] = self._build_result(result, pair.before, pair.after)

    def _compare_without_numpy(self, matches: Sequence[Match]) -> list[Delta] | None:
        """Return how the values of small tensors differ, or None if the comparison needs numpy."""
        if pool.is_distributed():
            return None
        before = [match.before for match in matches if match.before is not None]
        after = [match.after for match in matches if match.after is not None]
        versions = {
            **read_versions(byte_range.path for tensor in before + after for byte_range in tensor.ranges),
            **self._initial_versions,
        }
        deltas = compare_plain_pairs(before, after, self._request.how)
        return None if find_changed(versions) else deltas

    def _compare_digests(self, to_compare: Sequence[int], matches: Sequence[Match], outcomes: list[PairResult]) -> None:
        pairs = [(old, new) for n in to_compare if (old := matches[n].before) and (new := matches[n].after)]
        before = self._digests.find_digests([old for old, _ in pairs])
        after = self._digests.find_digests([new for _, new in pairs])
        for n, (old, new), old_digest, new_digest in zip(to_compare, pairs, before, after, strict=True):
            if old_digest is None or new_digest is None:
                is_unknown = old_digest != new_digest
                reason = "one side has no values" if is_unknown else "neither side has values"
            elif old.dtype != new.dtype:
                is_unknown = Field.DTYPE in self._request.ignore
                reason = "the dtypes differ, and a snapshot has only digests"
            else:
                outcomes[n] = PairResult(differs=old_digest != new_digest)
                continue
            inconclusive = describe_unknown(self._targets, new, reason) if is_unknown else None
            outcomes[n] = PairResult(not_compared=reason, inconclusive=inconclusive)

    def _check(self, unpaired_rows: Sequence[tuple[int, TensorInfo]], outcomes: list[PairResult]) -> None:
        """Check unpaired tensors for damage, because a damaged tensor must not count as added."""
        errors = values.recorded_checksums.check_checksums([row for _, row in unpaired_rows], jobs=self._request.jobs)
        for (n, row), row_errors in zip(unpaired_rows, errors, strict=True):
            if row_errors:
                outcomes[n] = PairResult(not_compared="could not be read", error=str(row_errors[0]))
            elif id(row) in self._inconclusive:
                outcomes[n] = PairResult(error=str(self._inconclusive[id(row)]))

    def _build_shape_result(
        self, after: TensorInfo, reason: str = "the shapes differ", *, reshaped: bool = False
    ) -> PairResult:
        if Field.SHAPE not in self._request.ignore:
            return PairResult(not_compared=reason, reshaped=reshaped)
        # If shapes are ignored, it is undefined which values belong together.
        return PairResult(not_compared=reason, inconclusive=describe_unknown(self._targets, after, reason))

    def _build_result(self, result: object, before: TensorInfo, after: TensorInfo) -> PairResult:
        """Convert the result of a comparison to the outcome of the pair.

        An inconclusive pair, neither equal nor different, is an error unless both are the same bytes of a file.
        """
        if isinstance(result, Delta):
            return PairResult(result) if result.changed else _EQUAL
        if isinstance(result, StateError):
            changed_file = result.path if isinstance(result, FileChanged) else None
            return PairResult(not_compared="could not be read", error=str(result), changed_file=changed_file)
        reason = str(getattr(result, "reason", result))
        if getattr(result, "reshaped", False):
            return self._build_shape_result(after, reason, reshaped=True)
        if before.data == after.data and before.parts == after.parts and (before.data or before.parts):
            return _EQUAL
        split_codes = core.quantized_weights.split_codes
        if (split_codes(before) is None) is not (split_codes(after) is None):
            return PairResult(not_compared=reason, has_codes=True)
        return PairResult(not_compared=reason, inconclusive=describe_unknown(self._targets, after, reason))


def describe_unknown(targets: tuple[str, str], row: TensorInfo, reason: str) -> str:
    """Return the error message for a pair for which it is unknown whether the values differ."""
    message = (
        f"{' and '.join(dict.fromkeys(targets))}: {row.fqn}: statecli does not know whether the values differ: {reason}"
    )
    return f"{message}; exclude the tensor with -x, or give --ignore values"


def _has_no_values(row: TensorInfo) -> bool:
    """Return True if the tensor has no values because it is on meta or uninitialized."""
    is_empty = row.device == "meta" or row.note_kind is NoteKind.UNINITIALIZED
    return is_empty and row.data is None and not row.parts

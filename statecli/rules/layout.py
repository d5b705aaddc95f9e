"""Rules about the layout of files: bytes that are unused, missing, damaged or misaligned."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET

from statecli.core import quoting
from statecli.core.dtypes import ELEMENT_BITS
from statecli.core.errors import ChecksumMismatch
from statecli.core.finding import Severity
from statecli.core.format_traits import Legacy
from statecli.core.oddity_kind import OddityKind
from statecli.core.state import ByteRange, Oddity, Place, TensorData, TensorInfo
from statecli.formats.dcp import ARCHIVE
from statecli.rules.rule import Issue, rule
from statecli.rules.subject import Subject, needs_digest_as_name, needs_values
from statecli.storage import files

#: Bytes that no tensor and no loader uses.
_UNUSED = (OddityKind.PREFIXED, OddityKind.GAP, OddityKind.UNUSED_STORAGES, OddityKind.UNUSED_RECORDS)


def _needs_file(subject: Subject) -> str | None:
    return "a class is no file" if subject.state.traits.is_class else None


def _report_oddities(subject: Subject, help: str, *kinds: OddityKind) -> Iterator[Issue]:
    """Return an issue for each oddity of these kinds that the reader recorded."""
    return (_build_issue(odd, help) for odd in subject.state.oddities if odd.kind in kinds)


def _build_issue(odd: Oddity, help: str) -> Issue:
    return Issue(odd.message, odd.fqn, help=help, place=None if odd.place is UNSET else odd.place)


@rule(Severity.WARNING, _needs_file)
def trailing_bytes(subject: Subject) -> Iterator[Issue]:
    """Something stands behind the end of the file's content.

    Why: readers that look from the front and readers that look from the back see two different files, which is how
    something is smuggled past a scanner; else it is what is left of a longer file, or a download that went on.

    Example: a second archive or a script appended to `model.pt`, a zip comment, bytes behind the pickle in data.pkl.

    Fix: load and save it again with torch.save, and find out who appended what.
    """
    help = "save it again with torch.save, and look at what was appended"
    yield from _report_oddities(subject, help, OddityKind.SUFFIXED, OddityKind.ZIP_COMMENT, OddityKind.PICKLE_TRAILING)


@rule(Severity.WARNING, _needs_file)
def unused_bytes(subject: Subject) -> Iterator[Issue]:
    """The file holds bytes that loading it never looks at.

    Why: they take room, travel with every copy, and are for anyone to read: weights that were taken out of the pickle
    and not out of the archive, or another file that rides along.

    Example: the record `data/7` that no tensor of data.pkl refers to; a megabyte between two records.

    Fix: load and save it again with torch.save, which writes what is used and nothing else.
    """
    help = "save it again with torch.save, which writes only what is used"
    yield from _report_oddities(subject, help, *_UNUSED)
    if not subject.state.traits.distinguishes_case:  # torch reads the last of such records
        yield from _report_oddities(subject, help, OddityKind.CASE_ONLY_NAMES)


def _needs_mapped_format(subject: Subject) -> str | None:
    traits = subject.state.traits
    if traits.never_mapped:
        return traits.never_mapped
    if Legacy.TAR in traits.legacy:
        return "a tar archive of before torch 0.1.10 is read, never mapped: see legacy-format"
    legacy = Legacy.STREAM in traits.legacy
    return "a stream of before torch 1.6 is read, never mapped: see legacy-format" if legacy else None


@rule(Severity.WARNING, _needs_file, _needs_mapped_format)
def misaligned(subject: Subject) -> Iterator[Issue]:
    """Tensors begin at no multiple of their element size.

    Why: a mapped file (`mmap=True`, safetensors) hands out its own bytes as tensors. Where these are not aligned, each
    load copies them, or faults on a processor that insists, and reading from a GPU's side is slow.

    Example: a safetensors header that was not padded to a multiple of 8, so that every float32 begins at an odd byte.

    Fix: load and save it again; torch.save aligns to 64 bytes, safetensors' writers pad the header.
    """
    first: dict[str, tuple[TensorInfo, TensorData]] = {}
    counts: dict[str, int] = {}
    for tensor in subject.state.tensors:
        for data in tensor.pieces:
            where = data.storage
            # What is packed is taken out of its archive, never mapped.
            if where.path and where.length and not where.packing and where.offset % _alignment(data.dtype):
                first.setdefault(where.path, (tensor, data))
                counts[where.path] = counts.get(where.path, 0) + 1
    for path, (tensor, data) in first.items():
        others = counts[path] - 1
        more = f", and so {'do' if others > 1 else 'does'} {others:,} more" if others else ""
        where, name = data.storage, subject.name_of(tensor)
        message = f"{name}: {data.dtype} begins at byte {where.offset:,}, no multiple of {_alignment(data.dtype)}{more}"
        yield Issue(message, tensor.fqn, tensor.section, "load it and save it again", place=where.place)


def _alignment(dtype: str) -> int:
    """Return the alignment of a dtype in bytes; a complex number is aligned as its two parts are."""
    size = max(ELEMENT_BITS.get(dtype, 8) // 8, 1)
    return size // 2 if dtype.startswith("complex") else size


def _needs_checksums(subject: Subject) -> str | None:
    has_checksums = any(_has_checksum(where) for tensor in subject.state.tensors for where in tensor.ranges)
    has_checksums = has_checksums or any(odd.kind is OddityKind.CHECKSUM_MISMATCH for odd in subject.state.oddities)
    return None if has_checksums else "no checksum of a tensor is recorded in it"


def _has_checksum(where: ByteRange) -> bool:
    """Return True if a checksum is recorded; a nested archive has one inside, which is found when it is read."""
    return where.crc32 is not None or (where.packing is not None and where.packing.how == ARCHIVE)


@rule(Severity.ERROR, _needs_file, _needs_checksums, needs_values)
def checksum_mismatch(subject: Subject) -> Iterator[Issue]:
    """The bytes of a record are not those that were written.

    Why: torch checks no checksum: a file that was damaged on a disk or in a transfer, or changed by hand, loads without
    a word and with other weights. That of data.pkl is checked in every audit, those of the tensors with `--values`.
    What such bytes are worth is judged by no other rule: where one about values is asked for, the target also counts
    as failed.

    Example: one bit of `data/3` has flipped since it was saved.

    Fix: copy or download the file again.
    """
    # A reader that lists a tensor only if its checksum is right has verified the checksum already.
    yield from _report_oddities(subject, ChecksumMismatch.help, OddityKind.CHECKSUM_MISMATCH)
    broken: dict[ChecksumMismatch, list[TensorInfo]] = {}
    for tensor, errors in zip(subject.state.tensors, subject.checksum_errors or (), strict=True):
        for error in errors:
            if isinstance(error, ChecksumMismatch):
                broken.setdefault(error, []).append(tensor)
    for error, tensors in broken.items():
        first, others = tensors[0], [subject.name_of(tensor) for tensor in tensors[1:]]
        also = f"; it is of {quoting.names(others)} too" if others else ""
        wrong = str(error).partition(": checksum wrong: ")[2].partition(";")[0]
        file = subject.member(error.place)
        saved = f"were saved in {quoting.name(file)}" if file else "were saved"
        message = f"{subject.name_of(first)}: its bytes are not those that {saved}: checksum {wrong}{also}"
        yield Issue(message, first.fqn, first.section, "copy or download the file again", place=error.place)


@rule(Severity.ERROR, _needs_file)
def missing_shard(subject: Subject) -> Iterator[Issue]:
    """A checkpoint in several files, and one of them is not there.

    Why: nothing can be loaded, or a loader that asks for one tensor at a time finds out hours later. Such a target
    also counts as failed, since not all of its tensors can be audited.

    Example: the index names `model-00002-of-00002.safetensors`, and the upload stopped after the first.

    Fix: copy or download the missing file, or save the checkpoint again.
    """
    # Of a checkpoint of which nothing can be read, the error is the finding: see errors.py.
    yield from _report_oddities(
        subject, "copy or download the missing file", OddityKind.MISSING_RANK, OddityKind.MISSING_SHARD
    )


@rule(Severity.ERROR, _needs_file)
def index_mismatch(subject: Subject) -> Iterator[Issue]:
    """The index of a sharded checkpoint says something else than its shards.

    Why: a loader opens the shard that the index names and finds no such tensor. What the index does not name is loaded
    by some (transformers 5) and not by others: there its layer keeps random weights. A wrong total misleads what places
    layers by it. A file that looks like one more shard, beside an index that does not name it, is told as a note.

    Example: after merging adapters into one shard the index was not written again.

    Fix: write the index again, by `save_pretrained` or from the shards' own headers.
    """
    help = "write the index again: save_pretrained does"
    for odd in subject.state.oddities:
        if odd.kind is OddityKind.NOT_IN_INDEX:
            yield _build_issue(odd, help)
        elif odd.kind is OddityKind.INDEX_TOTAL:
            yield Issue(odd.message, help=help, severity=Severity.WARNING)
        elif odd.kind is OddityKind.UNNAMED_SHARDS:
            yield Issue(odd.message, help="audit the folder, and each of them is a target", severity=Severity.NOTE)


@rule(Severity.NOTE, _needs_file)
def legacy_format(subject: Subject) -> Iterator[Issue]:
    """The file is a stream of pickles as torch wrote it before version 1.6, or a tar archive of before 0.1.10.

    Why: it has no directory and no checksums. It cannot be mapped, a single tensor cannot be read without walking over
    all before it, and damage to its weights goes unnoticed. torch loads a tar archive with weights_only=False only.

    Example: `torch.save(..., _use_new_zipfile_serialization=False)`, or a checkpoint of 2019.

    Fix: `torch.save(torch.load(path), path)` with any newer torch, or safetensors.
    """
    if Legacy.STREAM in subject.state.traits.legacy:
        yield Issue("is in the format of before torch 1.6, without directory and checksums", help="save it again")
    if Legacy.TAR in subject.state.traits.legacy:
        message = "is a tar archive of before torch 0.1.10, which torch.load reads with weights_only=False only"
        yield Issue(message, help="load it with weights_only=False if this audit is clean, and save it again")


@rule(Severity.ERROR, needs_digest_as_name)
def digest_mismatch(subject: Subject) -> Iterator[Issue]:
    """The bytes of a file are not those that its name promises: the name is a digest, and the digest is another.

    Why: the Hub's cache keeps each file as `blobs/DIGEST` and never hashes the file again. A damaged disk, an
    interrupted copy or somebody who changed the blob is loaded as if it came from the Hub. A name of 64 digits is a
    SHA-256, a name of 40 digits the SHA-1 that git gives to a file; ollama writes `sha256-DIGEST`.
    Files on disk are hashed up to 256 MB in one run, with `--values` all of them; the verdict counts the others.

    Example: `~/.cache/huggingface/hub/models--x/blobs/4f1d…`, whose SHA-256 is `9c0a…`.

    Fix: delete the blob and download it again: `huggingface-cli download REPO --force-download`.
    """
    for checked in subject.digest_files:
        if checked.digest not in (None, checked.file.expected):
            path = checked.file.path
            expected, digest = (quoting.name(text[:12]) for text in (checked.file.expected, str(checked.digest)))
            message = (
                f"{quoting.name(files.get_name(path))}: its name promises digest {expected}…, its bytes have {digest}…"
            )
            help = "delete the blob and download it again"
            yield Issue(message, help=help, place=Place(path, 0, checked.file.size), about=files.get_name(path))


RULES = (
    trailing_bytes,
    unused_bytes,
    misaligned,
    checksum_mismatch,
    missing_shard,
    index_mismatch,
    legacy_format,
    digest_mismatch,
)

"""Rules about the layout of files: bytes that are unused, missing, damaged or misaligned."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from msgspec import UNSET

from statecli.core import quoting
from statecli.core.dtypes import ELEMENT_BITS
from statecli.core.errors import ChecksumMismatch
from statecli.core.finding import Severity
from statecli.core.model_state import Oddity, Place, TensorData, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.core.units import plural
from statecli.rules.audit_rule import Issue, report_tensor, rule
from statecli.rules.audit_subject import Subject, needs_digest_as_name, needs_file, needs_values
from statecli.storage import files

#: Kinds of bytes that no tensor and no loader uses.
_UNUSED_BYTES_KINDS = (OddityKind.PREFIXED, OddityKind.GAP, OddityKind.UNUSED_STORAGES, OddityKind.UNUSED_RECORDS)


def _report_oddities(subject: Subject, help: str, *kinds: OddityKind) -> Iterator[Issue]:
    return (_build_issue(oddity, help) for oddity in subject.state.oddities if oddity.kind in kinds)


def _build_issue(oddity: Oddity, help: str) -> Issue:
    return Issue(oddity.message, oddity.fqn, help=help, place=None if oddity.place is UNSET else oddity.place)


@rule(Severity.WARNING, needs_file)
def trailing_bytes(subject: Subject) -> Iterator[Issue]:
    """The file has data after the end of its content.

    Why: some programs read a file from its start and some from its end, and may read different contents. Attackers use
    this to hide data from a scanner. The data can also be left over from a longer file, or from a broken download.

    Example: a second archive or a script appended to `model.pt`, a zip comment, bytes after the pickle in data.pkl.

    Fix: load the file and save it again with torch.save, and find out who appended the data.
    """
    help = "save the file again with torch.save, and inspect the appended data"
    yield from _report_oddities(subject, help, OddityKind.SUFFIXED, OddityKind.ZIP_COMMENT, OddityKind.PICKLE_TRAILING)


@rule(Severity.WARNING, needs_file)
def unused_bytes(subject: Subject) -> Iterator[Issue]:
    """The file has bytes that are not read by the loader of its format.

    Why: the bytes take space in every copy, and can be read by everyone with the file. Examples are weights removed
    from the pickle but not from the archive, and a hidden file for another library.

    Example: the record `data/7` without a tensor of data.pkl; a megabyte between two records; a file next to the arrays
    of an `.npz`.

    Fix: load the file and save it again with the same library, which writes only used bytes.
    """
    help = "save the file again with its library, which writes only the bytes that are used"
    yield from _report_oddities(subject, help, *_UNUSED_BYTES_KINDS)
    if not subject.state.traits.distinguishes_case:  # torch reads the last of several such records
        yield from _report_oddities(subject, help, OddityKind.CASE_ONLY_NAMES)


@rule(Severity.ERROR, needs_file)
def misplaced_storage(subject: Subject) -> Iterator[Issue]:
    """A storage is not at the offset computed by torch, so a load with computed offsets reads wrong bytes.

    Why: with `torch.utils.serialization.config.load.calculate_storage_offsets` and `mmap=True`, torch does not look up
    where a storage begins. Instead, torch adds up the sizes of the earlier storages. If the records are in another
    order, torch silently loads wrong weights. An ordinary `torch.load` is not affected.

    Example: an archive with the record `.format_version`, unpacked and zipped again in another order.

    Fix: load the file without this setting and save it again with torch.save.
    """
    help = "load the file without calculate_storage_offsets, and save it again with torch.save"
    yield from _report_oddities(subject, help, OddityKind.MISPLACED_STORAGE)


def _needs_mapped_format(subject: Subject) -> str | None:
    traits = subject.state.traits
    reason = "torch never memory-maps a file in the format from before torch 1.6: see the rule legacy-format"
    return traits.never_mapped or (reason if traits.is_legacy else None)


@rule(Severity.WARNING, needs_file, _needs_mapped_format)
def misaligned(subject: Subject) -> Iterator[Issue]:
    """A tensor does not begin at a multiple of its element size.

    Why: a memory-mapped load (`mmap=True`, safetensors) uses the bytes of the file as tensors. Misaligned tensors are
    copied at each load, crash on a processor that requires alignment, and are slow to read for a GPU.

    Example: a safetensors header without padding to a multiple of 8, so that every float32 begins at an odd byte.

    Fix: load the file and save it again; torch.save aligns to 64 bytes, and safetensors pads the header.
    """
    first: dict[str, tuple[TensorInfo, TensorData]] = {}
    counts: dict[str, int] = {}
    for tensor in subject.state.tensors:
        for data in tensor.pieces:
            storage = data.storage
            # A packed storage is unpacked from its archive, never mapped.
            if storage.path and storage.length and not storage.packing and storage.offset % _get_alignment(data.dtype):
                first.setdefault(storage.path, (tensor, data))
                counts[storage.path] = counts.get(storage.path, 0) + 1
    for path, (tensor, data) in first.items():
        others = counts[path] - 1
        more = f"; {plural(others, 'more tensor')} {'are' if others > 1 else 'is'} also misaligned" if others else ""
        storage, size = data.storage, _get_alignment(data.dtype)
        text = f"{data.dtype} data begins at byte {storage.offset:,}, which is not a multiple of {size}{more}"
        yield report_tensor(subject, tensor, text, "load the file and save it again", place=storage.place)


@lru_cache
def _get_alignment(dtype: str) -> int:
    """Return the alignment of a dtype in bytes. A complex number is aligned like its real part."""
    size = max(ELEMENT_BITS.get(dtype, 8) // 8, 1)
    return size // 2 if dtype.startswith("complex") else size


def _needs_checksums(subject: Subject) -> str | None:
    ranges = (byte_range for tensor in subject.state.tensors for byte_range in tensor.ranges)
    # The data of a nested archive are read with the checksum inside the archive.
    has_checksums = any(byte_range.crc32 is not None or byte_range.is_archive for byte_range in ranges)
    has_checksums = has_checksums or any(
        oddity.kind is OddityKind.CHECKSUM_MISMATCH for oddity in subject.state.oddities
    )
    return None if has_checksums else "the file records no tensor checksums"


@rule(Severity.ERROR, needs_file, _needs_checksums, needs_values)
def checksum_mismatch(subject: Subject) -> Iterator[Issue]:
    """The bytes of a record do not match the checksum in the file.

    Why: torch does not verify checksums. A file damaged on a disk or in a transfer, or changed by hand, loads silently
    with other weights. Every audit verifies the checksum of data.pkl; `--values` also verifies the checksums of the
    tensors. Rules about values do not check damaged tensors, so with such a rule the target also counts as failed.

    Example: a bit of `data/3` has flipped since the file was saved.

    Fix: copy or download the file again.
    """
    # A reader that lists a tensor only with a correct checksum has verified the checksum.
    yield from _report_oddities(subject, ChecksumMismatch.help, OddityKind.CHECKSUM_MISMATCH)
    tensors_of_error: dict[ChecksumMismatch, list[TensorInfo]] = {}
    for tensor, errors in zip(subject.state.tensors, subject.checksum_errors or (), strict=True):
        for error in errors:
            if isinstance(error, ChecksumMismatch):
                tensors_of_error.setdefault(error, []).append(tensor)
    for error, tensors in tensors_of_error.items():
        first, others = tensors[0], [subject.name_of(tensor) for tensor in tensors[1:]]
        also = f"; {quoting.names(others)} use{'s' * (len(others) == 1)} the same bytes" if others else ""
        file = subject.member(error.place)
        file_text = f" in {quoting.name(file)}" if file else ""
        text = f"its bytes{file_text} do not match the saved checksum: {error.difference}{also}"
        yield report_tensor(subject, first, text, "copy or download the file again", place=error.place)


@rule(Severity.ERROR, needs_file)
def missing_shard(subject: Subject) -> Iterator[Issue]:
    """A file of the checkpoint is missing.

    Why: the checkpoint cannot be loaded, or a loader that reads tensor by tensor fails hours later. The target also
    counts as failed, because not all of its tensors can be audited.

    Example: the index names `model-00002-of-00002.safetensors`, and the upload stopped after the first file.

    Fix: copy or download the missing file, or save the checkpoint again.
    """
    # If nothing of the checkpoint can be read, the error is the finding (see errors.py).
    yield from _report_oddities(
        subject, "copy or download the missing file", OddityKind.MISSING_RANK, OddityKind.MISSING_SHARD
    )


@rule(Severity.ERROR, needs_file, cases={"total": Severity.WARNING, "not in the index": Severity.NOTE})
def index_mismatch(subject: Subject) -> Iterator[Issue]:
    """The index of a sharded checkpoint contradicts its shards.

    Why: if the index names the wrong shard, a loader does not find the tensor. If the index does not name a tensor,
    most loaders leave its layer at random weights; transformers 5 loads the tensor. A wrong total is a warning: code
    that assigns layers to devices by size is misled. A file that looks like a shard but is not in the index is a note.

    Example: adapters were merged into a shard, and the index was not written again.

    Fix: write the index again, with `save_pretrained` or from the headers of the shards.
    """
    help = "write the index again with save_pretrained"
    for oddity in subject.state.oddities:
        if oddity.kind is OddityKind.NOT_IN_INDEX:
            yield _build_issue(oddity, help)
        elif oddity.kind is OddityKind.INDEX_TOTAL:
            yield Issue(oddity.message, help=help, severity=index_mismatch.cases["total"])
        elif oddity.kind is OddityKind.UNNAMED_SHARDS:
            yield Issue(
                oddity.message,
                help="audit the folder: statecli then checks each file as a separate target",
                severity=index_mismatch.cases["not in the index"],
            )


@rule(Severity.NOTE, needs_file)
def legacy_format(subject: Subject) -> Iterator[Issue]:
    """The file is a stream of pickles from before torch 1.6.

    Why: the format has no central directory and no checksums. The file cannot be memory-mapped, a reader must pass all
    earlier tensors to reach a later one, and damaged weights cannot be detected.

    Example: `torch.save(..., _use_new_zipfile_serialization=False)`, or a checkpoint of 2019.

    Fix: `torch.save(torch.load(path), path)` with any newer torch, or safetensors.
    """
    if subject.state.traits.is_legacy:
        yield Issue(
            "the file has the format from before torch 1.6, which has no checksums, so damaged values cannot be "
            "detected",
            help="save the file again with a newer torch",
        )


@rule(Severity.ERROR, needs_digest_as_name)
def digest_mismatch(subject: Subject) -> Iterator[Issue]:
    """The bytes of a file do not match the digest in the file's name.

    Why: the Hub's cache stores each file as `blobs/DIGEST` and never computes the digest again. So a loader does not
    notice that a damaged disk, an interrupted copy or another person changed the file. A name of 64 digits is a
    SHA-256, and a name of 40 digits is git's SHA-1 of a file; ollama writes `sha256-DIGEST`. A run hashes up to 256 MB
    of local files, or all files with `--values`; the verdict counts the other files.

    Example: `~/.cache/huggingface/hub/models--x/blobs/4f1d…`, whose SHA-256 is `9c0a…`.

    Fix: delete the blob and download it again: `huggingface-cli download REPO --force-download`.
    """
    for checked in subject.digest_files:
        if checked.digest not in (None, checked.file.expected):
            path = checked.file.path
            expected, digest = (quoting.name(text[:12]) for text in (checked.file.expected, str(checked.digest)))
            digests = f"the file name is the digest {expected}…, but the content has the digest {digest}…"
            message = f"{quoting.name(files.get_name(path))}: {digests}"
            help = "delete the blob and download it again"
            yield Issue(message, help=help, place=Place(path, 0, checked.file.size), about=files.get_name(path))


RULES = (
    trailing_bytes,
    unused_bytes,
    misplaced_storage,
    misaligned,
    checksum_mismatch,
    missing_shard,
    index_mismatch,
    legacy_format,
    digest_mismatch,
)

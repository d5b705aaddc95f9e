"""Archives of torch as records: read by zipfile, written by torch or zipfile."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch


def write_archive(records: dict[str, bytes], target) -> None:
    writer = torch._C.PyTorchFileWriter(target)
    for name, content in records.items():
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()


def build_archive(path: Path, records: dict[str, bytes], folder: str = "x/") -> Path:
    """Write an archive of the records, without the alignment of torch."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(folder + name, data)
    return path


def read_archive(path: str | Path) -> dict[str, bytes]:
    """Return the records by name, without the folder and without the records that a writer adds."""
    with zipfile.ZipFile(path) as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    return {name: content for name, content in records.items() if name not in ("version", ".data/serialization_id")}

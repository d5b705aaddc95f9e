"""The first bytes decide which storages of torch.save are skipped: the findings equal a scan that opens each record."""

from __future__ import annotations

import io
import pickle
import random
import zipfile

from statecli.file_scan import scan
from statecli.pickle_scan import archive_records

HIDDEN_PICKLE = b"cos\nsystem\n(S'id'\ntR."
FOLDERS = ("archive", "Archive", "a.b", "data", "x\\data\\aotinductor", "data\\constants")
NAMES = (
    *("data.pkl", "data/0", "data/1", "data/2", "data/3", "DATA/3", "data/10", "data/0.pkl", "data/a", "byteorder"),
    *(".data/extern_modules", "archive_format", "data/weights/0", "data/weights/m_weights_config.json", "version"),
    *("models/data/0", "code/data/0", "data/aotinductor/0", "data/0/1"),
)
CONTENTS = (
    *(b"", b"3", b"little", b"big", b"1" * 64, b"1" * 65, b"\0" * 8, b"\0" * 80, bytes(range(256)), b"P", b"(", b"c"),
    *(
        HIDDEN_PICKLE,
        b"(" + HIDDEN_PICKLE,
        b"\n" + HIDDEN_PICKLE,
        pickle.dumps(OSError, 0),
        pickle.dumps(OSError),
        pickle.dumps([1, 2]),
    ),
    *(b"\x93NUMPY\1\0\x10\0{'descr': '|O'} \n" + HIDDEN_PICKLE, b"PK\3\4" + b"\0" * 40 + HIDDEN_PICKLE, b"{}"),
    b'{"config": {"w": {"path_name": "../0", "use_pickle": true}}}',
)


def write_zip(picked: random.Random, depth: int = 0) -> bytes:
    content = io.BytesIO()
    folder = picked.choice(FOLDERS)
    with zipfile.ZipFile(content, "w") as archive:
        for name in picked.sample(NAMES, picked.randint(1, len(NAMES))):
            data = picked.choice(CONTENTS)
            if depth < 2 and picked.random() < 0.1:
                data = write_zip(picked, depth + 1)
            method = zipfile.ZIP_DEFLATED if picked.random() < 0.2 else zipfile.ZIP_STORED
            chosen_folder = picked.choice(FOLDERS) if picked.random() < 0.1 else folder
            archive.writestr(zipfile.ZipInfo(f"{chosen_folder}/{name}"), data, method)
    return content.getvalue()


def test_findings_are_those_of_a_scan_that_opens_each_record(tmp_path, monkeypatch):
    """The archives have records with torch's names and other names: pickles, archives, arrays, numbers or nothing."""
    path = tmp_path / "m.pt"
    for seed in range(150):
        path.write_bytes(write_zip(random.Random(seed)))  # noqa: S311
        pickles = scan.scan_pickles(str(path))
        with monkeypatch.context() as patch:
            patch.setattr(archive_records, "_list_numbered_storages", lambda _: frozenset())
            assert pickles == scan.scan_pickles(str(path)), seed


def test_most_storages_are_not_opened(tmp_path, monkeypatch):
    """If all storages were opened, the test above would prove nothing."""
    path, opened = tmp_path / "m.pt", []
    with zipfile.ZipFile(path, "w") as archive:
        for n in range(10):
            archive.writestr(f"archive/data/{n}", bytes([n]) * 80)
    monkeypatch.setattr(scan.FileScan, "_scan_record", lambda *args: opened.append(args[3].name))
    assert scan.scan_pickles(str(path)) == ()
    assert opened == []

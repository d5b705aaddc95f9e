"""The measurements as data: what is run, beside what, and how good it should be.

In the commands `{d}` is the folder of the inputs, `{url}` an http server of this folder with 30 ms to the first byte.
A peer that begins with `peer ` is a function of `_peers.py`. Commands of statecli begin with `statecli `.
"""

from __future__ import annotations

from typing import NamedTuple

from _inputs import TYPES

#: Figures of a row, in the units of its aims: millions of instructions, seconds, seconds, MB.
INSTRUCTIONS, WALL, CPU, PEAK = "M instructions", "s", "s CPU", "MB"


class Aim(NamedTuple):
    """`figure` is at most `limit`; with `of_peer` the limit is a multiple of the first peer's figure."""

    figure: str
    limit: float
    of_peer: bool = False


class Row(NamedTuple):
    """A measurement. `means` says what makes it fast, or why an aim is missed and what was tried."""

    name: str
    work: str
    ours: str
    peers: dict[str, str]
    inputs: tuple[str, ...] = ()
    aims: tuple[Aim, ...] = ()
    means: str = ""
    rounds: int = 3
    size: int = 0  # bytes of one side, for a rate


EMPTY = {
    "`python -c pass`": "python -c pass",
    "an empty click command": "python -c 'import click; click.command()(lambda: 0)([])'",
}
TORCH = {"`import torch`": "python -c 'import torch'"}
INPUT = "--input int64:8x128<30522"


def _start(
    name: str, work: str, command: str, limit: float, *inputs: str, wall: float | None = None, means: str = ""
) -> Row:
    aims = (Aim(INSTRUCTIONS, limit), *((Aim(WALL, wall),) if wall else ()))
    return Row(name, work, command, EMPTY, inputs, aims, means or START, rounds=11)


START = (
    "The parser of command lines is our own, and a reader and a renderer are imported by name. Help, rules and schemas "
    "are read from files that are made with the documents."
)
LISTING = (
    "Missed. Millions of instructions: an empty Python 41; re and typing, which msgspec imports too, 35; msgspec "
    "22; the table of options and the types of its options 45; console, outputs, formats and storage 28; the "
    "modules of the listing 24; signals and the first module 14. Making 280 classes takes 57 of it, reading "
    "bytecode 28, and the end of the process 7. Tried: the classes of datetime from C (5 saved), modules that only "
    "pages and findings need imported there (12 saved), plain names as annotations (3 saved), all kept; a lighter "
    "Annotated saves 5, but shards need the one of typing; os._exit at the end saves 7 and skips the exit handlers "
    "of libraries; _signal instead of signal saves 3 and is a private module."
)
SMALL_DIFF = (
    "Small pairs are tallied from their bytes in C, and differences that show ordinary training are not searched "
    "for transformations, so numpy, whose import takes 252 M instructions, is not imported. Making classes takes "
    "80, reading bytecode 39. Where a matrix was replaced, a name or a type differs, or a value is NaN, numpy is "
    "still imported (700 to 760 M). Tried: readers of formats and the search imported where they are used (307 to "
    "268 M)."
)
START_ROWS = (
    _start("start", "`inspect` of a small safetensors", "statecli inspect {d}/small.safetensors -f json", 190,
           "small.safetensors", wall=0.060, means=LISTING),
    _start("version", "`--version`", "statecli --version", 100),
    _start("help", "`--help`", "statecli --help", 100),
    _start("mistake", "a mistyped option", "statecli inspect --colour", 100),
    _start("rules", "`rules`", "statecli rules", 250),
    _start("schema", "`schema inspect`", "statecli schema inspect", 250),
    _start("config", "`config`", "statecli config", 250),
    _start("diff-small", "`diff` of small files", "statecli diff {d}/small.safetensors {d}/small2.safetensors", 300,
           "small.safetensors", "small2.safetensors", means=SMALL_DIFF),
    _start("lock-small", "`lock` of a small file", "statecli lock {d}/small.safetensors -o {d}/small.lock", 300,
           "small.safetensors"),
    Row("list-2k", "2,000 tensors, `.safetensors`, to JSON", "statecli inspect {d}/2k.safetensors -f json",
        {"`safe_open`": "peer list_safetensors {d}/2k.safetensors"}, ("2k.safetensors",)),
)  # fmt: skip

SAFE_OPEN = {"`safe_open`, dtype and shape of each": "peer list_safetensors {d}/100k.safetensors"}
MANY_ROWS = (
    Row("list-100k", "100,000 tensors, `.safetensors`, to JSON", "statecli inspect {d}/100k.safetensors -f json",
        SAFE_OPEN, ("100k.safetensors",), (Aim(CPU, 0.35), Aim(PEAK, 110)),
        "A typed decode of the header, and one encoder for all rows. CPU: decoding 15 %, building rows 15 %, encoding "
        "6 %, names of codes 6 %. Tried: one decode of the whole header (0.013 s less, 38 MB more); joined names (no "
        "gain)."),
    Row("list-800k", "800,000 tensors, `.safetensors`, to JSON", "statecli inspect {d}/800k.safetensors -f json",
        {"`safe_open`": "peer list_safetensors {d}/800k.safetensors"}, ("800k.safetensors",),
        (Aim(CPU, 3), Aim(PEAK, 500)),
        "As above; the rows are streamed. Missed: the header with its entries takes 534 MB when it is decoded, and the "
        "rows 523 MB later: 592 bytes a tensor, 288 of them the fields of a TensorInfo. Tried: freeing the header "
        "before the rows are built (618 to 548 MB); smaller slices for the encoder (no gain). Entries that are decoded "
        "row by row would keep the header until the last row."),
    *(Row(f"list-800k-{output}", f"800,000 tensors, `.safetensors`, to {output}",
          f"statecli inspect {{d}}/800k.safetensors -f {output}",
          {"to JSON": "statecli inspect {d}/800k.safetensors -f json"}, ("800k.safetensors",),
          (Aim(CPU, 3), Aim(PEAK, 500)), means)
      for output, means in (
          ("plain", "Missed. Reading and classifying take 1.8 s, aligning 1.0, the page 0.6. Tried: columns instead of "
                    "rows (8.2 to 3.7 s); garbage collection off (no gain)."),
          ("table", "Missed. Reading and classifying take 1.8 s, folding 0.95, totals 0.6, alike tensors 0.35. Tried: "
                    "one line for tensors that are alike (10.0 to 4.4 s); garbage collection off (no gain)."))),
    Row("list-100k-pt", "100,000 tensors, `.pt`, to JSON", "statecli inspect {d}/100k.pt -f json",
        {'`torch.load(map_location="meta")`': "peer load_on_meta {d}/100k.pt"}, ("100k.pt",), (Aim(CPU, 1.0),),
        "Runs of tensors are read in C, and tensors that differ from an earlier one in a few fields are decoded by its "
        "layout. CPU: zip directory 20 %, the pickle 12 %, layouts 10 %, misplaced storages 7 %. Tried: garbage "
        "collection off (2 % less); tuned loops over the zip directory (1.38 to 1.33 s, kept); plain tensors left out "
        "of the search for settings (9 % less, kept)."),
    Row("diff-names", "`diff --metadata-only` of two of 100,000 tensors",
        "statecli diff --metadata-only {d}/100k.safetensors {d}/100k2.safetensors",
        {"`inspect` of one": "statecli inspect {d}/100k.safetensors -f json"},
        ("100k.safetensors", "100k2.safetensors"), (Aim(CPU, 2.2, of_peer=True),),
        "Missed, because inspect became faster by as much. Reading both takes 1.1 × inspect by itself, that is 39 % of "
        "the CPU; pairing takes 21 % (sorting 11 %), writing 12 %, changes 9 %, fields 7 %, totals 6 %. Tried: cached "
        "sort keys, and pairs that are alike settled by one comparison (11 % together, kept); equal lists of names "
        "paired at once, without sets of the unmatched (1.15 to 1.00 s, kept); garbage collection off (no gain)."),
    Row("lock-100k", "`lock` of 100,000 small tensors", "statecli lock {d}/100k.safetensors -o {d}/100k.lock",
        {"`inspect` of it": "statecli inspect {d}/100k.safetensors -f json"}, ("100k.safetensors",), (Aim(CPU, 0.6),),
        "One descriptor, and neighbouring tensors in one read."),
    Row("audit-100k-pt", "`audit` of 100,000 tensors, `.pt`", "statecli audit --no-values {d}/100k.pt",
        {"`inspect` of it": "statecli inspect {d}/100k.pt -f json"}, ("100k.pt",), (Aim(CPU, 1.3, of_peer=True),),
        "Missed: reading 38 %, rules 21 %, the scan of the pickle 19 %, of the archive 19 %. The directory of the zip "
        "takes 9 % in the reader and again in the scanner, which reads the file by itself, so that damage that ends "
        "the reader hides nothing. Tried: storages skipped by their first bytes (5.8 to 4.6 s), rules only for tensors "
        "with something to report (3.7 to 2.9 s), and rules that look at all names, dtypes and sizes together (2.65 to "
        "2.33 s), all kept; a tuned zip loop (no gain); garbage collection paused for the whole target (0.1 s, and "
        "42 MB more, because the graph of the pickle waits)."),
    Row("audit-dcp", "`audit` of 10,000 tensors of a distributed checkpoint",
        "statecli audit --no-values {d}/chunks-1", {"`inspect` of it": "statecli inspect {d}/chunks-1 -f json"},
        ("chunks-1",), (),
        "An audit also scans the 10,000 archives, 22 % of the CPU, and follows 140,000 calls and states of the "
        "`.metadata`: its opcodes 20 %, the flow of names 19 %, allocations 17 %; the places of the archives take 8 %. "
        "Tried: the graph freed without the collector (5.9 to 5.5 s, 178 to 137 MB, kept); reads of blocks of 32 KiB "
        "instead of each header (no gain: a read takes 0.6 µs); one pass over nested calls that are measured already "
        "(0.05 s, kept)."),
    Row("list-400mb-pt", "200-tensor 400 MB `.pt`", "statecli inspect {d}/400MB.pt -f json",
        {'`torch.load(map_location="meta")`': "peer load_on_meta {d}/400MB.pt"}, ("400MB.pt",),
        (Aim(WALL, 0.1, of_peer=True), Aim(PEAK, 60))),
    Row("shards", "128 shards, 36,864 tensors, to JSON", "statecli inspect {d}/model -f json",
        {"`json`, then `safe_open` of each": "peer list_shards {d}/model"}, ("model",), (Aim(WALL, 1.5),)),
    Row("shards-table", "the same, to a table", "statecli inspect {d}/model -f table",
        {"`json`, then `safe_open` of each": "peer list_shards {d}/model"}, ("model",), (Aim(WALL, 1.5),)),
    Row("dcp", "10,000 tensors of a distributed checkpoint", "statecli inspect {d}/chunks-1 -f json",
        {"`read_metadata`": "peer read_dcp {d}/chunks-1"}, ("chunks-1",), (Aim(WALL, 1),)),
    Row("dcp-chunks", "the same, in 8 chunks each", "statecli inspect {d}/chunks-8 -f json",
        {"`read_metadata`": "peer read_dcp {d}/chunks-8"}, ("chunks-8",)),
)  # fmt: skip

#: Types, and how many times the CPU of bfloat16 they may take.
LIMITS = {**dict.fromkeys(("int8", "int16", "int32", "int64", "bool"), 1.5),
          **dict.fromkeys(("float8_e4m3fn", "float64", "complex64"), 2.0)}  # fmt: skip


def _compare(dtype: str, more: str = "") -> str:
    return f"statecli diff {{d}}/type.{dtype}/a.safetensors {{d}}/type.{dtype}/b.safetensors --jobs 1 {more}"


TYPE_ROWS = tuple(
    row
    for dtype in TYPES
    for row in (
        Row(f"diff-{dtype}", f"`diff` of 256 MiB of {dtype}, every element changed, one worker", _compare(dtype),
            {"as many bytes of bfloat16": _compare("bfloat16")}, (f"type.{dtype}", "type.bfloat16"),
            (Aim(CPU, LIMITS[dtype], of_peer=True),) if dtype in LIMITS else (), size=256 << 20),
        Row(f"diff-{dtype}-atol", f"the same with `--atol 1e-3` ({dtype})", _compare(dtype, "--atol 1e-3"),
            {"without": _compare(dtype)}, (f"type.{dtype}",), (Aim(CPU, 1.2, of_peer=True),), size=256 << 20),
    )
)  # fmt: skip

NUMPY = "import sys; sys.modules['statecli.values._native'] = None; from statecli.__main__ import command; command()"


def _compare_files(dtype: str, after: str = "b") -> str:
    return f"statecli diff {{d}}/pair.{dtype}/a.safetensors {{d}}/pair.{dtype}/{after}.safetensors"


def _cmp(dtype: str) -> dict[str, str]:
    return {"`cmp` of identical files": f"cmp {{d}}/pair.{dtype}/a.safetensors {{d}}/pair.{dtype}/same.safetensors"}


KERNEL = (
    "One pass over both sides in C; numpy takes eleven passes over blocks of the second-level cache. Missed: of 1 GiB "
    "of bfloat16, reading both files takes 0.30 s of one core, as cmp does, and the pass over the elements 0.2 to "
    "0.25 s; the values of float16 are 1.01 times those before, and this is found and checked on each element. Tried: "
    "vector types of the compiler (ten times slower); decoding inside the loop of sums (a third slower); the product "
    "in float32 (a fifth faster, and wrong where terms cancel); mapped files (no faster)."
)
VALUE_ROWS = (
    *(
        row
        for dtype in ("bfloat16", "float16", "float32")
        for row in (
            Row(f"diff-same-{dtype}", f"`diff` of identical 1 GiB {dtype} files", _compare_files(dtype, "same"),
                _cmp(dtype), (f"pair.{dtype}",), (Aim(WALL, 1.0, of_peer=True),), rounds=5, size=1 << 30),
            Row(f"diff-all-{dtype}", f"the same, every element changed, all statistics ({dtype})",
                _compare_files(dtype), _cmp(dtype), (f"pair.{dtype}",), (Aim(CPU, 1.2, of_peer=True),), KERNEL,
                rounds=5, size=1 << 30),
        )
    ),
    Row("diff-loop", "`diff` of 1 GiB of bfloat16, every element changed", _compare_files("bfloat16"),
        {"a loop with torch": "peer loop_with_torch {d}/pair.bfloat16/a.safetensors {d}/pair.bfloat16/b.safetensors"},
        ("pair.bfloat16",), (Aim(WALL, 0.125, of_peer=True),), rounds=1, size=1 << 30),
    Row("diff-numpy", "the same without a compiler at install, one worker", f"python -c \"{NUMPY}\" "
        + _compare_files("bfloat16").removeprefix("statecli ") + " --jobs 1",
        {"with": _compare_files("bfloat16") + " --jobs 1"}, ("pair.bfloat16",), (),
        "numpy takes eleven passes over blocks of the second-level cache.", size=1 << 30),
    Row("diff-memory", "memory of `diff`, 10 GiB",
        "statecli diff {d}/more_zeros/a.safetensors {d}/more_zeros/b.safetensors",
        {"1 GiB": "statecli diff {d}/zeros/a.safetensors {d}/zeros/b.safetensors"}, ("zeros", "more_zeros"),
        (Aim(PEAK, 1.2, of_peer=True),), rounds=1),
    Row("stats", "`inspect --stats` of 1 GB of bfloat16", "statecli inspect --stats {d}/1GB.safetensors -f json",
        {"`audit --values` of it": "statecli audit --values {d}/1GB.safetensors",
         "a loop with torch": "peer list_statistics {d}/1GB.safetensors"},
        ("1GB.safetensors",), (Aim(CPU, 1.2, of_peer=True),),
        "Missed since `audit` became faster. The mean and the deviation need passes in float64 over decoded values, "
        "60 % of the CPU; reading and gathering take 25 %. Tried: counting the 65,536 codes of two-byte types (1.2 ns "
        "an element, 0.7 now); sums and squares in one pass (8 % less, and wrong digits where the mean is large).",
        rounds=1, size=10**9),
    *(
        Row(f"audit-{name}", f"`audit --values` of 1 GB of {dtype}, all rules about values",
            f"statecli audit --values {{d}}/{file}", {"`sha256sum`": f"sha256sum {{d}}/{file}",
            "`openssl dgst -sha256`": f"openssl dgst -sha256 {{d}}/{file}"}, (file,),
            (Aim(WALL, 1.0, of_peer=True),), size=10**9)
        for name, dtype, file in (("bfloat16", "bfloat16", "1GB.safetensors"),
                                  ("float32", "float32", "1GB.float32.safetensors"),
                                  ("float8", "float8_e4m3fn", "1GB.float8.safetensors"))
    ),
    Row("lock", "`lock` of 1 GB of safetensors", "statecli lock {d}/1GB.safetensors -o {d}/1GB.lock",
        {"BLAKE3 of the file on all cores": "peer hash_blake3 {d}/1GB.safetensors",
         "`sha256sum`": "sha256sum {d}/1GB.safetensors"}, ("1GB.safetensors",), size=10**9),
    Row("lock-pt", "`lock` of 1 GB of `.pt`, with the checksums of the zip",
        "statecli lock {d}/1GB.pt -o {d}/1GB.pt.lock",
        {"BLAKE3 of the file on all cores": "peer hash_blake3 {d}/1GB.pt",
         "`sha256sum`": "sha256sum {d}/1GB.pt"}, ("1GB.pt",), size=10**9),
)  # fmt: skip

CLASS_ROWS = (
    Row("class", "`inspect` of a BERT-base of plain layers", "statecli inspect {d}/classes/net.py:Plain -f json",
        {"import and build it": "peer build {d}/classes Plain", **TORCH}, ("classes",),
        (Aim(WALL, 1.3, of_peer=True),)),
    Row("class-meta", "the same, `--init-device meta`",
        "statecli inspect {d}/classes/net.py:Plain --init-device meta -f json",
        TORCH, ("classes",), (Aim(WALL, 1.5, of_peer=True),),
        "Missed by 2 %: torch.arange on meta imports torch.fx.experimental.symbolic_shapes and sympy, 0.6 s. Tried: "
        "parameters that are not filled on meta, because normal_ imports 800 modules (0.8 s less, kept); garbage "
        "collection paused while torch is imported (0.1 s less, kept)."),
    Row("move", "`verify --check move` of a tiny model", "statecli verify {d}/classes/net.py:Tiny --check move -f json",
        TORCH, ("classes",), (Aim(CPU, 1.15, of_peer=True),),
        "A move needs no FakeTensorMode, which imports dynamo and sympy. Tried: moves without these modules (1.9 to "
        "1.17 × import torch, kept); garbage collection paused while torch is imported (1.67 to 1.57 s, kept). The 164 "
        "modules of statecli take 0.06 s.", rounds=5),
    Row("verify", "`verify`, all proofs of a BERT-base of plain layers",
        f"statecli verify {{d}}/classes/net.py:Plain -f json {INPUT}",
        {"import, build and 2.5 steps": "peer train {d}/classes Plain 2.5",
         "import and build it": "peer build {d}/classes Plain"}, ("classes",), (Aim(WALL, 1.0, of_peer=True),),
        "Most of the time is memory that is written for the first time: of transformers' BERT-base cast takes 2.3 s of "
        "CPU, save 3.0 and copy 2.5, and the step 1.0 to 1.3 times a plain one. Missed by wall time: the copies run on "
        "one core, the steps of the peer on both. Tried: initial values only where a proof needs them, and pieces of "
        "16 MB for safetensors, which holds three copies (both kept)."),
    Row("verify-bert", "the same of transformers' BERT-base",
        f"statecli verify {{d}}/classes/net.py:bert -f json {INPUT}",
        {"import, build and 2.5 steps": "peer train {d}/classes bert 2.5",
         "import and build it": "peer build {d}/classes bert"}, ("classes",), (Aim(WALL, 1.0, of_peer=True),),
        "As above. Missed: more of the work is copies, because its step is shorter. Tried: the same two means."),
    Row("save", "`verify --check save` of it: memory", "statecli verify {d}/classes/net.py:bert --check save -f json",
        {"import and build it": "peer build {d}/classes bert"}, ("classes",), (Aim(PEAK, 787 + 3 * 418),),
        "Missed by 1 %: the model, its tensors as they are loaded and a second instance are in memory together. Tried: "
        "pieces of 16 MB for safetensors, which holds three copies, and tensors copied only if the second instance "
        "shares their memory (both kept).", rounds=1),
)  # fmt: skip

AUDIT_ROWS = (
    Row("audit", "`audit` of a 200-tensor 400 MB `.pt`", "statecli audit --no-values {d}/400MB.pt",
        {name: f"{{scanners}}/{name} {words} {{d}}/400MB.pt"
         for name, words in (("modelaudit", "scan"), ("picklescan", "-p"), ("modelscan", "-p"))},
        ("400MB.pt",), (Aim(WALL, 0.25), Aim(PEAK, 60))),
    Row("audit-many", "`audit` of 1,000 small `.pt` in one run", "statecli audit {d}/many",
        {name: f"{{scanners}}/{name} -p {{d}}/many" for name in ("picklescan", "modelscan")}, ("many",),
        (Aim(WALL, 10),)),
)  # fmt: skip

REMOTE_ROWS = (
    Row("remote-shards", "128 shards over http, 30 ms to the first byte", "statecli inspect {url}/model/ -f json",
        {"headers alone, 16 at a time": "peer list_headers {url}/model/",
         "on disk": "statecli inspect {d}/model -f json"}, ("model",), (Aim(WALL, 1.12),)),
    Row("remote-pt", "400 MB `.pt` over http", "statecli inspect {url}/400MB.pt -f json",
        {"download and `torch.load`": "peer download_and_load {url}/400MB.pt"}, ("400MB.pt",),
        (Aim(WALL, 0.2, of_peer=True),)),
    Row("remote-diff", "`diff` of 2 × 256 MiB, both sides over http",
        "statecli diff {url}/far/a.safetensors {url}/far/b.safetensors",
        {"`curl` of both": "curl -sS --parallel -o {d}/1 {url}/far/a.safetensors -o {d}/2 {url}/far/b.safetensors"},
        ("far",), (Aim(WALL, 1.5, of_peer=True), Aim(PEAK, 128)),
        "Each of 16 threads holds two windows of 2 MiB. Tried: windows of 1 MiB (165 to 116 MB, and 1.5 × the time); 8 "
        "threads (139 MB, and more time); one arena of malloc for all threads (165 to 125 MB in the same time, kept).",
        size=256 << 20),
)  # fmt: skip

ROWS = (*START_ROWS, *MANY_ROWS, *TYPE_ROWS, *VALUE_ROWS, *CLASS_ROWS, *AUDIT_ROWS, *REMOTE_ROWS)

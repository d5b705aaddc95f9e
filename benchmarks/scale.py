"""What outgrows one machine, on paper: the figures of docs/explanation/scale.md, each of which a command here repeats.

python benchmarks/scale.py make FOLDER       two checkpoints of 1.34 TB, sparse: headers are real, no byte of a tensor
python benchmarks/scale.py plan FOLDER       what `diff` of them hands out: tasks, shares, bytes
python benchmarks/scale.py measure           what this machine does a second: the constants below
python benchmarks/scale.py diff [--name N]   the arithmetic of a diff on 1 to 64 workers; any constant can be given
python benchmarks/scale.py hub [--name N]    the arithmetic of an audit of a million repositories
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from _inputs import changed_values, many_small, safetensors_values
from _measure import ROOT, run, statecli
from _server import Served

GB = 1e9
WORKERS = (1, 2, 4, 8, 16, 32, 64)


def _given(value: float, source: str) -> Any:
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True)
class Diff:
    """Constants of the diff. A worker is one machine, or one container of it."""

    bytes: float = _given(1_342_052_838_400, "made: `statecli inspect` of one side")
    metadata: float = _given(2.0, "measured: seconds to list and pair both sides, 30 ms to the first byte")
    cores: float = _given(16, "chosen: of a worker")
    rate: float = _given(0.28 * GB, "measured: bytes of one side that a core fetches and compares in a second")
    network: float = _given(25 / 8 * GB, "chosen: bytes a second into a worker")
    store: float = _given(0, "chosen: bytes a second out of the store, 0 for no limit")
    request: float = _given(2 * 2**20, "statecli's own: bytes of a range that it asks for")
    latency: float = _given(0.03, "chosen: seconds to the first byte")
    price: float = _given(0.0004, "chosen: dollars for 1,000 requests (S3's standard class)")
    uneven: float = _given(1.015, "made: the largest of 64 parts compared with an even one, `plan`")
    task: float = _given(512 * 2**20, "statecli's own: bytes of one side that are handed out together, at most")
    overhead: float = _given(0.003, "measured: seconds to hand out a task of Dask, `run.py executors`; 0 for parts")


@dataclass(frozen=True)
class Hub:
    """Constants of the audit. A repository has one checkpoint, of `files` files."""

    repositories: float = _given(1_000_000, "chosen")
    files: float = _given(3, "chosen: files with weights of a repository")
    requests: float = _given(1.1, "chosen: of a file; a second request if the header is longer than 64 KiB")
    listing: float = _given(2, "counted in tests/storage/test_hub.py: the commit, the listing")
    beside: float = _given(8, "chosen: other files, of which statecli reads the beginning")
    bytes: float = _given(64 * 2**10, "statecli's own: bytes of a request, at most")
    cpu: float = _given(0.0027, "measured: CPU seconds of a file")
    cores: float = _given(2, "chosen")
    api: float = _given(1_000, "the hub's own: calls of the API in five minutes, a free account")
    resolve: float = _given(5_000, "the hub's own: files in five minutes, a free account")


# --- the arithmetic --------------------------------------------------------------------------------------------------


def diff_rows(of: Diff) -> Iterator[tuple[str, ...]]:
    """A row for each number of workers: what bounds it, seconds, speed-up, dollars."""
    yield ("workers", "bytes a worker", "network", "compare", "hand out", "in all", "faster", "bound by")
    alone = 0.0
    for workers in WORKERS:
        share = 2 * of.bytes / workers * (of.uneven if workers > 1 else 1)
        # The store sends what all shares have together.
        sent = 2 * of.bytes / of.store if of.store else 0.0
        network = max(share / of.network, sent)
        compare = share / 2 / (of.rate * of.cores)
        # One scheduler hands out all of them, however many workers there are, and while they work.
        handing = of.bytes / of.task * of.overhead
        whole = of.metadata + max(network, compare, handing)
        alone = alone or whole
        wire = "the store" if network == sent else "network"
        bound = max((network, wire), (compare, "cores"), (handing, "scheduler"))[1]
        yield (
            str(workers),
            _bytes(share),
            _time(network),
            _time(compare),
            _time(handing),
            _time(whole),
            f"{alone / whole:.1f} ×",
            bound,
        )


def diff_lines(of: Diff) -> Iterator[str]:
    """What does not depend on the number of workers."""
    requests = 2 * of.bytes / of.request
    yield f"requests: 2 × {_bytes(of.bytes)} / {_bytes(of.request)} = {requests:,.0f}"
    yield f"price of the requests: {requests:,.0f} / 1000 × ${of.price} = ${requests / 1000 * of.price:.2f}"
    flight = of.network / of.request * of.latency
    needed = f"{_bytes(of.network)}/s × {of.latency} s / {_bytes(of.request)} = {flight:.1f}"
    yield f"requests in flight that hide {of.latency * 1000:.0f} ms: {needed}"
    yield f"tasks: {_bytes(of.bytes)} / {_bytes(of.task)} = {of.bytes / of.task:,.0f}"
    work = of.task / of.rate
    yield f"overhead: {of.overhead * 1000:.1f} ms of {work * 1000:.0f} ms a task = {of.overhead / work:.1%}"


def hub_rows(of: Hub) -> Iterator[tuple[str, ...]]:
    """A row for each thing that could be what it takes so long for."""
    files = of.repositories * of.files
    resolved = files * of.requests + of.repositories * of.beside
    listed = of.repositories * of.listing
    yield ("what", "how many", "a second", "in all")
    yield ("answers of the API", f"{listed:,.0f}", f"{of.api / 300:.1f}", _time(listed / (of.api / 300)))
    yield ("answers with files", f"{resolved:,.0f}", f"{of.resolve / 300:.1f}", _time(resolved / (of.resolve / 300)))
    every = files + of.repositories * of.beside
    yield ("CPU", f"{every:,.0f} files", f"{of.cores / of.cpu:,.0f}", _time(every * of.cpu / of.cores))
    yield ("bytes, at most", _bytes(resolved * of.bytes), _bytes(of.resolve / 300 * of.bytes), "")


def constants(kind: type[Diff] | type[Hub]) -> None:
    """Each with its value and where it is from, as rows."""
    for one in fields(kind):
        print(f"| `--{one.name}` | {one.default:g} | {one.metadata['source']} |")


def show_diff() -> None:
    """What the subcommand prints, for the document."""
    print(table(diff_rows(Diff())), "", "```", *diff_lines(Diff()), "```", sep="\n")


def show_hub() -> None:
    """The same of the other."""
    print(table(hub_rows(Hub())))


def table(rows: Iterator[tuple[str, ...]]) -> str:
    """In Markdown."""
    head, *body = rows
    lines = [head, ("---",) * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 48 * 3600 else f"{seconds / 86400:.3g} days"


# --- a checkpoint of that size ---------------------------------------------------------------------------------------


def names() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a mixture of experts as DeepSeek-V3's config.json describes it: 671 billion parameters."""
    hidden, experts, width = 7168, 256, 2048
    yield "model.embed_tokens.weight", (129_280, hidden)
    for layer in range(61):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        for part, shape in (
            ("q_a_proj", (1536, hidden)),
            ("q_a_layernorm", (1536,)),
            ("q_b_proj", (24_576, 1536)),
            ("kv_a_proj_with_mqa", (576, hidden)),
            ("kv_a_layernorm", (512,)),
            ("kv_b_proj", (32_768, 512)),
            ("o_proj", (hidden, 16_384)),
        ):
            yield f"{at}.self_attn.{part}.weight", shape
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        if layer < 3:
            yield from _mlp(f"{at}.mlp", hidden, 18_432)
            continue
        yield f"{at}.mlp.gate.weight", (experts, hidden)
        yield f"{at}.mlp.gate.e_score_correction_bias", (experts,)
        for expert in range(experts):
            yield from _mlp(f"{at}.mlp.experts.{expert}", hidden, width)
        yield from _mlp(f"{at}.mlp.shared_experts", hidden, width)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (129_280, hidden)


def _mlp(at: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (width, hidden)
    yield f"{at}.up_proj.weight", (width, hidden)
    yield f"{at}.down_proj.weight", (hidden, width)


def make(folder: Path, shard: float = 8.3 * GB) -> None:
    """Two folders, `before` and `after`, as `save_pretrained` lays them out, in bfloat16; of tensors only holes."""
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in names():
        if size > shard:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += 2 * math.prod(shape)
    for side in ("before", "after"):
        (folder / side).mkdir(parents=True)
        weight_map = {}
        for number, tensors in enumerate(shards):
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            weight_map.update(dict.fromkeys((name for name, _ in tensors), file))
            _shard(folder / side / file, tensors)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / side / "model.safetensors.index.json").write_text(json.dumps(index))


def _shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    header, at = {}, 0
    for name, shape in tensors:
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def plan(folder: Path) -> None:
    """What `diff` hands out to Dask, and how even the shares of `diff --shard` are: the fullest beside an even one."""
    sys.path.insert(0, str(ROOT))
    from statecli.shards.partition import Partition
    from statecli.targets import load

    print(f"tasks: {_tasks(folder):,}", "", sep="\n")
    # All tasks of a pair of tensors are in one share.
    sizes = [tensor.nbytes for tensor in load.read_checkpoint(str(folder / "before")).tensors]
    print(table(_shares(Partition, sizes)))


def _tasks(folder: Path) -> int:
    """How many there are: all are handed out, and none is done."""
    from statecli.commands.diff.request import Request
    from statecli.commands.diff.run import compare_targets
    from statecli.core import errors
    from statecli.workers import pool
    from statecli.workers.executors.dask import MAX_BATCH_BYTES

    handed = []

    class Counting:
        def min_batch_bytes(self, _: int) -> int:
            return MAX_BATCH_BYTES

        def run(self, _: Any, __: Any, batches: Any, place: Any) -> None:
            handed.append(len(batches))
            for n in range(len(batches)):
                place(n, errors.UnreadableError("not done"))

    with pool.use_engine(Counting()):
        compare_targets(Request(str(folder / "before"), str(folder / "after")))
    return handed[0]


def _shares(cut: Any, sizes: list[int]) -> Iterator[tuple[str, ...]]:
    yield "shares", "bytes of both sides in the fullest", "beside an even one"
    for count in WORKERS[1:]:
        fullest = max(sum(sizes[n] for n in cut(index + 1, count).select_tasks(sizes, None)) for index in range(count))
        yield str(count), _bytes(2 * fullest), f"{fullest * count / sum(sizes):.4f} ×"


# --- measured --------------------------------------------------------------------------------------------------------


def measure() -> None:
    """The constants, on this machine, each beside the name it has here."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        print(f"diff --rate      {_rate(folder):.3g}")
        print(f"diff --metadata  {_metadata(folder):.3g}")
        print(f"hub --cpu        {_cpu_of_a_file(folder):.3g}")


def _rate(folder: Path) -> float:
    """Bytes of one side that a second of CPU compares, both fetched over http: bfloat16, every element changed."""
    before = safetensors_values(folder / "before.safetensors", "bfloat16", 10**9)
    after = changed_values(before, folder / "after.safetensors")
    size = before.stat().st_size
    with Served(folder, 0) as served:
        found = run(statecli("diff", served.url(before.name), served.url(after.name), "-q"), accept=(1,))
    before.unlink()
    after.unlink()
    return size / found.cpu


def _metadata(folder: Path) -> float:
    """Seconds until both checkpoints of `make` are listed and paired, from a server with 30 ms to the first byte."""
    make(folder / "model")
    with Served(folder, 0.03) as served:
        sides = [served.url(f"model/{side}/model.safetensors.index.json") for side in ("before", "after")]
        found = run(statecli("diff", *sides, "--metadata-only", "-q"))
    shutil.rmtree(folder / "model")
    return found.wall


def _cpu_of_a_file(folder: Path, count: int = 400) -> float:
    """CPU seconds that one file more costs an audit."""
    files = sorted(many_small(folder / "small", count).iterdir())
    with Served(folder, 0.03) as served:
        urls = [served.url(f"small/{file.name}") for file in files]
        every, one = (run(statecli("audit", "-q", *some)) for some in (urls, urls[:1]))
    return (every.cpu - one.cpu) / (count - 1)


# --- the command line ------------------------------------------------------------------------------------------------


def _above_zero(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def main() -> None:
    """One of the subcommands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("make", "plan"):
        commands.add_parser(name).add_argument("folder", type=Path)
    commands.add_parser("measure")
    for name, kind in (("diff", Diff), ("hub", Hub)):
        command = commands.add_parser(name)
        for one in fields(kind):
            kind_of = float if one.name in ("store", "overhead", "latency", "price") else _above_zero
            command.add_argument(f"--{one.name}", type=kind_of, default=one.default, help=one.metadata["source"])
    asked = vars(parser.parse_args())
    name = asked.pop("command")
    if name == "make":
        make(asked["folder"])
    elif name == "plan":
        plan(asked["folder"])
    elif name == "measure":
        measure()
    elif name == "diff":
        of = replace(Diff(), **asked)
        print(table(diff_rows(of)), *diff_lines(of), sep="\n")
    elif name == "hub":
        print(table(hub_rows(replace(Hub(), **asked))))


if __name__ == "__main__":
    main()

"""Run every command of an installed statecli once: any interpreter, with or without numpy and torch.

    PYTHON -P tools/smoke.py            with the Python that statecli is installed for
    PYTHON tools/smoke.py PROGRAM       the program `statecli` of another environment (pipx, uv tool)

Only the standard library is used. Prints a line for each failure, then a summary; exits with 1 for a failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import json
import os
import pickle
import shlex
import socketserver
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ADVICE_NUMPY = "needs numpy, which is not installed: pip install 'torch-statecli[values]'"
ADVICE_TORCH = "pip install 'torch-statecli[torch]'"


class System:
    """Object that calls os.system when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("echo hacked",)


def write_safetensors(path: str, tensors: dict[str, list[float]]) -> None:
    """Write tensors of float32 with one dimension."""
    header, data = {}, b""
    for name, values in tensors.items():
        raw = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_gguf(path: str) -> None:
    """Write a quantized tensor: one block of Q8_0, with the scale 0.5 and the numbers 0 to 31."""
    head = b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"w" + struct.pack("<IQIQ", 1, 32, 8, 0)
    head += b"\0" * (-len(head) % 32)
    Path(path).write_bytes(head + struct.pack("<e32b", 0.5, *range(32)) + b"\0" * 30)


def write_torch(path: str, values: list[float]) -> None:
    """Write {"weight": tensor} as torch.save does: a ZIP archive with a pickle of protocol 2, and a storage."""
    storage = (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        + pack(len(values))
        + b"tQ"
    )
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"K\x00"
        + pack(len(values))
        + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    )
    program = b"\x80\x02}X\x06\x00\x00\x00weight" + tensor + b"s."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", "little")
        # As torch does: a field of padding, so that the data begins at a multiple of 64.
        record = zipfile.ZipInfo("archive/data/0")
        padding = -(archive.fp.tell() + 30 + len(record.filename) + 4) % 64
        record.extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        archive.writestr(record, struct.pack(f"<{len(values)}f", *values))
        archive.writestr("archive/version", "3\n")


def pack(number: int) -> bytes:
    """Return the opcode of a small number."""
    return b"K" + bytes([number])


def write_files() -> None:
    """Write the checkpoints and the class that the commands read into the current folder."""
    write_safetensors("a.safetensors", {"layer.weight": [1.0, 2.0, 3.0], "layer.bias": [0.0]})
    write_safetensors("b.safetensors", {"layer.weight": [1.0, 2.5, 3.0], "layer.bias": [0.0]})
    write_safetensors("nan.safetensors", {"layer.weight": [float("nan")]})
    write_gguf("a.gguf")
    write_torch("a.pt", [1.0, 2.0])
    Path("broken.pt").write_bytes(Path("a.pt").read_bytes()[:200])
    Path("hostile.pkl").write_bytes(pickle.dumps(System()))
    with zipfile.ZipFile("a.npz", "w") as archive:
        array = io.BytesIO()
        header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"
        header += b" " * (117 - len(header)) + b"\n"
        array.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + struct.pack("<2f", 1.0, 2.0))
        archive.writestr("x.npy", array.getvalue())


def list_schemas(program: list[str]) -> list[str]:
    """Return the commands that have a schema, as `statecli __complete` lists them."""
    answer = run(program, "__complete bash = schema")[1].splitlines()
    assert answer[:1] == ["words"], answer
    return [line.split("\t")[0] for line in answer[2:]]


def list_commands(details: str, schemas: list[str], address: str) -> list[tuple[str, int, str]]:
    """Return each command line with its exit status and a text that its output contains.

    `details` is the output of `--version -v`; the files are served at `address`.
    """
    packages = details.partition("packages")[2].replace("\n", " ")
    has_numpy, has_torch, has_libcst, has_urllib3, has_gguf = (
        f" {name} " in packages for name in ("numpy", "torch", "libcst", "urllib3", "gguf")
    )
    values = (lambda status, text: (status, text)) if has_numpy else (lambda _, __: (2, ADVICE_NUMPY))
    # Small files are compared by the compiled kernel alone.
    small = (lambda status, text: (status, text)) if "kernel    compiled" in details else values
    commands = [
        ("--version", 0, "statecli "),
        ("--version -v", 0, "kernel    "),
        ("--help", 0, "inspect"),
        ("help diff", 0, "--rtol"),
        ("inspect --help", 0, "--stats"),
        ("inspect", 2, "see statecli inspect --help"),
        ("inspekt a.pt", 2, "inspect"),
        ("inspect a.safetensors", 0, "layer.weight"),
        # Short options that share a dash.
        ("inspect a.safetensors -qf json", 0, "layer.weight"),
        ("inspect -qh", 0, "--stats"),
        ("inspect a.safetensors --tree", 0, "layer"),
        ("inspect a.pt", 0, "weight"),
        ("inspect a.npz", 0, "x"),
        ("inspect missing.pt", 2, "no such file"),
        ("inspect broken.pt", 2, "broken.pt"),
        ("inspect a.safetensors --stats", *values(0, "layer.weight")),
        ("diff a.safetensors b.safetensors --metadata-only", 0, "values not compared"),
        ("diff a.safetensors b.safetensors", *small(1, "layer.weight")),
        # Small equal files are compared and hashed without numpy.
        ("diff a.safetensors a.safetensors", 0, "identical"),
        ("diff a.safetensors b.safetensors --rtol 0.5", *small(0, "")),
        ("diff a.safetensors nan.safetensors", *values(1, "layer.weight")),
        ("audit a.safetensors a.pt --no-config", 0, "exit status 0"),
        ("audit hostile.pkl --no-config", 1, "os.system" if os.name == "nt" else "system"),
        ("audit nan.safetensors --values --no-config", *values(1, "nan")),
        ("lock a.safetensors -o a.lock.json", 0, ""),
        ("audit a.safetensors --lock a.lock.json --no-config", *values(0, "exit status 0")),
        ("log a.safetensors b.safetensors", *values(0, "b.safetensors")),
        ("rules", 0, "unregistered-tensor"),
        ("rules nan", 0, "Why"),
        ("config --no-config", 0, "fail-on"),
        ("completion bash", 0, "complete"),
        ("samples samples", 0, "statecli inspect"),
    ]
    outputs = ("plain", "json", "jsonl", "markdown", "html", "github", "sarif", "junit", "gitlab")
    commands += [(f"audit a.safetensors --no-config -f {output}", 0, "") for output in outputs]
    commands += [(f"schema {name}", 0, '"$id"') for name in schemas]
    net = "samples/net.py:Net"
    if has_torch:
        commands += [
            (f"inspect {net} --to meta", 1, "self.register_buffer"),
            (f"verify {net} --input 4x3", 1, "unregistered-tensor"),
            ("verify samples/net_fixed.py:Net --input 4x3", 0, ""),
            ("inspect torch.nn:Linear(2,3)", 0, "weight"),
            (f"explain a.pt {net}", 1, "param"),
        ]
    else:
        commands += [(f"inspect {net}", 2, ADVICE_TORCH), (f"verify {net} --input 4x3", 2, ADVICE_TORCH)]
    if has_torch and has_libcst:
        commands += [(f"fix {net} --input 4x3", 1, "+        self.register_buffer")]
    if has_urllib3:
        commands += [(f"inspect {address}/a.safetensors", 0, "layer.weight"), (f"audit {address}/a.pt", 0, "")]
    if has_numpy and has_gguf:
        commands += [("inspect a.gguf --stats", 0, "15.5")]
    return commands


@contextlib.contextmanager
def serve_folder() -> Iterator[str]:
    """Serve the current folder on this machine while the block runs; yield the address."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), SilentHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class SilentHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *_: object) -> None:
        """Write nothing."""


def main() -> int:
    """Run the commands; return the exit status."""
    started = time.monotonic()
    program = [os.path.abspath(sys.argv[1])] if len(sys.argv) > 1 else [sys.executable, "-P", "-m", "statecli"]
    if len(sys.argv) == 1 and sys.version_info < (3, 11):
        program.remove("-P")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_files()
        details = run(program, "--version -v")[1]
        schemas = list_schemas(program)
        with serve_folder() as address:
            commands = list_commands(details, schemas, address)
            failures = sum(not check(program, *command) for command in commands)
        texts = "".join(run(program, f"schema {name}")[1] for name in schemas)
        os.chdir(os.path.dirname(folder))
    sys.stdout.write(details)
    sys.stdout.write(f"schemas   sha256 {hashlib.sha256(texts.encode()).hexdigest()[:16]}\n")
    sys.stdout.write(f"{len(commands)} commands, {failures} failed, {time.monotonic() - started:.0f} s\n")
    return 1 if failures else 0


def check(program: list[str], line: str, status: int, text: str) -> bool:
    """Run a command, and return whether its result is as expected; print the difference if not."""
    code, output = run(program, line)
    if code == status and text in output and "Traceback (most" not in output and "statecli: internal" not in output:
        return True
    sys.stdout.write(f"FAILED  statecli {line}: status {code}, expected {status} and {text!r}\n{output}\n")
    return False


def run(program: list[str], line: str) -> tuple[int, str]:
    """Run a command; return its exit status and both of its outputs."""
    words = shlex.split(line)
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(
        [*program, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, check=False, timeout=300
    )
    return done.returncode, done.stdout.decode("utf-8", "replace")


if __name__ == "__main__":
    raise SystemExit(main())

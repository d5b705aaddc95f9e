"""Filters with the tensors that match them, for `statecli browse` and the page of `statecli report`."""

from __future__ import annotations

from msgspec.structs import replace

from statecli.core.model_state import Kind, ModelState, Stats, TensorInfo

_STATS = Stats(zeros=0, nan=0, inf=0, min=-1.0, max=1.0, mean=0.0, std=0.5)


def build_state(*, with_stats=True):
    """Forty layers, a head in float32 with a NaN, a buffer; layer 7 is an outlier."""
    tensors = [TensorInfo("embed.weight", "bfloat16", (128, 64), 8192, 16384)]
    for n in range(40):
        stats = replace(_STATS, std=50.0) if n == 7 else _STATS
        tensors += [
            TensorInfo(f"layers.{n}.attn.weight", "bfloat16", (64, 64), 4096, 8192, stats=stats),
            TensorInfo(f"layers.{n}.norm.weight", "float32", (64,), 64, 256, stats=_STATS),
        ]
    tensors += [
        TensorInfo("head.weight", "float32", (128, 64), 8192, 32768, stats=replace(_STATS, nan=3)),
        TensorInfo("steps", "int64", (), 1, 8, kind=Kind.BUFFER, stats=_STATS),
        TensorInfo("x:y[0]", "int64", (3,), 3, 24, kind=Kind.BUFFER, stats=_STATS, device="cpu"),
    ]
    tensors[0] = replace(tensors[0], stats=_STATS)
    if not with_stats:
        tensors = [replace(tensor, stats=None) for tensor in tensors]
    return ModelState("x", "safetensors", tuple(tensors))


def build_sections():
    """The same names in two sections."""
    tensors = tuple(
        TensorInfo(name, "float32", (2,), 2, 8, section=section)
        for section in ("model", "ema")
        for name in ("a.w", "b")
    )
    return ModelState("x", "safetensors", tensors, ("model", "ema"))


#: The text of a filter, and a test of a tensor.
CASES = [
    ("", lambda t: True),
    ("attn", lambda t: "attn" in t.fqn),
    ("ATTN", lambda t: "attn" in t.fqn),
    ("*.norm.weight", lambda t: t.fqn.endswith(".norm.weight")),
    ("layers.?.*", lambda t: t.fqn.startswith("layers.") and t.fqn[8] == "."),
    ("layers.? norm", lambda t: False),
    ("layers.[0-2].*", lambda t: t.fqn.startswith(("layers.0.", "layers.1.", "layers.2."))),
    ("layers.[!0-8].*", lambda t: t.fqn.startswith("layers.9.")),
    ("layers.{3,4} norm", lambda t: t.fqn in ("layers.3.norm.weight", "layers.4.norm.weight")),
    ("layers.{3,4,5}", lambda t: t.fqn.startswith(("layers.3.", "layers.4.", "layers.5."))),
    ("layers.{38..99}.*", lambda t: t.fqn.startswith(("layers.38.", "layers.39."))),
    ("layers.{0..120000}.norm.*", lambda t: t.fqn.endswith("norm.weight")),
    ("layers.{8..21}.norm.*", lambda t: t.fqn in {f"layers.{n}.norm.weight" for n in range(8, 22)}),
    ("layers.{0,2..3}.*norm*", lambda t: t.fqn in {f"layers.{n}.norm.weight" for n in (0, 2, 3)}),
    ("layers -{attn,layers.1} !layers.{2..39}", lambda t: t.fqn == "layers.0.norm.weight"),
    ("{head,embed}.weight", lambda t: t.fqn in ("head.weight", "embed.weight")),
    ("bf16", lambda t: t.dtype == "bfloat16"),
    ("torch.float32 !norm", lambda t: t.fqn == "head.weight"),
    ("dtype:bf16", lambda t: t.dtype == "bfloat16"),
    ("dtype:int*", lambda t: t.dtype == "int64"),
    ("DTYPE=FP32", lambda t: t.dtype == "float32"),
    ("kind:param", lambda t: t.kind is Kind.PARAMETER),
    ("buffer", lambda t: t.kind is Kind.BUFFER),
    ("[128,*]", lambda t: t.shape == (128, 64)),
    ("128x*", lambda t: t.shape == (128, 64)),
    ("128x64", lambda t: t.shape == (128, 64)),
    ("(64,)", lambda t: t.shape == (64,)),
    ("[]", lambda t: t.shape == ()),
    ("shape:*x64 -layers", lambda t: t.fqn in ("embed.weight", "head.weight")),
    ("shape:64", lambda t: t.shape == (64,)),
    ("elements>4096", lambda t: t.elements > 4096),
    ("numel<=4.096k", lambda t: t.elements <= 4096),
    ("elements:64", lambda t: t.elements == 64),
    ("size>16kB", lambda t: t.nbytes > 16000),
    ("size>=16KiB", lambda t: t.nbytes >= 16384),
    ("bytes:>16000", lambda t: t.nbytes > 16000),
    ("size:16kB", lambda t: t.nbytes >= 16000),
    ("size<1kB size>24", lambda t: 24 < t.nbytes < 1000),
    ("size=8", lambda t: t.nbytes == 8),
    ("nan>0", lambda t: t.fqn == "head.weight"),
    ("std>1e1", lambda t: t.fqn == "layers.7.attn.weight"),
    ("mean:0 head", lambda t: t.fqn == "head.weight"),
    ("problem", lambda t: t.fqn in ("head.weight", "layers.7.attn.weight")),
    ("outlier", lambda t: t.fqn == "layers.7.attn.weight"),
    ("NaN", lambda t: t.fqn == "head.weight"),
    ("!problem bf16 layers.{6..8}.", lambda t: t.fqn in ("layers.6.attn.weight", "layers.8.attn.weight")),
    ("remark:outlier", lambda t: t.fqn == "layers.7.attn.weight"),
    ("remark:*nan", lambda t: t.fqn == "head.weight"),
    ("section:model steps", lambda t: t.fqn == "steps"),
    ("device:cpu", lambda t: t.fqn == "x:y[0]"),
    ("x:y", lambda t: t.fqn == "x:y[0]"),
    ("x:y[0]", lambda t: t.fqn == "x:y[0]"),
    ("name:steps", lambda t: t.fqn == "steps"),
    ("-", lambda t: False),
    ("[z-a]", lambda t: False),
]

#: The text of a filter, the number of remaining tensors, and the message.
PROBLEMS = [
    ("size>", 84, "size>: write a number after >, such as size>1MB"),
    ("steps elements>many", 1, "elements>many: write a number after >, such as elements>1000"),
    ("nan:", 84, "nan:: write a number after >, such as nan>0"),
    ("dtype:", 84, "dtype:: write a value after :"),
    ("dtype>3", 84, "dtype>3: dtype is not a number; write dtype:VALUE"),
    (
        "foo:3",
        84,
        "foo:3: unknown field foo; the fields are name, dtype, kind, shape, section, device, remark, size, elements, "
        "nan, inf, zeros, min, max, mean, std, rank, stable_rank, sigma",
    ),
    ("dtype:float8", 0, "dtype:float8: no tensor has this dtype; the tensors have bfloat16, float32, int64"),
    ("head kind:opt", 0, "kind:opt: no tensor has this kind; the tensors have buffer, parameter"),
    ("typo", 0, "typo: no tensor matches"),
    ("3|7|11", 0, "3|7|11: no tensor matches; for alternatives write {3,7,11}"),
    ("layers.3,layers.7", 0, "layers.3,layers.7: no tensor matches; for alternatives write {3,7,11}"),
    ("layers.[3-5]0.", 0, "layers.[3-5]0.: no tensor matches; for alternatives write {3,7,11}"),
    ("head norm", 0, "no tensor matches all words; for alternatives write {3,7,11}"),
]

#: With two sections: the text, and the section and name of each tensor.
SECTION_CASES = [
    ("ema.a", [("ema", "a.w")]),
    ("ema.*", [("ema", "a.w"), ("ema", "b")]),
    ("b", [("model", "b"), ("ema", "b")]),
    ("section:em", [("ema", "a.w"), ("ema", "b")]),
]

"""`verify` of transformers' BERT-base on the CPU: all proofs, and the moves that need no data.

Beside all proofs stands one forward, backward and optimizer step of the same model with inputs of the same shape, as a
process of its own; what it takes beyond importing and building is the step alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _measure import MB, Median, Row, alternate, python, seconds, statecli, with_peak

SOURCE = """
from transformers import BertConfig, BertModel


def make():
    return BertModel(BertConfig())
"""
INPUT = "int64:8x128<30522"
BUILD = "import sys, torch; sys.path.insert(0, sys.argv[1]); import bert_base; model = bert_base.make()"
STEP = f"""{BUILD}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
found = model.train()(torch.randint(30522, (8, 128)))
(found.last_hidden_state.sum() + found.pooler_output.sum()).backward()
optimizer.step()
"""
TORCH = [sys.executable, "-c", "import torch"]
PEER = [sys.executable, "-c", "from transformers import BertConfig, BertModel"]
#: float32, 109 million of them.
MODEL = 438 * 1_000_000
STEPS, EXTRA, COPIES = 5, 3.0, 3


def rows(folder: Path) -> list[Row]:
    """All proofs, saving alone for its memory, and the two moves."""
    (folder / "bert_base.py").write_text(SOURCE)
    verify = [f"{folder / 'bert_base.py'}:make", "-f", "json"]
    whole, save, step, built, torch = alternate(
        statecli("verify", *verify, "--input", INPUT),
        statecli("verify", *verify, "--check", "save"),
        python(STEP, str(folder)),
        python(BUILD, str(folder)),
        TORCH,
        rounds=3,
    )
    moves = [statecli("verify", *verify, "--check", "move", "--device", device) for device in ("meta", "fake-cuda")]
    meta, fake, imported = alternate(*moves, PEER, rounds=3)
    return [
        _all(whole, step, built, torch),
        _memory(save, built),
        _move("meta", meta, imported),
        _move("fake-cuda", fake, imported),
    ]


def _all(ours: Median, step: Median, built: Median, torch: Median) -> Row:
    alone = step.wall - built.wall
    peer = f"import, build and one step: {with_peak(step)}, {alone:.2f} s of it the step"
    steps = (ours.wall - torch.wall) / alone
    return Row(
        f"`verify`: all proofs of transformers' BERT-base, `--input '{INPUT}'`",
        with_peak(ours),
        f"{peer}; `import torch`: {seconds(torch)}",
        f"`import torch` + {steps:.1f} steps",
        f"`import torch` + ≤ {STEPS} steps",
        steps <= STEPS,
    )


def _memory(ours: Median, built: Median) -> Row:
    copies = (ours.peak - built.peak) / MODEL
    return Row(
        "`--check save` of it: peak memory",
        with_peak(ours),
        f"import and build it: {with_peak(built)}; it is {MODEL / MB:.0f} MB",
        f"+ {copies:.1f} × the model",
        f"+ ≤ {COPIES} × the model",
        copies <= COPIES,
    )


def _move(device: str, ours: Median, imported: Median) -> Row:
    extra = ours.wall - imported.wall
    return Row(
        f"`--check move --device {device}` of it",
        with_peak(ours),
        f"import transformers' BERT: {seconds(imported)}",
        f"+ {extra:.2f} s",
        f"the import + ≤ {EXTRA:.0f} s",
        extra <= EXTRA,
    )

"""Run `statecli log`: order the checkpoints, measure each in turn, report values that became NaN."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
from msgspec.structs import replace

from statecli.commands.log import rules
from statecli.commands.log.cache import Cache
from statecli.commands.log.checkpoints import order_run
from statecli.commands.log.follow import Follower
from statecli.commands.log.result import CheckpointRow, Log, ModuleRow
from statecli.core import quoting
from statecli.core.finding import Finding
from statecli.core.model_state import Oddity
from statecli.core.units import format_section

#: Smallest number of comparisons after which a setting that changed in each of them counts as a counter.
MIN_COMPARISONS = 3


class Request(msgspec.Struct, frozen=True):
    """The options of `log`: folders of runs, globs and checkpoints."""

    targets: tuple[str, ...]
    cache: bool = True


#: Function that takes the number of checkpoints and returns a context, which gives a function to call after each.
Steps = Callable[[int], AbstractContextManager[Callable[[], None]]]


def log_run(request: Request, steps: Steps = lambda count: nullcontext(lambda: None)) -> Log:  # noqa: ARG005
    """Return a row for each checkpoint of the run, in the order of the steps.

    Raises UnreadableError if there is no checkpoint. An unreadable checkpoint is a row with its error.
    """
    run = order_run(request.targets)
    follower = Follower(Cache(enabled=request.cache))
    rows: list[CheckpointRow] = []
    with steps(len(run.checkpoints)) as advance:
        for checkpoint in run.checkpoints:
            rows.append(follower.add(checkpoint))
            advance()
    modules = follower.list_modules()
    rows = _add_stopped(rows, modules)
    others = list(dict.fromkeys(name for row in rows for name in row.other_sections))
    note = Oddity(
        "sections-left-out",
        f"the norm does not count these sections: {quoting.names([format_section(section) for section in others])}",
    )
    return Log(
        target=", ".join(request.targets),
        rows=tuple(rows),
        modules=modules,
        findings=tuple(_report(rows)),
        notes=(*run.notes, *([note] if others else ())),
        changing=_find_changing(rows),
    )


def _add_stopped(rows: Sequence[CheckpointRow], modules: Sequence[ModuleRow]) -> list[CheckpointRow]:
    stopped: dict[int, list[str]] = {}
    for module in modules:
        if module.stopped and module.last_moved is not None:
            stopped.setdefault(module.last_moved, []).append(module.name)
    return [replace(row, stopped=tuple(stopped.get(n, ()))) for n, row in enumerate(rows)]


def _report(rows: Sequence[CheckpointRow]) -> Iterator[Finding]:
    for row in rows:
        for name in row.became_nan:
            message = f"{quoting.name(name)}: has contained NaN or an infinity since {_describe_place(row)}"
            yield rules.BECAME_NAN.finding(message, target=row.path, fqn=name)
        for name in row.stopped:
            message = f"{quoting.name(name)}: unchanged, bit for bit, since {_describe_place(row)}"
            yield rules.STOPPED.finding(message, target=row.path, about=name)


def _describe_place(row: CheckpointRow) -> str:
    return row.path if row.step is None else f"step {row.step.number}"


def _find_changing(rows: Sequence[CheckpointRow]) -> tuple[str, ...]:
    """Return the keys of settings that differ in every comparison with the previous checkpoint."""
    compared = [row for row in rows if row.compared_with is not None and not row.is_copy]
    if len(compared) < MIN_COMPARISONS:
        return ()
    counts = Counter(change.key for row in compared for change in row.settings)
    return tuple(key for key, count in counts.items() if count >= len(compared))

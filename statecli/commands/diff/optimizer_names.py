"""Compare two optimizers with different keys: parameter numbers, parameter names, or flat parameter names.

`torch.optim.Optimizer.state_dict` numbers the parameters in the order of its groups. `torch.distributed.checkpoint`
(`get_optimizer_state_dict`) and FSDP write the parameters' names in the same order. The flat form of
`torch.distributed.checkpoint` has a group's settings for each parameter. The order is trusted only if the shapes of all
states agree. If the file has a model, the names must also be in the order of its parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import islice

import msgspec

from statecli.commands.diff.pairing import Match, MatchedBy, NotedMatches
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Kind, ModelState, Oddity, OptimizerFacts, Scalar, Settings, TensorInfo
from statecli.core.setting_paths import select

_NESTED = compile_on_use(r"state\[(?:(?P<id>\d+)|'(?P<name>[^']*)')\](?P<state>.+)")
_STATE_KEY = compile_on_use(r"\['([^']*)'\]")


class Keys(str, Enum):
    """Kind of keys in an optimizer's state."""

    NUMBERS = "parameter numbers"
    NAMES = "parameter names"
    FLAT = "flat parameter names"


class OptimizerPair(msgspec.Struct, frozen=True):
    """Two optimizers with different types of keys (`keys`). `places` maps each side's keys to parameter positions."""

    sections: tuple[str, str]
    keys: tuple[Keys, Keys]
    places: tuple[Mapping[str, int], Mapping[str, int]]


def pair_optimizers(before: ModelState, after: ModelState, sections: Mapping[str, str]) -> list[OptimizerPair]:
    """Return pairs of optimizers with different kinds of keys, if the states of all parameters have equal shapes."""
    facts_after = {facts.section: facts for facts in after.optimizers}
    pairs = []
    for old in before.optimizers:
        partner = sections.get(old.section)
        new = facts_after.get(partner) if partner is not None else None
        if new is None or partner is None:
            continue
        keys = _find_keys(before, old), _find_keys(after, new)
        places = _list_places(old), _list_places(new)
        if keys[0] is keys[1]:
            continue
        if Keys.NUMBERS not in keys and places[0].keys() == places[1].keys():
            pairs.append(OptimizerPair((old.section, partner), keys, (places[0], places[0])))
        elif Keys.NUMBERS in keys and _list_shapes(old) == _list_shapes(new):
            named, numbered = ((after, new), old) if keys[0] is Keys.NUMBERS else ((before, old), new)
            if not _follows_model(*named, [len(group.params) for group in numbered.groups]):
                continue
            pairs.append(OptimizerPair((old.section, partner), keys, places))
    return pairs


def _follows_model(state: ModelState, facts: OptimizerFacts, sizes: Sequence[int]) -> bool:
    """Return True if the parameter names of each group are in the order of the model's parameters in the file.

    A flat optimizer has its groups after each other without a mark at their ends: `sizes` are the other side's sizes.
    Numbers follow the order of `model.parameters()`, so that names in another order may belong to other numbers.
    """
    places = {row.fqn: n for n, row in enumerate(state.tensors) if row.kind is Kind.PARAMETER}
    names = iter([str(parameter) for group in facts.groups for parameter in group.params])
    for size in sizes:
        own_places = [places[name] for name in islice(names, size) if name in places]
        if own_places != sorted(own_places):
            return False
    return True


def _find_keys(state: ModelState, facts: OptimizerFacts) -> Keys:
    if all(isinstance(parameter, int) for group in facts.groups for parameter in group.params):
        return Keys.NUMBERS
    is_flat = any(row.section == facts.section and row.fqn.startswith("state.") for row in state.tensors)
    return Keys.FLAT if is_flat else Keys.NAMES


def _list_shapes(facts: OptimizerFacts) -> list[tuple[int, ...] | None]:
    return [shape for group in facts.groups for shape in group.shapes]


def _list_places(facts: OptimizerFacts) -> dict[str, int]:
    keys = [str(parameter) for group in facts.groups for parameter in group.params]
    return {key: place for place, key in enumerate(keys)}


# --- tensors ---------------------------------------------------------------------------------------------------------


def pair_optimizer_states(matches: Sequence[Match], pairs: Sequence[OptimizerPair]) -> NotedMatches:
    """Pair the optimizer states of the same parameter. Return all matches, and a note for each optimizer."""
    paired_matches = list(matches)
    notes: list[Oddity] = []
    for pair in pairs:
        old = {key: n for n, m in enumerate(paired_matches) if m.after is None and (key := _locate(m.before, pair, 0))}
        new = {key: n for n, m in enumerate(paired_matches) if m.before is None and (key := _locate(m.after, pair, 1))}
        partner_numbers = {old[key]: new[key] for key in old if key in new}
        for n, partner in partner_numbers.items():
            paired_matches[partner] = Match(paired_matches[n].before, paired_matches[partner].after, MatchedBy.PREFIX)
        paired_matches = [match for n, match in enumerate(paired_matches) if n not in partner_numbers]
        if partner_numbers:
            notes.append(Oddity("optimizer-keys", _describe_pair(pair, len(partner_numbers))))
    return NotedMatches(paired_matches, notes)


def _locate(row: TensorInfo | None, pair: OptimizerPair, side: int) -> tuple[int, str] | None:
    """Return (position of the parameter, name of its state) for an optimizer's tensor, or None."""
    if row is None or row.kind is not Kind.OPTIMIZER or row.section != pair.sections[side]:
        return None
    nested = _NESTED.fullmatch(row.fqn)
    if nested is not None:
        parameter = nested["id"] or nested["name"]
        state = _STATE_KEY.sub(r"\1", nested["state"])
    else:
        parameter, _, state = row.fqn.removeprefix("state.").rpartition(".")
    place = pair.places[side].get(parameter)
    return None if place is None else (place, state)


def _describe_pair(pair: OptimizerPair, count: int) -> str:
    old, new = pair.keys
    method = "the order of the parameters" if Keys.NUMBERS in pair.keys else "name"
    return (
        f"the keys of the optimizer state differ: {old.value} before, {new.value} after; statecli matched "
        f"{count:,} tensors of {len(pair.places[0]):,} parameters by {method}"
    )


# --- settings --------------------------------------------------------------------------------------------------------


def unify_settings(before: ModelState, after: ModelState, pairs: Iterable[OptimizerPair]) -> tuple[Settings, Settings]:
    """Return the settings of both sides in the same form: without parameter keys, and grouped by parameter group."""
    old, new = before.metadata, after.metadata
    for pair in pairs:
        # A flat optimizer does not say which parameters are one group.
        grouped_state, side = (after, 1) if pair.keys[0] is Keys.FLAT else (before, 0)
        facts = next(facts for facts in grouped_state.optimizers if facts.section == pair.sections[side])
        group_of = [number for number, group in enumerate(facts.groups) for _ in group.params]
        old = _unify(old, pair.sections[0], pair.places[0], group_of)
        new = _unify(new, pair.sections[1], pair.places[1], group_of)
    return old, new


def _unify(side: Settings, section: str, places: Mapping[str, int], group_of: Sequence[int]) -> Settings:
    is_below = any(key.startswith(f"{section}.param_groups.") for key in side.values)
    start = f"{section}.param_groups" if is_below else "param_groups"
    keys = re.compile(rf"{re.escape(start)}\.\d+\.params(?:\.\d+)?")
    kept_settings = select(side, lambda key: not keys.fullmatch(key))
    values: dict[str, Scalar] = {}
    for key, value in kept_settings.values.items():
        name = _name_group_setting(key, f"{start}.", places, group_of)
        if values.setdefault(name, value) != value:
            return kept_settings  # parameters of one group have different settings
    if values.keys() == kept_settings.values.keys():
        return kept_settings
    kinds = {key: kind for key, kind in kept_settings.kinds.items() if not f"{key}.".startswith(f"{start}.")}
    types = {key: letters for key, letters in kept_settings.types.items() if not key.startswith(f"{start}.")}
    return Settings(values, types, kinds, kept_settings.companion_names)


def _name_group_setting(key: str, start: str, places: Mapping[str, int], group_of: Sequence[int]) -> str:
    """Return the path of a setting below its parameter group. Flat optimizers store the setting at each parameter."""
    relative_key = key.removeprefix(start) if key.startswith(start) else ""
    dots = [place for place, character in enumerate(relative_key) if character == "."]
    for dot in dots:
        place = places.get(relative_key[:dot])
        if place is not None and not relative_key[:dot].isdigit():
            return f"{start}{group_of[place]}.{relative_key[dot + 1 :]}"
    return key

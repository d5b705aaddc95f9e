"""Tensors and sections are paired by their names alone."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from statecli import formats
from statecli.commands.diff import pairing
from statecli.core.errors import UsageError
from statecli.core.model_state import Kind, ModelState, TensorInfo


def build_state(*names: str, section: str = "model", kind: Kind = Kind.PARAMETER, target: str = "a.pt") -> ModelState:
    """Return a state with one section of tensors with the given names."""
    return build_sections({section: (kind, names)}, target)


def build_sections(sections: dict[str, tuple[Kind, tuple[str, ...]]], target: str = "a.pt") -> ModelState:
    """Sections with their kind and names."""
    rows = [
        TensorInfo(fqn, "float32", (1,), 1, 4, section=section, kind=kind)
        for section, (kind, names) in sections.items()
        for fqn in names
    ]
    return ModelState(target, "torch-zip", tuple(rows), tuple(sections))


def map_pairs(before: ModelState, after: ModelState, *rules: str) -> dict[str | None, str | None]:
    """Map each name before to its name after; None if the tensor has no partner."""
    matches = pairing.pair_tensors(before, after, rules).matches
    return {m.before.fqn if m.before else f"+{m.output_row.fqn}": m.after.fqn if m.after else None for m in matches}


def list_notes(before: ModelState, after: ModelState, *rules: str) -> list[str]:
    return [note.message for note in pairing.pair_tensors(before, after, rules).notes]


# --- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fc.weight", "module.fc.weight"),
        ("fc.weight", "_orig_mod.module.fc.weight"),
        ("module._orig_mod.fc.weight", "_fsdp_wrapped_module.fc.weight"),
        ("model.fc.weight", "fc.weight"),
        ("model.fc.weight", "module.model.fc.weight"),
        ("layers.0._orig_mod.fc.weight", "layers.0.fc.weight"),
        ("layers.0._checkpoint_wrapped_module.fc.weight", "layers.0._fsdp_wrapped_module.fc.weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.w", "module.layers.0.w"),
        ("_forward_module.model.fc.weight", "model.fc.weight"),
        ("_fsdp_wrapped_module._fpw_module.layers.0._fsdp_wrapped_module._fpw_module.w", "layers.0.w"),
    ],
)
def test_wrapper_prefixes_are_stripped(before, after):
    """Prefixes of wrappers, nested and in any order, are stripped in both directions, and a note reports the prefix."""
    for first, second in ((before, after), (after, before)):
        assert map_pairs(build_state(first), build_state(second)) == {first: second}
        assert any("stripped the prefix" in message for message in list_notes(build_state(first), build_state(second)))


def test_equal_names_are_paired_first():
    """Equal names are paired before a prefix is stripped, without a note."""
    before, after = build_state("fc.w", "model.fc.w"), build_state("model.fc.w", "fc.w")
    assert map_pairs(before, after) == {"fc.w": "fc.w", "model.fc.w": "model.fc.w"}
    assert not list_notes(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fc.w", "other"), ("module.fc.w", "_orig_mod.fc.w", "other")),
        (("module.fc.w", "_orig_mod.fc.w", "other"), ("fc.w", "other")),
        (("fc.w", "module.fc.w"), ("fc.w", "model.fc.w")),
    ],
)
def test_ambiguous_prefix_is_not_stripped(before, after):
    """If two names of a side are equal without prefixes, the intended name is unknown and no prefix is stripped."""
    matches = pairing.pair_tensors(build_state(*before), build_state(*after), ()).matches
    assert {m.output_row.fqn for m in matches if m.before and m.after} == set(before) & set(after)


def test_module_prefix_is_stripped_before_model_prefix():
    """`module.` is stripped before `model.`, so wrapped names that differ only in `model.` are not ambiguous."""
    before, after = build_state("model.fc", "fc"), build_state("module.model.fc", "module.fc")
    assert map_pairs(before, after) == {"model.fc": "module.model.fc", "fc": "module.fc"}


def test_note_names_only_the_stripped_prefix():
    """The note names the prefix that one side lacks, the number of tensors and their target."""
    before, after = (
        build_state("model.a.w", "model.b.w"),
        build_state("module.model.a.w", "module.model.b.w", target="b.pt"),
    )
    assert list_notes(before, after) == ["stripped the prefix 'module.' from the names of 2 tensors of b.pt"]


def test_prefix_of_all_names_is_stripped():
    """If no other rule matches a name, a single prefix that all names of a side share is stripped."""
    assert map_pairs(build_state("net.a.w", "net.b.w"), build_state("a.w", "b.w", "c.w")) == {
        "net.a.w": "a.w",
        "net.b.w": "b.w",
        "+c.w": "c.w",
    }
    assert map_pairs(build_state("a.w"), build_state("lit.net.a.w")) == {"a.w": "lit.net.a.w"}
    assert map_pairs(build_state("net.a.w", "b.w"), build_state("a.w", "b.w"))["net.a.w"] is None


NAME_LISTS = st.lists(
    st.lists(st.sampled_from(["a", "b", "model", "module", "_orig_mod", "w"]), min_size=1, max_size=4).map(".".join),
    max_size=8,
)


@given(NAME_LISTS, NAME_LISTS)
def test_every_tensor_is_matched_once(before, after):
    """No tensor is lost, no tensor is used twice, and equal names are always paired."""
    before_state, after_state = build_state(*before), build_state(*after)
    matches = pairing.pair_tensors(before_state, after_state, ()).matches
    assert sorted(id(m.before) for m in matches if m.before) == sorted(map(id, before_state.tensors))
    assert sorted(id(m.after) for m in matches if m.after) == sorted(map(id, after_state.tensors))
    for match in matches:
        if match.before is not None and match.after is None:
            assert before.count(match.before.fqn) > after.count(match.before.fqn)


@given(NAME_LISTS)
def test_a_state_matches_itself(names):
    """Every name, including a repeated name, is paired with itself, in order."""
    result, same_state = build_state(*names), build_state(*names)
    matches = pairing.pair_tensors(result, same_state, ()).matches
    assert [(m.before, m.after) for m in matches] == list(zip(result.tensors, same_state.tensors, strict=True))


def test_name_of_many_parts_is_paired_in_two_seconds():
    """A prefix is searched part by part, in linear time."""
    long_state = build_state("." * 400_000 + "a")
    before = time.process_time()
    for pair in ((long_state, build_state("w", "v")), (build_state("w", "v"), long_state)):
        map_pairs(*pair)
    assert time.process_time() - before < 2


def test_many_names_take_linear_time():
    """20,000 names with a wrapper prefix on one side are matched within one second of processor time."""
    names = [f"layers.{n}.weight" for n in range(20_000)]
    before = time.process_time()
    actual = map_pairs(build_state(*names), build_state(*(f"module.{name}" for name in names)))
    assert time.process_time() - before < 1
    assert None not in actual.values()


# --- --map -------------------------------------------------------------------------------------------------------


def test_rules_apply_one_after_another():
    """Each rule gets the result of the rule before; a mapped name is a match like any other."""
    before, after = build_state("enc.1.w", "dec.w"), build_state("encoder.1.weight", "dec.w", target="b.pt")
    assert map_pairs(before, after, "^enc[.]=encoder.", r"(\d)\.w$=\1.weight") == {
        "enc.1.w": "encoder.1.weight",
        "dec.w": "dec.w",
    }
    (note,) = pairing.pair_tensors(before, after, ("^enc[.]=encoder.", r"(\d)\.w$=\1.weight")).notes
    assert (note.name, note.message) == ("mapped", "--map renames 1 tensor of a.pt")


def test_last_equals_sign_splits_a_rule():
    """A regular expression may contain an equals sign: (?=...) looks ahead."""
    assert map_pairs(build_state("a.w"), build_state("b.w"), "a(?=[.]w)=b") == {"a.w": "b.w"}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("nothing", "--map 'nothing': write REGEX=REPLACEMENT, as in --map '^model[.]='"),
        ("=x", "--map '=x': write REGEX=REPLACEMENT, as in --map '^model[.]='"),
        ("(=x", "--map '(=x': the regular expression or the replacement is not valid: missing )"),
        (r"a=\9", r"--map 'a=\\9': the regular expression or the replacement is not valid: invalid group reference 9"),
        ("zzz=x", "--map 'zzz=x': matches none of the 2 names of a.pt"),
        ("[ab]=x", "--map renames both a and b of a.pt to 'x'"),
    ],
)
def test_invalid_rule_is_a_one_line_error(rule, message):
    """A rule that is malformed, matches nothing or makes two names equal is refused in one line, quoted for a shell."""
    with pytest.raises(UsageError) as error:
        pairing.pair_tensors(build_state("a", "b"), build_state("a", "b"), (rule,))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_rule_accepts_a_name_that_the_file_has_twice():
    """The file already had two equal names, so the rule is accepted."""
    assert map_pairs(build_state("a", "a", "b"), build_state("a", "a", "c"), "b=c") == {"a": "a", "b": "c"}


# --- sections ----------------------------------------------------------------------------------------------------

MODEL, OPTIMIZER = (Kind.PARAMETER, ("w",)), (Kind.OPTIMIZER, ("state[0]",))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"model": MODEL}, {"model": MODEL}, {"model": "model"}),
        ({"model": MODEL}, {"state_dict": MODEL}, {"model": "state_dict"}),
        ({"state_dict": MODEL, "optimizer": OPTIMIZER}, {"model": MODEL}, {"state_dict": "model"}),
        (
            {"state_dict": MODEL, "optimizer_states[0]": OPTIMIZER},
            {"model": MODEL, "optimizer": OPTIMIZER},
            {"state_dict": "model", "optimizer_states[0]": "optimizer"},
        ),
        ({"model": MODEL, "ema": MODEL}, {"model": MODEL}, {"model": "model"}),
        ({"model": MODEL, "ema": MODEL}, {"model": MODEL, "avg": MODEL}, {"model": "model", "ema": "avg"}),
        ({"model_ema": MODEL, "net": MODEL}, {"weights": MODEL}, {"net": "weights"}),
        ({"model": MODEL, "a": MODEL, "a_ema": MODEL}, {"model": MODEL, "b": MODEL}, {"model": "model"}),
        ({"gen": MODEL, "disc": MODEL}, {"model": MODEL}, {}),
        ({"rng": (Kind.OTHER, ("w",))}, {"model": MODEL}, {"rng": "model"}),
        (
            {"rng": (Kind.OTHER, ("w",)), "model": MODEL},
            {"seed": (Kind.OTHER, ("w",)), "model": MODEL},
            {"model": "model"},
        ),
    ],
)
def test_sections_are_paired_by_name_or_kind(before, after, expected):
    """Sections are paired by name, else as the only model or optimizer left, else as the only section of each file."""
    assert pairing.pair_sections(build_sections(before), build_sections(after)).by_section == expected
    assert pairing.pair_tensors(build_sections(before), build_sections(after), ()).sections == expected


def test_ambiguous_sections_are_not_paired():
    """A note says how to name the section, and all tensors are reported as added and removed."""
    before, after = build_sections({"gen": MODEL, "disc": MODEL}), build_state("w", target="b.pt")
    (note,) = pairing.pair_tensors(before, after, ()).notes
    assert note.name == "sections-apart"
    assert note.message.startswith(
        "statecli does not know which sections belong together: gen, disc of a.pt and model of b.pt"
    )
    assert note.message.endswith("such as a.pt#gen")
    assert [m.before is None or m.after is None for m in pairing.pair_tensors(before, after, ()).matches] == [True] * 3


def test_tensors_of_a_missing_section_are_removed():
    """Each tensor of the missing section is reported as removed."""
    tensors = pairing.pair_tensors(build_sections({"model": MODEL, "optimizer": OPTIMIZER}), build_state("w"), ())
    assert [(m.output_row.fqn, m.after is None) for m in tensors.matches] == [("w", False), ("state[0]", True)]


def list_order(before: ModelState, after: ModelState) -> list[str]:
    return [match.output_row.fqn for match in pairing.pair_tensors(before, after, ()).matches]


def test_names_of_safetensors_are_sorted_by_number():
    """safetensors writes wide dtypes first and names as text: layer 10 stands before layer 2, norms before weights."""
    names = ("l.1.norm", "l.10.norm", "l.2.norm", "emb", "l.1.w", "l.10.w", "l.2.w")
    safetensors_state = replace(build_state(*names), format="safetensors", traits=formats.traits_of("safetensors"))
    ordered = ["emb", "l.1.norm", "l.1.w", "l.2.norm", "l.2.w", "l.10.norm", "l.10.w"]
    assert list_order(build_state(*reversed(names)), safetensors_state) == ordered
    assert (
        list_order(
            safetensors_state,
            replace(safetensors_state, format="sharded safetensors", traits=formats.traits_of("sharded safetensors")),
        )
        == ordered
    )


def test_the_order_of_the_module_is_kept():
    """A .pt file records the order of the module; only names that are sorted as text are sorted again by number."""
    names = ("z.10", "z.2", "a.0")
    assert list_order(build_state(*names), build_state(*names)) == list(names)
    assert list_order(
        replace(build_state(*names), format="safetensors", traits=formats.traits_of("safetensors")), build_state(*names)
    ) == list(names)
    assert list_order(build_state("a", "l.10", "l.2"), build_state("a", "l.10", "l.2")) == ["a", "l.2", "l.10"]


def test_removed_layers_are_sorted_by_number():
    """This holds for layers of either file."""
    after = replace(
        build_state("l.0.w", "l.10.w", "l.9.w"), format="safetensors", traits=formats.traits_of("safetensors")
    )
    assert list_order(build_state("l.2.w", "l.0.w"), after) == ["l.0.w", "l.2.w", "l.9.w", "l.10.w"]


def test_selected_matches_keep_the_order_of_the_file():
    """No match is lost if another tensor has no match, and the order of the file applies even if all matches moved."""
    before, after = build_state("z.other", "z.removed", "y", "x"), build_state("x", "z.other", "y")
    matches = pairing.pair_tensors(before, after, ()).matches
    selected = [match for match in reversed(matches) if match.output_row.fqn != "z.other"]
    assert [match.output_row.fqn for match in pairing.sort_matches(selected, before, after)] == ["z.removed", "x", "y"]
    reversed_matches = [match for match in reversed(matches) if match.after]
    assert [match.output_row.fqn for match in pairing.sort_matches(reversed_matches, before, after)] == [
        "x",
        "z.other",
        "y",
    ]


def test_sections_stay_together_if_names_are_sorted_by_number():
    """A section that exists on one side only follows the section before it."""
    sections = {"model": (Kind.PARAMETER, ("b.2", "b.10")), "ema": (Kind.PARAMETER, ("a.1",))}
    assert list_order(
        build_sections(sections),
        replace(build_state("b.10", "b.2"), format="safetensors", traits=formats.traits_of("safetensors")),
    ) == ["b.2", "b.10", "a.1"]


@given(st.lists(st.integers(0, 10**30), max_size=20), st.text("a.0", max_size=3))
def test_numbers_in_names_are_ordered_as_numbers(numbers, start):
    """Numbers may have any number of digits and leading zeros."""
    start += "."
    names = tuple(dict.fromkeys(f"{start}{number:05}.w" for number in numbers))
    safetensors_state = replace(build_state(*names), format="safetensors", traits=formats.traits_of("safetensors"))
    assert list_order(safetensors_state, safetensors_state) == [
        f"{start}{number:05}.w" for number in sorted(set(numbers))
    ]


# --- ties that a format drops -----------------------------------------------------------------------------------------


def build_tied_row(fqn: str, *tied_names: str, **fields: object) -> TensorInfo:
    """Return a row of a torch.save file, which records storages and devices."""
    row = TensorInfo(fqn, "float32", (2, 2), 4, 16, tied_to=tied_names, storage=0, device="cpu")
    return replace(row, **fields)


def build_plain_row(fqn: str, **fields: object) -> TensorInfo:
    """Return a row of a safetensors file, which records neither storage nor device."""
    return replace(TensorInfo(fqn, "float32", (2, 2), 4, 16), **fields)


def build_sides(before: list[TensorInfo], after: list[TensorInfo]) -> tuple[ModelState, ModelState]:
    """Return a checkpoint with ties and a checkpoint without ties."""
    return ModelState("a.pt", "torch-zip", tuple(before)), ModelState(
        "b.safetensors", "safetensors", tuple(after), traits=formats.traits_of("safetensors")
    )


def test_dropped_tie_is_paired_with_the_kept_name():
    """The tie is compared in either direction under its own name, and a note names the file that lacks the entry."""
    first, second = build_sides(
        [build_tied_row("embed.w", "head.w"), build_tied_row("head.w", "embed.w")], [build_plain_row("embed.w")]
    )
    for before, after, lacking_path in ((first, second, "b.safetensors"), (second, first, "b.safetensors")):
        tensors = pairing.pair_tensors(before, after, ())
        matched_by = {match.output_row.fqn: match.matched_by for match in tensors.matches}
        assert matched_by == {"embed.w": pairing.MatchedBy.NAME, "head.w": pairing.MatchedBy.TIE}
        (tie,) = (match for match in tensors.matches if match.matched_by is pairing.MatchedBy.TIE)
        assert (tie.before.fqn, tie.after.fqn) == ("head.w", "head.w")
        assert tie.before.section == tie.after.section == "model"
        assert (tie.before.storage is None) is (before is second)
        assert (tie.after.storage is None) is (after is second)
        (note,) = tensors.notes
        assert (note.name, note.fqn) == ("tied-entry-left-out", "head.w")
        assert note.message.startswith(
            f"{lacking_path} does not have head.w; statecli compares the tied tensor embed.w"
        )


def test_removed_tie_does_not_hide_a_dropped_tie():
    """A tied entry that was removed together with its tie does not hide the next dropped tie."""
    rows = [
        build_tied_row("a", "b"),
        build_tied_row("b", "a"),
        build_tied_row("embed.w", "head.w"),
        build_tied_row("head.w", "embed.w"),
    ]
    first, second = build_sides(rows, [build_plain_row("embed.w")])
    for before, after in ((first, second), (second, first)):
        tensors = pairing.pair_tensors(before, after, ())
        by_tie = [match.output_row.fqn for match in tensors.matches if match.matched_by is pairing.MatchedBy.TIE]
        assert by_tie == ["head.w"]


@pytest.mark.parametrize(
    ("head", "kept_row"),
    [
        (build_tied_row("head.w"), build_plain_row("embed.w")),
        (build_tied_row("head.w", "other.w"), build_plain_row("embed.w")),
        (build_tied_row("head.w", "embed.w", shape=(4,)), build_plain_row("embed.w")),
        (build_tied_row("head.w", "embed.w", dtype="float16"), build_plain_row("embed.w")),
        (build_tied_row("head.w", "embed.w", storage_offset=1), build_plain_row("embed.w")),
        (build_tied_row("head.w", "embed.w", section="other"), build_plain_row("embed.w")),
        (build_tied_row("head.w", "embed.w"), build_plain_row("embed.w", storage=0)),
        (build_tied_row("head.w", "embed.w"), build_plain_row("embed.w", device="cpu")),
        (build_tied_row("head.w", "embed.w"), build_plain_row("elsewhere.w")),
    ],
    ids=["untied", "to another", "shape", "dtype", "offset", "section", "storages", "devices", "nothing kept"],
)
def test_entry_that_is_not_a_dropped_tie_is_removed_or_added(head, kept_row):
    """A different view of the storage, or a file format that would have recorded the tie, is not a dropped tie."""
    first, second = build_sides([build_tied_row("embed.w", "head.w"), head], [kept_row])
    for before, after in ((first, second), (second, first)):
        tensors = pairing.pair_tensors(before, after, ())
        assert all(match.matched_by is not pairing.MatchedBy.TIE for match in tensors.matches)
        assert "tied-entry-left-out" not in [note.name for note in tensors.notes]
        (row,) = (match for match in tensors.matches if match.output_row.fqn == "head.w")
        assert (row.before is None) is (before is second)
        assert (row.after is None) is (after is second)


def test_a_wrappers_note_names_the_file_that_has_the_prefix():
    """The note also counts the names with the prefix."""
    first, second = build_state("module.a", "module.b", target="one.pt"), build_state("a", "b", target="two.pt")
    assert list_notes(first, second) == ["stripped the prefix 'module.' from the names of 2 tensors of one.pt"]
    assert list_notes(second, first) == ["stripped the prefix 'module.' from the names of 2 tensors of one.pt"]
    for before, after in ((first, second), (second, first)):
        tensors = pairing.pair_tensors(before, after, ())
        assert [note.name for note in tensors.notes] == ["wrapper-prefix"]
        assert tensors.stripped == (pairing.StrippedPrefix("module.", 2, "one.pt", before is first),)

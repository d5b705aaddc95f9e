"""Tensor names: case collisions, wrapper prefixes and control characters."""

from __future__ import annotations

import time

import pytest
import torch
from safetensors.torch import save_file

from statecli.core.parameter_or_buffer import WRAPPER_ATTRIBUTES

from ..formats.attacks import build, build_pickle, records, tensor, text


def test_case_collision_finds_names_that_differ_only_in_case(run_rule, tmp_path):
    """The finding is at the second name and mentions the first name."""
    torch.save({"head.Weight": torch.zeros(2), "head.weight": torch.ones(2)}, tmp_path / "a.pt")
    (finding,) = run_rule("case-collision", tmp_path / "a.pt")
    assert finding.fqn == "head.weight"
    assert "head.Weight" in finding.message


@pytest.mark.parametrize(("first", "second"), [("\xe9", "e\u0301"), ("K", "\u212a")], ids=ascii)
def test_case_collision_finds_the_same_text_in_other_code_points(run_rule, save_checkpoint, first, second):
    """Both names look alike on the screen, so the message shows their code points."""
    (finding,) = run_rule("case-collision", save_checkpoint({first: torch.zeros(2), second: torch.ones(2)}))
    assert (
        finding.message
        == f"{ascii(second)[1:-1]}: same letters as {ascii(first)[1:-1]}, written with other code points"
    )


def test_case_collision_spares_names_that_do_not_fold(run_rule, tmp_path):
    """`ss` is another file than `ß`."""
    torch.save({name: torch.zeros(2) for name in ("ß", "ss", "ﬁ", "fi", "ı", "i")}, tmp_path / "a.pt")
    assert not run_rule("case-collision", tmp_path / "a.pt")


def test_case_collision_does_not_sort_the_marks_of_a_name(run_rule, tmp_path):
    """Python sorts combining marks by insertion, and needed a minute and a half for the two names."""
    marks = "\u0315" * 100_000 + "\u0300" * 100_000
    save_file({f"a{marks}{end}": torch.zeros(1) for end in "xX"}, tmp_path / "a.safetensors")
    begin = time.process_time()
    findings = run_rule("case-collision", tmp_path / "a.safetensors")
    assert time.process_time() - begin < 10
    messages = [finding.message for finding in findings]
    assert sum("more than 30 combining marks in a row" in message for message in messages) == 2
    assert sum("only in upper and lower case" in message for message in messages) == 1


def test_case_collision_spares_thirty_marks(run_rule, save_checkpoint):
    """The limit of Unicode's stream-safe text."""
    assert not run_rule("case-collision", save_checkpoint({"e" + "\u0301" * 30: torch.zeros(2)}))
    assert len(run_rule("case-collision", save_checkpoint({"e" + "\u0301" * 31: torch.zeros(2)}))) == 1


def test_case_collision_spares_names_of_two_sections(run_rule, tmp_path):
    """Each section is a state_dict of its own."""
    torch.save({"model": {"W": torch.zeros(2)}, "ema": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    assert not run_rule("case-collision", tmp_path / "a.pt")


# --- wrapper-prefix --------------------------------------------------------------------------------------------------

WRAPPERS = {
    "module.": torch.nn.DataParallel,
    "_orig_mod.": torch.compile,
}


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_wrapper_prefix_finds_the_state_dict_of_a_wrapper(run_rule, save_checkpoint, prefix):
    """Each section has a single finding. The advice gives the names of the plain model."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    state = WRAPPERS[prefix](net).state_dict()
    (finding,) = run_rule("wrapper-prefix", save_checkpoint(state))
    assert finding.message.startswith(f"all 4 names have the prefix {prefix!r} of a wrapper, which the plain model")
    assert f"removeprefix({prefix!r})" in finding.help
    assert [name.removeprefix(prefix) for name in state] == list(net.state_dict())


@pytest.mark.parametrize("name", WRAPPER_ATTRIBUTES)
@pytest.mark.parametrize("is_inside", [False, True], ids=["around all", "around a part"])
def test_wrapper_prefix_finds_the_name_of_each_wrapper(run_rule, save_checkpoint, name, is_inside):
    """Wrappers of torch, Lightning, fairscale and torchrec, before all names and in the middle of a name."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    state = {f"{name}.{key}": value for key, value in net.state_dict().items()}
    if is_inside:
        state = {key.replace("1.", f"1.{name}."): value for key, value in net.state_dict().items()}
    (finding,) = run_rule("wrapper-prefix", save_checkpoint(state))
    verb = "contain" if is_inside else "have the prefix"
    assert f"{verb} '{name}.' of a wrapper" in finding.message


def test_wrapper_prefix_finds_the_wrapper_of_lightning_in_deepspeed(run_rule, tmp_path):
    """DeepSpeed saves the section `module`, and every name in the section begins with Lightning's wrapper."""
    state = {f"_forward_module.model.{key}": tensor for key, tensor in torch.nn.Linear(2, 2).state_dict().items()}
    torch.save({"module": state, "global_steps": 3}, tmp_path / "mp_rank_00_model_states.pt")
    (finding,) = run_rule("wrapper-prefix", tmp_path / "mp_rank_00_model_states.pt")
    assert "all 2 names in section 'module' have the prefix '_forward_module.'" in finding.message


def test_wrapper_prefix_finds_a_compiled_submodule(run_rule, tmp_path):
    """The prefix is in the middle of some names."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.compile(torch.nn.Linear(2, 2)))
    torch.save({"model": net.state_dict(), "ema": {"0.weight": torch.zeros(2)}}, tmp_path / "a.pt")
    (finding,) = run_rule("wrapper-prefix", tmp_path / "a.pt")
    assert "2 of 4 names in section 'model' contain '_orig_mod.'" in finding.message
    assert "replace('_orig_mod.', '')" in finding.help


def test_wrapper_prefix_spares_a_submodule_called_module(run_rule, save_checkpoint):
    """Averaged models have a `module` next to a counter of their own; half of all models have a `model`."""
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    assert not run_rule("wrapper-prefix", save_checkpoint(averaged.state_dict()))
    assert not run_rule("wrapper-prefix", save_checkpoint({"model.weight": torch.zeros(2)}))


def test_wrapper_prefix_spares_names_of_the_given_class(list_fqns, tmp_path):
    """The names are the wrapper's own state_dict: they load into the compiled class, but not into the bare class."""
    (tmp_path / "net.py").write_text(
        "import torch\n\n\ndef bare():\n    return torch.nn.Linear(2, 2)\n\n\n"
        "def compiled():\n    return torch.compile(bare())\n"
    )
    torch.save(torch.compile(torch.nn.Linear(2, 2)).state_dict(), tmp_path / "a.pt")
    assert list_fqns("wrapper-prefix", tmp_path / "a.pt", model=f"{tmp_path / 'net.py'}:bare") == [None]
    assert list_fqns("wrapper-prefix", tmp_path / "a.pt", model=f"{tmp_path / 'net.py'}:compiled") == []


def test_wrapper_prefix_spares_a_module_pickled_whole(run_rule, save_checkpoint):
    """A module pickled whole brings its own names."""
    assert not run_rule("wrapper-prefix", save_checkpoint(torch.nn.DataParallel(torch.nn.Linear(2, 2))))


# --- control-characters ----------------------------------------------------------------------------------------------

UNSEEN_CHARACTERS = [
    "\n",
    "\t",
    "\x1b[31m",
    "\x7f",
    "\x9b",
    "\u200b",
    "\u200d",
    "\u202e",
    "\u2066",
    "\ufeff",
    "\u2028",
    "\ud800",
]
UNSEEN_CHARACTERS += ["\xad", "\ufdd0", "\ufdef", "\ufffe", "\uffff", "\U0001ffff", "\U000e0041"]


@pytest.mark.parametrize("character", UNSEEN_CHARACTERS, ids=ascii)
def test_control_characters_finds_invisible_characters(run_rule, tmp_path, character):
    """The message shows the character escaped, on a single printable line."""
    body = text("fc") + tensor() + text(f"fc{character}w") + tensor()
    (tmp_path / "a.pt").write_bytes(build(records(build_pickle(b"}(" + body + b"u"))))
    (finding,) = run_rule("control-characters", tmp_path / "a.pt")
    assert finding.fqn == f"fc{character}w"
    assert character not in finding.message
    assert finding.message.isprintable()


def test_control_characters_finds_the_name_of_a_section(run_rule, tmp_path):
    """The section name stands before each name of the section."""
    torch.save({"a\u202e.model": {"x.weight": torch.zeros(2)}, "ema": {"x.weight": torch.zeros(2)}}, tmp_path / "a.pt")
    assert "section 'a\\u202e.model'" in run_rule("control-characters", tmp_path / "a.pt")[0].message


def test_control_characters_spares_letters_of_all_scripts(run_rule, save_checkpoint):
    """Spaces, quotes and brackets are not control characters either."""
    names = ["größe.weight", "重み", "ваги", "وزن", "a b", "a'b", "[0]", "x\u0301", "😀", "❤\ufe0f", "a\\nb"]
    assert not run_rule("control-characters", save_checkpoint({name: torch.zeros(2) for name in names}))

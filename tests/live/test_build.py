"""Import and construct the user's class, or report the failure in one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from statecli.core.errors import ModelError, UsageError
from statecli.live.build import build
from statecli.live.spec import parse_spec

from ..forked_python import run_python


def make(target: str, **options):
    """Build the model of a spec."""
    spec = parse_spec(target)
    assert spec is not None
    return build(spec, **options)


def get_build_error(target: str, **options) -> str:
    """Return the error line of a failed build."""
    with pytest.raises((ModelError, UsageError)) as caught:
        make(target, **options)
    line = str(caught.value)
    assert "\n" not in line
    return line


SIMPLE = """
class Net(nn.Module):
    def __init__(self, hidden, act="relu"):
        super().__init__()
        self.fc = nn.Linear(hidden, 2)
        self.act = act
"""


def test_arguments_reach_the_constructor(write):
    """Positional and keyword arguments are passed as written."""
    built = make(write(SIMPLE, "Net(3, act='gelu')"))
    assert (built.module.fc.in_features, built.module.act) == (3, "gelu")


def test_unknown_argument_shows_the_signature(write):
    """For an unknown keyword, the error shows a similar keyword, or the keywords of the class."""
    assert "write 'net0.py:Net(hidden=3)'" in get_build_error(write(SIMPLE, "Net(hiden=3)"))
    assert "its signature is Net(hidden, act='relu')" in get_build_error(write(SIMPLE, "Net(3, zzz='x')"))


def test_a_wrong_name_has_the_similar_name_or_the_only_class(write):
    """The error suggests a similar class of the file, a similar module, or the model classes of the file."""
    write(SIMPLE, name="mymodels.py")
    assert "did you mean Net?" in get_build_error("mymodels.py:Nett(3)")
    assert "did you mean mymodels" in get_build_error("mymodel:Net")
    assert "its only model class is Net" in get_build_error("mymodels.py:Xyzzy")


@pytest.mark.parametrize(
    ("source", "expected_message", "number"),
    [
        ("class Net(nn.Module):\n    def __init__(self):\n        raise ValueError('a\\nb')", "ValueError: a b", 5),
        ("class Net(nn.Module):\n    def __init__(self):\n        raise SystemExit(3)", "SystemExit: 3", 5),
        ("class Net(nn.Module):\n    def __init__(self):\n        nn.Linear(2.5, 'x')", "TypeError", 5),
        ("class Net(nn.Module):\n    def __init__(self):\n        self.fc = nn.Linear(1, 1)", "AttributeError", 5),
        ("x = 1 / 0", "ZeroDivisionError", 3),
        ("x = 1\ny = = 2", "SyntaxError", 4),
    ],
)
def test_error_of_a_constructor_or_import_names_the_users_line(write, source, expected_message, number):
    """For any exception, a single line has the type, the message and the user's own line."""
    line = get_build_error(write(source))
    assert expected_message in line
    assert f"(net0.py:{number})" in line


def test_error_names_the_line_of_the_sibling_module_that_raised(write):
    """The error names the line of the sibling module that raised, with a relative path."""
    Path("helper_deep.py").write_text("def check(x):\n    raise KeyError(x)\n")
    source = "from helper_deep import check\nclass Net(nn.Module):\n    def __init__(self):\n        check('k')"
    assert "(helper_deep.py:2)" in get_build_error(write(source))


def test_keyboard_interrupt_passes(write):
    """Ctrl-C in a constructor raises KeyboardInterrupt."""
    with pytest.raises(KeyboardInterrupt):
        make(write("class Net(nn.Module):\n    def __init__(self):\n        raise KeyboardInterrupt"))


@pytest.mark.parametrize(("value", "named"), [("3", "an int"), ("None", "None"), ("torch", "a Python module")])
def test_error_names_the_type_of_a_target_that_is_not_a_module(write, value, named):
    """The error names the type of a factory's result or an attribute that is not a module."""
    assert f"is {named}," in get_build_error(write(f"net = {value}", "net"))
    assert f"returned {named}," in get_build_error(write(f"def f():\n    return {value}", "f"))


def test_module_level_instance_is_used_without_a_call(write):
    """`net.py:model` may name an existing module; a call of the module is refused."""
    assert type(make(write("model = nn.Linear(2, 2)", "model")).module) is torch.nn.Linear
    assert "remove the parentheses" in get_build_error(write("model = nn.Linear(2, 2)", "model()"))


def test_nested_class_and_nested_function_are_called(write):
    """Outer.Net and a function are looked up and called."""
    source = "class Outer:\n    class Net(nn.Linear):\n        pass\n    make = staticmethod(lambda n: nn.Linear(n, n))"
    assert make(write(source, "Outer.Net(1, 2)")).module.out_features == 2
    assert make(write(source, "Outer.make(5)")).module.out_features == 5


def test_sibling_imports_work_and_are_not_mixed_up(write, tmp_path):
    """Two files of the same name, each with a sibling of the same name, import their own sibling."""
    for folder, size in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "layers_x.py").write_text(f"SIZE = {size}\n")
        source = "from torch import nn\nfrom layers_x import SIZE\ndef net():\n    return nn.Linear(SIZE, SIZE)\n"
        (tmp_path / folder / "net.py").write_text(source)
    assert make("a/net.py:net").module.in_features == 1
    assert make("b/net.py:net").module.in_features == 2


def test_dotted_modules_come_from_the_current_directory(write):
    """`pkg.mod:Net` names a package in the current directory."""
    os.mkdir("pkg_here")
    Path("pkg_here/__init__.py").write_text("")
    Path("pkg_here/mod.py").write_text("from torch import nn\nNet = nn.ReLU\n")
    assert type(make("pkg_here.mod:Net").module) is torch.nn.ReLU


def test_prints_go_to_stderr(write):
    """print(), os.write(1) and child processes of the user's code never reach stdout."""
    source = """
    import os, subprocess, sys
    print("A")
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            print("B"); os.write(1, b"C\\n"); subprocess.run([sys.executable, "-c", "print('D')"])
    """
    target = write(source)
    code = (
        "from statecli.live.build import build; from statecli.live.spec import parse_spec as parse; "
        f"build(parse({target!r})); print('result')"
    )
    run = run_python(["-c", code])
    assert run.stdout == "result\n", run.stderr
    assert set("ABCD") <= set(run.stderr)


def test_meta_builds_hold_no_memory(write):
    """--init-device meta builds on meta."""
    assert make(write(SIMPLE, "Net(1_000_000_000)"), init_device="meta").module.fc.weight.device.type == "meta"


def test_a_constructor_that_fails_on_meta_suggests_the_cpu(write):
    """If a constructor reads values, the build on meta fails, and the error suggests `--init-device cpu`."""
    source = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        torch.ones(1).item()"
    assert "--init-device cpu" in get_build_error(write(source), init_device="meta")


def test_unknown_init_device_is_a_usage_error(write):
    """A device torch does not know is a usage error."""
    assert "warp" in get_build_error(write(SIMPLE, "Net(2)"), init_device="warp")


def test_build_restores_sys_path_and_patched_methods(write):
    """nn.Module and torch.Tensor are restored after the lines of assignments were recorded, also after a failure."""
    path = list(sys.path)
    before = {n: torch.nn.Module.__dict__[n] for n in ("__setattr__", "register_buffer", "add_module")}
    fills = torch.Tensor.normal_, torch.nn.init._no_grad_trunc_normal_
    make(write(SIMPLE, "Net(2)"))
    get_build_error(write("class Net(nn.Module):\n    def __init__(self):\n        1 / 0"))
    assert {n: torch.nn.Module.__dict__[n] for n in before} == before
    assert (torch.Tensor.normal_, torch.nn.init._no_grad_trunc_normal_) == fills
    assert "normal_" not in vars(torch.Tensor)
    get_build_error(write("raise ValueError", "Net"))
    assert sys.path == path


def test_values_true_draws_the_same_initial_values_each_time(write):
    """values=True draws the same initial values each time."""
    drawn = make(write(SIMPLE, "Net(100_000)"), values=True)
    assert torch.equal(drawn.module.fc.weight, drawn.build_again().fc.weight)
    assert drawn.module.fc.weight.std() > 0


def test_large_parameters_are_zeros(write):
    """In a process without reused memory, because statecli looks at 64 elements only."""
    target = write(SIMPLE, "Net(100_000)")
    code = (
        "from statecli.live.build import build\n"
        "from statecli.live.spec import parse_spec\n"
        f"print(bool(build(parse_spec({target!r})).module.fc.weight.any()))\n"
    )
    run = run_python(["-c", code])
    assert (run.stdout, run.stderr) == ("False\n", "")


def test_seed_may_be_larger_than_the_seeds_of_numpy(write):
    """The seeds of numpy end at 2**32."""
    drawn = make(write("import numpy\n" + SIMPLE, "Net(8)"), values=True)
    assert drawn.build_again(seed=2**32).fc.weight.any()


def test_small_parameters_are_always_drawn(write):
    """Small parameters keep their drawn values, because user code makes decisions by them."""
    target = write(SIMPLE, "Net(8)")
    assert torch.equal(make(target).module.fc.weight, make(target, values=True).module.fc.weight)


def test_constructor_that_fails_on_zeros_gets_drawn_values(write):
    """A constructor that fails on zeros is run again with drawn values."""
    source = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1000, 1000)
            assert self.fc.weight.std() > 0
    """
    assert make(write(source)).module.fc.weight.std() > 0


def test_build_again_returns_a_new_instance(write):
    """A second instance is a different object; a module-level instance cannot be built again."""
    built = make(write(SIMPLE, "Net(2)"))
    assert built.build_again() is not built.module
    with pytest.raises(ModelError):
        make(write("model = nn.Linear(2, 2)", "model")).build_again()


@pytest.mark.parametrize("init", [True, False])
def test_file_with_relative_imports_is_a_module_of_its_package(write, init, tmp_path):
    """`pkg/net.py:net` with `from .layers import L` works, __init__.py or not, and two packages are not mixed up."""
    for outer, size in (("one", 1), ("two", 2)):
        folder = tmp_path / outer / f"pkg_rel_{init}" / "sub"
        folder.mkdir(parents=True)
        (folder.parent / "layers.py").write_text(f"SIZE = {size}\n")
        if init:
            (folder / "__init__.py").write_text("")
            (folder.parent / "__init__.py").write_text("")
        source = "from torch import nn\nfrom ..layers import SIZE\ndef net():\n    return nn.Linear(SIZE, SIZE)\n"
        (folder / "net.py").write_text(source)
    for outer, size in (("one", 1), ("two", 2)):
        assert make(f"{outer}/pkg_rel_{init}/sub/net.py:net").module.in_features == size


def test_messages_show_no_absolute_path(write, tmp_path):
    """The path that Python puts into an ImportError is shown relative to the current directory."""
    Path("helper_short.py").write_text("")
    line = get_build_error(write("from helper_short import missing"))
    assert str(tmp_path) not in line
    assert "(helper_short.py)" in line

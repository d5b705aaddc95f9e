"""Broken models of many kinds: the body of a class, the shape of its input, and lines of the fixed class."""

from __future__ import annotations

from typing import NamedTuple


class BrokenModel(NamedTuple):
    """A file with a class `Net`: its text, the input, and texts expected in the fixed file."""

    text: str
    expected: tuple[str, ...]
    input: str = ""


BUILD = "\n    def build(self):\n        self.t = torch.ones(4)\n"
HEAD = "import torch\nfrom torch import nn\n\n\n"


def net(init: str, forward: str = "", *, head: str = HEAD, before: str = "", more: str = "") -> str:
    """Return a file with a class that has these lines in `__init__`, and in `forward(self, x)`."""
    lines = ["class Net(nn.Module):", *before.splitlines(), "    def __init__(self, width=4):"]
    lines += ["        super().__init__()", "        self.fc = nn.Linear(width, width)"]
    lines += [f"        {line}" if line else "" for line in init.splitlines()]
    lines += ["", "    def forward(self, x):"]
    lines += [f"        {line}" for line in (forward or "return self.fc(x)").splitlines()]
    return head + "\n".join(lines) + "\n" + more


BROKEN_MODELS = {
    "annotated": BrokenModel(
        net("# table\nself.t: torch.Tensor = torch.ones(4)  # ones"),
        (
            "        # table\n        self.t: torch.Tensor\n"
            '        self.register_buffer("t", torch.ones(4), persistent=False)  # ones\n',
        ),
    ),
    "method-called-again": BrokenModel(
        net("self.t = None\nself.build()", "return self.fc(x) + self.t", more=BUILD),
        ('        if "t" in self.__dict__:\n            self.register_buffer("t", self.__dict__.pop("t"), ',),
        "2x4",
    ),
    "annotated-parameter": BrokenModel(
        net("self.t: torch.Tensor = torch.ones(4, requires_grad=True)", "return self.fc(x) * self.t"),
        ("self.t: torch.Tensor = nn.Parameter(torch.ones(4, requires_grad=True))\n",),
        "2x4",
    ),
    "annotated-list": BrokenModel(
        net("self.m: list[nn.Linear] = [nn.Linear(4, 4)]", "return self.m[0](self.fc(x))"),
        ("self.m = nn.ModuleList([nn.Linear(4, 4)])",),
        "2x4",
    ),
    "annotated-property": BrokenModel(
        net("self.w: torch.Tensor = self.fc.weight * 2", "return self.fc(x) @ self.w").replace(
            "\n\n    def f", "\n    def f"
        ),
        ("    @property\n    def w(self) -> torch.Tensor:\n        return self.fc.weight * 2\n\n    def forward",),
        "2x4",
    ),
    "two-properties": BrokenModel(
        net("self.v = self.fc.weight * 2\nself.w = self.fc.weight * 3", "return self.fc(x) @ self.w @ self.v").replace(
            "\n\n    def f", "\n    def f"
        ),
        ("\n\n    @property\n    def w(self):\n        return self.fc.weight * 3\n\n", "* 2\n\n    @prop"),
        "2x4",
    ),
    "class-attribute-without-blank-lines": BrokenModel(
        HEAD + "class Net(nn.Module):\n    t = torch.ones(4)\n    def forward(self, x):\n        return x * self.t\n",
        ('        self.register_buffer("t", torch.ones(4), persistent=False)\n\n    def forward',),
        "2x4",
    ),
    "several-lines": BrokenModel(
        net("# the table\nself.t = (\n    torch.arange(4.)  # first\n    * 2  # second\n)  # last"),
        ("# the table\n", "# first\n", "# second", "persistent=False)  # last\n"),
    ),
    "two-statements": BrokenModel(
        net("self.a = 1; self.t = torch.ones(4); self.b = 2"),
        ('self.a = 1; self.register_buffer("t", torch.ones(4), persistent=False); self.b = 2',),
    ),
    "property-after-another-statement": BrokenModel(
        net("self.a = 1; self.w = self.fc.weight * 2  # twice", "return self.fc(x) @ self.w"),
        ("        self.a = 1  # twice\n", "    @property\n    def w(self)"),
        "2x4",
    ),
    "if-on-one-line": BrokenModel(
        net("if width: self.t = torch.ones(4)  # wide"),
        ('if width: self.register_buffer("t", torch.ones(4), persistent=False)  # wide',),
    ),
    "if-else-on-lines": BrokenModel(
        net("if width:\n    self.t = torch.ones(4)\nelse:\n    self.t = None"),
        ('    self.register_buffer("t", torch.ones(4), persistent=False)\n',),
    ),
    "two-branches": BrokenModel(
        net("if width > 2:\n    self.t = torch.ones(width)\nelse:\n    self.t = torch.zeros(width)"),
        (
            "            self.t = torch.zeros(width)\n        self.register_buffer(",
            'self.register_buffer("t", self.__dict__.pop("t"), persistent=False)',
        ),
    ),
    "module-list-in-branches": BrokenModel(
        net("if width > 2:\n    self.m = [nn.Linear(4, 4)]\nelse:\n    self.m = [nn.Linear(2, 2)]"),
        ("        self.m = nn.ModuleList(self.m)\n",),
    ),
    "added-to-a-list": BrokenModel(
        net("self.m = []\nfor _ in range(2):\n    self.m += [nn.Linear(4, 4)]"), ("self.m = nn.ModuleList(self.m)\n",)
    ),
    "chained": BrokenModel(
        net("self.t = t = torch.ones(4)\nself.n = t.numel()"),
        ('self.register_buffer("t", torch.ones(4), persistent=False)\n        t = self.t',),
    ),
    "walrus": BrokenModel(
        net("self.t = torch.ones(n := 4)\nself.n = n"),
        ('self.register_buffer("t", torch.ones(n := 4), persistent=False)',),
    ),
    "before-super": BrokenModel(
        HEAD + "class Net(nn.Module):\n    def __init__(self):\n        # early\n        self.t = torch.ones(4)\n"
        "        super().__init__()\n        self.fc = nn.Linear(4, 4)\n",
        ('super().__init__()\n        # early\n        self.register_buffer("t", torch.ones(4), persistent=False)\n',),
    ),
    "class-attribute": BrokenModel(
        net("", "return self.fc(x) + self.t", before="    t = torch.arange(4.)\n"),
        ('super().__init__()\n        self.register_buffer("t", torch.arange(4.), persistent=False)\n',),
        "2x4",
    ),
    "class-attribute-with-a-parameter": BrokenModel(
        net("", "return self.fc(x) * self.p", before="    p = nn.Parameter(torch.ones(4) * 3)\n"),
        ("super().__init__()\n        self.p = nn.Parameter(torch.ones(4) * 3)\n",),
        "2x4",
    ),
    "class-without-init": BrokenModel(
        HEAD + 'class Net(nn.Module):\n    """A net."""\n\n    t = torch.arange(4.)\n\n    def forward(self, x):\n'
        "        return x + self.t\n",
        ("def __init__(self, *args, **kwargs):", 'self.register_buffer("t", torch.arange(4.), persistent=False)'),
        "2x4",
    ),
    "module-list-with-comments": BrokenModel(
        net("self.m = [\n    nn.Linear(4, 4),  # in\n    nn.Linear(4, 4),  # out\n]"),
        (
            "self.m = nn.ModuleList([\n            nn.Linear(4, 4),  # in\n",
            "            nn.Linear(4, 4),  # out\n        ])",
        ),
    ),
    "module-comprehension": BrokenModel(
        net("self.m = [nn.Linear(4, 4) for _ in range(width)]"),
        ("self.m = nn.ModuleList([nn.Linear(4, 4) for _ in range(width)])",),
    ),
    "module-tuple": BrokenModel(
        net("self.m = nn.Linear(4, 4), nn.Linear(4, 4)"),
        ("self.m = nn.ModuleList((nn.Linear(4, 4), nn.Linear(4, 4)))",),
    ),
    "appended": BrokenModel(
        net("self.m = []\nfor _ in range(2):\n    self.m.append(nn.Linear(4, 4))"), ("self.m = nn.ModuleList()\n",)
    ),
    "extended": BrokenModel(
        net("self.m = list()\nself.m.extend(nn.Linear(4, 4) for _ in range(2))"), ("self.m = nn.ModuleList()\n",)
    ),
    "inserted": BrokenModel(
        net("self.m = [nn.Linear(4, 4)]\nself.m.insert(0, nn.Linear(4, 4))"),
        ("self.m = nn.ModuleList(self.m)",),
    ),
    "module-dict": BrokenModel(
        net('self.m = {"a": nn.Linear(4, 4)}', 'return self.m["a"](self.fc(x))'),
        ('self.m = nn.ModuleDict({"a": nn.Linear(4, 4)})',),
        "2x4",
    ),
    "module-dict-filled": BrokenModel(
        net('self.m = {}\nself.m["a"] = nn.Linear(4, 4)'), ("self.m = nn.ModuleDict()\n",)
    ),
    "dotted-keys": BrokenModel(
        net('self.m = {"a.b": nn.Linear(4, 4)}', 'return self.m["a.b"](self.fc(x))'),
        ('self.m["a_b"](self.fc(x))', "nn.ModuleDict("),
        "2x4",
    ),
    "number-keys": BrokenModel(
        net("self.m = {n: nn.Linear(4, 4) for n in (8, 16)}", "n = 8\nreturn self.m[n](self.m[16](self.fc(x)))"),
        ("self.m[str(n).replace('.', '_')]", 'self.m["16"]'),
        "2x4",
    ),
    "named-pairs": BrokenModel(
        net(
            'self.m = [("a", nn.Linear(4, 4)), ("b", nn.Linear(4, 4))]',
            "for name, m in self.m:\n    x = m(x)\nreturn self.fc(x)",
        ),
        ("for name, m in self.m.items():", "nn.ModuleDict("),
        "2x4",
    ),
    "nested-lists": BrokenModel(
        net(
            "self.m = [[nn.Linear(4, 4)], [nn.Linear(4, 4)]]",
            "for part in self.m:\n    x = part[0](x)\nreturn self.fc(x)",
        ),
        ("nn.ModuleList(nn.ModuleList(part) for part in [[",),
        "2x4",
    ),
    "parameters": BrokenModel(
        net("self.p = [nn.Parameter(torch.ones(4)) for _ in range(2)]", "return self.fc(x) * self.p[0] * self.p[1]"),
        ("self.p = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])",),
        "2x4",
    ),
    "parameter-dict": BrokenModel(
        net('self.p = {"a": nn.Parameter(torch.ones(4))}', 'return self.fc(x) * self.p["a"]'),
        ('self.p = nn.ParameterDict({"a": nn.Parameter(torch.ones(4))})',),
        "2x4",
    ),
    "parameters-appended": BrokenModel(
        net("self.p = []\nself.p.append(nn.Parameter(torch.ones(4)))"), ("self.p = nn.ParameterList()\n",)
    ),
    "requires-grad": BrokenModel(
        net("self.s = torch.ones(4, requires_grad=True)", "return self.fc(x) * self.s"),
        ("self.s = nn.Parameter(torch.ones(4, requires_grad=True))",),
        "2x4",
    ),
    "tensors": BrokenModel(
        net("self.a = [torch.ones(4), torch.zeros(4)]", "return self.fc(x) * self.a[0] + self.a[1]"),
        ('self.register_buffer(f"a_{i}", tensor, persistent=False)', "for i in range(2)]"),
        "2x4",
    ),
    "tensor-tuple": BrokenModel(
        net("self.a = (torch.ones(4), torch.zeros(4))", "a, b = self.a\nreturn self.fc(x) * a + b"),
        ('return tuple(getattr(self, f"a_{i}") for i in range(2))',),
        "2x4",
    ),
    "tensor-dict": BrokenModel(
        net(
            'self.a = {"cos": torch.ones(4), "sin": torch.zeros(4)}',
            'return self.fc(x) * self.a["cos"] + self.a["sin"]',
        ),
        ('{key: getattr(self, f"a_{key}") for key in ("cos", "sin")}',),
        "2x4",
    ),
    "tensors-of-a-size": BrokenModel(
        net("self.a = [torch.ones(4) * i for i in range(width)]", "return self.fc(x) + sum(self.a)"),
        ('self.named_buffers(recurse=False) if key.startswith("a_")',),
        "2x4",
    ),
    "other-name-of-nn": BrokenModel(
        "import torch\nimport torch.nn as N\n\n\nclass Net(N.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.m = [N.Linear(4, 4)]\n",
        ("self.m = N.ModuleList([N.Linear(4, 4)])",),
    ),
    "torch.nn": BrokenModel(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.m = [torch.nn.Linear(4, 4)]\n",
        ("self.m = torch.nn.ModuleList([torch.nn.Linear(4, 4)])",),
    ),
    "no-name-of-nn": BrokenModel(
        "from torch import ones\nfrom torch.nn import Linear, Module\n\n\nclass Net(Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.m = [Linear(4, 4)]\n",
        ("from torch import nn\n", "self.m = nn.ModuleList([Linear(4, 4)])"),
    ),
    "computed-from-a-parameter": BrokenModel(
        net("scale = 2.0\nself.scale = scale\nself.w = self.fc.weight / scale  # once", "return self.fc(x) @ self.w"),
        ("    @property\n    def w(self):\n        return self.fc.weight / self.scale  # once\n",),
        "2x4",
    ),
    "view-of-a-buffer": BrokenModel(
        net('t = torch.arange(8.)\nself.register_buffer("table", t)\nself.cos = t[:4]', "return self.fc(x) * self.cos"),
        ("return self.table[:4]",),
        "2x4",
    ),
    "second-name-changed-later": BrokenModel(
        net(
            'self.register_buffer("f", torch.ones(4), persistent=False)\nself.old = self.f',
            "if x.shape[0] > 99:\n    self.f = self.f * 2\nreturn self.fc(x) * self.f + self.old",
        ),
        ('self.register_buffer("old", self.f.clone(), persistent=False)',),
        "2x4",
    ),
    "two-names": BrokenModel(
        net("self.a = torch.ones(4)\nself.b = self.a", "return self.fc(x) * self.a * self.b"),
        ('self.register_buffer("a", torch.ones(4), persistent=False)', "return self.a"),
        "2x4",
    ),
    "graph-of-a-plain-tensor": BrokenModel(
        net("w = torch.ones(4, requires_grad=True)\nself.v = w * 2", "return self.fc(x) * self.v"),
        ('self.register_buffer("v", (w * 2).detach(), persistent=False)',),
        "2x4",
    ),
    "zeros-in-forward": BrokenModel(
        net("", "h = torch.zeros(x.shape[0], 4)\nreturn self.fc(x) + h"),
        ("h = torch.zeros(x.shape[0], 4, device=x.device)",),
        "2x4",
    ),
    "zeros-in-forward-on-lines": BrokenModel(
        net("", "h = torch.full(\n    (x.shape[0], 4),\n    2.0,\n)\nreturn self.fc(x) + h"),
        ("            2.0,\n            device=x.device,\n        )",),
        "2x4",
    ),
    "two-in-forward": BrokenModel(
        net(
            "self.t = torch.ones(4)", "h = torch.zeros(4)\nx = self.fc(x) + h\ng = torch.ones(4)\nreturn x * g * self.t"
        ),
        ("h = torch.zeros(4, device=x.device)", "g = torch.ones(4, device=x.device)", 'register_buffer("t"'),
        "2x4",
    ),
    "created-in-a-helper": BrokenModel(
        net(
            "",
            "return self.fc(x) + self.positions(x)",
            more="\n    def positions(self, y: torch.Tensor):\n        return torch.arange(y.shape[-1])\n",
        ),
        ("torch.arange(y.shape[-1], device=y.device)",),
        "2x4",
    ),
    "created-in-a-function": BrokenModel(
        net(
            "",
            "return self.fc(x) + positions(x)",
            head=HEAD + "def positions(y):\n    return torch.arange(y.shape[-1])\n\n\n",
        ),
        ("torch.arange(y.shape[-1], device=y.device)",),
        "2x4",
    ),
    "cache-without-device": BrokenModel(
        net(
            "self.t = None",
            "if self.t is None:\n    self.t = torch.ones(4)\nreturn self.fc(x) + self.t",
        ),
        (
            "if self.t is None or self.t.device != x.device or self.t.dtype != x.dtype:\n"
            "            self.t = torch.ones(4, device=x.device, dtype=x.dtype)\n",
        ),
        "2x4",
    ),
    "cache-by-size": BrokenModel(
        net(
            "self.cache = None",
            "if self.cache is None or self.cache.shape[0] < x.shape[0]:\n"
            "    self.cache = torch.ones(x.shape[0], 4, device=x.device)\nreturn self.fc(x) + self.cache",
        ),
        ("or self.cache.device != x.device or self.cache.dtype != x.dtype:", "dtype=x.dtype)"),
        "2x4",
    ),
    "complex": BrokenModel(
        net("self.f = torch.polar(torch.ones(4), torch.arange(4.))", "return (self.fc(x) * self.f).abs()"),
        ("(self.fc(x) * self.f.to(x.device)).abs()",),
        "2x4",
    ),
    "complex-buffer": BrokenModel(
        net(
            'self.register_buffer("f", torch.polar(torch.ones(4), torch.arange(4.)), persistent=False)',
            "return (self.fc(x) * self.f).abs()",
        ),
        ("torch.view_as_real(torch.polar(", "torch.view_as_complex(self.f.float())"),
        "2x4",
    ),
    **{
        f"saved-by-{name.strip('_')}": BrokenModel(
            net("self.t = torch.randn(4)", "return self.fc(x) * self.t", more=f"\n    def {name}{code}\n"),
            ('self.register_buffer("t", torch.randn(4), persistent=False)',),
            "2x4",
        )
        for name, code in (
            (
                "get_extra_state",
                "(self):\n        return self.t\n\n    def set_extra_state(self, state):\n        self.t = state",
            ),
            (
                "_save_to_state_dict",
                "(self, entries, prefix, keep_vars):\n"
                "        super()._save_to_state_dict(entries, prefix, keep_vars)\n"
                '        entries[prefix + "table"] = self.t\n\n'
                "    def _load_from_state_dict(self, entries, prefix, *args):\n"
                '        self.t = entries.pop(prefix + "table")\n'
                "        super()._load_from_state_dict(entries, prefix, *args)",
            ),
        )
    },
    "parameters-in-a-list-of-tensors": BrokenModel(
        net(
            "self.ps = [nn.Parameter(torch.eye(4)), nn.Parameter(torch.eye(4))]",
            "return torch.linalg.multi_dot([self.fc(x), *self.ps])",
        ),
        ("self.ps = nn.ParameterList([",),
        "2x4",
    ),
    "tensor-of-a-submodule": BrokenModel(
        net("del self.fc.bias\nself.fc.bias = torch.randn(4)"),
        ('self.fc.register_buffer("bias", torch.randn(4))',),
        "2x4",
    ),
    **{
        f"stored-with-a-graph-as-{kind}": BrokenModel(
            net(init, f"x = self.fc(x)\n{update}\nreturn x * self.t.detach()"),
            ('self.register_buffer("t", torch.zeros(4))', after),
            "2x4",
        )
        for kind, init, update, after in (
            (
                "an-attribute",
                "self.t = torch.zeros(4)",
                "self.t = 0.9 * self.t + 0.1 * x.mean(0)",
                "self.t = (0.9 * self.t + 0.1 * x.mean(0)).detach()",
            ),
            (
                "a-buffer",
                'self.register_buffer("t", torch.zeros(4))',
                "self.t = torch.lerp(self.t, x.mean(0), 0.1)",
                "self.t = torch.lerp(self.t, x.mean(0), 0.1).detach()",
            ),
        )
    },
    "complex128-buffer": BrokenModel(
        net(
            'self.register_buffer("f", torch.randn(4, dtype=torch.complex128))',
            "return self.fc(x) * self.f.real",
        ),
        ("torch.view_as_complex(self.f.double())",),
        "2x4",
    ),
    "another-name-of-torch": BrokenModel(
        net(
            'self.register_buffer("f", th.polar(th.ones(4), th.arange(4.)))',
            "return (self.fc(x) * self.f).abs() + th.ones(4)",
            head="import torch as th\nfrom torch import nn\n\n\n",
        ),
        (
            "th.view_as_real(th.polar(",
            "th.view_as_complex(self.f.float())",
            "= th.view_as_real(f)",
            "th.ones(4, device=x.device)",
        ),
        "2x4",
    ),
    **{
        f"parameters-as-{name}": BrokenModel(
            net("self.ps = [nn.Parameter(torch.randn(4)) for _ in range(3)]", f"return self.fc(x) * {before}.sum(0)"),
            ("self.ps = nn.ParameterList([", after),
            shape,
        )
        for shape in ("", "2x4")
        for name, before, after in (
            (f"argument-{shape}", "torch.stack(self.ps)", "torch.stack(list(self.ps))"),
            (f"keyword-{shape}", "torch.stack(tensors=self.ps)", "torch.stack(tensors=list(self.ps))"),
            (f"slice-{shape}", "torch.stack(self.ps[:])", "torch.stack(list(self.ps[:]))"),
            (f"vector-{shape}", *["nn.utils.parameters_to_vector(self.ps).view(3, 4)"] * 2),
            (f"operand-{shape}", "torch.stack(self.ps + [x[0]])", "torch.stack(list(self.ps) + [x[0]])"),
        )
    },
    "parameters-of-a-function-imported-in-forward": BrokenModel(
        net(
            "self.ps = [nn.Parameter(th.randn(4)) for _ in range(3)]",
            "import torch\nreturn self.fc(x) * torch.stack(self.ps).sum(0)",
            head="import torch as th\nfrom torch import nn\n\n\n",
        ),
        ("self.ps = nn.ParameterList([", "torch.stack(list(self.ps))"),
        "2x4",
    ),
    "beside-compiled-code-that-no-check-reads": BrokenModel(
        net(
            "self.t = torch.ones(4)\nself.inner = torch.jit.trace(Shift(), torch.ones(4))",
            head=HEAD + "class Shift(nn.Module):\n    def forward(self, x):\n"
            "        return x + torch.tensor([1.0, 2.0, 3.0, 4.0])\n\n\n",
        ),
        ('self.register_buffer("t", torch.ones(4), persistent=False)',),
    ),
    "buffer-with-grad": BrokenModel(
        net('self.register_buffer("s", torch.ones(4).requires_grad_())', "return self.fc(x) * self.s"),
        ("self.s = nn.Parameter(torch.ones(4))",),
        "2x4",
    ),
    "built-in-a-method": BrokenModel(
        net("self.build()", more="\n    def build(self):\n        self.t = torch.ones(4)\n"),
        ('    def build(self):\n        self.register_buffer("t", torch.ones(4), persistent=False)',),
    ),
    "assigned-twice": BrokenModel(
        net("self.t = torch.ones(4)\nself.t = self.t * 2"),
        ('self.register_buffer("t", self.__dict__.pop("t"), persistent=False)',),
    ),
    "other-instance-name": BrokenModel(
        HEAD + "class Net(nn.Module):\n    def __init__(this):\n        super().__init__()\n"
        "        this.t = torch.ones(4)\n",
        ('this.register_buffer("t", torch.ones(4), persistent=False)',),
    ),
    "in-a-submodule": BrokenModel(
        HEAD + "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.t = torch.ones(4)\n"
        "\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.blocks = nn.ModuleList(Block() for _ in range(2))\n",
        ('self.register_buffer("t", torch.ones(4), persistent=False)',),
    ),
    "list-of-broken-modules": BrokenModel(
        HEAD + "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc, self.a, self.b = nn.Linear(4, 4), torch.ones(4), torch.zeros(4)\n\n"
        "    def forward(self, x):\n        return self.fc(x) * self.a + self.b\n\n\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.blocks = [Block() for _ in range(2)]\n\n"
        "    def forward(self, x):\n        return self.blocks[1](self.blocks[0](x))\n",
        (
            "self.blocks = nn.ModuleList([Block() for _ in range(2)])",
            'self.register_buffer("a", self.__dict__.pop("a"), persistent=False)',
            'self.register_buffer("b", self.__dict__.pop("b"), persistent=False)',
        ),
        "2x4",
    ),
    "in-a-base-class": BrokenModel(
        HEAD + "class Base(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.t = torch.ones(4)\n\n\nclass Net(Base):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(4, 4)\n",
        ('self.register_buffer("t", torch.ones(4), persistent=False)',),
    ),
    "decorated": BrokenModel(
        HEAD + "def keep(kind):\n    return kind\n\n\n@keep\nclass Net(nn.Module):\n    @torch.no_grad()\n"
        "    def __init__(self):\n        super().__init__()\n        self.t = torch.ones(4)\n",
        ('self.register_buffer("t", torch.ones(4), persistent=False)',),
    ),
}

#: Models without a fix: the text, the input, and a part of the reason.
BROKEN_MODELS |= {
    name: BrokenModel(
        net("self.t = torch.ones(4)", "return self.fc(x) + self.t", more=f"\n\n{more}\n"),
        ('self.register_buffer("t", torch.ones(4), persistent=False)',),
        "2x4",
    )
    for name, more in (
        ("a-subclass-reads", "class Other(Net):\n    def forward(self, x):\n        return x * self.t"),
        ("another-class-assigns", "class Other(nn.Module):\n    def __init__(self):\n        self.t = 3"),
        ("a-function-assigns-none", "def drop(model):\n    model.t = None"),
        ("a-subclass-needs-arguments", "class Other(Net):\n    def __init__(self, n):\n        self.n = n"),
        ("a-subclass-never-works", "class Other(Net):\n    def __init__(self):\n        raise OSError"),
    )
}

UNFIXABLE_MODELS = {
    **{
        name: BrokenModel(
            net(init, forward),
            (
                f"line 12 detaches the result of {layer}: to freeze {layer}, call self.{layer}.requires_grad_(False) "
                f"in __init__; to train {layer}, remove .detach()",
            ),
            "2x4",
        )
        for name, layer, init, forward in (
            ("detached-argument", "fc", "self.head = nn.Linear(4, 2)", "return self.head(self.fc(x).detach())"),
            (
                "detached-teacher",
                "old",
                "self.old = nn.Linear(4, 4)",
                "y = self.old(x).detach()\nreturn self.fc(x) - y",
            ),
            (
                "detached-teacher-of-layers",
                "old",
                "self.old = nn.Sequential(nn.Linear(4, 4), nn.ReLU())",
                "y = self.old(x).mean().detach()\nreturn self.fc(x) - y",
            ),
        )
    },
    "teacher-without-grad": BrokenModel(
        net(
            "self.old = nn.Sequential(nn.Linear(4, 4))",
            "with torch.no_grad():\n    y = self.old(x)\nreturn self.fc(x) - y",
            more="\n\nclass Other(nn.Module):\n    def forward(self, x):\n        return self.old(x).detach()\n",
        ),
        ("no method calls detach() on a result of old",),
        "2x4",
    ),
    "unused-layer": BrokenModel(
        net("self.skip = nn.Linear(4, 4)"), ("statecli has no fix for the rule no-gradient",), "2x4"
    ),
    "set-by-setattr": BrokenModel(net('setattr(self, "t", torch.ones(4))'), ("",)),
    "plain-object": BrokenModel(
        net(
            "self.box = Box()", head=HEAD + "class Box:\n    def __init__(self):\n        self.t = torch.ones(4)\n\n\n"
        ),
        ("statecli fix cannot make this change; make the change by hand",),
    ),
    "in-a-closure": BrokenModel(
        net("t = torch.ones(4)\nself.act = lambda x: x + t"),
        ("statecli fix cannot make this change; make the change by hand",),
    ),
    "a-list-changed-in-forward": BrokenModel(
        net("self.a = [torch.ones(4)]", "self.a.append(self.a[0] * 2)\nreturn self.fc(x) + self.a[0]"), ("",), "2x4"
    ),
    "an-item-changed-in-forward": BrokenModel(
        net("self.a = [torch.ones(4)]", "self.a[0] = self.a[0] * 2\nreturn self.fc(x) + self.a[0]"), ("",), "2x4"
    ),
    "read-from-the-class": BrokenModel(
        net("", "return self.fc(x) + Net.t", before="    t = torch.arange(4.)\n"), ("of the class Net",), "2x4"
    ),
    "assigned-from-outside": BrokenModel(
        net("self.w = self.fc.weight * 2", more="\n\ndef reset(model):\n    model.w = torch.ones(4)\n"),
        ("code outside of Net assigns w",),
    ),
    "own-getattr": BrokenModel(
        net(
            "self.t = torch.ones(4)",
            more="\n    def register_buffer(self, *args, **kwargs):\n        raise TypeError\n",
        ),
        ("the fixed class cannot be checked",),
    ),
    **{
        name: BrokenModel(
            net("self.t = torch.ones(4)", "return self.fc(x) + self.t", more=f"\n\n{more}\n"), (reason,), "2x4"
        )
        for name, more, reason in (
            (
                "a-subclass-assigns-a-number",
                "class Other(Net):\n    def __init__(self):\n        super().__init__()\n        self.t = 3",
                "Other, a subclass of Net, also defines t (line 18)",
            ),
            (
                "a-subclass-of-a-subclass-assigns",
                "class Mid(Net):\n    pass\n\n\nclass Other(Mid):\n    def reset(self):\n        self.t = None",
                "Other, a subclass of Net, also defines t (line 21)",
            ),
            (
                "a-subclass-has-a-class-attribute",
                "class Other(Net):\n    t: int = 3",
                "Other, a subclass of Net, also defines t (line 16)",
            ),
            (
                "a-mixin-of-a-subclass-assigns",
                "class Mixin:\n    def off(self):\n        self.t = 0\n\n\nclass Other(Mixin, Net):\n    pass",
                "Mixin, a base class of Net, also defines t (line 17)",
            ),
            (
                "a-trainer-assigns-a-number",
                "class Trainer:\n    def scale(self):\n        self.net.t = 2",
                "code outside of Net assigns t (line 17)",
            ),
            (
                "a-subclass-reads-the-dict",
                "class Other(Net):\n    def __init__(self):\n        Net.__init__(self)\n        len(vars(self)['t'])",
                "the class Other cannot be built with the fix: building the model raised KeyError: 't'",
            ),
            (
                "a-class-around-it-reads-the-dict",
                "class Other(nn.Module):\n    def __init__(self):\n        super().__init__()\n        n = Net()\n"
                '        self.n = len(n.__dict__["t"])',
                "the class Other cannot be built with the fix: building the model raised KeyError: 't'",
            ),
        )
    },
    "a-trainer-reverses-the-list": BrokenModel(
        net(
            "self.m = [nn.Linear(4, 4)]",
            "return self.m[0](self.fc(x))",
            more="\n\nclass Trainer:\n    def flip(self):\n        self.net.m.reverse()\n",
        ),
        ("line 17 reads .m.reverse, which nn.ModuleList does not have",),
        "2x4",
    ),
    **{
        f"cache-of-{name}": BrokenModel(
            net("self.m = None", f"x = self.fc(x)\nif self.m is None:\n    self.m = {value}\nreturn x - self.m"),
            ("another input gives m other values",),
            "2x4",
        )
        for name, value in (("the-input", "x.detach().mean(0)"), ("random-values", "torch.rand(4)"))
    },
    "tensor-subclass": BrokenModel(
        net(
            "self.t = torch.randn(4).as_subclass(Named)",
            "return self.fc(x) * self.t.as_subclass(torch.Tensor)",
            head=HEAD + "class Named(torch.Tensor):\n    pass\n\n\n",
        ),
        ("with the fix, the check move is inconclusive: moving the model",),
        "2x4",
    ),
    "variable-of-the-file-in-a-function": BrokenModel(
        net("", "return self.fc(x) * GT", head=HEAD + "def make():\n    return torch.ones(4)\n\n\nGT = make()\n\n\n"),
        ("GT is a variable of the file; statecli edits only classes",),
        "2x4",
    ),
    "variable-of-the-file": BrokenModel(
        net("", "return self.fc(x) * GT", head=HEAD + "GT = torch.ones(4)\n\n\n"),
        ("GT is a variable of the file; statecli edits only classes",),
        "2x4",
    ),
    "stored-and-read-with-a-graph": BrokenModel(
        net('self.register_buffer("t", torch.zeros(4))', "self.t = self.t + self.fc(x).mean(0)\nreturn x * self.t"),
        ("line 13 reads t with its graph, so .detach() would change the gradients",),
        "2x4",
    ),
    "stored-and-read-by-another-class-with-a-graph": BrokenModel(
        net(
            "self.stat = Stat()",
            "h = self.stat(x)\nreturn self.fc(h) * self.stat.t",
            head=HEAD + "class Stat(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            '        self.fc = nn.Linear(4, 4)\n        self.register_buffer("t", torch.zeros(4))\n\n'
            "    def forward(self, x):\n        y = self.fc(x)\n        self.t = y.mean(0)\n        return y\n\n\n",
        ),
        ("line 25 reads t with its graph, so .detach() would change the gradients",),
        "2x4",
    ),
    "stored-under-two-names": BrokenModel(
        net('self.register_buffer("t", torch.zeros(2, 4))', "y = self.t = self.fc(x)\nreturn y * x + self.fc(x)"),
        ("the statement also assigns other names; assign t in its own statement",),
        "2x4",
    ),
    "a-function-reads-the-complex-buffer": BrokenModel(
        net(
            'self.register_buffer("z", torch.ones(4) * 1j)',
            "return self.fc(x) + self.z.abs()",
            more="\n\ndef angle(model):\n    return model.z.angle()\n",
        ),
        ("code outside of Net uses z as a complex tensor (line 16)",),
        "2x4",
    ),
    "popped": BrokenModel(
        net("self.m = [nn.Linear(4, 4)]", more="\n    def last(self):\n        return self.m.pop()\n"), ("",)
    ),
}

#: Models without a defect.
HONEST_MODELS = {
    "tied": net("self.out = nn.Linear(4, 4)\nself.out.weight = self.fc.weight", "return self.out(self.fc(x))"),
    "frozen": net("self.fc.requires_grad_(False)\nself.out = nn.Linear(4, 1)", "return self.out(self.fc(x))"),
    "numbers": net("self.sizes = [1, 2]\nself.names = {'a': 1}"),
    "detached-target": net("self.out = nn.Linear(4, 4)", "y = self.fc(x)\nreturn self.out(y) + y + y.detach()"),
}

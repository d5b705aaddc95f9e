"""What a verification asks for, refused where it contradicts itself."""

from __future__ import annotations

import re

from statecli.commands.verify.run import Request
from statecli.core.errors import UsageError
from statecli.requests.options import CUDA

_DEVICE = re.compile(rf"meta|cpu|fake-cuda|{CUDA}")
#: An option, and the proofs that it says something of.
_OF = {"device": {"move", "forward"}, "dtype": {"cast"}, "optimizer": {"step"}}


def check(request: Request) -> None:
    """Raise UsageError for what makes no sense, before the model is built."""
    if request.device is not None and not _DEVICE.fullmatch(request.device):
        raise UsageError(f"--device {request.device}: no such device; write meta, cpu, cuda, cuda:N or fake-cuda")
    asked = {name.value for name in request.checks}
    for option, of in _OF.items():
        value = getattr(request, option)
        if asked and value is not None and not asked & of:
            shown = value if isinstance(value, str) else value.__name__
            raise UsageError(f"--{option} {shown}: --check leaves out {' and '.join(sorted(of))}; leave it out too")

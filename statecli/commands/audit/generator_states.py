"""Check saved states of torch's CPU generator, because some accepted states make torch read memory outside the state.

`torch.set_rng_state` takes a table of 624 numbers, `next` and `left`. The next draws read the table from `next` on,
`left - 1` of them, and torch only checks that neither exceeds 624. Source: LegacyGeneratorState in
aten/src/ATen/CPUGeneratorImpl.cpp. A state of CUDA (16 bytes, a seed and an offset) has no table.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from statecli.commands.audit.extra_states import locate_storage, read_bytes
from statecli.core import quoting
from statecli.core.model_state import Hazard, ModelState, ScannedPickle

_STATE_BYTES = 5056
#: Start of a state: seed, `left`, `seeded`, `next`. torch uses the lower half of `next`.
_STATE_HEADER = struct.Struct("<QiiI")
_TABLE_LENGTH = 624


def check_generator_states(state: ModelState) -> Iterator[ScannedPickle]:
    """Yield a hazard for each accepted state that makes torch read past the state's end. Raises UnreadableError."""
    for tensor in state.tensors:
        if tensor.dtype == "uint8" and tensor.elements == _STATE_BYTES and tensor.data is not None:
            _, remaining, seeded, following = _STATE_HEADER.unpack_from(read_bytes(tensor))
            is_accepted = seeded and 0 < remaining <= _TABLE_LENGTH and following <= _TABLE_LENGTH
            if is_accepted and following + remaining > _TABLE_LENGTH + 1:
                text = (
                    f"{quoting.name(tensor.fqn)}: the state of a torch generator claims {remaining} unused numbers "
                    f"from position {following} on, but has only {_TABLE_LENGTH} numbers; after torch.set_rng_state, "
                    "torch would read memory outside the state"
                )
                yield ScannedPickle(
                    f"the tensor {quoting.name(tensor.fqn)}", locate_storage(tensor, state), hazards=(Hazard(text),)
                )

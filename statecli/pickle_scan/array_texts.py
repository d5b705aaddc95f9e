"""Check the texts that RLlib unpacks to arrays. A policy's checkpoint stores the limits of its spaces as such texts.

RLlib decodes base64, decompresses the result with zlib, and gives it to `numpy.load(allow_pickle=True)`, which
unpickles an array of objects, and everything except arrays. Source: rllib/utils/serialization.py of ray 2.60.
"""

from __future__ import annotations

import base64
import re
import zlib

from statecli.core.lazy_pattern import compile_on_use

#: Key of the mapping that describes a space, and keys of the arrays in it.
SPACE, ARRAYS = "space", ("low", "high", "nvec")
HELP = "do not load the file with RLlib; contact its publisher"
#: Bytes of the array that are decompressed. The header of an array of numbers has 128 bytes, and a header of version
#: 1.0 at most 64 KB.
_HEAD_BYTES = 1024
#: Longest text that is decoded, in characters; the limits of 100 million numbers compress to less.
_MAX_CHARACTERS = 16 << 20
#: Header of an array of numbers.
_NUMBERS = compile_on_use(
    rb"\x93NUMPY\x01\0..\{'descr': '[<>|=][biufc]\d{1,2}', 'fortran_order': (?:True|False), ", re.DOTALL
)


def unpickles_text(text: str | bytes) -> bool:
    """Return True if RLlib may unpickle the text; False for an array of numbers and for a text that RLlib refuses."""
    if len(text) > _MAX_CHARACTERS:
        return True
    try:
        head = zlib.decompressobj().decompress(base64.b64decode(text), _HEAD_BYTES)
    except (ValueError, zlib.error):
        return False  # RLlib decodes the text in the same way
    return bool(head) and _NUMBERS.match(head) is None

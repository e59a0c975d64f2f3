"""A true-or-false key of a GGUF file, without building the lists of its vocabulary.

`gguf.GGUFReader` makes an array of every token: 18 s for a vocabulary of 262,144.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_NUM_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Of a value, by its type: the numbers and (7) the bool."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_VERSIONS = (2, 3)


def gguf_flag(file: Path, key: str) -> bool | None:
    """Value of a bool key; None where the file has none of this name, or is no little-endian GGUF of version 2 or 3."""
    with file.open("rb") as stream:
        magic, version, _, num_keys = struct.unpack("<4sIQQ", stream.read(24))
        if magic != b"GGUF" or version not in _VERSIONS:
            return None
        for _ in range(num_keys):
            name = stream.read(_number(stream, "<Q")).decode()
            kind = _number(stream, "<I")
            if name == key and kind == _BOOL:
                return bool(stream.read(1)[0])
            _skip(stream, kind)
    return None


def _skip(stream: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        stream.seek(_number(stream, "<Q"), 1)
    elif kind == _ARRAY:
        of, count = _number(stream, "<I"), _number(stream, "<Q")
        if of in _NUM_BYTES:
            stream.seek(count * _NUM_BYTES[of], 1)
        else:
            for _ in range(count):
                _skip(stream, of)
    else:
        stream.seek(_NUM_BYTES[kind], 1)


def _number(stream: BinaryIO, form: str) -> int:
    (value,) = struct.unpack(form, stream.read(struct.calcsize(form)))
    return int(value)

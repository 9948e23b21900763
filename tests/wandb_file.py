"""Reads the file of an offline run of W&B: records in the log format of LevelDB, which `wandb` itself only writes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK_BYTES = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Record]:
    """All records of a `.wandb` file."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, parts = 7, b""
    while place + 7 <= len(data):
        if (left := -place % _BLOCK_BYTES) and left < 7:  # too little for a header: the block is filled up
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        piece = data[place + 7 : place + 7 + length]
        place += 7 + length
        parts = piece if kind in (_FULL, _FIRST) else parts + piece
        if kind in (_FULL, _LAST):
            yield Record.FromString(parts)


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged, one dict a call of `wandb.log`, without W&B's own `_…` keys."""
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
            }
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return rows

"""
One rank of `test_replicas.py`, the first process of a node of its own: `replica_rank.py FOLDER FAULT`.

With a fault, rank 0 cannot read the stage's first shard: "read" gives an error, "short" fewer bytes than are listed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from accelerate import Accelerator

from mu_grpo_trl.replicas import replicate
from mu_grpo_trl.stage.schema import StageError

folder, fault = Path(sys.argv[1]), sys.argv[2]
accelerator = Accelerator(cpu=True)
read = np.fromfile


def faulty(path: Path, *args, **options) -> np.ndarray:
    if path.suffix == ".arrow" and fault == "read":
        raise OSError("Input/output error")
    return read(path, *args, **options)[: -1 if path.suffix == ".arrow" and fault == "short" else None]


if accelerator.is_main_process:
    np.fromfile = faulty
try:
    replicate(accelerator, folder)
except StageError as error:
    print(error)
    raise SystemExit(3) from error
finally:
    accelerator.end_training()  # gloo's threads may abort a process that ends without

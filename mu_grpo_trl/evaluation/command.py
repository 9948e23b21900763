"""
`mu-grpo eval`: checkpoints on benchmarks, by the paper's protocol.

    mu-grpo eval --config recipes/qwen2.5-math-7b.yaml --checkpoints runs/qwen2.5-math-7b/checkpoint-*

Options are read from `--protocol FILE.yaml` and from the command line, which wins; prompts, context and servers are
those of the training recipe `--config FILE.yaml`. Started again after a kill, it generates only what is missing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ..locks import FolderInUseError
from ..rollout.engine import EngineError
from ..stage.schema import StageError
from ..train import message_only
from .options import parse
from .report import JSON_NAME, MARKDOWN_NAME, write_results
from .run import evaluate
from .store import RESPONSES_NAME


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate, write `eval.json` and `eval.md`, and print the table."""
    logging.basicConfig(format="%(message)s")
    mendable = (EngineError, FolderInUseError, StageError, ValueError, TypeError, OSError, ImportError)
    with message_only(*mendable):
        options = parse(sys.argv[1:] if argv is None else argv)
        results = evaluate(options)
    folder = Path(options.evaluation.output_dir)
    print(f"\n{write_results(results, folder)}")
    print(f"{folder}/{JSON_NAME}, {MARKDOWN_NAME}, {RESPONSES_NAME}/")

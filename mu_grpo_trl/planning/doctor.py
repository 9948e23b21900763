"""
`mu-grpo doctor [--config RECIPE] [--key value …]`: whether this machine is ready for a run, one line a thing.

    ok    trl 1.16.0 (needs <1.17,>=1.16)
    warn  no GPU: only recipes with `use_cpu: true` run here
    fail  output_dir '/data/runs': Permission denied. Choose another `output_dir`, or mend its rights

With a recipe, its output folder, vLLM servers and trackers are looked at; without one, the current folder. Nothing is
downloaded, no request takes longer than 3 seconds, and no key is printed. Exit code 1 if a line says fail.
"""

from __future__ import annotations

import argparse
import http.client
import json
import netrc
import os
import platform
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from huggingface_hub import constants, get_token
from packaging.requirements import Requirement
from torch.cuda import nccl

from ..rollout.engine import EngineError
from ..rollout.vllm_process import check_version

TIMEOUT_S = 3.0
DISTRIBUTION = "mu-grpo-trl"
WANDB_HOST = "api.wandb.ai"
RUNTIME_EXTRAS = ("deepspeed", "wandb")
SLOW_DISK_MB_S = 100.0
_PROBE_BYTES, _PROBE_S = 64 * 2**20, 2.0


class Line(NamedTuple):
    """One thing that was looked at; the text of a `warn` or `fail` ends with the mend."""

    verdict: Literal["ok", "warn", "fail"]
    text: str


@dataclass(frozen=True)
class Subject:
    """
    What of a run is looked at.

    Args:
        output_dir (`Path`): where it would write.
        vllm_python (`str` or None): interpreter of managed servers; None where none is started.
        server_urls (`Sequence[str]`): external servers.
        api_key (`str` or None): for those.
        uses_wandb (`bool`), pushes (`bool`): whether it logs there, and pushes to the Hub.
        on_cpu (`bool`): whether it asks for the CPU.
    """

    output_dir: Path = Path(".")
    vllm_python: str | None = sys.executable
    server_urls: Sequence[str] = ()
    api_key: str | None = None
    uses_wandb: bool = False
    pushes: bool = False
    on_cpu: bool = False
    from_recipe: bool = False


def main(argv: Sequence[str] | None = None) -> None:
    """Print the lines as they come. Exit code 1: one of them says fail; 2: the recipe is wrong."""
    parser = argparse.ArgumentParser(
        prog="mu-grpo doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, help="a recipe; what follows overrides it")
    arguments, rest = parser.parse_known_args(argv)
    subject = Subject() if arguments.config is None and not rest else _subject(arguments.config, rest)
    failed = False
    for line in examine(subject):
        failed |= line.verdict == "fail"
        print(f"{line.verdict:<5} {line.text}", flush=True)
    if failed:
        sys.exit(1)


def _subject(recipe: Path | None, rest: Sequence[str]) -> Subject:
    from .options import Findings, read_options

    findings = Findings()
    options = read_options(recipe, rest, findings)
    if findings.errors or options is None:
        print("\n".join(f"mu-grpo doctor: {error}" for error in findings.errors), file=sys.stderr)
        print("`mu-grpo plan` with the same arguments says more.", file=sys.stderr)
        sys.exit(2)
    config = options.config
    managed = config.starts_vllm and config.vllm_mode == "managed"
    return Subject(
        output_dir=config.output_path,
        vllm_python=config.vllm_interpreter if managed else None,
        server_urls=config.server_urls if config.starts_vllm and not managed else (),
        api_key=config.vllm_api_key or os.environ.get("VLLM_API_KEY"),
        uses_wandb="wandb" in (config.report_to or ()),
        pushes=bool(config.push_to_hub),
        on_cpu=options.on_cpu,
        from_recipe=True,
    )


def examine(subject: Subject) -> Iterator[Line]:
    """All that is looked at, quick things first."""
    yield from packages()
    yield from devices(subject.on_cpu)
    yield from backends(subject.on_cpu)
    yield ports()
    if subject.vllm_python is not None:
        yield managed_vllm(subject.vllm_python, required=subject.from_recipe)
    for url in subject.server_urls:
        yield server(url, subject.api_key)
    yield disk_speed(subject.output_dir)
    yield hub(subject.pushes)
    yield wandb(subject.uses_wandb)


# Software


def packages() -> Iterator[Line]:
    """Versions of what is installed against the ranges that this package declares."""
    yield Line("ok", f"Python {platform.python_version()}, PyTorch {torch.__version__}")
    try:
        declared = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        yield Line("warn", f"{DISTRIBUTION} is not installed: versions are not checked. pip install -e .")
        return
    for requirement in declared:
        marker = requirement.marker
        extra = next((name for name in RUNTIME_EXTRAS if marker and marker.evaluate({"extra": name})), None)
        needed = marker is None or marker.evaluate({"extra": ""})
        if (needed or extra) and (line := version_line(requirement, optional=not needed)) is not None:
            yield line


def version_line(requirement: Requirement, optional: bool) -> Line | None:
    """What there is to say about one package; None about an optional one that is not there."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return None if optional else Line("fail", f"{requirement.name} is not installed. pip install '{requirement}'")
    wanted = f"{requirement.name}{requirement.specifier}"
    if not requirement.specifier.contains(version, prereleases=True):
        verdict = "warn" if optional else "fail"
        return Line(verdict, f"{requirement.name} {version} is not {wanted}. pip install '{wanted}'")
    return Line("ok", f"{requirement.name} {version} (needs {requirement.specifier or 'any'})")


def managed_vllm(python: str, required: bool) -> Line:
    """Whether an interpreter has a vLLM that the trainer can start; it is asked for its version, not imported."""
    program = "from importlib.metadata import version; print(version('vllm'))"
    mend = "Set `vllm_python` to an interpreter with vLLM, or `rollout_engine: transformers`"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Line("fail", f"{python!r} cannot be run: {error}. {mend}")
    if done.returncode:
        return Line("fail" if required else "warn", f"{python!r} has no vLLM. {mend}")
    try:
        return Line("ok", f"vLLM {check_version(done.stdout.strip())} in {python!r}")
    except EngineError as error:
        return Line("fail", str(error))


# Devices and processes


def devices(on_cpu: bool) -> Iterator[Line]:
    """The GPUs."""
    if not torch.cuda.is_available():
        yield (
            Line("ok", "no GPU, none needed")
            if on_cpu
            else Line(
                "warn", "no GPU: only recipes with `use_cpu: true` run here. Check the driver and `torch.version.cuda`"
            )
        )
        return
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        text = (
            f"GPU {number}: {torch.cuda.get_device_name(number)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        )
        yield (
            Line("ok", text)
            if free > 0.9 * total
            else Line("warn", f"{text}: another process is on it. End it, or leave it out of CUDA_VISIBLE_DEVICES")
        )


def backends(on_cpu: bool) -> Iterator[Line]:
    """The libraries that ranks talk by: gloo is tried, NCCL only looked for, as it needs two GPUs."""
    yield _try_gloo()
    if not on_cpu and torch.cuda.is_available():
        yield (
            Line("ok", f"NCCL {'.'.join(map(str, nccl.version()))}")
            if torch.distributed.is_nccl_available()
            else Line("fail", "this PyTorch has no NCCL. Install the build for your CUDA version")
        )


def _try_gloo() -> Line:
    if not torch.distributed.is_gloo_available():
        return Line("fail", "this PyTorch has no gloo. Install an official build")
    store, limit = torch.distributed.HashStore(), timedelta(seconds=TIMEOUT_S)
    try:
        group: Any = torch.distributed.ProcessGroupGloo(store, 0, 1, limit)
        group.allreduce([torch.ones(1)]).wait()
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        return Line("fail", f"gloo cannot open a connection: {first}. Set GLOO_SOCKET_IFNAME to a network interface")
    return Line("ok", "gloo")


def ports() -> Line:
    """The port at which ranks meet, and one for a managed server."""
    port = int(os.environ.get("MASTER_PORT", "29500"))
    for number, mend in ((port, "Pass another --main_process_port to accelerate launch"), (0, "Check `ulimit -n`")):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", number))
            except OSError as error:
                return Line("fail", f"port {number or 'of a server'} on 127.0.0.1: {error.strerror}. {mend}")
    return Line("ok", f"port {port} is free")


# Services


def server(url: str, api_key: str | None) -> Line:
    """Whether an external vLLM server answers, and with which version."""
    try:
        answer = _get(f"{url}/version", api_key)
        return Line("ok", f"{url} runs vLLM {check_version(str(answer.get('version')))}")
    except urllib.error.HTTPError as error:
        mend = "Give its key in VLLM_API_KEY" if error.code in (401, 403) else "Is it a vLLM server?"
        return Line("fail", f"{url} answers {error.code}. {mend}")
    except EngineError as error:
        return Line("fail", f"{url}: {error}")
    except (OSError, ValueError) as error:
        return Line("fail", f"{url} does not answer ({error}). Start it, or mend `vllm_server_urls`")


def hub(required: bool) -> Line:
    """Whether there is a login to the Hub, and whose."""
    verdict: Literal["warn", "fail"] = "fail" if required else "warn"
    token = get_token()
    if not token:
        return Line(verdict, "Hub: not logged in. `hf auth login`, or set HF_TOKEN")
    if constants.HF_HUB_OFFLINE:
        return Line("ok", "Hub: a token is there; HF_HUB_OFFLINE is set, so it was not tried")
    try:
        return Line("ok", f"Hub: logged in as {_get(f'{constants.ENDPOINT}/api/whoami-v2', token).get('name')}")
    except urllib.error.HTTPError as error:
        return Line(verdict, f"Hub: the token is refused ({error.code}). `hf auth login`")
    except (OSError, ValueError) as error:
        return Line(verdict, f"Hub: cannot be reached ({error}). Check the network, or set HF_HUB_OFFLINE=1")


def wandb(required: bool) -> Line:
    """Whether there is a key for W&B; it is not tried."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return Line("ok", f"W&B: WANDB_MODE is {os.environ['WANDB_MODE']}")
    key = os.environ.get("WANDB_API_KEY")
    try:
        key = key or netrc.netrc().authenticators(WANDB_HOST)
    except (OSError, netrc.NetrcParseError):
        key = key or None
    if key:
        return Line("ok", "W&B: a key is there")
    return Line("fail" if required else "warn", "W&B: not logged in. `wandb login`, or WANDB_MODE=offline")


def _get(url: str, key: str | None) -> dict[str, object]:
    """The JSON object at an address, or an error after `TIMEOUT_S`, also where the name cannot be resolved."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    answers: queue.Queue[bytes | Exception] = queue.Queue()

    def ask() -> None:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                answers.put(answer.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True, name="doctor").start()  # no timeout ends a look-up of a name
    try:
        answer = answers.get(timeout=TIMEOUT_S)
    except queue.Empty:
        raise TimeoutError(f"no answer in {TIMEOUT_S:.0f} seconds") from None
    if isinstance(answer, Exception):
        raise answer if isinstance(answer, OSError) else ValueError(str(answer))
    values = json.loads(answer)
    if not isinstance(values, dict):
        raise ValueError("no JSON object")
    return values


# Disk


def disk_speed(folder: Path) -> Line:
    """What a file of 64 MiB, forced to the disk, takes in the output folder, or in the parent that exists."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    written, block = 0, os.urandom(4 * 2**20)
    start = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            while written < _PROBE_BYTES and time.perf_counter() - start < _PROBE_S:
                written += file.write(block)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        return Line(
            "fail", f"output_dir '{folder}': {error.strerror}. Choose another `output_dir`, or mend its rights"
        )
    speed = written / 1e6 / (time.perf_counter() - start)
    text = f"output_dir '{folder}': {speed:.0f} MB/s written"
    if speed < SLOW_DISK_MB_S:
        return Line(
            "warn", f"{text}, so a checkpoint of 85 GB takes {85e3 / speed / 60:.0f} minutes. Use a faster disk"
        )
    return Line("ok", text)

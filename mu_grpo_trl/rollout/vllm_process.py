"""vLLM servers that the trainer starts itself: one process group each, gone whenever the trainer is."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .engine import EngineError

SERVED_MODEL_NAME = "policy"
OLDEST_VLLM = (0, 22)
NEWEST_VLLM = (0, 31)

_HOST = "127.0.0.1"
_POLL_S = 0.2
_STOP_S = 30.0
_PORT_TRIES = 3
_LOG_TAIL_LINES = 20
_LOG_ERROR_LINES = 10
_LOG_WIDTH = 400

_SUPERVISOR = """
import os, signal, subprocess, sys, time
trainer = int(sys.argv[1])
server = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while server.poll() is None and os.getppid() == trainer:
    time.sleep(0.2)
if server.returncode is None:
    os.killpg(0, signal.SIGKILL)
sys.exit(server.returncode if server.returncode >= 0 else 128 - server.returncode)
"""
"""Leads the server's process group and kills it once the trainer is gone, however it went. A parent-death signal would
fire at the end of the *thread* that started the server, and a pipe is kept open by whatever the trainer forks."""

_TRAINER_VARIABLES = re.compile(
    r"(GLOBAL_|LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|ROLE_.*|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|ACCELERATE_.*"
    r"|FSDP_.*|PYTORCH_(CUDA_)?ALLOC_CONF|OMP_NUM_THREADS"
)
"""The launcher's description of the training job (a server must not join it), and allocator settings that sleep mode
cannot work with."""


@dataclass(frozen=True)
class ServerOptions:
    """
    How managed servers are started.

    Args:
        log_dir (`Path`): folder of the servers' logs.
        python (`str`): interpreter with vLLM installed.
        tensor_parallel_size (`int`): devices per server.
        gpu_memory_utilization (`float` or None): share of the device's memory a server takes; None for vLLM's default.
        max_model_len (`int` or None): limit on prompt and response together, in tokens; None for the model's own.
        dtype (`str`): dtype of the weights in the server.
        enable_sleep_mode (`bool`): needed to sleep between stages; GPUs only.
        startup_timeout_s (`float`): seconds a server may take until it answers.
        port (`int`): port of the (first) server, 0 for any free one.
        extra_args (`tuple[str, ...]`): more command-line arguments, e.g. `("--enforce-eager",)`.
        env (`Mapping[str, str]`): more environment variables.
    """

    log_dir: Path
    python: str = sys.executable
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    dtype: str = "auto"
    enable_sleep_mode: bool = False
    startup_timeout_s: float = 1800.0
    port: int = 0
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # it may hold a key


def preflight(python: str) -> str:
    """
    Version of the vLLM that the interpreter `python` imports; loads no model.

    Raises:
        [`EngineError`]: when there is no such interpreter, or it has no usable vLLM of a supported version.
    """
    probe = "import vllm; print('vllm-version', vllm.__version__)"
    advice = "Set `vllm_python` to an interpreter with vLLM installed, or `rollout_engine: transformers`."
    try:
        done = subprocess.run([python, "-c", probe], env=_server_env({}), capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{python!r} cannot be run to start vLLM: {error}. {advice}") from error
    found = re.search(r"^vllm-version (\S+)$", done.stdout, re.MULTILINE)
    if done.returncode != 0 or found is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EngineError(f"{python!r} cannot import vLLM (exit code {done.returncode}): {last}. {advice}")
    return check_version(found[1])


def check_version(version: str) -> str:
    """`version` itself if it is of the supported range (`0.22` to `0.31`). Raises [`EngineError`] otherwise."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not OLDEST_VLLM <= (int(numbers[1]), int(numbers[2])) <= NEWEST_VLLM:
        oldest, newest = (".".join(map(str, limit)) for limit in (OLDEST_VLLM, NEWEST_VLLM))
        raise EngineError(f"vLLM {version} is not supported: the range is {oldest} to {newest}. Install one of these.")
    return version


def device_sets(num_servers: int | None, tensor_parallel_size: int, devices: list[str]) -> list[str | None]:
    """
    `CUDA_VISIBLE_DEVICES` of each server: consecutive `devices`, `tensor_parallel_size` each.

    Without devices (CPU) every entry is None. Example: `device_sets(None, 2, ["0", "1", "2", "3"]) == ["0,1", "2,3"]`.

    Raises:
        `ValueError`: when there are too few devices for the servers.
    """
    if not devices:
        return [None] * (num_servers or 1)
    possible = len(devices) // tensor_parallel_size
    if possible < (num_servers or 1):
        raise ValueError(
            f"{num_servers or 1} server(s) of {tensor_parallel_size} device(s) each do not fit on {len(devices)} "
            f"device(s) ({','.join(devices)}). Lower `vllm_num_servers` or `vllm_tensor_parallel_size`."
        )
    size = tensor_parallel_size
    return [",".join(devices[i * size : (i + 1) * size]) for i in range(num_servers or possible)]


class ManagedServer:
    """
    One vLLM server process on a loopback port. Not thread-safe, but `stop` may be called from any thread.

    Args:
        options (`ServerOptions`): how to start it.
        number (`int`): tells its log from the others'.
        devices (`str` or None): its `CUDA_VISIBLE_DEVICES`; None leaves the environment's.
    """

    def __init__(self, options: ServerOptions, number: int = 0, devices: str | None = None) -> None:
        self.log_path = options.log_dir / f"vllm-{number}.log"
        self.port = options.port + number if options.port else 0
        self._options = options
        self._devices = devices
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._starts = 0

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, policy: Path) -> None:
        """
        Serve the model folder `policy`; returns once the server answers.

        Raises:
            [`EngineError`]: when the process ends or does not answer in time; the message quotes the end of its log.
        """
        self.stop(patience_s=0.0)  # one that is still there is dead or frozen
        for tries_left in reversed(range(_PORT_TRIES)):
            self._spawn(policy)
            try:
                return self._wait_until_ready()
            except EngineError as error:
                self.stop()
                lost_the_port = self._options.port == 0 and "ddress already in use" in str(error)
                if not (lost_the_port and tries_left):
                    raise

    def stop(self, patience_s: float = _STOP_S) -> None:
        """End the server and all it started, by force after `patience_s`. Harmless when it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log_tail(self) -> str:
        """Of what the server wrote since its last start: the first lines that speak of errors, and the last lines."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            lines = [line[:_LOG_WIDTH] for line in log.read().decode(errors="replace").splitlines()]
        before, last = lines[:-_LOG_TAIL_LINES], lines[-_LOG_TAIL_LINES:]
        errors = [line for line in before if re.search(r"error|exception|died", line, re.IGNORECASE)]
        return "\n".join([*errors[:_LOG_ERROR_LINES], *last])

    def describe_failure(self) -> str:
        """Exit code (if it has ended) and an excerpt of the log, for error messages."""
        code = None if self._process is None else self._process.poll()
        state = "is still running" if code is None else f"ended with exit code {code}"
        return f"The vLLM server of {self.log_path} {state}. From its log:\n{self.log_tail()}"

    def command(self, policy: Path) -> list[str]:
        """The command line that serves `policy`."""
        options = self._options
        command = [options.python, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(policy), "--served-model-name", SERVED_MODEL_NAME]
        command += ["--host", _HOST, "--port", str(self.port), "--dtype", options.dtype]
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        command += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
        # Else every server, after every start, would draw the same random numbers.
        command += ["--seed", str(zlib.crc32(f"{policy}:{self.log_path.name}:{self._starts}".encode()))]
        if options.gpu_memory_utilization is not None:
            command += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
        if options.max_model_len is not None:
            command += ["--max-model-len", str(options.max_model_len)]
        if options.enable_sleep_mode:
            command.append("--enable-sleep-mode")
        return [*command, *options.extra_args]

    def _spawn(self, policy: Path) -> None:
        self.port = self._free_port()
        self._starts += 1
        env = _server_env(self._options.env)
        if self._devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = self._devices
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        supervisor = [sys.executable, "-I", "-S", "-c", _SUPERVISOR, str(os.getpid())]
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*supervisor, *self.command(policy)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def _free_port(self) -> int:
        wanted = self._options.port and self.port
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, wanted))
            except OSError as error:
                raise EngineError(
                    f"Port {wanted} is in use ({error}). Choose another, or 0 for any free one."
                ) from error
            return probe.getsockname()[1]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._options.startup_timeout_s
        while not _answers(f"{self.url}/health"):
            if not self.alive:
                raise EngineError(self.describe_failure())
            if time.monotonic() > deadline:
                raise EngineError(f"No answer after {self._options.startup_timeout_s:g} s. {self.describe_failure()}")
            time.sleep(_POLL_S)


def _server_env(extra: Mapping[str, str]) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not _TRAINER_VARIABLES.fullmatch(name)}
    env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for name in ("no_proxy", "NO_PROXY"):
        env[name] = ",".join(filter(None, [env.get(name), _HOST, "localhost"]))
    return env | dict(extra)


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5.0) as response:
            return response.status == 200
    except OSError:
        return False

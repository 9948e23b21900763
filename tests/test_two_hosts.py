"""
Two hosts, as two network namespaces joined by a wire: a trainer rank on each, a real vLLM server on the second.

Needs root and `ip` (iproute2), as CI has; elsewhere the tests are skipped with that reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import REPOSITORY, WORKER, config_options, displacement_errors

from mu_grpo_trl import load_stage
from mu_grpo_trl.lab.arithmetic import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, make_problems
from mu_grpo_trl.lab.warm_start import warm_start_path

pytestmark = [pytest.mark.distributed, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

PORT = 8000
CUT_S = 8
CONTEXT = MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS


@dataclass
class Host:
    """A network namespace with an address of its own."""

    name: str
    address: str
    interface: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, command: list[str], log: Path, env: dict[str, str] | None = None, hidden: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Run a command on this host; it sees an empty folder of its own in the place of `hidden`."""
        if hidden is not None:
            command = [
                "unshare",
                "--mount",
                "sh",
                "-c",
                f'mount -t tmpfs none "{hidden}" && exec "$@"',
                "sh",
                *command,
            ]
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(env or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def wire(self, state: str) -> None:
        """Plug the network cable in (`up`) or pull it (`down`)."""
        _ip("-n", self.name, "link", "set", self.interface, state)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()
        _ip("netns", "delete", self.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    tag = uuid.uuid4().hex[:6]
    first = Host(f"mg-{tag}-0", "10.213.7.1", f"mg{tag}0")
    second = Host(f"mg-{tag}-1", "10.213.7.2", f"mg{tag}1")
    try:
        _ip("netns", "add", first.name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root and iproute2: {error}")
    _ip("netns", "add", second.name)
    peer = ("peer", "name", second.interface, "netns", second.name)
    _ip("link", "add", first.interface, "netns", first.name, "type", "veth", *peer)
    for host in (first, second):
        _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
        _ip("-n", host.name, "link", "set", "lo", "up")
        host.wire("up")
    yield first, second
    for host in (first, second):
        host.close()


@dataclass(frozen=True)
class Server:
    """A vLLM server that was started by hand."""

    url: str
    log: Path

    @property
    def num_answers(self) -> int:
        return self.log.read_text().count('"POST /v1/completions HTTP/1.1" 200')


@pytest.fixture(scope="module")
def server(hosts: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> Server:
    """On the second host, started as the docs say."""
    host, log = hosts[1], tmp_path_factory.mktemp("server") / "vllm.log"
    command = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(warm_start_path())]
    command += ["--host", host.address, "--port", str(PORT), "--dtype", "float32", "--max-model-len", str(CONTEXT)]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enforce-eager"]
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": host.address}
    process = host.start(command, log, env)
    health = ["ip", "netns", "exec", hosts[0].name, sys.executable, "-c"]
    health += [f"import urllib.request as r; r.urlopen('http://{host.address}:{PORT}/health', timeout=2)"]
    deadline = time.monotonic() + 300
    while subprocess.run(health, capture_output=True).returncode != 0:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(2)
    return Server(f"http://{host.address}:{PORT}", log)


def start_ranks(
    hosts: tuple[Host, Host], spec: dict[str, Any], folder: Path, hidden: Path | None = None
) -> list[subprocess.Popen[bytes]]:
    """One rank on each host; the second does not see what the first writes to `hidden`."""
    (folder / "spec.json").write_text(json.dumps(spec))
    processes = []
    for rank, host in enumerate(hosts):
        env = {
            "WORLD_SIZE": "2",
            "RANK": str(rank),
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": host.interface,
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_MIXED_PRECISION": "no",
        }
        command = [sys.executable, str(WORKER), str(folder / "spec.json")]
        processes.append(host.start(command, folder / f"rank{rank}.log", env, hidden if rank == 1 else None))
    return processes


def wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> list[int]:
    deadline = time.monotonic() + timeout_s
    return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]


def wait_for(condition: Callable[[], Any], processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes), logs(folder)
        time.sleep(0.02)


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-4000:] for path in sorted(folder.glob("rank*.log")))


def server_options(folder: Path, server: Server, **options: Any) -> dict[str, Any]:
    return {
        **config_options(folder / "run"),
        "model": str(warm_start_path()),
        "prompts": make_problems(128)["prompt"][:],
        "rollout_engine": "vllm",
        "vllm_mode": "server",
        "vllm_server_urls": [server.url],
        "max_context_length": CONTEXT,
        "max_completion_length": MAX_RESPONSE_TOKENS,
        "rollout_concurrency": 8,
        "prompts_per_update": 8,
        "stage_updates": 8,
        "max_steps": 16,
        **options,
    }


def status(stage: Path) -> str:
    manifest = stage / "manifest.json"
    return json.loads(manifest.read_text())["status"] if manifest.exists() else "not begun"


def test_a_run_over_two_hosts_outlives_a_cut_in_each_phase(
    hosts: tuple[Host, Host], server: Server, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    stage = run / "stages" / "stage-000"
    sizes = {"prompts_per_update": 2, "stage_updates": 32, "max_steps": 64}
    options = server_options(tmp_path, server, **sizes, save_strategy="steps", save_steps=2)
    processes = start_ranks(hosts, options, tmp_path)
    wait_for(lambda: status(stage) == "filling", processes, tmp_path)
    answers = server.num_answers
    wait_for(lambda: server.num_answers >= answers + 16, processes, tmp_path)
    cut(hosts[1], lambda: server.num_answers)
    assert status(stage) == "filling"
    wait_for((run / "checkpoint-2").exists, processes, tmp_path)
    cut(hosts[1], lambda: len(list(run.glob("checkpoint-*"))))
    assert not (run / "checkpoint-32").exists()
    assert wait(processes, 150) == [0, 0], logs(tmp_path)
    for number in range(2):
        rows = load_stage(run / "stages" / f"stage-{number:03d}")
        assert sorted(zip(rows["group"], rows["sample"], strict=True)) == [(g, s) for g in range(64) for s in range(4)]
    weights = torch.load(run / "weights.pt")
    assert len(weights) == 1 + 64 and all(torch.isfinite(tensor).all() for tensor in weights[-1].values())


def cut(host: Host, progress: Callable[[], int]) -> None:
    """Pull a host's cable for `CUT_S`; what was on its way arrives within the first half, and nothing after it."""
    host.wire("down")
    time.sleep(CUT_S / 2)
    before = progress()
    time.sleep(CUT_S / 2)
    assert progress() == before
    host.wire("up")


def test_stages_are_copied_to_a_host_that_does_not_share_their_folder(
    hosts: tuple[Host, Host], server: Server, tmp_path: Path
) -> None:
    stages = tmp_path / "local"
    stages.mkdir()
    sgd = {"optim": "sgd", "learning_rate": 0.25}  # Adam would make steps of rounding where gradients are near 0
    options = server_options(tmp_path, server, stage_dir=str(stages), replicate_stages=True, max_steps=12, **sgd)
    assert wait(start_ranks(hosts, options, tmp_path, hidden=stages), 240) == [0, 0], logs(tmp_path)
    assert [path.name for path in sorted(stages.glob("stage-*"))] == ["stage-000", "stage-001"]
    weights = torch.load(tmp_path / "run" / "weights.pt")
    again = {**options, "output_dir": str(tmp_path / "alone"), "max_steps": 8, "replicate_stages": False}
    (tmp_path / "alone.json").write_text(json.dumps(again))
    alone = hosts[0].start([sys.executable, str(WORKER), str(tmp_path / "alone.json")], tmp_path / "rank-alone.log")
    assert wait([alone], 120) == [0], logs(tmp_path)
    expected = torch.load(tmp_path / "alone" / "weights.pt")
    assert max(displacement_errors(expected, weights, step=8).values()) < 1e-3


def test_a_stages_folder_that_the_hosts_do_not_share_is_refused_on_both(
    hosts: tuple[Host, Host], server: Server, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    processes = start_ranks(hosts, server_options(tmp_path, server), tmp_path, hidden=tmp_path / "run")
    assert all(code != 0 for code in wait(processes, 120))
    for rank in range(2):
        log = (tmp_path / f"rank{rank}.log").read_text()
        assert "is not shared by all ranks: [1] do not see what rank 0 wrote there" in log
    assert not list(tmp_path.glob("run/stages/stage-*"))

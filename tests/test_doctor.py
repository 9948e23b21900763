"""`mu-grpo doctor`: what it says of a machine, that it is quick where nothing answers, and that it tells no secret."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mu_grpo_trl.cli import main
from mu_grpo_trl.planning import doctor

SECRET = "hf_secret_of_this_test"


@pytest.fixture(autouse=True)
def no_logins(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "HF_TOKEN", "VLLM_API_KEY", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "get_token", lambda: None)
    monkeypatch.setattr(doctor.constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def service():
    """Starts an HTTP server that answers every request with a code and JSON; gives its address and the keys it got."""
    servers = []

    def start(code: int, answer: object, delay_s: float = 0.0) -> tuple[str, list[str | None]]:
        keys: list[str | None] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                keys.append(self.headers.get("Authorization"))
                time.sleep(delay_s)
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", keys

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("requirement", "optional", "verdict", "text"),
    [
        ("pyyaml>=1", False, "ok", "pyyaml 6"),
        ("pyyaml>=999", False, "fail", "is not pyyaml>=999. pip install 'pyyaml>=999'"),
        ("pyyaml>=999", True, "warn", "is not pyyaml>=999"),
        ("no-such-package-here>=1", False, "fail", "is not installed. pip install 'no-such-package-here>=1'"),
    ],
)
def test_a_package_outside_its_range_is_named_with_what_installs_it(requirement, optional, verdict, text):
    line = doctor.version_line(Requirement(requirement), optional)
    assert line is not None
    assert line.verdict == verdict
    assert text in line.text


def test_an_optional_package_that_is_not_there_is_passed_over():
    assert doctor.version_line(Requirement("no-such-package-here"), optional=True) is None


def test_all_that_this_package_needs_is_looked_at_and_what_only_its_developers_need_is_not():
    names = {line.text.split()[0] for line in doctor.packages()}
    assert {"trl", "transformers", "torch", "datasets", "accelerate"} <= names
    assert not {"pytest", "ruff", "pyright"} & names


def test_a_server_that_runs_vllm_is_told_with_its_version_and_gets_the_key(service):
    url, keys = service(200, {"version": "0.25.1"})
    assert doctor.server(url, SECRET) == ("ok", f"{url} runs vLLM 0.25.1")
    assert keys == [f"Bearer {SECRET}"]


@pytest.mark.parametrize(
    ("code", "answer", "text"),
    [
        (401, {}, "answers 401. Give its key in VLLM_API_KEY"),
        (404, {}, "answers 404. Is it a vLLM server?"),
        (200, {"version": "0.10.0"}, "vLLM 0.10.0 is not supported: the range is 0.22 to 0.31"),
        (200, ["x"], "does not answer (no JSON object). Start it, or mend `vllm_server_urls`"),
    ],
)
def test_a_server_that_cannot_be_used_is_told_with_the_mend(service, code, answer, text):
    url, _ = service(code, answer)
    line = doctor.server(url, None)
    assert line.verdict == "fail"
    assert text in line.text


def test_nobody_waits_for_what_does_not_answer(service, monkeypatch):
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
    slow, _ = service(200, {"version": "0.25.1"}, delay_s=2.0)
    start = time.monotonic()
    assert [doctor.server(url, None).verdict for url in (closed, slow)] == ["fail", "fail"]
    monkeypatch.setattr(doctor, "get_token", lambda: SECRET)
    monkeypatch.setattr(doctor.constants, "ENDPOINT", closed)
    line = doctor.hub(required=False)
    assert (line.verdict, "Check the network" in line.text) == ("warn", True)
    assert time.monotonic() - start < 2.0


def test_a_login_to_the_hub_is_told_by_its_name_and_no_token_is_printed(service, monkeypatch):
    endpoint, keys = service(200, {"name": "someone"})
    monkeypatch.setattr(doctor, "get_token", lambda: SECRET)
    monkeypatch.setattr(doctor.constants, "ENDPOINT", endpoint)
    assert doctor.hub(required=True) == ("ok", "Hub: logged in as someone")
    assert keys == [f"Bearer {SECRET}"]
    refused, _ = service(401, {})
    monkeypatch.setattr(doctor.constants, "ENDPOINT", refused)
    line = doctor.hub(required=True)
    assert (line.verdict, SECRET in line.text) == ("fail", False)


def test_logins_are_needed_only_by_runs_that_use_them(monkeypatch, tmp_path):
    assert [doctor.hub(False).verdict, doctor.hub(True).verdict] == ["warn", "fail"]
    assert [doctor.wandb(False).verdict, doctor.wandb(True).verdict] == ["warn", "fail"]
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    assert doctor.wandb(True) == ("ok", "W&B: a key is there")
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / ".netrc").write_text(f"machine {doctor.WANDB_HOST}\n  login user\n  password {SECRET}\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert doctor.wandb(True) == ("ok", "W&B: a key is there")


def test_an_interpreter_without_vllm_or_that_is_none_is_told(tmp_path):
    assert doctor.managed_vllm("/no/such/python", required=True).verdict == "fail"
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 0.25.1\n")
    fake.chmod(0o755)
    assert doctor.managed_vllm(str(fake), required=True) == ("ok", f"vLLM 0.25.1 in {str(fake)!r}")
    fake.write_text("#!/bin/sh\nexit 1\n")
    assert [doctor.managed_vllm(str(fake), required).verdict for required in (True, False)] == ["fail", "warn"]


def test_the_port_at_which_ranks_meet_must_be_free(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        line = doctor.ports()
        assert line.verdict == "fail"
        assert f"port {taken.getsockname()[1]} " in line.text
        assert "--main_process_port" in line.text
    assert doctor.ports().verdict == "ok"


def test_the_disk_is_measured_without_leaving_anything_and_one_that_refuses_is_told(tmp_path, monkeypatch):
    line = doctor.disk_speed(tmp_path / "not" / "yet" / "there")
    assert line.verdict in ("ok", "warn")
    assert "MB/s" in line.text
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(doctor, "SLOW_DISK_MB_S", 1e9)
    assert doctor.disk_speed(tmp_path).verdict == "warn"
    refused = doctor.disk_speed(Path("/proc/none"))
    assert refused.verdict == "fail"
    assert "Choose another `output_dir`" in refused.text


def test_gloo_is_tried():
    assert next(doctor.backends(on_cpu=True)) == ("ok", "gloo")


def run(capsys, *arguments: str) -> tuple[int, list[str]]:
    code = 0
    try:
        main(["doctor", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, [*captured.out.splitlines(), *captured.err.splitlines()]


def test_a_recipe_decides_what_is_looked_at_and_the_exit_code(capsys, tmp_path, service, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    url, _ = service(200, {"version": "0.25.1"})
    recipe = tmp_path / "recipe.yaml"
    values = {"output_dir": str(tmp_path / "out"), "vllm_mode": "server", "vllm_server_urls": [url], "use_cpu": True}
    recipe.write_text(json.dumps(values | {"report_to": "none"}))
    code, lines = run(capsys, "--config", str(recipe))
    assert code == 0, lines
    assert f"ok    {url} runs vLLM 0.25.1" in lines
    assert "ok    no GPU, none needed" in lines
    assert not any("vllm_python" in line or SECRET in line for line in lines)

    code, lines = run(capsys, "--config", str(recipe), "--report_to", "wandb")
    assert code == 1
    assert [line for line in lines if line.startswith("fail")] == [
        "fail  W&B: not logged in. `wandb login`, or WANDB_MODE=offline"
    ]

    code, lines = run(capsys, "--config", str(recipe), "--top_p", "0.5")
    assert code == 2
    assert any("`top_p=0.5` cannot be honored" in line for line in lines)


def test_without_a_recipe_the_machine_is_looked_at(capsys):
    code, lines = run(capsys)
    assert code == 0, lines
    assert all(line.startswith(("ok   ", "warn ")) for line in lines if line)
    assert any(sys.executable in line for line in lines)

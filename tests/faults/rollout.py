"""Faults of servers and of the network between them and the run."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
from helpers import PROMPTS
from stub_vllm import StubVLLM

from mu_grpo_trl.stage.reader import StageReader

from .case import BITWISE, FLUSHED, MANAGED, PROCESS, STUB, VLLM, Case, Fails, Fault, Recovers, Unexpected
from .worker import At, Call

NUM_GROUPS = 40
STAGE_1 = 17
"""The first generation request of stage 1, counted from 1."""


def at(fault: str, *numbers: int) -> Callable[[int, dict[str, Any]], str | None]:
    """The stub's misbehavior at some of its generation requests."""
    return lambda number, body: fault if number in numbers else None


def _nth_answer(change: Callable[[dict[str, Any]], Any], *numbers: int) -> Callable[[dict[str, Any]], None]:
    """Changes some of the answers, counted from 1."""
    count = itertools.count(1)

    def distort(answer: dict[str, Any]) -> None:
        if next(count) in numbers:
            change(answer)

    return distort


def _serves_through(num_repeated: int, **misbehavior: Any) -> Any:
    """One start; every group asked for once, and `num_repeated` of them again."""

    def run(case: Case) -> None:
        _set(case.stub, misbehavior)
        case.go()
        asked = len(case.stub.generated)
        if asked != NUM_GROUPS + num_repeated:
            raise Unexpected(f"{asked} requests for {NUM_GROUPS} groups, {NUM_GROUPS + num_repeated} expected")
        case.notes.append(f"{asked} requests for {NUM_GROUPS} groups")

    return run


def _stops_until_mended(**misbehavior: Any) -> Any:
    """One start with the misbehavior, one without."""

    def run(case: Case) -> None:
        healthy = {name: getattr(case.stub, name) for name in misbehavior}
        _set(case.stub, misbehavior)
        case.go(exits=2)
        _set(case.stub, healthy)
        case.go()

    return run


def _set(stub: StubVLLM, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(stub, name, value)


def _distorted(change: Callable[[dict[str, Any]], Any], from_request: int = STAGE_1 + 2) -> Any:
    """Stops because one choice of an answer in stage 1 is wrong; goes on once it is not."""

    def run(case: Case) -> None:
        def distort(answer: dict[str, Any]) -> None:
            if len(case.stub.generated) >= from_request:
                change(answer["choices"][1])

        case.stub.distort = distort
        case.go(exits=2)
        case.stub.distort = lambda answer: None
        case.go()

    return run


def _without_a_logp(value: float | None) -> Any:
    """One answer with one log-prob that is none; the token is stored as NaN and left out."""

    def run(case: Case) -> None:
        def change(answer: dict[str, Any]) -> None:
            answer["choices"][2]["logprobs"]["token_logprobs"][0] = value

        case.stub.distort = _nth_answer(change, STAGE_1)
        case.go()
        missing = [
            StageReader(case.output / f"stages/stage-{stage:03d}").summary().tokens_without_logp for stage in range(3)
        ]
        if missing != [0, 1, 0]:
            raise Unexpected(f"tokens without a log-prob in the stages: {missing}, [0, 1, 0] expected")
        case.notes.append("that token alone is left out")

    return run


def _reordered(case: Case) -> None:
    case.stub.distort = lambda answer: answer["choices"].reverse()
    case.go()


def _aborted(case: Case) -> None:
    case.stub.distort = _nth_answer(
        lambda answer: answer["choices"][1].__setitem__("finish_reason", "abort"), 5, STAGE_1
    )
    case.go()
    if len(case.stub.generated) != NUM_GROUPS + 2:
        raise Unexpected(f"{len(case.stub.generated)} requests, {NUM_GROUPS + 2} expected")


def _stale_in_stage_1(case: Case) -> None:
    case.stub.reload_does_nothing = True  # stage 0 is the policy it started with
    case.go(exits=2)
    case.stub.reload_does_nothing = False
    case.go()


def _raw_during_a_stage(case: Case) -> None:
    """Every check before the stage passes; the ratios before its first update do not."""

    def fault(number: int, body: dict[str, Any]) -> None:
        case.stub.logprobs_mode = "raw_logprobs" if number >= STAGE_1 else "processed_logprobs"

    case.stub.fault = fault
    case.go(exits=2)
    case.stub.fault, case.stub.logprobs_mode = at("", 0), "processed_logprobs"
    shutil.rmtree(case.output / "stages/stage-001")
    case.go()


def _two_servers(stale: bool) -> Any:
    def run(case: Case) -> None:
        second = StubVLLM(case.lab.policy("bigram"))
        second.reload_does_nothing = stale
        second.start()
        both = case.setting.but(options={"vllm_server_urls": [case.stub.url, second.url]})
        try:
            case.go(setting=both, exits=2 if stale else 0)
            if stale:
                second.reload_does_nothing = False
                case.go(setting=both)
        finally:
            second.stop()

    return run


def _server_process(action: Callable[[Case], None], exits: int = 0) -> Any:
    """Something happens to the external server while stage 1 is generated; after an error, it is started again."""

    def run(case: Case) -> None:
        case.process  # noqa: B018  # started before the run
        running = case.start(At("generating", STAGE_1 + 2, Call("time:sleep", 0.5)))
        running.wait_for("generating", STAGE_1 + 2)
        action(case)
        ended = running.wait()
        if ended.exitcode != exits:
            raise Unexpected(f"exit code {ended.exitcode}, {exits} expected:\n{ended.log[-4000:]}")
        if exits:
            case.process.kill()
            case.process.start()
            case.go()

    return run


def _killed_and_started_again(case: Case) -> None:
    case.process.kill()
    case.process.start()


def _frozen_for(seconds: float) -> Any:
    def action(case: Case) -> None:
        case.process.send(signal.SIGSTOP)
        time.sleep(seconds)
        case.process.send(signal.SIGCONT)

    return action


def _managed(*, then: bool = False, exits: int = 0, **env: str) -> Any:
    """Stub servers in vLLM's place that misbehave as `env` says; `then`: once more without."""

    def run(case: Case) -> None:
        case.go(setting=case.setting.but(env=env), exits=exits)
        if then:
            case.go()

    return run


def _server_killed(number: int) -> Any:
    """A signal to the managed server (whatever it is) while stage 1 is generated."""

    def run(case: Case) -> None:
        running = case.start(At("generating", STAGE_1 + 2, Call("time:sleep", 0.5)))
        running.wait_for("generating", STAGE_1 + 2)
        pids = _children_serving(running.processes[0].pid)
        if not pids:
            raise Unexpected("no server process was found")
        for pid in pids:
            os.kill(pid, number)
        case.notes.append(f"signal {number} to {len(pids)} process(es)")
        ended = running.wait(1000)
        if ended.exitcode:
            raise Unexpected(f"exit code {ended.exitcode}:\n{ended.log[-4000:]}")

    return run


def _children_serving(pid: int | None) -> list[int]:
    """Processes below `pid` that run a server's module or one of its engines, the supervisor aside."""
    below = psutil.Process(pid).children(recursive=True)
    names = [(child.pid, " ".join(child.cmdline())) for child in below]
    return [child for child, name in names if ("api_server" in name and "Popen" not in name) or "EngineCore" in name]


def _trainer_killed_with_its_server(case: Case) -> None:
    running = case.start(At("generating", STAGE_1 + 2, Call("time:sleep", 0.5)))
    running.wait_for("generating", STAGE_1 + 2)
    served = _children_serving(running.processes[0].pid)
    if not served:
        raise Unexpected("no server process was found")
    running.kill()
    running.wait()
    deadline = time.monotonic() + 5
    while any(_runs(pid) for pid in served):
        if time.monotonic() > deadline:
            raise Unexpected("the server outlived its trainer")
        time.sleep(0.05)
    case.go()


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _plain(exits: int = 0, **changes: Any) -> Any:
    """One start with a changed setting."""

    def run(case: Case) -> None:
        case.go(setting=case.setting.but(**changes), exits=exits)

    return run


def _garbage(choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"] = [None] * len(choice["token_ids"])


def _cut(choice: dict[str, Any], length: int = 1) -> None:
    choice["token_ids"], choice["finish_reason"] = choice["token_ids"][:length], "length"
    choice["logprobs"] = {key: value[:length] for key, value in choice["logprobs"].items()}


def _foreign_token(choice: dict[str, Any]) -> None:
    choice["token_ids"][0], choice["logprobs"]["tokens"][0] = 999, "token_id:999"


def _then(message: str) -> Fails:
    return Fails(message, then=BITWISE)


_MIDWAY = "in stage 1, at its third request"
_LONG = {"prompt": [*PROMPTS[:23], "1+" * 40]}
_PROXIES = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"), "http://127.0.0.1:9")

_PASSING = {
    "drop": "the connection is dropped",
    "truncate": "the answer is cut off",
    "html": "a proxy answers with a page",
    "500": "answers 500",
    "503": "answers 503",
    "429": "answers 429",
    "408": "answers 408",
}
_WRONG_ANSWERS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "no usable log-prob in a response": ("none of .* tokens has a usable log-prob", _garbage),
    "a log-prob above 0": ("above 0: the server gives logits",
                           lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, 0.5)),
    "a log-prob missing from the list": ("token ids but", lambda choice: choice["logprobs"]["token_logprobs"].pop()),
    "log-probs of other tokens": ("belong to other tokens",
                                  lambda choice: choice["logprobs"]["tokens"].__setitem__(0, "token_id:47")),
    "a token outside the vocabulary": ("do not fit the trainer's vocabulary", _foreign_token),
    "a choice twice": ("got those of index", lambda choice: choice.__setitem__("index", 0)),
    "a response cut below its limit": ("1 tokens ended with finish_reason='length'", _cut),
    "an empty completion": ("at least one", lambda choice: _cut(choice, 0)),
}  # fmt: skip

FAULTS = [
    *(
        Fault(what, "two requests of stage 0", BITWISE, _serves_through(2, fault=at(fault, 6, 7)), STUB,
              quick=fault == "drop")
        for fault, what in _PASSING.items()
    ),
    Fault("every tenth request is dropped", "all along", BITWISE,
          _serves_through(4, fault=lambda number, body: "drop" if number % 10 == 0 else None), STUB),
    Fault("responses aborted by the server", "in stages 0 and 1", BITWISE, _aborted, STUB),
    Fault("a slow server", "0.1 s a request", BITWISE, _serves_through(0, delay_s=0.1), STUB),
    Fault("choices in reverse order", "all along", BITWISE, _reordered, STUB),
    *(
        Fault(f"a log-prob that is {value}", "one token of stage 1", FLUSHED, _without_a_logp(value), STUB)
        for value in (None, float("nan"), -9999.0)
    ),
    Fault("answers 400", _MIDWAY, _then("answered 400: .*told to fail"),
          _stops_until_mended(fault=at("400", STAGE_1 + 2)), STUB),
    Fault("answers 401", _MIDWAY, _then("answered 401"), _stops_until_mended(fault=at("401", STAGE_1 + 2)), STUB),
    Fault("answers 500 for good", _MIDWAY, _then("failed 6 times.*500"),
          _stops_until_mended(fault=lambda number, body: "500" if number >= STAGE_1 + 2 else None), STUB),
    Fault("a request hangs for good", "the last of stage 0", _then("No prompt group finished for 3 s"),
          _stops_until_mended(fault=at("hang", 16)), STUB.but(options={"rollout_timeout_s": 3.0})),
    *(
        Fault(what, _MIDWAY, _then(message), _distorted(change), STUB)
        for what, (message, change) in _WRONG_ANSWERS.items()
    ),
    Fault("runs past the EOS", "from the start", _then("went on after EOS token"),
          _stops_until_mended(ignores_stop_ids=True), STUB),
    Fault("another model answers", _MIDWAY, _then("'other' answered"),
          _stops_until_mended(distort=lambda answer: answer.__setitem__("model", "other")), STUB),
    Fault("other prompt ids come back", _MIDWAY, _then("other token ids than it was sent"),
          _stops_until_mended(distort=lambda answer: answer["choices"][0].__setitem__("prompt_token_ids", [1, 2])),
          STUB),
    Fault("stale weights", "the reload for stage 1 does nothing", _then("serves other or stale weights"),
          _stale_in_stage_1, STUB, quick=True),
    Fault("a prefix cache that stays", "opening stage 0", _then("kept its prefix cache"),
          _stops_until_mended(reset_succeeds=False), STUB),
    Fault("raw log-probs", "before the first stage", _then("does not give log-probs after temperature"),
          _stops_until_mended(logprobs_mode="raw_logprobs"), STUB.but(options={"temperature": 0.7})),
    Fault("logits for log-probs", "before the first stage", _then("gives logits for log-probs"),
          _stops_until_mended(logprobs_mode="raw_logits"), STUB),
    Fault("log-probs become raw", "within stage 1", _then("Before the first update of stage 1"),
          _raw_during_a_stage, STUB.but(options={"temperature": 0.7})),
    Fault("an unsupported version", "before the first stage", _then("is not supported: the range is"),
          _stops_until_mended(version="0.21.2"), STUB),
    Fault("a server that never gets healthy", "before the first stage", _then("not healthy within 3 s.*503"),
          _stops_until_mended(health_status=503), STUB),
    Fault("too short a context", "before the first stage", Fails("allows 64 tokens.*needs 100"),
          _plain(2, options={"max_context_length": 100}), STUB),
    Fault("over-long prompts", "before the first stage", Fails("(?s)row.*23.*tokens"), _plain(2, prompts=_LONG),
          STUB),
    Fault("over-long prompts, `overlong_prompts: drop`", "before the first stage", FLUSHED,
          _plain(prompts=_LONG, options={"overlong_prompts": "drop"}), STUB),
    Fault("proxy variables are set", "all along", BITWISE, _plain(env=_PROXIES), STUB),
    Fault("one of two servers has stale weights", "opening stage 1", _then("one of them has other weights"),
          _two_servers(stale=True), STUB),
    Fault("two servers side by side", "all along", BITWISE, _two_servers(stale=False), STUB),
    Fault("an external server is killed and started again, with its first weights", _MIDWAY, BITWISE,
          _server_process(_killed_and_started_again), PROCESS, quick=True),
    Fault("an external server is killed for good", _MIDWAY, _then("was not healthy within 3 s"),
          _server_process(lambda case: case.process.kill(), exits=2), PROCESS),
    Fault("an external server freezes for a second", _MIDWAY, BITWISE, _server_process(_frozen_for(1)), PROCESS),
    Fault("an external server freezes", _MIDWAY, _then("was not healthy within 3 s"),
          _server_process(lambda case: case.process.send(signal.SIGSTOP), exits=2), PROCESS),
    Fault("a managed server crashes", "its third request", Recovers(warning="Starting http.* again"),
          _managed(STUB_FAULT="crash"), MANAGED),
    Fault("a managed server freezes", "its third request", Recovers(warning="Starting http.* again"),
          _managed(STUB_FAULT="freeze"), MANAGED),
    Fault("a managed server runs out of memory", "its third request",
          Recovers(warning="(?s)Starting http.*OutOfMemoryError"), _managed(STUB_FAULT="out of memory"), MANAGED),
    Fault("a managed server is killed", _MIDWAY, Recovers(warning="Starting http.* again"),
          _server_killed(signal.SIGKILL), MANAGED),
    Fault("a managed server dies whenever it is started", "its third request", _then("(?s)died 4 times.*exit code 3"),
          _managed(then=True, exits=2, STUB_FAULT="crash", STUB_FAULT_REPEATS="1"), MANAGED),
    Fault("a managed server cannot start", "opening stage 0", _then("(?s)exit code 1.*ValueError: no kernel image"),
          _managed(then=True, exits=2, STUB_FAILS_TO_START="no kernel image"), MANAGED),
    Fault("a managed server dies in its checks", "opening stage 0", _then("(?s)exit code 4.*no kernel image"),
          _managed(then=True, exits=2, STUB_DIES_IN_CHECKS="CUDA error: no kernel image"), MANAGED),
    Fault("someone takes the port of a managed server", "opening stage 0", BITWISE,
          _managed(STUB_LOSES_ITS_PORT="1"), MANAGED),
    Fault("no vLLM in the interpreter", "before the first stage", Fails("cannot import vLLM"),
          _plain(2, options={"vllm_python": "/usr/bin/python3"}, env={"PYTHONPATH": ""}), MANAGED),
    Fault("the trainer is killed while its server generates", _MIDWAY, BITWISE, _trainer_killed_with_its_server,
          MANAGED),
    Fault("a real vLLM server is killed", _MIDWAY, Recovers(bitwise=False, warning="Starting http.* again"),
          _server_killed(signal.SIGKILL), VLLM, needs="vllm"),
    Fault("a real vLLM server freezes", _MIDWAY, Recovers(bitwise=False, warning="Starting http.* again"),
          _server_killed(signal.SIGSTOP), VLLM, needs="vllm"),
]  # fmt: skip

"""Runs that are gone on with under other settings, and inputs that contradict the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers import PROMPTS, make_tokenizer
from workers.train_worker import digit_share

from .case import BITWISE, FLUSHED, IN_PROCESS, STUB, Case, Fails, Fault, Unexpected
from .worker import At, die

SECRET = "sk-of-the-fault-harness"
_WITHIN = At("after an optimizer step", 7, die)


def another_reward(completions: list[str], **_: Any) -> list[float]:
    return digit_share(completions)


def _changed(exits: int = 2, **changes: Any) -> Any:
    """Killed within stage 1, gone on with under a changed setting, and if that is refused, under the former one."""

    def run(case: Case) -> None:
        case.dies(_WITHIN)
        case.go(setting=case.setting.but(**changes), exits=exits)
        if exits:
            case.go()

    return run


def _secret(case: Case) -> None:
    """The key reaches the server, and no file or log of the run."""
    case.go()
    holding = [path for path in case.folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    if holding:
        raise Unexpected(f"the key is in {holding}")
    case.notes.append(f"{sum(1 for _ in case.folder.rglob('*'))} files searched for the key")


def _plain(case: Case) -> None:
    case.go(exits=2)


def _executed(case: Case) -> None:
    case.go(exits=2)
    if Path("/tmp/mu-grpo-fault").exists():
        raise Unexpected("the recipe's command was executed")


def _changed_tokenizer(case: Case) -> None:
    case.dies(_WITHIN)
    policy = Path(case.lab.policy("layers"))
    other = case.folder / "policy"
    other.mkdir()
    for path in policy.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["=="])
    tokenizer.save_pretrained(other)
    case.go(setting=case.setting.but(policy=str(other)), exits=2)
    case.go()


_REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "`num_generations`": ("num_generations: 4 → 8", {"options": {"num_generations": 8}}),
    "`prompts_per_update`": ("prompts_per_update: 4 → 2", {"options": {"prompts_per_update": 2}}),
    "`stage_updates` (μ)": ("stage_updates: 4 → 2", {"options": {"stage_updates": 2}}),
    "`temperature`": ("temperature: 1.0 → 0.9", {"options": {"temperature": 0.9}}),
    "`max_completion_length`": ("max_tokens: 16 → 17", {"options": {"max_completion_length": 17}}),
    "`seed`": ("seed: 42 → 43", {"options": {"seed": 43}}),
    "`reward_weights`": ("reward_weights: None → .0.5.", {"options": {"reward_weights": [0.5]}}),
    "the reward": ("reward_funcs: .'digit_share'. → .'another_reward'.", {"reward": another_reward}),
    "the dataset": ("hash of the dataset", {"prompts": {"prompt": PROMPTS[1:25]}}),
}

FAULTS = [
    *(
        Fault(f"{name} changed on resume", "within stage 1", Fails(f"other settings.*{message}", then=BITWISE),
              _changed(**changes))
        for name, (message, changes) in _REFUSED.items()
    ),
    Fault("the tokenizer changed on resume", "within stage 1",
          Fails("other settings.*hash of the tokenizer", then=BITWISE), _changed_tokenizer),
    Fault("`logging_steps` and `save_steps` changed on resume", "within stage 1", BITWISE,
          _changed(exits=0, options={"logging_steps": 3, "save_steps": 3})),
    Fault("two ranks instead of one on resume", "within stage 1", FLUSHED, _changed(exits=0, ranks=2)),
    Fault("one rank instead of two on resume", "within stage 1", FLUSHED, _changed(exits=0, ranks=1),
          IN_PROCESS.but(ranks=2)),
    Fault("an API key is set", "all along", BITWISE, _secret, STUB.but(env={"VLLM_API_KEY": SECRET})),
    Fault("a recipe that runs a command", "before the run", Fails("is not YAML"), _executed,
          IN_PROCESS.but(recipe="run_name: !!python/object/apply:os.system ['touch /tmp/mu-grpo-fault']\n")),
    Fault("an unknown key in the recipe", "before the run", Fails("unknown key 'stage_update'.*stage_updates"), _plain,
          IN_PROCESS.but(recipe="stage_update: 4\n")),
    Fault("a key twice in the recipe", "before the run", Fails("'max_steps'.*given more than once"), _plain,
          IN_PROCESS.but(recipe="max_steps: 4\n")),
    Fault("a column of the dataset is None", "before the run", Fails("None|row 3"), _plain,
          IN_PROCESS.but(prompts={"prompt": [*PROMPTS[:3], None, *PROMPTS[4:24]]})),
]  # fmt: skip

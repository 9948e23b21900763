"""Cards of the Hub: how a model was trained, and what a stage holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData, ModelCard, ModelCardData
from transformers import SchedulerType

from ..config import MuGRPOConfig
from ..schedule import Schedule
from ..stage.reader import StageReader
from .tracking import FIGURE_NAME

PAPER_URL = "https://huggingface.co/papers/2605.17570"
CITATIONS = r"""```bibtex
@article{mugrpo2026,
  title   = {How Off-Policy Can GRPO Be? {\mu}-GRPO for Efficient LLM Reinforcement Learning},
  journal = {arXiv preprint arXiv:2605.17570},
  year    = {2026}
}

@software{vonwerra2020trl,
  title   = {{TRL: Transformers Reinforcement Learning}},
  author  = {von Werra, Leandro and Belkada, Younes and Tunstall, Lewis and Beeching, Edward and Thrush, Tristan and Lambert, Nathan and Huang, Shengyi and Rasul, Kashif and Gallouédec, Quentin},
  license = {Apache-2.0},
  url     = {https://github.com/huggingface/trl},
  year    = {2020}
}
```"""  # noqa: E501
_LIBRARIES = ("mu-grpo-trl", "trl", "transformers", "peft", "torch", "datasets", "tokenizers")
_COLUMNS = """| column | content |
|---|---|
| `prompt_index`, `group`, `sample` | row of the prompts' dataset, prompt group of the stage, response of the group |
| `prompt_ids`, `completion_ids` | token ids |
| `behavior_logps` | log-prob of each generated token as it was sampled, after temperature |
| `rewards`, `reward`, `advantage` | per reward function, their weighted sum, and what the update used |
| `finish_reason` | `stop`, or `length` where the token limit cut it |
| `policy_version` | hash of the weights that generated it |"""


@dataclass(frozen=True)
class RunFacts:
    """
    What the card of a model tells of its run.

    Args:
        config (`MuGRPOConfig`), schedule (`Schedule`): of the run.
        updates (`int`): taken.
        logs (`Sequence[Mapping]`): `trainer.state.log_history`.
        rewards (`Sequence[str]`): names of the reward functions.
        total_s (`float`), rollout_s (`float`): T_total and T_rollout, in seconds.
        base_model (`str` or None): its id on the Hub; None for a local folder.
        dataset (`str` or None): its id on the Hub; None for local data.
        lora (`Any`): the `LoraConfig` or None.
        tags (`Sequence[str]`): of the model.
        wandb_url (`str` or None): of the run in W&B.
    """

    config: MuGRPOConfig
    schedule: Schedule
    updates: int
    logs: Sequence[Mapping[str, Any]]
    rewards: Sequence[str]
    total_s: float
    rollout_s: float
    base_model: str | None = None
    dataset: str | None = None
    lora: Any = None
    tags: Sequence[str] = ()
    wandb_url: str | None = None


def model_card(facts: RunFacts, repo_id: str) -> ModelCard:
    """
    The card of a trained model.

    Args:
        facts (`RunFacts`): of its run.
        repo_id (`str`): where the model goes; its last part is the model's name.
    """
    data = ModelCardData(
        base_model=facts.base_model,
        datasets=facts.dataset,
        library_name="transformers" if facts.lora is None else "peft",
        model_name=repo_id.split("/")[-1],
        pipeline_tag="text-generation",
        tags=sorted({"generated_from_trainer", *facts.tags}),
    )
    base = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})" if facts.base_model else "a local model"
    sections = [
        f"# {data.model_name}",
        f"{'A LoRA adapter for' if facts.lora is not None else 'A fine-tuned version of'} {base}, trained by "
        f"[μ-GRPO]({PAPER_URL}) with mu-grpo-trl on [TRL](https://github.com/huggingface/trl): a few large stages of "
        "rollouts, each followed by many optimizer updates on that static data.",
        "## Quick start",
        f"```python\nfrom transformers import pipeline\n\n"
        f'generator = pipeline("text-generation", model="{repo_id}")\n'
        'print(generator([{"role": "user", "content": "What is 17 + 25?"}], return_full_text=False)[0])\n```',
        "## How it was trained",
        _table(("option", "value"), _settings(facts)),
        "## What came of it",
        _table(("stage", "updates", "responses", "mean reward", "cut", "groups without signal"), _stages(facts)),
        _outcome(facts),
    ]
    if (facts.config.output_path / FIGURE_NAME).exists():
        sections.append(f"![reward, ratios, veto and time over the run]({FIGURE_NAME})")
    if facts.wandb_url:
        sections.append(f"Its log is [in W&B]({facts.wandb_url}).")
    sections += ["## Versions", _versions(), "## Citations", CITATIONS]
    return ModelCard(f"---\n{data}\n---\n\n" + "\n\n".join(section for section in sections if section) + "\n")


def stage_card(reader: StageReader, repo_id: str) -> DatasetCard:
    """The card of a complete stage as a dataset."""
    manifest, summary = reader.manifest, reader.summary()
    data = DatasetCardData(
        tags=["mu-grpo", "trl", "rollouts"],
        configs=[{"config_name": "default", "data_files": "groups/*.arrow"}],  # type: ignore[arg-type]
    )
    facts = {
        "stage": manifest.stage,
        "prompt groups × responses": f"{manifest.num_groups} × {manifest.num_generations}",
        "generated tokens": summary.num_tokens,
        "made for": f"{manifest.num_updates} updates of {manifest.prompts_per_update} groups",
        "mean reward": f"{summary.mean_reward:.4g}",
        "per function": ", ".join(f"{name} {mean:.4g}" for name, mean in summary.mean_rewards.items()),
        "cut by the token limit": f"{summary.truncated_share:.2%}",
        "groups without signal": f"{summary.zero_advantage_group_share:.2%}",
        "engine": f"{manifest.engine} {manifest.engine_version}",
        "sampling": f"`{json.dumps(manifest.sampling)}`",
        "policy": f"`{manifest.policy_hash}`, published at update {manifest.published_step}",
        "prompts, tokenizer": f"`{manifest.dataset_hash}`, `{manifest.tokenizer_hash}`",
    }
    sections = [
        f"# {repo_id.split('/')[-1]}",
        f"One stage of rollouts of [μ-GRPO]({PAPER_URL}): responses of a frozen policy with the log-probs they were "
        "sampled with, their rewards and advantages. It holds the prompts' token ids: their license is that of the "
        "data they came from.",
        f'```python\nfrom datasets import load_dataset\n\nstage = load_dataset("{repo_id}", split="train")\n'
        'stage = stage.sort(["group", "sample"])  # on disk they are in the order in which they were finished\n```',
        _table(("", ""), facts.items()),
        _COLUMNS,
        "To train on it again, download the repository to `<output_dir>/stages/stage-000`.",
        "## Citations",
        CITATIONS,
    ]
    return DatasetCard(f"---\n{data}\n---\n\n" + "\n\n".join(sections) + "\n")


def _settings(facts: RunFacts) -> list[tuple[str, Any]]:
    config, schedule = facts.config, facts.schedule
    low, high = config.clip_range
    veto = "none" if config.veto_scope == "none" else f"{config.veto_scope}, τ_c = {config.veto_threshold:g}"
    rows = [
        ("objective", config.objective),
        ("stages", schedule.num_stages),
        ("updates a stage (μ)", schedule.stage_updates),
        ("updates", f"{facts.updates} of {schedule.num_updates}"),
        ("prompt groups an update × responses", f"{schedule.prompts_per_update} × {config.num_generations}"),
        ("clip of the ratio", "M2PO's" if config.objective == "m2po" else f"[{low:g}, {high:g}]"),
        ("veto", veto),
        ("KL coefficient", f"{config.beta:g}"),
        ("learning rate", f"{config.learning_rate:g}, {SchedulerType(config.lr_scheduler_type).value}"),
        ("temperature", f"{config.temperature:g}"),
        ("longest response", f"{config.max_completion_length} tokens"),
        ("data", f"[{facts.dataset}](https://huggingface.co/datasets/{facts.dataset})" if facts.dataset else "local"),
        ("rewards", ", ".join(f"`{name}`" for name in facts.rewards)),
        ("engine", config.rollout_engine),
        ("seed", config.seed),
    ]  # fmt: skip
    if facts.lora is not None:
        modules = facts.lora.target_modules
        named = modules if isinstance(modules, str) else ", ".join(sorted(modules or ()))
        rows.append(("LoRA", f"r = {facts.lora.r}, alpha = {facts.lora.lora_alpha}, on {named}"))
    return rows


def _stages(facts: RunFacts) -> list[tuple[Any, ...]]:
    rows = []
    for log in facts.logs:
        if "stage/responses" in log:
            stage, reward = int(log["stage/number"]), log.get("stage/reward")
            first = facts.schedule.first_update(stage)
            rows.append(
                (
                    stage,
                    f"{first + 1}–{min(first + facts.schedule.updates_in(stage), facts.updates)}",
                    f"{log['stage/responses']:.0f}",
                    "–" if reward is None else f"{reward:.4g}",
                    f"{log['stage/truncated_share']:.1%}",
                    f"{log['stage/zero_advantage_share']:.1%}",
                )
            )
    return rows


def _outcome(facts: RunFacts) -> str:
    said = [f"T_total {facts.total_s / 3600:.2f} h, of which rollouts {facts.rollout_s / 3600:.2f} h."]
    evaluations = [log for log in facts.logs if log.get("eval_reward") is not None]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        said.append(
            f"Evaluation reward: {first['eval_reward']:.4g} at update {first['step']}, {last['eval_reward']:.4g} at "
            f"update {last['step']}."
        )
    return " ".join(said)


def _versions() -> str:
    return "\n".join(f"- {name}: {version(name)}" for name in _LIBRARIES)


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)

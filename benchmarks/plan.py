"""
Planning and balancing the updates of a long-tailed stage, against the lower bound and beside fixed micro-batches.

For each number of ranks and token budget, every update of a stage is planned: the padding, the imbalance of the ranks,
and how long planning takes. No plan can do better than no padding and, on the costliest rank, the mean load or the
longest row, whichever is more. The other side has the same rows and the same limit on rows × longest row, cut as
stock trainers cut: in the order sampled, dealt out evenly, equally many rows to each micro-batch. `ratio` compares the
tokens that the costliest rank forwards, summed over updates and cases; nothing of it depends on the machine.

    python -m benchmarks.plan [--quick] [--ranks 1 2 4 8] [--budgets 8192 16384 32768] [--updates 128]
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from mu_grpo_trl.stage import UpdatePlan, plan_update

from .common import make_parser, num_pairs, report
from .synthetic import PROMPT_TOKENS, group_advantages, long_tailed_lengths

PROMPTS_PER_UPDATE = 32
NUM_GENERATIONS = 8


@dataclass(frozen=True)
class Case:
    """The stage planned for some ranks and a budget; loads in tokens, padding included, summed over updates."""

    real: int
    forwarded: int
    mean_load: float
    highest_load: float
    lockstep_load: float
    bound: float
    plan_ms: list[float]

    def figures(self) -> dict[str, float]:
        return {
            "padding": round(1 - self.real / self.forwarded, 4),
            "imbalance": round(self.highest_load / self.mean_load - 1, 4),
            "imbalance_in_step": round(self.lockstep_load / self.mean_load - 1, 4),
            "over_bound": round(self.highest_load / self.bound - 1, 4),
            "plan_p50_ms": round(float(np.quantile(self.plan_ms, 0.5)), 2),
            "plan_p99_ms": round(float(np.quantile(self.plan_ms, 0.99)), 2),
            "plan_stage_s": round(sum(self.plan_ms) / 1e3, 2),
        }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[8192, 16384, 32768], help="tokens per micro-batch")
    parser.add_argument("--updates", type=int, default=128, help="updates of the stage")
    options = parser.parse_args()
    ratios, cases = [], {}
    for seed in range(num_pairs(options)):
        stage = make_stage(options.updates, seed)
        ours = other = 0.0
        for ranks in options.ranks:
            for budget in options.budgets:
                case = plan_stage(stage, ranks, budget)
                cases.setdefault(f"{ranks} ranks, {budget} tokens", []).append(case.figures())
                ours += case.highest_load
                other += sum(fixed_load(lengths, ranks, budget) for lengths in stage)
        ratios.append(other / ours)
    worst = {name: {key: max(one[key] for one in figures) for key in figures[0]} for name, figures in cases.items()}
    for name, figures in worst.items():
        print(f"{name}: {figures}")
    figures = {f"worst_{key}": max(case[key] for case in worst.values()) for key in ("padding", "imbalance")}
    report("plan", ratios, **figures, cases=worst)


def make_stage(num_updates: int, seed: int) -> list[np.ndarray]:
    """Tokens of the rows that each update of a stage forwards, those of nonzero advantage: int64 `(rows,)` each."""
    rng = np.random.default_rng(seed)
    num_groups = num_updates * PROMPTS_PER_UPDATE
    forwarded = group_advantages(rng, num_groups, NUM_GENERATIONS) != 0
    prompts = np.repeat(rng.integers(*PROMPT_TOKENS, (num_groups, 1)), NUM_GENERATIONS, axis=1)
    completions = long_tailed_lengths(rng, (num_groups, NUM_GENERATIONS))
    shape = (num_updates, PROMPTS_PER_UPDATE * NUM_GENERATIONS)
    updates = zip((prompts + completions).reshape(shape), forwarded.reshape(shape), strict=True)
    return [lengths[keep] for lengths, keep in updates]


def plan_stage(stage: list[np.ndarray], num_ranks: int, budget: int) -> Case:
    """Plan every update."""
    real = forwarded = 0
    highest = lockstep = mean = bound = 0.0
    plan_ms = []
    for lengths in stage:
        started = time.perf_counter()
        plan = plan_update(lengths, num_ranks, budget)
        plan_ms.append(1e3 * (time.perf_counter() - started))
        loads = _loads(plan, lengths)
        real += int(lengths.sum())
        forwarded += plan.forwarded_tokens
        mean += float(loads.sum()) / num_ranks
        highest += float(loads.sum(axis=1).max())
        lockstep += float(loads.max(axis=0).sum())
        bound += max(float(lengths.sum()) / num_ranks, float(lengths.max()))
    return Case(real, forwarded, mean, highest, lockstep, bound, plan_ms)


def fixed_load(lengths: np.ndarray, num_ranks: int, budget: int) -> float:
    """Tokens the costliest rank forwards when each micro-batch holds as many rows as fit at the longest length."""
    size = max(1, budget // int(lengths.max()))
    shares = (lengths[rank::num_ranks] for rank in range(num_ranks))
    return max(
        sum(len(batch) * int(batch.max()) for batch in np.split(share, range(size, len(share), size)) if len(batch))
        for share in shares
    )


def _loads(plan: UpdatePlan, lengths: np.ndarray) -> np.ndarray:
    """Tokens of each micro-batch, padding included, int64 `(ranks, micro-batches)`."""
    return np.array(
        [[len(rows) * lengths[rows[0]] if rows else 0 for rows in batches] for batches in plan.microbatches]
    )


if __name__ == "__main__":
    main()

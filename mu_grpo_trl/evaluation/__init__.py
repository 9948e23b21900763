"""`mu-grpo eval`: checkpoints on benchmarks, by the paper's protocol (see `docs/evaluation.md`)."""

"""
Faults injected into real runs, each with its required outcome: `make faults`.

    python -m tests.faults [--only TEXT] [--seed N] [--workers N] [--quick]

A table of faults by kind (`kills`, `rollout`, `rewarding`, `host`, `learning`, `settings`), the runs they disturb
(`case`), and what a training process does to itself (`worker`). `soak` measures thirty stages in one process.
"""

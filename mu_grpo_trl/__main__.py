"""`python -m mu_grpo_trl` is `mu-grpo`."""

from .cli import main

main()

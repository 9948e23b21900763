"""What a run will need, and whether this machine is ready for one: `mu-grpo plan` and `mu-grpo doctor`."""

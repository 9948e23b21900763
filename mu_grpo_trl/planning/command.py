"""
`mu-grpo plan --config RECIPE [--key value …]`: what a run will need, and what is wrong with it.

    mu-grpo plan --config recipes/qwen3-8b-base.yaml --accelerate-config recipes/accelerate/zero3.yaml
    mu-grpo plan --config recipes/qwen3-8b-base.yaml --device H100 --num-processes 8 --sharding zero3 --json

Other arguments are the recipe's, as for `mu-grpo train`. No weights are read, no GPU is touched, and nothing is
downloaded: the model's configuration comes from its folder, the Hub's cache, --model-config, or, for the paper's
models, from a table. Exit code 2 if something is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..train import message_only
from .architecture import find_config
from .launch import SHARDINGS, Launch, read_launch
from .memory import GIB
from .options import Findings, Options, read_options
from .plan import DEVICE_BYTES, Assumptions, Plan, make_plan

PAPER_LAUNCH = Launch(num_processes=4, sharding="fsdp2")
"""What is planned without a launcher's configuration, unless the recipe is for the CPU."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan. Exit code 2: something is wrong, and each thing is a line."""
    arguments, rest = _parser().parse_known_args(argv)
    findings = Findings()
    with message_only(ValueError):
        plan = plan_run(arguments, rest, findings)
    print(json.dumps(plan.to_dict(), indent=1) if arguments.json else as_text(plan))
    if findings.errors:
        sys.exit(2)


def plan_run(arguments: argparse.Namespace, rest: Sequence[str], findings: Findings) -> Plan:
    """
    Raises:
        `ValueError`: an argument of `mu-grpo plan` itself is wrong.
    """
    options = read_options(arguments.config, rest, findings)
    if options is None:
        return Plan(findings)
    launch = _launch(arguments, options)
    model_config = None
    with findings.collecting():
        if options.model.model_name_or_path:
            name = options.model.model_name_or_path
            model_config = find_config(name, arguments.model_config, options.config.trust_remote_code)
    values = {field.name: getattr(arguments, field.name) for field in fields(Assumptions)}
    return make_plan(options, model_config, launch, Assumptions(**values), findings)


def _launch(arguments: argparse.Namespace, options: Options) -> Launch:
    named = (arguments.accelerate_config, arguments.num_processes, arguments.sharding)
    if named == (None, None, None):
        return Launch() if options.on_cpu else PAPER_LAUNCH
    return read_launch(*named)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mu-grpo plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, help="the recipe")
    add("--json", action="store_true", help="print JSON: sizes in bytes, times in hours")
    add("--model-config", type=Path, help="config.json of the policy, where its folder is elsewhere")
    add("--accelerate-config", type=Path, help="the launcher's configuration (default: 4 processes, FSDP2)")
    add("--num-processes", type=int, help="ranks, in place of that file's")
    add("--sharding", choices=SHARDINGS, help="in place of that file's")
    defaults = Assumptions()
    add("--device", choices=tuple(DEVICE_BYTES), default=defaults.device, help=f"(default {defaults.device})")
    for name, text in (
        ("device_gb", "memory of a device, in 10⁹ bytes, in place of the data sheet's"),
        ("prompt_tokens", "mean prompt (default: measured where data and tokenizer are here, else 150)"),
        ("response_tokens", "mean response (default: half of the longest)"),
        ("skipped_share", f"responses without advantage, never forwarded (default {defaults.skipped_share})"),
        ("rollout_share", f"of the peak operations, in generation (default {defaults.rollout_share})"),
        ("optimize_share", f"of the peak operations, in updates (default {defaults.optimize_share})"),
        ("generated_tokens_per_s", "of all devices, in place of what follows from --rollout-share"),
        ("forwarded_tokens_per_s", "of all devices, in place of what follows from --optimize-share"),
        ("stage_overhead_s", f"seconds between two phases, a stage (default {defaults.stage_overhead_s:.0f})"),
    ):
        add(f"--{name.replace('_', '-')}", type=float, default=getattr(defaults, name), help=text)
    return parser


def as_text(plan: Plan) -> str:
    """The plan as aligned lines, what is wrong last."""
    lines: list[str] = []

    def section(title: str, rows: dict[str, Any], shown: Any) -> None:
        if rows:
            width = max(map(len, rows))
            lines.append(title)
            lines.extend(f"  {name:<{width}}  {shown(value)}" for name, value in rows.items() if value is not None)

    section("Launch", plan.launch, str)
    section("Schedule", {name.replace("_", " "): value for name, value in plan.schedule.items()}, _number)
    section("Tokens", {name.replace("_", " "): value for name, value in plan.tokens.items()}, _number)
    section("Disk", plan.disk, _size)
    section("A device in an update", _with_total(plan.optimization), _size)
    section("A device in the rollout", _with_total(plan.rollout), _size)
    section("Host memory of a node", plan.host, _size)
    section("Hours", plan.hours, lambda hours: f"{hours:.2f}" if hours < 10 else f"{hours:.0f}")
    section("Assumed (each is an option)", plan.assumptions, _number)
    findings = plan.findings
    lines += [f"note: {text}" for text in findings.warnings] + [f"wrong: {text}" for text in findings.errors]
    lines.append(f"{len(findings.errors)} thing(s) to mend." if findings.errors else "Nothing is wrong.")
    return "\n".join(lines)


def _with_total(parts: dict[str, int]) -> dict[str, int]:
    return parts | {"total": sum(parts.values())} if parts else {}


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _size(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.2f} MiB"

"""How a run is launched: what `accelerate`'s configuration says of processes, nodes and sharding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SHARDINGS = ("none", "ddp", "zero2", "zero3", "fsdp2")


@dataclass(frozen=True)
class Launch:
    """
    Args:
        num_processes (`int`): ranks, over all nodes; one a device.
        num_nodes (`int`): machines.
        sharding (`str`): what a rank holds of the training state: one of `SHARDINGS`.
        mixed_precision (`str`): `"no"`, `"bf16"` or `"fp16"`.
        settings (`dict`): the launcher's configuration, empty without one.
    """

    num_processes: int = 1
    num_nodes: int = 1
    sharding: str = "none"
    mixed_precision: str | None = None
    settings: dict[str, Any] | None = None

    @property
    def processes_per_node(self) -> int:
        """Ranks, and so devices, of one machine."""
        return max(1, self.num_processes // self.num_nodes)

    @property
    def parameter_shards(self) -> int:
        """Ranks that share one copy of the parameters."""
        return self.num_processes if self.sharding in ("zero3", "fsdp2") else 1

    @property
    def optimizer_shards(self) -> int:
        """Ranks that share one copy of the optimizer's state."""
        return 1 if self.sharding in ("none", "ddp") else self.num_processes

    def problems(self, uses_cpu: bool) -> list[str]:
        """What in the launcher's configuration would stop or damage a run, each with its mend."""
        settings = self.settings or {}
        deepspeed, fsdp = settings.get("deepspeed_config") or {}, settings.get("fsdp_config") or {}
        found = []
        if self.sharding == "zero3" and deepspeed.get("zero3_save_16bit_model") is not True:
            found.append(
                f"`zero3_save_16bit_model: {deepspeed.get('zero3_save_16bit_model')}` in the launcher's "
                "configuration: no model could be saved under ZeRO-3. Set it to true."
            )
        if fsdp and str(fsdp.get("fsdp_version", 1)) != "2":
            found.append(
                f"`fsdp_version: {fsdp.get('fsdp_version', 1)}` in the launcher's configuration is not supported. Set "
                "it to 2."
            )
        if fsdp and fsdp.get("fsdp_state_dict_type") == "SHARDED_STATE_DICT":
            found.append(
                "`fsdp_state_dict_type: SHARDED_STATE_DICT` saves a model that `from_pretrained` cannot open. Set it "
                "to FULL_STATE_DICT."
            )
        if self.num_processes % self.num_nodes:
            found.append(
                f"`num_processes: {self.num_processes}` is no multiple of `num_machines: {self.num_nodes}`; it counts "
                "the devices of all machines. Set it to devices per machine × machines."
            )
        if settings and bool(settings.get("use_cpu")) != uses_cpu:
            found.append(
                f"`use_cpu: {bool(settings.get('use_cpu'))}` in the launcher's configuration contradicts "
                f"`use_cpu: {uses_cpu}` of the recipe. Choose another file of recipes/accelerate/."
            )
        return found


def read_launch(file: Path | None, num_processes: int | None, sharding: str | None) -> Launch:
    """
    The launch that a configuration of `accelerate` describes; `num_processes` and `sharding` win over it.

    Raises:
        `ValueError`: the file is no such configuration.
    """
    settings: dict[str, Any] = {}
    if file is not None:
        try:
            settings = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(
                f"--accelerate-config {str(file)!r} cannot be read ({error}). Name a YAML file."
            ) from error
        if not isinstance(settings, dict) or "distributed_type" not in settings:
            raise ValueError(
                f"--accelerate-config {str(file)!r} has no `distributed_type`: it is no configuration of accelerate. "
                "Use one of recipes/accelerate/, or `accelerate config`."
            )
    processes = num_processes or int(settings.get("num_processes") or 1)
    return Launch(
        num_processes=processes,
        num_nodes=int(settings.get("num_machines") or 1),
        sharding=sharding or _sharding(settings, processes),
        mixed_precision=settings.get("mixed_precision"),
        settings=settings,
    )


def _sharding(settings: dict[str, Any], processes: int) -> str:
    kind = settings.get("distributed_type")
    if kind == "DEEPSPEED":
        stage = int((settings.get("deepspeed_config") or {}).get("zero_stage", 2))
        return {3: "zero3", 2: "zero2"}.get(stage, "ddp")
    if kind == "FSDP":
        return "fsdp2"
    return "ddp" if processes > 1 else "none"

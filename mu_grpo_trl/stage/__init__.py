"""A stage on disk: written group by group, read at random, cut into micro-batches. Knows no trainer."""

from .batches import UpdatePlan, bundle_responses, plan_update
from .collate import collate
from .reader import Response, StageReader, StageSummary, load_stage
from .schema import GroupRollout, Manifest, ResponseRow, StageError, read_manifest
from .writer import StageWriter

__all__ = [
    "GroupRollout",
    "Manifest",
    "Response",
    "ResponseRow",
    "StageError",
    "StageReader",
    "StageSummary",
    "StageWriter",
    "UpdatePlan",
    "bundle_responses",
    "collate",
    "load_stage",
    "plan_update",
    "read_manifest",
]

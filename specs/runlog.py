"""The run log: JSON lines in which every second of a run is accounted for.

Seconds go to buckets that carry the names of ml-goodput-measurement, lower case.  `step` is the productive one;
the others are badput.  The buckets of a run add up to its wall clock.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, TypeAdapter, ValidationError

from specs.base import Spec, first_problem
from specs.errors import BadInputError
from specs.plan import StepTerms

Bucket = Literal[
    "accelerator_initialization",
    "training_preparation",
    "data_loading_sync",
    "program_startup",
    "checkpoint_save",
    "checkpoint_restore",
    "evaluation",
    "wasted_progress",
    "failure_detection",
    "replanning",
    "reforming",
    "state_transfer",
    "step",
    "other",
]


class _Measured(Spec):
    """Values of a diverged run, NaN and infinity, are written as such (not as null), so that the log can be read."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


class StartRecord(Spec):
    """A run begins or resumes."""

    kind: Literal["start"] = "start"
    time: float  # seconds since the epoch
    step: NonNegativeInt  # steps already done
    plan_sha256: str
    world_size: int
    backend: str
    device: str
    versions: dict[str, str]
    seconds: dict[Bucket, float]  # spent so far, by bucket


class StepRecord(_Measured):
    """One optimizer step.  `terms` are means over ranks and add up to `seconds`."""

    kind: Literal["step"] = "step"
    time: float
    step: NonNegativeInt  # 1 for the first
    loss: float  # mean over the target tokens, natural logarithm
    gradient_norm: float  # before clipping
    learning_rate: float
    tokens: int
    seconds: NonNegativeFloat
    terms: StepTerms
    warm_up: bool = False  # first steps of a process: allocation and tracing make them slower


class MemoryRecord(Spec):
    """Measured peak bytes of every rank, by rank; on a GPU from the allocator, else from live tensors."""

    kind: Literal["memory"] = "memory"
    method: str
    peak_bytes: dict[int, int]
    activation_bytes: dict[int, int]
    static_bytes: dict[int, int]  # weights, gradients, optimizer


class TimedAction(NamedTuple):
    """`name` is an action of the schedule (F0, B0, ...) or a term of the step; seconds after the step began."""

    name: str
    start: float
    stop: float


class ActionsRecord(Spec):
    """What every rank did in one step, each on its own clock; terms inside an action lie inside its time."""

    kind: Literal["actions"] = "actions"
    step: NonNegativeInt
    actions: dict[int, tuple[TimedAction, ...]]  # by rank


class ExpertLoadRecord(Spec):
    """How the router of each mixture of experts dealt out the tokens of one step: 1.0 is an even share."""

    kind: Literal["expert_load"] = "expert_load"
    time: float
    step: NonNegativeInt
    share: dict[str, tuple[NonNegativeFloat, ...]]  # by module, then by expert


class EvaluationRecord(_Measured):
    """Loss on held-out data."""

    kind: Literal["evaluation"] = "evaluation"
    time: float
    step: NonNegativeInt
    loss: float
    tokens: int
    seconds: NonNegativeFloat


class CheckpointRecord(Spec):
    """A checkpoint became durable; `seconds` is what training waited for it, `lag_seconds` how long after the step."""

    kind: Literal["checkpoint"] = "checkpoint"
    time: float
    step: NonNegativeInt
    path: str
    size_bytes: int
    seconds: NonNegativeFloat
    lag_seconds: NonNegativeFloat | None = None  # None: training waited for all of it


# Where the parts of an interruption go in the account; its first step (first_step) is a step like others.
# failure_detection: from the fault to its discovery.  reforming: leaving the old groups, starting processes, new groups
# and modules.  replanning: the way on.  state_transfer: weights and moments to their owners, or from a checkpoint.
INCIDENT_BUCKETS: dict[str, Bucket] = {
    "partial_step": "wasted_progress",
    "failure_detection": "failure_detection",
    "replanning": "replanning",
    "reforming": "reforming",
    "state_transfer": "state_transfer",
}


class IncidentRecord(Spec):
    """Devices were lost, came back or turned out slow; training goes on after `step` in another generation.

    Steps that were taken beyond `step` are trained again.  `seconds` by part, from the moment of the fault (where it
    is known, else of its discovery) to the first step after it, that step included.
    """

    kind: Literal["incident"] = "incident"
    time: float  # when training went on
    generation: NonNegativeInt  # the new one
    step: NonNegativeInt
    redone_steps: NonNegativeInt
    lost: dict[int, str]  # cause by rank
    returned: tuple[int, ...] = ()
    restarted: tuple[int, ...] = ()  # workers whose process was started again, device kept
    slow: dict[int, float] = Field(default_factory=dict)  # factor by rank
    policy: str
    layout: str
    rejected: tuple[str, ...] = ()  # other ways on, each with its reason
    world_size: NonNegativeInt
    global_batch: NonNegativeInt  # sequences per step from now on
    batch_kept: bool
    source: Literal["memory", "checkpoint", "start"]
    missing_elements: NonNegativeInt = 0  # of the state, that no survivor held
    seconds: dict[str, NonNegativeFloat]

    @property
    def cause(self) -> str:
        """What happened, in a few words."""
        parts = []
        for what in dict.fromkeys(what for _, what in sorted(self.lost.items())):
            ranks = [str(rank) for rank, cause in sorted(self.lost.items()) if cause == what]
            parts.append(f"rank {ranks[0]} {what}" if len(ranks) == 1 else f"each of ranks {', '.join(ranks)} {what}")
        parts += [f"rank {rank} is back" for rank in self.returned]
        parts += [f"rank {rank} was started again" for rank in self.restarted if rank not in self.lost]
        parts += [
            f"rank {rank} takes {factor:.2f} x as long as its peers" for rank, factor in sorted(self.slow.items())
        ]
        return "; ".join(parts) or "all ranks waited for each other"


class SlowRecord(Spec):
    """A rank's own work takes persistently longer than its peers'."""

    kind: Literal["slow"] = "slow"
    time: float
    step: NonNegativeInt
    rank: NonNegativeInt
    factor: NonNegativeFloat


class EndRecord(Spec):
    """A run ends; `seconds` adds up to `wall_seconds`."""

    kind: Literal["end"] = "end"
    time: float
    step: NonNegativeInt
    reason: str
    wall_seconds: NonNegativeFloat
    seconds: dict[Bucket, float]


Record = Annotated[
    StartRecord
    | StepRecord
    | MemoryRecord
    | ActionsRecord
    | ExpertLoadRecord
    | EvaluationRecord
    | CheckpointRecord
    | IncidentRecord
    | SlowRecord
    | EndRecord,
    Field(discriminator="kind"),
]
_record: TypeAdapter[Record] = TypeAdapter(Record)


def read_log(path: Path) -> list[Record]:
    """All records of a log.  A torn last line (a killed run) is dropped; any other bad line is an error."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    except OSError as error:
        raise BadInputError(f"run log {path} cannot be read: {error.strerror}. Is this a run folder?") from None
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            raise BadInputError(f"run log {path}, line {number} is not valid JSON.") from None
        try:
            records.append(_record.validate_python(data))
        except ValidationError as error:
            raise BadInputError(f"run log {path}, line {number}: {first_problem(error)}") from None
    return records

"""One interruption of training: what happened, and where the seconds until the next step went."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Literal

from recovery.policy import Way
from specs.runlog import INCIDENT_BUCKETS, Bucket, IncidentRecord

Part = Literal["partial_step", "failure_detection", "reforming", "replanning", "state_transfer", "first_step"]


class Incident:
    """Open from the discovery of a fault (or the pause for a change) until the first step after it."""

    def __init__(self, *, since_step: float, detection: float) -> None:
        """`since_step`: seconds since the last step was done; `detection`: since the fault, as far as it is known."""
        self.seconds: defaultdict[Part, float] = defaultdict(float)
        detection = min(detection, since_step)
        self.seconds["failure_detection"] = detection
        self.seconds["partial_step"] = since_step - detection
        self.lost: dict[int, str] = {}
        self.returned: set[int] = set()
        self.restarted: set[int] = set()
        self.slow: dict[int, float] = {}
        self._part: Part = "reforming"
        self._since = time.monotonic()

    def enter(self, part: Part) -> None:
        """What is done from now on."""
        now = time.monotonic()
        self.seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def by_bucket(self) -> dict[Bucket, float]:
        """Seconds for the account; the first step has its own there."""
        return {INCIDENT_BUCKETS[part]: seconds for part, seconds in self.seconds.items() if part in INCIDENT_BUCKETS}

    def record(
        self,
        *,
        generation: int,
        step: int,
        redone_steps: int,
        way: Way,
        full_batch: int,
        source: Literal["memory", "checkpoint", "start"],
        missing: int,
    ) -> IncidentRecord:
        """Close it: training goes on."""
        self.enter("first_step")
        plan = way.plan
        return IncidentRecord(
            time=time.time(),
            generation=generation,
            step=step,
            redone_steps=redone_steps,
            lost=self.lost,
            returned=tuple(sorted(self.returned)),
            restarted=tuple(sorted(self.restarted)),
            slow=self.slow,
            policy=way.policy,
            layout=way.layout,
            rejected=way.rejected,
            world_size=plan.world_size,
            global_batch=plan.training.global_batch,
            batch_kept=plan.training.global_batch == full_batch,
            source=source,
            missing_elements=missing,
            seconds=dict(self.seconds),
        )


def sentence(record: IncidentRecord, *, full_batch: int) -> str:
    """For the person who watches."""
    took = sum(seconds for part, seconds in record.seconds.items() if part != "first_step")
    where = {
        "memory": "the survivors' memory, no step lost",
        "checkpoint": f"the checkpoint of step {record.step}, {record.redone_steps} steps are trained again",
        "start": f"the first weights, {record.redone_steps} steps are trained again",
    }[record.source]
    layout = f" ({record.layout})" if record.layout else ""
    text = (
        f"{record.cause}. Training goes on after step {record.step} on "
        f"{record.world_size} ranks, {record.policy}{layout}; state from {where}; {took:.1f} s"
    )
    if not record.batch_kept:
        text += (
            f". The global batch is {record.global_batch} sequences instead of {full_batch} until devices return: "
            "losses will differ from the whole run's"
        )
    return text

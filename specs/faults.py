"""Faults that a drill injects into a run: which rank, at which step and moment, of which kind."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator
from typing_extensions import Self

from specs.base import Spec, first_problem
from specs.errors import BadInputError

# kill: the process ends at once.  stop: it freezes (SIGSTOP).  hang: its training thread waits for ever.  slow: it
# computes `factor` times as long from this step on.  partition: it loses its supervisor.  full-disk: its checkpoint
# files cannot be written.
FaultKind = Literal["kill", "stop", "hang", "slow", "partition", "full-disk"]

# begin: before the step.  forward: inside its first micro-batch.  sync: before gradients are summed.  update: after the
# norm is known, before the weights change.  gather: after they changed, before shards are exchanged.  save: inside the
# step's checkpoint.  recovery: while groups are formed anew after another fault (`step` is then not looked at).
Moment = Literal["begin", "forward", "sync", "update", "gather", "save", "recovery"]


class Fault(Spec):
    """One fault.  `factor` for kind slow only."""

    kind: FaultKind
    rank: NonNegativeInt
    step: PositiveInt
    moment: Moment = "begin"
    factor: PositiveFloat | None = None

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if (self.kind == "slow") != (self.factor is not None):
            raise ValueError("a slow fault needs a factor (rank@step:factor), the others take none")
        if self.factor is not None and self.factor <= 1:
            raise ValueError(f"factor {self.factor:g} would not slow anything. Give one above 1")
        return self


def parse_fault(kind: FaultKind, text: str) -> Fault:
    """`rank@step`, `rank@step:moment` or, for slow, `rank@step:factor`.  Raises `BadInputError` for anything else."""
    where, _, rest = text.partition(":")
    rank, at, step = where.partition("@")
    if not (at and rank.isdecimal() and step.isdecimal()):
        wanted = "rank@step:factor, such as 1@20:1.5" if kind == "slow" else "rank@step, such as 1@20"
        raise BadInputError(f"fault {text!r}: give {wanted}.")
    given: dict[str, object] = {"kind": kind, "rank": int(rank), "step": int(step)}
    if rest:
        given["factor" if kind == "slow" else "moment"] = rest
    try:
        return Fault.model_validate(given)
    except ValidationError as error:
        raise BadInputError(f"fault {text!r}: {first_problem(error)}") from None

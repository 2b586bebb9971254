"""A generation: the workers that train together under one plan, and how far each of them is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from executor.messages import Finished, Form, Formed, Halted, Paused, Report, Totals
from recovery.log import SupervisorLog
from recovery.policy import Way, ranks_of
from specs.faults import Fault


@dataclass
class Generation:
    """`speaker`: the member whose records go to the log.  `broken`: why it cannot go on as it is, else empty."""

    number: int
    way: Way
    speaker: int
    formed: dict[int, Formed] = field(default_factory=dict)
    halted: dict[int, Halted] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    finished: dict[int, Finished] = field(default_factory=dict)
    is_pausing: bool = False
    broken: str = ""
    redone: int = 0  # steps that it trains again

    def __post_init__(self) -> None:
        self.members = ranks_of(self.way.plan)
        if self.speaker not in self.members:
            self.speaker = self.members[0]

    @property
    def is_formed(self) -> bool:
        return len(self.formed) == len(self.members)

    @property
    def is_paused(self) -> bool:
        return len(self.paused) == len(self.members)

    @property
    def is_finished(self) -> bool:
        return len(self.finished) == len(self.members)

    @property
    def active(self) -> list[int]:
        """Members that should make progress."""
        return [rank for rank in self.members if rank not in self.paused and rank not in self.finished]

    def breaks(self, reason: str) -> None:
        """It cannot go on; the first reason is kept."""
        self.broken = self.broken or reason

    def orders(self, plan: Path, totals: Totals | None, log: SupervisorLog, faults: Iterable[Fault]) -> dict[int, Form]:
        """To each member, by rank."""
        faults = tuple(faults)
        return {
            rank: Form(
                generation=self.number,
                plan=str(plan),
                members=self.members,
                hosts_store=rank == self.members[0],
                reports=rank == self.speaker,
                totals=totals,
                logged=log.step,
                evaluated=log.evaluated,
                saved=log.saved,
                faults=tuple(fault for fault in faults if fault.rank == rank),
            )
            for rank in self.members
        }

    def take(self, rank: int, report: Report, log: SupervisorLog) -> None:
        """Note how far a member is."""
        match report:
            case Formed() if report.generation == self.number:
                self.formed[rank] = report
                if rank == self.speaker:  # its next word may be a record
                    self.redone = log.rewind(report.step)
            case Halted() if report.generation == self.number:
                self.halted[rank] = report
                self.breaks(f"worker {rank}: {report.cause}")
            case Paused():
                self.paused.add(rank)
            case Finished():
                self.finished[rank] = report

    def agree(self) -> tuple[int, Totals | None]:
        """The next speaker and the totals of the newest step.

        One step for all: who has taken it tells what was summed in it to those whose gradients are ready for it.
        """
        newest = max((halted.step for halted in self.halted.values()), default=-1)
        ahead = [rank for rank, halted in sorted(self.halted.items()) if halted.step == newest >= 0]
        totals = next((applied for rank in ahead if (applied := self.halted[rank].applied) is not None), None)
        return (ahead[0] if ahead else self.speaker), totals

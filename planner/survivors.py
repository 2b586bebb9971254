"""Ways to go on without some ranks: what the survivors of damaged replicas may do, and who takes which share.

A *way* says the same for every damaged replica (reduced, resplit into so many stages, split into so many replicas,
dropped), so that it is one candidate whatever was lost.  Estimates rank the candidates; `contingency` prices them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from cost_models.activations import ACTIVATION_BYTES
from cost_models.interface import CostModel
from cost_models.reduced import candidates
from planner.describe_loss import describe_loss
from planner.refit import Fitted, Refit, Task
from planner.schedules import most_kept, schedule_after
from planner.shares import Worker, deal, deal_modules, finish_seconds, least_seconds
from specs.layout import balanced_cuts, block_starts
from specs.plan import ContingencyPolicy, Pipeline, Plan, Replica, Stage
from specs.schedule import Schedule


class Way(NamedTuple):
    """A policy and its number, and the micro-batch of what is composed anew.

    `number` of stages (resplit), of replicas (split), of damaged replicas that are left out (drop).
    """

    policy: ContingencyPolicy
    number: int = 0
    micro_batch: int = 0


class Slack(NamedTuple):
    """Bytes to leave free on the ranks of healthy replicas and of those that are composed anew."""

    healthy: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A pipeline and ranks for it; seconds per micro-batch, of filling it, and once a step after it."""

    pipeline: Pipeline
    ranks: tuple[int, ...]
    seconds: float
    fill_seconds: float
    once_seconds: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One complete way on, as `specs.contingency.remade` takes it; `seconds` is an estimate of the passes, and no
    schedule makes them shorter than `least`.
    """

    policy: ContingencyPolicy
    layout: str
    pipelines: tuple[Pipeline, ...]
    replicas: tuple[Replica, ...]
    replaced: dict[int, int]
    sequences: tuple[int, ...]
    global_batch: int
    seconds: float
    least: float


class Survivors:
    """Builds candidates for one plan; what was composed is kept for the next loss."""

    def __init__(self, plan: Plan, costs: CostModel, capacity: int) -> None:
        self.plan = plan
        self.refit = Refit(plan, costs, capacity)
        self._costs = costs
        starts = plan.cluster.node_starts()
        self._node = [node for node, (start, stop) in enumerate(pairwise(starts)) for _ in range(start, stop)]
        self._largest = max(stage.num_ranks for pipeline in plan.pipelines for stage in pipeline.stages)
        self._domain = max(group.devices_per_node for group in plan.cluster.nodes)
        self.slack = Slack()
        self._healthy: dict[tuple[int, int, int], Part | None] = {}
        self._candidates: dict[tuple[Way, tuple[int, ...], Slack], Candidate | None] = {}
        self._place = {name: index for index, (name, _) in enumerate(plan.model.modules())}

    def ways(self, lost: Sequence[int], *, few: bool = False) -> Iterator[Way]:
        """Every way worth building; `few`: the ones that most often win."""
        plan, gone = self.plan, set(lost)
        damaged = [replica for replica in plan.replicas if gone.intersection(replica.ranks)]
        # A replica of which nobody is left can only be left out; what the others do does not hang on it.
        most = max(damaged, key=lambda replica: len(set(replica.ranks) - gone))
        left = len(set(most.ranks) - gone)
        pipeline = plan.pipelines[most.pipeline]
        if self._idle(gone):
            yield Way("spare")
        for number in range(1, len(damaged) + 1):
            yield Way("drop", number)
        for micro_batch in self._micro_batches(pipeline, left, alone=len(damaged) == len(plan.replicas), few=few):
            yield Way("reduced", 0, micro_batch)
            for number in self._stage_numbers(pipeline, left, few=few):
                if number == len(pipeline.stages) == 1:
                    continue  # the same as reduced
                yield Way("resplit", number, micro_batch)
            if len(pipeline.stages) == 1:
                for number in sorted({2, left}) if few else range(2, left + 1):
                    yield Way("split", number, micro_batch)

    def candidate(self, way: Way, lost: Sequence[int]) -> Candidate | None:
        """What a way leads to; None when it cannot run."""
        key = (way, tuple(lost), self.slack)
        if key not in self._candidates:
            self._candidates[key] = self._candidate(way, lost)
        return self._candidates[key]

    def _candidate(self, way: Way, lost: Sequence[int]) -> Candidate | None:
        gone = set(lost)
        if way.policy in ("spare", "drop"):
            repaired = self._repaired(way.number, gone)
            return None if repaired is None else self._dealt(way.policy, repaired, lost)
        parts: list[Part] = []
        for replica in self.plan.replicas:
            if gone.intersection(replica.ranks) and not gone.issuperset(replica.ranks):
                own = self._parts(way, replica, gone)
                if own is None:
                    return None
                parts += own
        return self._dealt(way.policy, parts, lost) if parts else None  # of replicas that are gone whole: "drop"

    def _idle(self, gone: set[int]) -> list[int]:
        """Ranks of the cluster that the plan leaves unused."""
        busy = gone.union(*(replica.ranks for replica in self.plan.replicas))
        return [rank for rank in self.plan.cluster.ranks() if rank not in busy]

    def _repaired(self, donors: int, gone: set[int]) -> list[Part] | None:
        """Damaged replicas with idle ranks in the lost places, of the same node first; `donors` of them, those that
        lost most, are left out and give what they have left.
        """
        damaged = [replica for replica in self.plan.replicas if gone.intersection(replica.ranks)]
        damaged.sort(key=lambda replica: -len(gone.intersection(replica.ranks)))
        pool = self._idle(gone) + [r for replica in damaged[:donors] for r in replica.ranks if r not in gone]
        damaged, parts = damaged[donors:], []
        for replica in damaged:
            ranks = []
            for rank in replica.ranks:
                if rank in gone:
                    if not pool:
                        return None
                    near = min(pool, key=lambda spare: (self._node[spare] != self._node[rank], spare))
                    pool.remove(near)
                    ranks.append(near)
                else:
                    ranks.append(rank)
            part = self._part_of(replica.pipeline, others=len(self.plan.replicas) - 1 - donors)
            if part is None:
                return None
            parts.append(replace(part, ranks=tuple(ranks)))
        return parts

    def _parts(self, way: Way, replica: Replica, gone: set[int]) -> list[Part] | None:
        """What takes the place of one damaged replica."""
        pipeline = self.plan.pipelines[replica.pipeline]
        ranks = tuple(rank for rank in replica.ranks if rank not in gone)
        if way.policy == "reduced":
            sizes = _left_in_stages(pipeline, replica, gone)
            part = self._composed(pipeline, ranks, sizes, self._places(pipeline), way.micro_batch)
            return None if part is None else [part]
        if way.policy == "resplit":
            if way.number > len(ranks):
                return None
            sizes = _left_in_stages(pipeline, replica, gone)
            if way.number != len(sizes) or min(sizes) < 1:
                sizes = [b - a for a, b in pairwise(balanced_cuts(len(ranks), way.number))]
            places = deal_modules(self.refit.work, tuple(sizes))
            part = None if places is None else self._composed(None, ranks, sizes, places, way.micro_batch)
            return None if part is None else [part]
        blocks = next((c for c in candidates(len(ranks)) if len(c) == way.number), ())
        parts = []
        for start, stop in pairwise(block_starts(blocks)):
            whole = [tuple(range(len(self._place)))]
            part = self._composed(None, ranks[start:stop], [stop - start], whole, way.micro_batch)
            if part is None:
                return None
            parts.append(part)
        return parts or None

    def _composed(
        self,
        old: Pipeline | None,
        ranks: tuple[int, ...],
        sizes: Sequence[int],
        places: Sequence[tuple[int, ...]],
        micro_batch: int,
        others: int | None = None,
        slack: int | None = None,
    ) -> Part | None:
        """A pipeline of stages of these sizes and modules; stages of `old` that nothing changes stay as they are while
        they fit.  In the schedule of `old`, or in 1f1b, which holds least, where that saves recomputing.

        `others`: replicas beside this one, None: as many as the plan has.  `slack` None: that of damaged ones.
        """
        own = schedule_after(old)
        lean = own if old is not None and old.num_virtual > 1 else "1f1b"
        parts = [
            self._scheduled(schedule, old, ranks, sizes, places, micro_batch, others, slack)
            for schedule in dict.fromkeys((own, lean))
        ]
        return min((part for part in parts if part is not None), key=lambda part: part.seconds, default=None)

    def _scheduled(
        self,
        schedule: Schedule,
        old: Pipeline | None,
        ranks: tuple[int, ...],
        sizes: Sequence[int],
        places: Sequence[tuple[int, ...]],
        micro_batch: int,
        others: int | None,
        slack: int | None,
    ) -> Part | None:
        if min(sizes) < 1 or max(sizes) > max(self._largest, self._domain):
            return None
        number, replicas = len(sizes), len(self.plan.replicas)
        others = replicas - 1 if others is None else others
        slack = self.slack.damaged if slack is None else slack
        rounds = max(1, -(-self.plan.training.global_batch // (micro_batch * max(1, others + 1))))
        stages: list[Stage] = []
        fitted: list[Fitted] = []
        firsts = block_starts(sizes)
        for index, size in enumerate(sizes):
            nodes = tuple(self._node[rank] for rank in ranks[firsts[index] : firsts[index + 1]])
            kept = min(rounds, most_kept(schedule, index, number, 1 if old is None else old.num_virtual) or rounds)
            task = Task(places[index], nodes, micro_batch, kept, rounds, others, slack)
            if old is not None and old.micro_batch == micro_batch and old.stages[index].num_ranks == size:
                task = task._replace(keep_blocks=True)
                found: Fitted | None = self.refit.as_it_is(old.stages[index], task)
                if found is not None and found.fits:
                    stages.append(old.stages[index])
                    fitted.append(found)
                    continue
            found = self.refit.compose(task)
            if found is None:
                return None
            runs = old.stages[index].virtual_stages if old is not None else None
            stages.append(found.stage.model_copy(update={"virtual_stages": runs}))
            fitted.append(found)
        pipeline = Pipeline(micro_batch=micro_batch, stages=tuple(stages), schedule=schedule)
        seconds = [found.seconds for found in fitted]
        fill = sum(seconds) - max(seconds) + self._transfers(pipeline, ranks)
        return Part(pipeline, ranks, max(seconds), fill, max(found.once for found in fitted))

    def _transfers(self, pipeline: Pipeline, ranks: Sequence[int]) -> float:
        """Seconds of the first micro-batch's way down and its gradient's way back up."""
        training, firsts = self.plan.training, pipeline.stage_starts()
        size = ACTIVATION_BYTES[training.precision] * self.plan.model.hidden
        total = 0.0
        for index, (here, there) in enumerate(pairwise(pipeline.stages)):
            tokens = -(-pipeline.micro_batch * training.seq_len // min(here.num_ranks, there.num_ranks))
            inside = self._node[ranks[firsts[index]]] == self._node[ranks[firsts[index + 1]]]
            total += 2.0 * self._costs.collective(
                "point_to_point",
                num_ranks=2,
                payload_bytes=tokens * size,
                level="scale_up" if inside else "scale_out",
            )
        return total

    def _part_of(self, number: int, others: int) -> Part | None:
        """A pipeline of the plan with the ranks of one of its replicas; with more recompute where it would not fit
        any more beside `others` replicas (which share the optimizer's state).
        """
        key = (number, others, self.slack.healthy)
        if key not in self._healthy:
            replica = next(replica for replica in self.plan.replicas if replica.pipeline == number)
            pipeline = self.plan.pipelines[number]
            sizes, places = [stage.num_ranks for stage in pipeline.stages], self._places(pipeline)
            self._healthy[key] = self._composed(
                pipeline, replica.ranks, sizes, places, pipeline.micro_batch, others, self.slack.healthy
            )
        return self._healthy[key]

    def _dealt(self, policy: ContingencyPolicy, parts: Sequence[Part], lost: Sequence[int]) -> Candidate | None:
        """Shares for the healthy replicas and the parts; the largest batch up to the plan's that they divide."""
        plan, gone = self.plan, set(lost)
        healthy = [replica for replica in plan.replicas if not gone.intersection(replica.ranks)]
        numbers = Counter(replica.pipeline for replica in healthy)
        others = len(healthy) + len(parts) - 1
        kinds = [self._part_of(number, others) for number in numbers]
        workers = [
            Worker(count, part.pipeline.micro_batch, part.seconds, part.fill_seconds)
            for part, count in [*zip(kinds, numbers.values(), strict=True), *((part, 1) for part in parts)]
            if part is not None
        ]
        if not workers or len(workers) < len(kinds) + len(parts):
            return None
        once = max(part.once_seconds for part in (*kinds, *parts) if part is not None)
        batch = plan.training.global_batch
        batch -= batch % math.gcd(*(worker.micro_batch for worker in workers))
        shares = deal(batch, workers) if batch else None
        if shares is None:
            return None
        waiting = {
            number: [m * worker.micro_batch for m in own]
            for number, worker, own in zip(numbers, workers, shares, strict=False)
        }
        sequences = tuple(
            0 if gone.intersection(replica.ranks) else waiting[replica.pipeline].pop(0) for replica in plan.replicas
        )
        pipelines = _sharded_alike(
            [part.pipeline for part in (*kinds, *parts) if part is not None],
            alike=len({m * worker.micro_batch for worker, own in zip(workers, shares, strict=True) for m in own}) == 1,
        )
        every, replaced = [*plan.pipelines], {}
        for number, pipeline in zip(numbers, pipelines, strict=False):
            if pipeline != plan.pipelines[number]:
                replaced[number] = _number_of(pipeline, every)
        stand_ins = [
            Replica(pipeline=_number_of(pipeline, every), ranks=part.ranks, sequences=own[0] * pipeline.micro_batch)
            for part, pipeline, own in zip(parts, pipelines[len(kinds) :], shares[len(kinds) :], strict=True)
        ]
        return Candidate(
            policy=policy,
            layout=describe_loss(policy, [part.pipeline for part in parts], stand_ins, sequences),
            pipelines=tuple(every[len(plan.pipelines) :]),
            replicas=tuple(stand_ins),
            replaced=replaced,
            sequences=sequences,
            global_batch=batch,
            seconds=finish_seconds(workers, shares) + once,
            least=least_seconds(workers, shares),
        )

    def _places(self, pipeline: Pipeline) -> list[tuple[int, ...]]:
        """Places in the chain of every stage's modules."""
        return [tuple(self._place[placement.module] for placement in stage.modules) for stage in pipeline.stages]

    def _micro_batches(self, pipeline: Pipeline, left: int, *, alone: bool, few: bool) -> list[int]:
        """The pipeline's own, and those that the ranks left of a stage share evenly; `alone`: divisors of the batch
        beside them, since nobody else can take the rest.
        """
        own, batch = pipeline.micro_batch, self.plan.training.global_batch
        fewer = max(max(stage.num_ranks for stage in pipeline.stages) - 1, 1)
        stage = fewer + 1
        wanted = {own, max(own * fewer // stage, 1), own * fewer}
        if fewer > 1:
            wanted.add(2 * own)
        if not few:
            wanted |= {1, 2, 2 * own, fewer}
        if alone:
            divisors = [size for size in range(1, batch + 1) if batch % size == 0]
            below = {max(size for size in divisors if size <= one) for one in wanted}
            above = {min(size for size in divisors if size >= min(one, batch)) for one in wanted}
            wanted = below | above | (set() if few else wanted)
        return sorted(size for size in wanted if size <= min(batch, max(4 * own, 2 * left)))

    @staticmethod
    def _stage_numbers(pipeline: Pipeline, left: int, *, few: bool) -> list[int]:
        own = len(pipeline.stages)
        if few:
            return [min(own, left)] if left else []
        return sorted({number for number in (1, own - 1, own, own + 1) if 1 <= number <= left})


def _sharded_alike(pipelines: list[Pipeline], *, alike: bool) -> list[Pipeline]:
    """The pipelines; weights that were sharded (zero 3) are not where replicas become unlike in shape or share."""
    if alike and all(pipeline == pipelines[0] for pipeline in pipelines):
        return pipelines
    return [
        pipeline.model_copy(
            update={
                "stages": tuple(
                    stage.model_copy(
                        update={"modules": tuple(p.model_copy(update={"zero": min(p.zero, 2)}) for p in stage.modules)}
                    )
                    for stage in pipeline.stages
                )
            }
        )
        if any(p.zero == 3 for stage in pipeline.stages for p in stage.modules)
        else pipeline
        for pipeline in pipelines
    ]


def _left_in_stages(pipeline: Pipeline, replica: Replica, gone: set[int]) -> list[int]:
    """Surviving ranks of every stage of a damaged replica."""
    return [sum(rank not in gone for rank in replica.ranks[a:b]) for a, b in pairwise(pipeline.stage_starts())]


def _number_of(pipeline: Pipeline, every: list[Pipeline]) -> int:
    """Where a pipeline stands in the list; added at the end if it is new."""
    if pipeline not in every:
        every.append(pipeline)
    return every.index(pipeline)

"""What one rank holds, computes and sends in one step, by the formulas that prices rest on.

`executor.dry_run` counts the same in the executor's own code; tests hold the two together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cost_models.activations import ACTIVATION_BYTES
from cost_models.buckets import Bucket, holdings
from cost_models.context import executed_score_flop, gathered_width
from cost_models.dispatch import exchange_bytes
from cost_models.flops import matrix_flop
from cost_models.memory import GRADIENT_BYTES, WEIGHT_BYTES, PlanMemory, share_of
from cost_models.share import Share
from specs.cluster import CollectiveOp
from specs.errors import BadInputError
from specs.layout import block_of, interval_of
from specs.model import Attention, Embedding, Head, Mlp, Module, Moe
from specs.plan import Plan, Recompute


@dataclass(frozen=True)
class RankWork:
    """One rank, one step.  Bytes held by kind; floating-point operations, attention over all pairs of
    its pieces, masked ones too;
    bytes sent by operation.
    """

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # between two actions, at the most, with a chunk that is on its way in
    peak_bytes: int  # all of that at the most, with what modules work in and with buffers
    flop: float
    sent_bytes: dict[CollectiveOp, float]

    @property
    def held_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


class Seat(NamedTuple):
    """Where a rank of the cluster stands in a plan; `process` counts the ranks in use."""

    rank: int
    process: int
    replica: int
    stage: int
    position: int


def seat_of(plan: Plan, rank: int) -> Seat:
    """Raises `BadInputError` for a rank that the plan does not use."""
    used = sorted(rank for replica in plan.replicas for rank in replica.ranks)
    for number, replica in enumerate(plan.replicas):
        if rank in replica.ranks:
            sizes = [stage.num_ranks for stage in plan.pipelines[replica.pipeline].stages]
            stage, position = block_of(sizes, replica.ranks.index(rank))
            return Seat(rank, used.index(rank), number, stage, position)
    raise BadInputError(f"rank {rank} has no place in the plan, which uses ranks {used[0]} to {used[-1]}.")


class PlanWork:
    """The formulas for any rank of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._chain = dict(plan.model.modules())
        self._replicas_of = Counter(replica.pipeline for replica in plan.replicas)
        self._holdings = holdings(plan)
        self._memory = PlanMemory(plan, self._holdings, self._replicas_of, reserved_bytes=0)
        self._rounds = max(plan.num_micro_batches(replica) for replica in plan.replicas)

    def unlike_seats(self) -> list[Seat]:
        """One rank of every kind, by what they hold, compute and send."""
        kinds: dict[str, Seat] = {}
        seen: set[tuple[int, int]] = set()
        for replica in self._plan.replicas:
            if (replica.pipeline, replica.sequences) in seen:
                continue
            seen.add((replica.pipeline, replica.sequences))
            for rank in replica.ranks:
                seat = seat_of(self._plan, rank)
                kinds.setdefault(repr((seat.stage, self.of(seat))), seat)
        return sorted(kinds.values())

    def fullest_seats(self) -> list[Seat]:
        """The rank of each stage of each kind of replica that holds most."""
        fullest: dict[tuple[int, int, int], tuple[int, Seat]] = {}
        for seat in self.unlike_seats():
            replica, held = self._plan.replicas[seat.replica], self.of(seat).held_bytes
            key = (replica.pipeline, replica.sequences, seat.stage)
            if key not in fullest or held > fullest[key][0]:
                fullest[key] = (held, seat)
        return sorted(seat for _, seat in fullest.values())

    def of(self, seat: Seat) -> RankWork:
        """One rank's step without the update itself."""
        plan, replica = self._plan, self._plan.replicas[seat.replica]
        pipeline, m = plan.pipelines[replica.pipeline], plan.num_micro_batches(replica)
        cuts = pipeline.stages[seat.stage].chunk_cuts(pipeline.micro_batch * plan.training.seq_len)
        size = ACTIVATION_BYTES[plan.training.precision]
        flop, sent = 0.0, defaultdict[CollectiveOp, float](float)
        for placement in pipeline.stages[seat.stage].modules:
            module = self._chain[placement.module]
            share = share_of(placement, module, seat.position, cuts, plan.training.seq_len, pipeline.context_parallel)
            flop += m * _flop(module, share, placement.recompute)
            for op, num_bytes in _block_sends(module, share, placement.recompute, size):
                sent[op] += m * num_bytes
            if isinstance(module, Attention):
                blocks = pipeline.stages[seat.stage].sharing_blocks(placement, cuts[-1], plan.training.seq_len)
                own = block_of(placement.blocks, seat.position)[0]
                others = next(len(group) for group in blocks if own in group) - 1
                for op, num_bytes in _context_sends(module, share, placement.recompute, size, others):
                    sent[op] += m * num_bytes
        chunk = size * interval_of(cuts, seat.position).size * plan.model.hidden
        sent["point_to_point"] += m * _edges(len(pipeline.stages), pipeline.num_virtual, seat.stage) * chunk
        member = (replica.pipeline, seat.stage, seat.position)
        for bucket in self._holdings.buckets:
            if member in bucket.members:
                owners = sum(self._replicas_of[number] for number, _, _ in bucket.members)
                weight = WEIGHT_BYTES[plan.training.precision]
                for op, num_bytes in _sync_sends(bucket, owners, weight, m, self._rounds):
                    sent[op] += num_bytes
        terms = self._memory.stage(replica.pipeline, seat.stage)[seat.position]
        return RankWork(
            weight_bytes=terms.weights,
            gradient_bytes=terms.gradients,
            optimizer_bytes=terms.optimizer,
            activation_bytes=terms.activations + (chunk if len(pipeline.stages) > 1 else 0),
            peak_bytes=terms.total(),
            flop=flop,
            sent_bytes={op: num_bytes for op, num_bytes in sent.items() if num_bytes},
        )


Sent = tuple[CollectiveOp, float]


def _edges(num_stages: int, num_virtual: int, stage: int) -> int:
    """Chunks that a stage sends for one micro-batch, forward and backward together."""
    last = num_stages * num_virtual - 1
    places = range(stage, last + 1, num_stages)
    return sum((place < last) + (place > 0) for place in places)


def _flop(module: Module, share: Share, recompute: Recompute) -> float:
    """Forward and backward of one micro-batch.

    # 3 w + (1 + 5/2) s, with a cap on scores 3 s, and once more what is recomputed: w + s (full), s (selective)
    #   w products with weights, s with scores.  The head makes its gradients in forward, and all of them again when
    #   it is recomputed.  torch counts nothing for an embedding.
    """
    products = matrix_flop(module, share.block_tokens, share.units)
    scores = executed_score_flop(module, share)
    backward = 2.0 if isinstance(module, Attention) and module.score_cap is not None else 2.5
    once = 3.0 * products + (1.0 + backward) * scores
    if recompute == "full":
        return 2.0 * once if isinstance(module, Head) else once + products + scores
    if recompute == "selective":
        return once + (products if isinstance(module, Moe) else scores)
    return once


def _block_sends(module: Module, share: Share, recompute: Recompute, size: int) -> Iterator[Sent]:
    """What a rank sends inside its block for one micro-batch.  c tokens of its chunk, T of the block, t ranks.

    # a gather sends (t - 1) c h a, a scatter (T - c) h a
    """
    if share.degree == 1:
        return
    token = size * module.hidden
    gather: Sent = ("all_gather", (share.degree - 1) * share.chunk_tokens * token)
    scatter: Sent = ("reduce_scatter", (share.block_tokens - share.chunk_tokens) * token)
    match module:
        case Embedding():
            # Recomputation ends with the last tensor that backward needs: after the sum only if it is worked on.
            goes_on = module.num_positions > 0 or module.scale is not None
            passes = [scatter] * (2 if recompute == "full" and goes_on else 1) + [gather]
        case Head():
            # the largest logit, then sums and the target's own, per token in 4 bytes
            ring = 2.0 * (share.degree - 1) / share.degree
            sums: Sent = ("all_reduce", ring * 3 * 4 * share.block_tokens)
            passes = [gather, scatter, sums] * (2 if recompute == "full" else 1)
        case Attention() | Mlp():
            again = [] if recompute == "keep" else [gather]  # of the input
            passes = [gather, scatter] + ([gather, scatter] if recompute == "full" else []) + [gather, scatter, *again]
        case Moe():
            to_experts, back = exchange_bytes(module, share.degree, share.block_tokens, size)
            others = (share.degree - 1) / share.degree
            passes = [("all_to_all", others * part) for part in to_experts * (2 if recompute == "full" else 1) + back]
        case _:
            raise ValueError(f"what a block of {module.kind} sends is not counted")
    yield from passes


def _context_sends(module: Attention, share: Share, recompute: Recompute, size: int, others: int) -> Iterator[Sent]:
    """What a rank sends to `others` that share its sequence: keys and values, and the sums of their gradients.

    # a gather sends others T 2 k d a, once more where attention is recomputed; a scatter (s - T) 2 k d a
    """
    token = gathered_width(module, share) * size
    if token:
        yield "all_gather", others * share.block_tokens * token * (2 if recompute in ("selective", "full") else 1)
        yield "reduce_scatter", (share.seq_len - share.block_tokens) * token


def _sync_sends(bucket: Bucket, owners: int, weight_bytes: int, m: int, rounds: int) -> Iterator[Sent]:
    """Gradient sync of one bucket; `rounds`: most micro-batches of any replica."""
    others = (owners - 1) / owners
    if bucket.zero == 0:
        yield "all_reduce", 2.0 * others * GRADIENT_BYTES * bucket.num_elements
        return
    scatter = others * GRADIENT_BYTES * bucket.num_elements
    gather = others * weight_bytes * bucket.num_elements
    yield "reduce_scatter", scatter * (rounds if bucket.zero >= 2 else 1)
    yield "all_gather", gather * (m * (1 + bucket.gathered_again) if bucket.zero == 3 else 1)

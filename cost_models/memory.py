"""Bytes per rank: weights, gradients, optimizer, activations kept for backward, and working memory.

The formulas describe this project's executor.  A module's input chunk stays on its rank and is gathered again in
backward, so that what grows with the block is only what is cut by its degree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cost_models.buckets import BUCKET_ELEMENTS, Holdings, Member, holdings
from cost_models.flops import gathered_width, largest_units, local_kv_heads, routed_tokens
from cost_models.share import Share
from specs.cluster import Precision
from specs.layout import Cuts, Interval, block_of, block_starts, kv_groups_of
from specs.model import Attention, Embedding, Head, LatentAttention, Mlp, Module, Moe
from specs.plan import MemoryTerms, ModulePlacement, Plan, Recompute
from specs.schedule import Held, most_held
from specs.tensors import local_num_elements, local_rows, sharding_level, tensors_of

WEIGHT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp8": 2}
ACTIVATION_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp8": 2}
GRADIENT_BYTES = 4  # summed over micro-batches in fp32
MOMENT_BYTES = 8  # AdamW's two moments in fp32
MASTER_BYTES = 4  # fp32 copy of weights that are kept in a shorter type
LOG_SUM_EXP_BYTES = 4
MAX_LOGIT_ELEMENTS = 2**26  # the head computes its logits in pieces of this size
TOKEN_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class StaticBytes:
    """What a rank holds of one module all the time."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def _state_bytes(precision: Precision) -> int:
    """Optimizer bytes per element that a rank owns."""
    return MOMENT_BYTES + (MASTER_BYTES if WEIGHT_BYTES[precision] < MASTER_BYTES else 0)


@lru_cache(maxsize=65536)
def static_bytes(
    module: Module, *, degree: int, num_copies: int, precision: Precision, zero: int, units: Interval | None = None
) -> StaticBytes:
    """One module that lies in `num_copies` equal blocks of `degree` evenly cut ranks: the form the search needs.

    `units`: the rank's own, None for the largest share.

    # weights w N, gradients 4 N, optimizer (8 + 4 [w < 4]) N / n;  gradients 4 N / n from zero 2 on, and with zero 3
    # weights w N / n (vectors w N)
    #   N local elements, w bytes of the compute type; n owners of each interval, 1 without sharding, else the copies,
    #   times the ranks of a block for what all of them hold (norms) or share (KV heads)
    """
    own = largest_units(module, degree) if units is None else units
    held = 0
    owned = kept = 0.0  # elements whose state is kept here, and of which weights are
    for tensor in tensors_of(module):
        width = max(tensor.cols, 1)
        rows = local_rows(module, tensor, own)
        size = rows.size * width
        held += size
        if not zero:
            part = float(size)
        elif tensor.cut == "whole":
            part = size / (num_copies * degree)
        elif tensor.cut == "kv":
            assert isinstance(module, Attention)
            groups = kv_groups_of(own, module.num_heads, module.num_kv_heads)
            part = sum(
                tensor.rows_per_unit * width / (num_copies * _kv_holders(module, group, degree))
                for group in range(groups.start, groups.stop)
            )
        else:
            part = size / num_copies
        owned += part
        kept += part if sharding_level(tensor, zero) == 3 else size
    return StaticBytes(
        round(kept * WEIGHT_BYTES[precision]),
        round((owned if zero >= 2 else held) * GRADIENT_BYTES),
        round(owned * _state_bytes(precision)),
    )


def _kv_holders(module: Attention, group: int, degree: int) -> int:
    """Ranks of an evenly cut block whose query heads read a KV head."""
    per_group = module.num_heads // module.num_kv_heads
    first, last = group * per_group, (group + 1) * per_group - 1
    # rank of head h in a balanced cut: the largest i with i * heads // degree <= h
    return ((last + 1) * degree - 1) // module.num_heads - ((first + 1) * degree - 1) // module.num_heads + 1


@lru_cache(maxsize=65536)
def activation_bytes(module: Module, share: Share, precision: Precision, recompute: Recompute = "none") -> int:
    """Bytes kept from forward to backward of one micro-batch on one rank.

    # attention  a (n c h + T (2 q + 2 k) d) + 4 T q       mlp        a (n c h + (3 | 2) T f)
    # head       a (n c h + v h)                           embedding  8 T       moe  `_moe_bytes`
    # full recompute: a c h (head: + 8 T).  selective: attention without its output and log-sum-exp, mlp without
    #   its product.  A norm of a module's output keeps that: a c h
    #   c tokens of the rank's chunk, T tokens of its block, h hidden, d head_dim, a bytes of an activation;
    #   q query heads, k KV heads, f columns (3 gated, 2 not), v vocabulary rows on this rank.  n = 2, the input and
    #   the normalised input; the head keeps the finished gradients of its input and weight instead of logits.
    #   Leaves out statistics of norms (4 or 8 bytes per token) and the rotary table.
    """
    size, block_tokens, units = ACTIVATION_BYTES[precision], share.block_tokens, share.units
    chunk = size * share.chunk_tokens * module.hidden
    if isinstance(module, Embedding):
        return (TOKEN_ID_BYTES + (size if share.degree > 1 and recompute != "full" else 0)) * block_tokens
    if recompute == "full":
        return chunk + (TOKEN_ID_BYTES * block_tokens if isinstance(module, Head) else 0)
    selective = recompute == "selective"
    chunks = 2 * chunk
    if isinstance(module, Attention | Mlp) and module.post_norm:
        chunks += chunk
    match module:
        case Attention():
            return chunks + _attention_bytes(module, share, precision, selective)
        case LatentAttention():
            return chunks + _latent_attention_bytes(module, share, precision, selective)
        case Mlp():
            return chunks + size * block_tokens * units.size * (1 + module.gated + (not selective))
        case Moe():
            return chunks + _moe_bytes(module, share, size, selective)
        case Head():
            return chunks + size * units.size * module.hidden


def _moe_bytes(module: Moe, share: Share, size: int, selective: bool) -> int:
    """What routing keeps on the rank's own tokens, and its experts of the tokens that a balanced router sends them.

    # router   c (4 E + 12 e + 4)     E experts, e of them a token, R = T e u / E tokens for the rank's u experts
    # experts  a R (3 h + 3 f + 2) + 24 R       inputs, columns, outputs, weights, three lists of places
    # shared   a 3 T f', and the gathered input a T h in a block of several
    # selective: router and T e a, in a block of several also the gathered input and choices, T (a h + 8 e)
    """
    tokens, chosen = share.block_tokens, module.experts_per_token
    router = share.chunk_tokens * (4 * module.num_experts + (TOKEN_ID_BYTES + 4) * chosen + 4)
    gathered = size * tokens * module.hidden if share.degree > 1 else 0
    if selective:
        choices = TOKEN_ID_BYTES * tokens * chosen if share.degree > 1 else 0
        return router + gathered + choices + size * tokens * chosen
    routed = routed_tokens(module, tokens, share.units)
    experts = size * (3 * module.hidden + 3 * module.expert_ffn + 2) + 3 * TOKEN_ID_BYTES
    columns = _shared_columns(module, share.units)
    return router + round(routed * experts) + (gathered + 3 * size * tokens * columns if columns else 0)


def _shared_columns(module: Moe, units: Interval) -> int:
    """Whole columns of the shared experts on a rank with these experts."""
    rows, experts = module.shared_ffn, module.num_experts
    return units.stop * rows // experts - units.start * rows // experts


def _attention_bytes(module: Attention, share: Share, precision: Precision, selective: bool) -> int:
    """What attention keeps between its two projections.

    # with a cap on scores, which no fused kernel takes: queries, the keys and values of each query head, the output,
    #   and the scores after the cap and as probabilities: a 4 T q d + T q s (a + 4, and a beside fp32) + s^2
    # with a window: the mask as the kernel wants it, a s^2
    """
    size, tokens, seq_len = ACTIVATION_BYTES[precision], share.block_tokens, share.seq_len
    queries, kv_heads = share.units.size, local_kv_heads(module, share.units)
    if selective:
        return size * tokens * (queries + 2 * kv_heads) * module.head_dim
    normed = queries + kv_heads if module.qk_norm else 0
    if module.score_cap is not None:
        scores = tokens * queries * seq_len * (size + 4 + (size if size < 4 else 0))
        return size * tokens * (4 * queries + normed) * module.head_dim + scores + seq_len**2
    heads = 2 * queries + 2 * (kv_heads if _whole_kv_groups(module, share.units) else queries) + normed
    mask = size * seq_len**2 if module.window is not None and module.window < seq_len else 0
    return size * tokens * heads * module.head_dim + LOG_SUM_EXP_BYTES * tokens * queries + mask


def _latent_attention_bytes(module: LatentAttention, share: Share, precision: Precision, selective: bool) -> int:
    """Low-rank vectors before and after their norms on the rank's chunk, and the heads' queries, keys and values.

    # a (2 c l + T n (2 d + r + 2 v)) + 4 T n;  selective: a (2 c l + T n (2 d + r + v))
    #   l latent width, n heads, d, r, v widths of a head's part without positions, with them, and of its value; joined
    #   keys add a T n r.  A formula: no executor that was measured runs this module.
    """
    heads = share.units.size
    width = module.key_dim + module.head_dim + module.value_dim
    if not selective:
        width += module.rope_dim + module.value_dim
    kept = 2 * share.chunk_tokens * module.latent_width + share.block_tokens * heads * width
    log_sum_exp = 0 if selective else LOG_SUM_EXP_BYTES * share.block_tokens * heads
    return ACTIVATION_BYTES[precision] * kept + log_sum_exp


def _whole_kv_groups(module: Attention, heads: Interval) -> bool:
    """Whether torch can repeat the KV heads itself; else each query head gets a copy of its group."""
    per_group = module.num_heads // module.num_kv_heads
    groups = kv_groups_of(heads, module.num_heads, module.num_kv_heads)
    return groups.size == 1 or (heads.start % per_group == 0 and heads.size == groups.size * per_group)


@lru_cache(maxsize=65536)
def deferred_bytes(module: Module, share: Share, precision: Precision) -> int:
    """Bytes that wait from the gradient of the input (I) to the gradients of the weights (W), where those are split.

    # attention  a (c h + T (2 q + 2 k) d + T h)        mlp  a (c h + T (3 | 2) f + T h)        others 0
    #   input chunk, gradients of the first projections' outputs, input of the last one and its gathered output gradient
    """
    if not isinstance(module, (Attention, Mlp)):
        return 0
    if isinstance(module, Attention):
        width = (2 * share.units.size + 2 * local_kv_heads(module, share.units)) * module.head_dim
    else:
        width = share.units.size * (2 + module.gated)
    kept = share.chunk_tokens * module.hidden + share.block_tokens * (width + module.hidden)
    return ACTIVATION_BYTES[precision] * kept


@lru_cache(maxsize=65536)
def working_bytes(module: Module, share: Share, precision: Precision, recompute: Recompute = "none") -> int:
    """Extra bytes at the peak of a module's own computing, beyond what is kept for backward.

    # backward: gathered input and gathered output gradient (2 T h in a block of several), gradients of the inner
    # tensors and of the weights, and with recomputation the tensors that it brings back
    # head (in forward): gathered input and its gradient, and a piece of logits in 4 bytes (and in a, where shorter)
    """
    size, block_tokens, units = ACTIVATION_BYTES[precision], share.block_tokens, share.units
    both = block_tokens * (gathered_width(module) + module.hidden)
    gathered = size * (both if share.degree > 1 else share.chunk_tokens * module.hidden)
    weights = size * local_num_elements(module, units)
    match module:
        case Embedding():
            return size * block_tokens * module.hidden + weights
        case Attention():
            inner = size * block_tokens * (2 * units.size + 2 * local_kv_heads(module, units)) * module.head_dim
            if module.score_cap is not None:
                inner += 8 * block_tokens * units.size * share.seq_len  # two of the gradients of scores, in fp32
        case LatentAttention():
            inner = size * block_tokens * 2 * units.size * (module.key_dim + module.value_dim)
        case Mlp():
            inner = size * block_tokens * units.size * (3 if module.gated else 2)
        case Moe():
            tokens = routed_tokens(module, block_tokens, units)
            inner = round(size * tokens * (2 * module.hidden + 3 * module.expert_ffn))
        case Head():
            piece = min(block_tokens, max(1, MAX_LOGIT_ELEMENTS // units.size))
            inner = piece * units.size * (4 if size == 4 else size + 4)  # in fp32 the loss works in place
            inner += 4 * piece * units.size if module.logit_cap is not None else 0  # the cap's slope
    kept = activation_bytes(module, share, precision, recompute)
    return gathered + inner + weights + activation_bytes(module, share, precision) - kept


def matrix_elements(module: Module, units: Interval) -> list[int]:
    """Elements of each matrix of a module on one rank."""
    return [local_rows(module, tensor, units).size * tensor.cols for tensor in tensors_of(module) if tensor.cols]


def sharding_bytes(scattered: int, bucket: int, gathered: int, precision: Precision) -> int:
    """Buffers during the passes of what is scattered after every micro-batch and gathered around every use.

    # 4 min(N, 3 B) + 2 w M
    #   N elements of level 2 and 3, B of the largest bucket: one fills while two are summed;  M matrices of the largest
    #   module of level 3: in use, and those gathered meanwhile;  w bytes of a weight
    """
    return GRADIENT_BYTES * min(scattered, 3 * bucket) + 2 * WEIGHT_BYTES[precision] * gathered


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Equal modules, equally placed, of one virtual stage."""

    module: Module
    placement: ModulePlacement
    count: int


def module_groups(run: Iterable[ModulePlacement], chain: Mapping[str, Module]) -> list[ModuleGroup]:
    """A virtual stage's modules with equal ones counted once, in order of first appearance."""
    groups: dict[tuple[object, ...], ModuleGroup] = {}
    for placement in run:
        module = chain[placement.module]
        key = (id(module), placement.blocks, placement.cuts, placement.recompute, placement.zero)
        known = groups.get(key)
        groups[key] = ModuleGroup(module, placement, known.count + 1 if known else 1)
    return list(groups.values())


def share_of(placement: ModulePlacement, module: Module, rank: int, chunk_cuts: Cuts, seq_len: int) -> Share:
    """A stage's rank seen from one of its modules."""
    block, _ = block_of(placement.blocks, rank)
    start, stop = block_starts(placement.blocks)[block : block + 2]
    return Share(
        degree=stop - start,
        chunk_tokens=chunk_cuts[rank + 1] - chunk_cuts[rank],
        block_tokens=chunk_cuts[stop] - chunk_cuts[start],
        units=placement.units_of(rank, module),
        seq_len=seq_len,
    )


class PlanMemory:
    """Memory of every rank of a plan, from one reading of its buckets."""

    def __init__(self, plan: Plan, held: Holdings, replicas_of: Mapping[int, int], *, reserved_bytes: int) -> None:
        """`replicas_of`: replicas of each pipeline."""
        self._plan = plan
        self._chain = dict(plan.model.modules())
        self._reserved_bytes = reserved_bytes
        self._weights: defaultdict[Member, float] = defaultdict(float, held.copied)
        self._gradients: defaultdict[Member, float] = defaultdict(float)
        self._scattered: defaultdict[Member, int] = defaultdict(int)  # after every micro-batch
        self._gathered: defaultdict[Member, int] = defaultdict(int)  # after the update, at most at once
        self.owned: defaultdict[Member, float] = defaultdict(float)
        for bucket in held.buckets:
            owners = sum(replicas_of[pipeline] for pipeline, _, _ in bucket.members)
            for member in bucket.members:
                part = bucket.num_elements / (owners if bucket.zero else 1)
                self.owned[member] += part
                self._weights[member] += part if bucket.zero == 3 else bucket.num_elements
                self._gradients[member] += part if bucket.zero >= 2 else bucket.num_elements
                if owners == 1:
                    continue
                if bucket.zero >= 2:
                    self._scattered[member] += bucket.num_elements
                if bucket.zero in (1, 2):
                    largest = min(bucket.num_elements, BUCKET_ELEMENTS)
                    self._gathered[member] = max(self._gathered[member], largest)

    def stage(self, pipeline: int, stage: int) -> list[MemoryTerms]:
        """Peak bytes of each rank of a stage."""
        layout = self._plan.pipelines[pipeline]
        groups = [module_groups(run, self._chain) for run in layout.stages[stage].runs()]
        cuts = layout.stages[stage].chunk_cuts(layout.micro_batch * self._plan.training.seq_len)
        sequences = max(replica.sequences for replica in self._plan.replicas if replica.pipeline == pipeline)
        moments = most_held(layout.stage_actions(sequences // layout.micro_batch)[stage])
        return [self._rank((pipeline, stage, rank), groups, cuts, moments) for rank in range(len(cuts) - 1)]

    def _rank(
        self, member: Member, runs: Sequence[Sequence[ModuleGroup]], cuts: Cuts, moments: Sequence[Held]
    ) -> MemoryTerms:
        precision = self._plan.training.precision
        kept, deferred, working = [0] * len(runs), [0] * len(runs), 0
        bucket, gathered = BUCKET_ELEMENTS, 0
        for virtual, groups in enumerate(runs):
            for group in groups:
                share = share_of(group.placement, group.module, member[2], cuts, self._plan.training.seq_len)
                recompute = group.placement.recompute
                kept[virtual] += group.count * activation_bytes(group.module, share, precision, recompute)
                deferred[virtual] += group.count * deferred_bytes(group.module, share, precision)
                working = max(working, working_bytes(group.module, share, precision, recompute))
                matrices = matrix_elements(group.module, share.units)
                bucket = max(bucket, *matrices)
                gathered = max(gathered, sum(matrices) if group.placement.zero == 3 else 0)
        activations = max(
            sum(n * size for n, size in zip(held.kept + held.deferred, kept + deferred, strict=True))
            for held in moments
        )
        weight = WEIGHT_BYTES[precision]
        # What is scattered and gathered once a step finds activations gone; a chunk is on its way in and out at every
        # edge of the pipeline.
        passing = sharding_bytes(self._scattered[member], bucket, gathered, precision)
        sharding = max(passing, self._gathered[member] * weight - activations - working)
        chunk = ACTIVATION_BYTES[precision] * (cuts[member[2] + 1] - cuts[member[2]]) * self._plan.model.hidden
        last = len(self._plan.pipelines[member[0]].stages) - 1
        edges = 2 * len(runs) - (member[1] == 0) - (member[1] == last)
        return MemoryTerms(
            weights=round(self._weights[member] * weight),
            gradients=round(self._gradients[member] * GRADIENT_BYTES),
            optimizer=round(self.owned[member] * _state_bytes(precision)),
            activations=activations,
            working=working,
            communication=sharding + 2 * edges * chunk,
            reserved=self._reserved_bytes,
        )


def rank_memory(plan: Plan, pipeline: int, stage: int, rank: int, *, reserved_bytes: int = 0) -> MemoryTerms:
    """Peak bytes of the `rank`-th rank of a stage of `plan.pipelines[pipeline]`."""
    replicas_of = Counter(replica.pipeline for replica in plan.replicas)
    memory = PlanMemory(plan, holdings(plan), replicas_of, reserved_bytes=reserved_bytes)
    return memory.stage(pipeline, stage)[rank]

"""Costs from a profile: what was measured, interpolated in tokens and bytes, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from statistics import fmean

from cost_models.activations import ACTIVATION_BYTES, activation_bytes
from cost_models.flops import forward_flop, largest_units, score_flop
from cost_models.interface import ModuleCost
from cost_models.interpolate import log_log
from cost_models.share import Share
from cost_models.stacks import stack
from cost_models.stragglers import expected_maximum
from cost_models.working import working_bytes
from specs.cluster import ClusterSpec, CollectiveOp, LinkLevel, Precision
from specs.errors import BadInputError
from specs.layout import Interval
from specs.model import Attention, LatentAttention, Mamba2, Mlp, Module, Moe
from specs.plan import Recompute, TrainingSpec
from specs.profile import ModuleTiming, OverlapTiming, Profile, StepOverhead

# Tokens may lie this far outside the measured range; the time is then in proportion and marked estimated.
MAX_EXTRAPOLATION = 2.0
# Where a profile of GPUs did not measure it: context 0.5 GiB, communicators 1 to 2, allocator slack.  Estimated.
GPU_RESERVED_BYTES = 3 * 2**30
# Activation function and product as a part of a feed-forward pass: 1 to 8 % on one CPU core, FFN 384 to 2,816.
ACTIVATION_SHARE = 0.05

_Key = tuple[Module, int, int, Precision]


class MeasuredCosts:
    """A `CostModel` over a profile, for one training specification and cluster."""

    def __init__(self, profile: Profile, training: TrainingSpec, cluster: ClusterSpec) -> None:
        """Raises `BadInputError` when the profile is of other devices than the cluster has."""
        profiled = sorted({group.device for group in profile.cluster.nodes})
        wanted = sorted({group.device for group in cluster.nodes})
        if profiled != wanted:
            raise BadInputError(
                f"the profile was measured on {', '.join(profiled)}, the cluster {cluster.name} has "
                f"{', '.join(wanted)}. Profile that cluster (plait profile), or plan without --profile."
            )
        self._profile = profile
        self._training = training
        self._on_gpu = any(device.kind == "gpu" for device in cluster.devices.values())
        self._modules: defaultdict[_Key, list[ModuleTiming]] = defaultdict(list)
        for timing in profile.modules:
            self._modules[timing.module, timing.degree, timing.seq_len, timing.precision].append(timing)
        for timings in self._modules.values():
            timings.sort(key=lambda timing: timing.block_tokens)
        curves: defaultdict[tuple[CollectiveOp, int, LinkLevel], list[tuple[int, float]]] = defaultdict(list)
        for collective in profile.collectives:
            key = (collective.op, collective.num_ranks, collective.level)
            curves[key].append((collective.payload_bytes, collective.timing.mean_seconds))
        self._collectives = {key: sorted(points) for key, points in curves.items()}
        self._hidden = {overlap.sharded: _hidden_share(overlap) for overlap in profile.overlaps}
        self._optimizer = sorted((timing.num_elements, timing.timing.mean_seconds) for timing in profile.optimizer)

    @property
    def overhead(self) -> StepOverhead:
        return self._profile.overhead

    @property
    def reserved_bytes(self) -> int:
        measured = self._profile.reserved_bytes
        return (GPU_RESERVED_BYTES if self._on_gpu else 0) if measured is None else measured

    @property
    def estimated(self) -> bool:
        """Whether a profile of GPUs lacks what hides gradient sync, or their reserved memory."""
        several = self._profile.world_size > 1
        return self._on_gpu and (self._profile.reserved_bytes is None or (several and not self._hidden))

    @cached_property
    def jitter(self) -> float:
        """# cv = mean over modules at degree 1 of skew / (mean E[max of n normals]);  at other degrees ranks wait for
        #   each other inside the module.  Profiles without skew: half the spread of the ranks' means in its place.
        """
        if self._profile.world_size < 2:
            return 0.0
        timings = [t.forward for t in self._profile.modules if t.degree == 1]
        skews = [(t.rank_spread / 2.0 if t.skew_seconds is None else t.skew_seconds / t.mean_seconds) for t in timings]
        return fmean(skews) / expected_maximum(self._profile.world_size) if skews else 0.0

    def module(
        self,
        module: Module,
        *,
        degree: int,
        block_tokens: int,
        seq_len: int,
        recompute: Recompute,
        level: LinkLevel,
        units: Interval | None = None,
    ) -> ModuleCost:
        """Interpolated in `block_tokens`; a rank with another number of units than the largest even share computes
        in proportion.  Full recomputation repeats the forward pass with its communication, selective its share of
        attention scores.
        """
        timings = self._timings(module, degree, seq_len)
        if level == "scale_out" and degree > 1 and self._profile.cluster.num_nodes == 1:
            raise BadInputError(
                f"{module.kind} at degree {degree} spans several nodes, the profile was measured on one node. "
                "Profile at least two nodes (torchrun ... plait profile) or limit the degree to one node."
            )
        tokens = [float(timing.block_tokens) for timing in timings]
        low, high = tokens[0] / MAX_EXTRAPOLATION, tokens[-1] * MAX_EXTRAPOLATION
        if block_tokens < seq_len:  # balanced slices of a sequence are that part of its work
            low = 0.0
        if not low <= block_tokens <= high:
            raise BadInputError(
                f"{module.kind} at degree {degree}: a block of {block_tokens} tokens was not measured, the profile has "
                f"{timings[0].block_tokens} to {timings[-1].block_tokens}. Run plait profile with that micro-batch, or "
                "choose a micro-batch inside the measured range."
            )

        def at(values: list[float]) -> float:
            if block_tokens < tokens[0]:
                return values[0] * block_tokens / tokens[0]
            return log_log(tokens, [max(value, 1e-9) for value in values], block_tokens)

        even = largest_units(module, degree)
        own = even if units is None else units
        share = own.size / even.size
        forward_communication = at([timing.forward_communication for timing in timings]) if degree > 1 else 0.0
        backward_communication = at([timing.backward_communication for timing in timings]) if degree > 1 else 0.0
        forward = max(0.0, at([timing.forward.mean_seconds for timing in timings]) - forward_communication) * share
        backward = max(0.0, at([timing.backward.mean_seconds for timing in timings]) - backward_communication) * share
        if recompute == "full":
            backward += forward
            backward_communication += forward_communication
        elif recompute == "keep" and degree > 1:
            payload = block_tokens * module.hidden * ACTIVATION_BYTES[self._training.precision]
            gather = self.collective("all_gather", num_ranks=degree, payload_bytes=payload, level=level)
            backward_communication = max(0.0, backward_communication - gather)
        elif recompute == "selective":
            backward += forward * _selective_share(module, block_tokens, seq_len, own)
        part, precision = Share.of(module, degree, block_tokens, seq_len, own), self._training.precision
        return ModuleCost(
            forward_seconds=forward,
            backward_seconds=backward,
            forward_communication_seconds=forward_communication,
            backward_communication_seconds=backward_communication,
            activation_bytes=activation_bytes(module, part, precision, recompute),
            working_bytes=working_bytes(module, part, precision, recompute),
            estimated=recompute in ("keep", "selective") or not tokens[0] <= block_tokens <= tokens[-1],
        )

    def _timings(self, module: Module, degree: int, seq_len: int) -> list[ModuleTiming]:
        timings = self._modules.get((module, degree, seq_len, self._training.precision))
        if timings is None:
            same = sorted({d for m, d, s, p in self._modules if m == module and s == seq_len})
            known = f"degrees {same}" if same else "no such shape"
            raise BadInputError(
                f"the profile has no timing of {_shape(module)} at degree {degree}, sequence length {seq_len}, "
                f"{self._training.precision} (it has {known} at that length). Run plait profile --model with this "
                f"model, --seq-len {seq_len}, and enough ranks for degree {degree}."
            )
        return timings

    def collective(
        self, op: CollectiveOp, *, num_ranks: int, payload_bytes: int, level: LinkLevel, ranks_per_domain: int = 1
    ) -> float:
        """Interpolated log-log in bytes for this operation and level, and linearly between measured group sizes."""
        del ranks_per_domain  # the measured group had the cluster's own placement
        if num_ranks <= 1 or payload_bytes <= 0:
            return 0.0
        measured = sorted(n for o, n, at in self._collectives if o == op and at == level)
        if op == "point_to_point" and measured:
            num_ranks = measured[0]  # every group size was measured by sends between two neighbours
        low = max((n for n in measured if n <= num_ranks), default=0)
        high = min((n for n in measured if n >= num_ranks), default=0)
        if not low or not high:
            raise BadInputError(
                f"the profile has no {op} over {num_ranks} ranks at level {level} (it has group sizes {measured}). "
                f"Run plait profile on at least {num_ranks} ranks."
            )
        ends = []
        for size in (low, high):
            payloads, seconds = zip(*self._collectives[op, size, level], strict=True)
            ends.append(log_log(payloads, seconds, payload_bytes))
        part = (num_ranks - low) / (high - low) if high > low else 0.0
        return ends[0] * (1.0 - part) + ends[1] * part

    def optimizer(self, num_elements: int) -> float:
        """Interpolated log-log in elements; below the smallest measured its time, above in proportion."""
        if num_elements <= 0:
            return 0.0
        return log_log(
            [float(n) for n, _ in self._optimizer], [seconds for _, seconds in self._optimizer], num_elements
        )

    def exposed_gradient_sync(self, seconds: float, backward_seconds: float, *, sharded: bool = False) -> float:
        """On CPUs all of it, since the executor keeps the cores for computing; on GPUs what overlap leaves.

        # exposed = s - h min(s, b)      h hidden share of the profile's own replicas: (step with sync after backward -
        #   step with it beside) / min(s, b); what hiding slows down is in it
        """
        if not self._on_gpu:
            return seconds
        if sharded not in self._hidden:
            return stack("plait").exposed(seconds, backward_seconds, sharded=sharded)
        return seconds - self._hidden[sharded] * min(seconds, backward_seconds)


def _hidden_share(overlap: OverlapTiming) -> float:
    """Part of the collectives that a backward pass hides; 0 where overlap does not pay."""
    could = min(overlap.sync_seconds, overlap.backward_seconds)
    gained = overlap.apart.mean_seconds - overlap.overlapped.mean_seconds
    return min(1.0, max(0.0, gained / could)) if could > 0.0 else 0.0


def _selective_share(module: Module, block_tokens: int, seq_len: int, units: Interval) -> float:
    """Part of a forward pass that selective recomputation repeats."""
    match module:
        case Attention() | LatentAttention() | Mamba2():
            whole = forward_flop(module, block_tokens=block_tokens, seq_len=seq_len, units=units)
            return score_flop(module, block_tokens, seq_len, units) / whole
        case Mlp() | Moe():
            return ACTIVATION_SHARE
        case _:
            return 0.0


def _shape(module: Module) -> str:
    sizes = {k: v for k, v in module.model_dump().items() if isinstance(v, int) and not isinstance(v, bool)}
    return f"{module.kind} ({', '.join(f'{name} {size}' for name, size in sizes.items())})"

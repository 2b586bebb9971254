"""What happens after a loss, in one line, for plans, logs and messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from specs.plan import ContingencyPolicy, Pipeline, Replica, Stage


def describe_loss(
    policy: ContingencyPolicy, pipelines: Sequence[Pipeline], stand_ins: Sequence[Replica], sequences: Sequence[int]
) -> str:
    """One line: what stands in the damaged replicas' place, and the shares."""
    kept = [share for share in sequences if share]
    others = f"others {min(kept)}" + (f" to {max(kept)}" if min(kept) != max(kept) else "") if kept else ""
    if not pipelines:
        return f"damaged replicas left out; {others} sequences"
    texts: dict[str, int] = {}
    for pipeline, replica in zip(pipelines, stand_ins, strict=True):
        sizes = [stage.num_ranks for stage in pipeline.stages]
        text = f"{_sum(sizes)} ranks" + (f" in {len(sizes)} stages" if len(sizes) > 1 else "")
        if policy not in ("spare", "drop"):
            smallest = min(pipeline.stages, key=lambda stage: stage.num_ranks)
            text += f": {_blocks(smallest)}"
        text += f"; micro-batch {pipeline.micro_batch}, {replica.sequences} sequences"
        texts[text] = texts.get(text, 0) + 1
    alike = [text if count == 1 else f"{count} x ({text})" for text, count in texts.items()]
    return " | ".join([*alike, *([others] if others else [])])


def _blocks(stage: Stage) -> str:
    """`attention 4 + 3, mlp 7`; embedding and head only where there is nothing else."""
    kinds: dict[str, dict[str, None]] = {}
    for placement in stage.modules:
        kinds.setdefault(placement.module.rsplit(".", 1)[-1], {})[_sum(placement.blocks)] = None
    inner = {kind: blocks for kind, blocks in kinds.items() if kind not in ("embedding", "head")}
    return ", ".join(f"{kind} {' or '.join(blocks)}" for kind, blocks in (inner or kinds).items())


def _sum(sizes: Sequence[int]) -> str:
    """`4 + 3`, `7 x 1`, `1 + 7 x 2`."""
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    return " + ".join(str(size) if count == 1 else f"{count} x {size}" for size, count in runs)

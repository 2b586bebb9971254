"""How to start a plan on every node: a batch file for Slurm with one agent per node, and torchrun lines.

Under torchrun processes are numbered node by node in the order of the plan's ranks; ranks that a plan leaves out
(missing devices, spares) get no process, and their devices are hidden from the others by `CUDA_VISIBLE_DEVICES`.  An
agent knows the devices by their numbers, and has spare ones at hand when another is lost.
"""

from __future__ import annotations

import shlex
from itertools import groupby, pairwise
from typing import NamedTuple

from exports.heading import heading
from specs.errors import BadInputError
from specs.plan import Plan

PORT = 29500


class Node(NamedTuple):
    """The devices of one node that a plan uses, by their number on the node."""

    devices: tuple[int, ...]
    installed: int

    @property
    def visible(self) -> str:
        """For CUDA_VISIBLE_DEVICES; empty when all are used."""
        return "" if len(self.devices) == self.installed else ",".join(map(str, self.devices))


def nodes_of(plan: Plan) -> list[Node]:
    """The nodes that a plan uses, in rank order."""
    used = {rank for replica in plan.replicas for rank in replica.ranks}
    nodes = []
    for start, stop in pairwise(plan.cluster.node_starts()):
        devices = tuple(rank - start for rank in range(start, stop) if rank in used)
        if devices:
            nodes.append(Node(devices, stop - start))
    return nodes


def write_torchrun(plan: Plan, plan_path: str) -> str:
    """One line for every run of equal nodes; the first node also holds the rendezvous."""
    nodes = nodes_of(plan)
    lines = [*heading(plan, "torchrun lines")]
    if len(nodes) == 1:
        lines += ["# On the node:", _line(nodes[0], 1, plan_path, "")]
        return "\n".join(lines) + "\n"
    lines += [
        "# On every node: set HEAD to the first node's name or address, NODE to the node's number as given below,",
        "# and start the line of that node. All nodes need the same plan and the run folder on a shared disk.",
    ]
    for node, run in groupby(enumerate(nodes), key=lambda item: item[1]):
        numbers = [number for number, _ in run]
        which = f"node {numbers[0]}" if len(numbers) == 1 else f"nodes {numbers[0]} to {numbers[-1]}"
        rendezvous = f'--node-rank "$NODE" --master-addr "$HEAD" --master-port {PORT} '
        lines += [f"# NODE: {which}", _line(node, len(nodes), plan_path, rendezvous)]
    return "\n".join(lines) + "\n"


def _line(node: Node, num_nodes: int, plan_path: str, rendezvous: str) -> str:
    hidden = f"CUDA_VISIBLE_DEVICES={node.visible} " if node.visible else ""
    where = rendezvous if rendezvous else "--standalone "
    return (
        f"{hidden}torchrun --nnodes {num_nodes} --nproc-per-node {len(node.devices)} {where}-m cli train "
        f"{shlex.quote(plan_path)} --out runs/first"
    )


def write_slurm(plan: Plan, plan_path: str) -> str:
    """An sbatch file: one agent per node, a checkpoint before the time limit, and the run goes on when requeued."""
    nodes = plan.cluster.node_ranks()
    installed = {len(ranks) for ranks in nodes}
    if len(installed) > 1:
        raise BadInputError(
            f"the plan's nodes have {' and '.join(map(str, sorted(installed)))} devices, one Slurm job asks for equal "
            "nodes. Use --to torchrun, or a heterogeneous job of your own."
        )
    of_devices = {plan.cluster.device_of(rank).kind for replica in plan.replicas for rank in replica.ranks}
    gpus = [f"#SBATCH --gpus-per-node={installed.pop()}"] if "gpu" in of_devices else []
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=plait-{''.join(c if c.isalnum() or c in '-.' else '-' for c in plan.model.name)}",
        f"#SBATCH --nodes={len(nodes)}",
        "#SBATCH --ntasks-per-node=1",
        *gpus,
        "#SBATCH --exclusive",
        "#SBATCH --no-kill  # a node that fails does not end the job: training goes on without it",
        "#SBATCH --requeue",
        "#SBATCH --signal=TERM@300  # five minutes before the limit: finish the step and save",
        "#SBATCH --output=%x-%j.log",
        *heading(plan, "Slurm batch file"),
        "# Submit: sbatch THIS_FILE. PLAN and RUN must be on a disk that all nodes share.",
        "set -euo pipefail",
        "",
        f'PLAN="${{PLAN:-{plan_path}}}"' if shlex.quote(plan_path) == plan_path else f"PLAN={shlex.quote(plan_path)}",
        'RUN="${RUN:-runs/$SLURM_JOB_NAME}"',
        'if [ -f "$RUN/log.jsonl" ]; then RESUME=--resume; else RESUME=; fi',
        "",
        "# One agent per node; the first node's supervises. Which node is which, Slurm tells them.",
        'srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 plait train "$PLAN" --out "$RUN" $RESUME',
    ]
    return "\n".join(lines) + "\n"

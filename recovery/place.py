"""Which node of how many this command is on: from its options, or from Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from specs.errors import BadInputError
from specs.plan import Plan

PORT = 29500
HOW = "--nnodes N --node-rank K --master-addr HOST, with K from 0 and HOST the first node"


@dataclass(frozen=True)
class Place:
    """Node `node` of `num_nodes`; the supervisor is on node 0 and listens at `host`, `port`."""

    node: int
    num_nodes: int
    host: str
    port: int

    def check_plan(self, plan: Plan) -> None:
        """Raise `BadInputError` when the plan's cluster has another number of nodes."""
        nodes = len(plan.cluster.node_ranks())
        if nodes != self.num_nodes:
            raise BadInputError(
                f"the plan's cluster {plan.cluster.name} has {nodes} nodes with devices in use, the command was "
                f"started for {self.num_nodes}. Start one `plait train` on each of the {nodes}."
            )


def find_place(
    num_nodes: int | None,
    node: int | None,
    host: str | None,
    port: int | None,
    environment: Mapping[str, str],
) -> Place | None:
    """What the options say, what Slurm says for those that are not given; None on a single node.

    Slurm is asked only where srun has started one task on each of several nodes.

    Raises:
        BadInputError: the options do not say which node this is and where the supervisor is, or not under torchrun.
    """
    given = {"--nnodes": num_nodes, "--node-rank": node, "--master-addr": host, "--master-port": port}
    named = [option for option, value in given.items() if value is not None]
    if "RANK" in environment:
        if named:
            raise BadInputError(
                f"{named[0]} is for one command per node, under torchrun every process is a worker. Start the command "
                "without torchrun, or leave the option out."
            )
        return None
    step_nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if step_nodes > 1 and environment.get("SLURM_STEP_NUM_TASKS") == str(step_nodes):
        num_nodes = step_nodes if num_nodes is None else num_nodes
        node = int(environment["SLURM_NODEID"]) if node is None else node
        host = first_host(environment["SLURM_STEP_NODELIST"]) if host is None else host
    elif step_nodes > 1:
        raise BadInputError(
            f"srun started {environment.get('SLURM_STEP_NUM_TASKS')} tasks on {step_nodes} nodes, plait train is one "
            "command per node. Use srun --ntasks-per-node=1."
        )
    if num_nodes in (None, 1) and node in (None, 0):
        if num_nodes is None and named:
            raise BadInputError(f"{named[0]} needs the number of nodes: {HOW}.")
        return None
    if num_nodes is None or node is None or host is None:
        raise BadInputError(f"training on several nodes needs {HOW}.")
    if node >= num_nodes:
        raise BadInputError(f"--node-rank {node} is not one of {num_nodes} nodes, which count from 0.")
    return Place(node, num_nodes, host, PORT if port is None else port)


def first_host(hosts: str) -> str:
    """The first of a Slurm host list: `node[03-05,9],head` begins with `node03`."""
    found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[]*))?", hosts)
    if found is None:
        raise BadInputError(f"{hosts!r} is no Slurm host list. Give the first node's name with --master-addr.")
    name, number, end = found.groups(default="")
    return f"{name}{number}{end}"

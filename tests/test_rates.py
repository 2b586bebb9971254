"""Once-a-step rates are never above what the price says of the same elements."""

from __future__ import annotations

from cost_models.sources import device_costs
from planner.constraints import Constraints
from planner.grid_search import Incumbent
from planner.problem import Pricer, Problem, make_searcher
from specs.cluster import ClusterSpec, NodeGroup
from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec
from specs.plan import Provenance, TrainingSpec
from specs.presets import machines

MADE = Provenance(created_by="tests", created_at="2026-01-01T00:00:00Z")


def test_shared_kv_heads_are_summed_as_fast_as_priced() -> None:
    """8 KV heads over blocks of 32: four ranks hold each, and sum its gradients inside their domain first."""
    layer = Layer(
        attention=Attention(hidden=4096, num_heads=64, num_kv_heads=8, head_dim=128),
        feed_forward=Mlp(hidden=4096, ffn=8192),
        repeat=4,
    )
    model = ModelSpec(
        name="wide",
        embedding=Embedding(hidden=4096, vocab=4096),
        layers=(layer,),
        head=Head(hidden=4096, vocab=4096),
    )
    machine = machines()["gb200"]
    domains = ClusterSpec(
        name="4 domains of 32",
        devices={machine.device.name: machine.device},
        nodes=(NodeGroup(count=4, devices_per_node=32, device=machine.device.name),),
        links={"scale_up": machine.scale_up, "scale_out": machine.scale_out},
    )
    constraints = Constraints(pins=("*.tp=32",), stages="0-3")
    problem = Problem(model, domains, TrainingSpec(global_batch=4, seq_len=1024), MADE, constraints=constraints)
    searcher = make_searcher(problem, device_costs(domains, problem.training))
    best = Incumbent(Pricer(problem, searcher).seconds)
    searcher.search("modules", best, deadline=float("inf"))
    for above in (1.0005, 1.01, 1.05):
        again = searcher.within(searcher.capacity)
        found = Incumbent(Pricer(problem, again).seconds, best.seconds * above)
        outcome = again.search("modules", found, deadline=float("inf"))
        assert found.layout is not None
        assert outcome.bound <= best.seconds

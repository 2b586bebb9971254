"""Why there is no plan, in one sentence: what binds, by how much, and the smallest change that would help."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from planner.blocks import stage_degrees
from planner.chain import make_chain
from planner.constraints import Constraints
from planner.describe import describe
from planner.feasible import FirstWithin, some_layout
from planner.fit import changes_that_fit, least_of_all
from planner.layout import Layout
from planner.problem import CostMaker, Pricer, Problem, make_searcher
from planner.search import Freedom, Searcher
from specs.errors import BadInputError, NoPlanFitsError, PlaitError, TimeLimitError
from specs.units import num_bytes

# Most seconds to look for a plan with one constraint left out.
TRIAL_SECONDS = 5.0


def nothing_found(
    problem: Problem,
    make_costs: CostMaker,
    searcher: Searcher,
    freedom: Freedom,
    *,
    complete: bool,
    time_limit_seconds: float,
) -> PlaitError:
    """The error that says why there is no plan, and what would change that.  `searcher` looked under a freedom."""
    if not complete:
        return TimeLimitError(
            f"no plan was found within {time_limit_seconds:g} s. Give more time with --time-limit, or fewer freedoms "
            "with --freedom uniform."
        )
    binding = _binding_constraint(problem, searcher, freedom)
    if binding is not None:
        return binding
    training, memory_bytes = problem.training, problem.memory_bytes
    if not searcher.grids:
        return BadInputError(
            f"global batch {training.global_batch} cannot be divided: {searcher.topology.num_ranks} ranks in up to "
            f"{searcher.chain.num_positions - 1} stages of up to {searcher.topology.domain} ranks leave replicas "
            f"whose number does not divide it. Use a multiple of {searcher.topology.num_ranks}."
        )
    least = least_of_all(searcher.chain, searcher.grids, searcher.source)
    if least is None and searcher.source.unmeasured:
        return BadInputError(f"nothing can be priced: {next(iter(searcher.source.unmeasured.values()))}")
    if least is None:
        return BadInputError(
            f"no layout of {searcher.topology.num_ranks} ranks divides global batch {training.global_batch} and the "
            f"modules of {problem.model.name}. Try another number of ranks or a multiple of it as the batch."
        )
    reserved = searcher.source.costs.reserved_bytes
    chain = make_chain(problem.model)
    needed = _rounded_up(least.total_bytes)
    cap = f"--memory-cap {needed.replace(' ', '')}"
    changes = [cap if least.total_bytes <= problem.device_bytes else f"devices with {needed}"]
    changes += changes_that_fit(problem.cluster, training, make_costs, chain, memory_bytes)
    return NoPlanFitsError(
        f"no plan fits {num_bytes(memory_bytes)}: stage {least.stage} needs {needed} even "
        f"with pp={least.grid.num_stages}, tp={least.degree}, dp={least.grid.num_replicas}, micro-batch "
        f"{least.grid.micro_batch} and full recompute (weights, gradients and optimizer "
        f"{num_bytes(least.static_bytes)}, activations {num_bytes(least.activation_bytes)}, working "
        f"{num_bytes(least.working_bytes - reserved)}, reserved {num_bytes(reserved)}). Try {' or '.join(changes)}."
    )


def _binding_constraint(problem: Problem, searcher: Searcher, freedom: Freedom) -> NoPlanFitsError | None:
    """The error that names the user's constraint without which something fits; None when it is not the constraints."""
    texts = problem.constraints.texts()
    without = _fitting(problem, searcher, freedom, ()) if texts else None
    if without is None:
        return None
    for text in texts:
        rest = tuple(other for other in texts if other != text)
        layout = _fitting(problem, searcher, freedom, rest) if rest else without
        if layout is not None:
            return NoPlanFitsError(
                f"no plan fits {num_bytes(problem.memory_bytes)} and divides the model with {text}"
                f"{_undivided(searcher)}. Without it {describe(layout)} does. Leave it out or loosen it."
            )
    return NoPlanFitsError(
        f"no plan fits {num_bytes(problem.memory_bytes)} and divides the model with {', '.join(texts)}, and leaving "
        f"out any one of them is not enough. Without all of them {describe(without)} does."
    )


def _undivided(searcher: Searcher) -> str:
    """The pinned degrees that no stage of these ranks can have."""
    sizes = sorted({grid.num_ranks for grid in searcher.grids})
    odd = [degree for degree in sorted(searcher.rules.pinned) if not any(degree in stage_degrees(n) for n in sizes)]
    return f": stages have {', '.join(map(str, sizes))} ranks, none of which allows degree {odd[0]}" if odd else ""


def _fitting(problem: Problem, searcher: Searcher, freedom: Freedom, texts: tuple[str, ...]) -> Layout | None:
    """Some layout of the problem with these constraints."""
    other = replace(problem, constraints=Constraints.of_texts(texts))
    trial = make_searcher(other, searcher.source.costs)
    incumbent = FirstWithin(Pricer(other, trial).seconds)
    return some_layout(trial, incumbent, freedom, deadline=time.monotonic() + TRIAL_SECONDS)


def _rounded_up(value: float) -> str:
    """The next tenth of a GiB or MiB, so that the printed cap suffices."""
    unit, size = ("GiB", 2**30) if value >= 2**30 else ("MiB", 2**20)
    return f"{math.ceil(10.0 * value / size) / 10.0:.1f} {unit}"

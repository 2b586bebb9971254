"""Even splits of the chain into P V runs, for interleaved schedules with V virtual stages on each of P stages.

All runs have equally many whole layers, but that the embedding, in the first run, and the head, in the last, may count
as some.  (Runs of unlike numbers make stages wait for each other all through the step.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from planner.chain import layer_starts
from specs.model import ModelSpec

# For how many layers the embedding and the head count: the first and the last run have so many less.
EMBEDDING_LAYERS = (0, 1)
HEAD_LAYERS = (0, 1, 2, 3)
# Most virtual stages: the idle time that is left falls with 1 / V, while transfers and host time grow with V.
MOST_VIRTUAL = 12


def splits(model: ModelSpec, num_stages: int, num_virtual: int) -> Iterator[tuple[int, ...]]:
    """Module indices where the runs begin, in the order of the chain, plus the length; none of them empty."""
    named = model.modules()
    starts = [*layer_starts(named), len(named) - 1]
    num_layers, num_runs = len(starts) - 1, num_stages * num_virtual
    for embedding, head in product(EMBEDDING_LAYERS, HEAD_LAYERS):
        size, rest = divmod(num_layers + embedding + head, num_runs)
        if not rest and embedding <= size >= max(head, 1):
            inner = (starts[run * size - embedding] for run in range(1, num_runs))
            yield (0, *inner, len(named))

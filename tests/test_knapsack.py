"""The stage knapsack against complete enumeration."""

from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import knapsack
from planner.knapsack import choose, relax

option = st.tuples(st.integers(1, 12), st.integers(0, 12))
kinds = st.lists(st.tuples(st.integers(1, 4), st.lists(option, min_size=1, max_size=4)), min_size=1, max_size=3)


def outcomes(counts, options):
    per_kind = [
        [tuple(map(sum, zip(*picked, strict=True))) for picked in combinations_with_replacement(of_kind, count)]
        for count, of_kind in zip(counts, options, strict=True)
    ]
    return [tuple(map(sum, zip(*chosen, strict=True))) for chosen in product(*per_kind)]


def arrays(instance):
    counts = [count for count, _ in instance]
    options = [of_kind for _, of_kind in instance]
    seconds, memory = ([np.array([o[i] for o in of], dtype=float) for of in options] for i in range(2))
    return counts, options, seconds, memory


def totals(selection, options):
    chosen = [(options[k][option], n) for k, own in enumerate(selection) for option, n in own]
    return tuple(sum(n * of[row] for of, n in chosen) for row in range(2))


# All ways to run the modules of a kind listed outright; and halves put together, a few at once.
@pytest.mark.parametrize("limits", [{}, {"MOST_LISTED": 2, "MOST_GROWN": 3}], ids=["listed", "halved"])
@settings(max_examples=300, deadline=None)
@given(instance=kinds, capacity=st.integers(0, 80))
def test_choose_is_the_best_that_fits(limits, instance, capacity):
    counts, options, seconds, memory = arrays(instance)
    fitting = [s for s, m in outcomes(counts, options) if m <= capacity]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(knapsack, name, value)
        found = choose(counts, seconds, memory, capacity)
        relaxed = relax(counts, seconds, memory, capacity)
        if not fitting:
            assert found is None
            assert relaxed is None
            return
        assert found.seconds == pytest.approx(min(fitting))
        assert relaxed.bound <= min(fitting) + 1e-9 <= relaxed.rounded + 2e-9
        assert [sum(n for _, n in chosen) for chosen in found.selection] == counts
        took, held = totals(found.selection, options)
        assert took == found.seconds
        assert held <= capacity
        assert choose(counts, seconds, memory, capacity, cutoff=min(fitting)) is None

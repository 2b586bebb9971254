"""Roundings beside the largest working memory: every value of it tried, and complete enumeration."""

from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.knapsack import relax
from planner.rounding import best_rounding

option = st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(0, 9))  # seconds, bytes held, bytes at work
kinds = st.lists(st.tuples(st.integers(1, 4), st.lists(option, min_size=1, max_size=4)), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(instance=kinds, capacity=st.integers(0, 80))
def test_no_value_of_the_largest_working_memory_has_a_better_rounding(instance, capacity):
    counts, options = [count for count, _ in instance], [of_kind for _, of_kind in instance]
    seconds, memory, working = ([np.array([o[i] for o in of], dtype=float) for of in options] for i in range(3))
    found = best_rounding(counts, seconds, memory, working, capacity)
    tried = []
    for work in {w for own in working for w in own.tolist()}:
        usable = [np.flatnonzero(own <= work) for own in working]
        if all(own.size for own in usable):
            own = ([of[u] for of, u in zip(all_of, usable, strict=True)] for all_of in (seconds, memory))
            relaxed = relax(counts, *own, capacity - work)
            tried += [] if relaxed is None else [relaxed.rounded]
    assert (found is None) == (not tried)
    ways = product(*(combinations_with_replacement(of, count) for count, of in zip(counts, options, strict=True)))
    every = [[o for own in way for o in own] for way in ways]
    fitting = [one for one in every if sum(o[1] for o in one) + max(o[2] for o in one) <= capacity]
    assert (found is None) == (not fitting)
    if found is None:
        return
    assert found.seconds == pytest.approx(min(tried))
    taken = [options[k][index] for k, own in enumerate(found.selection) for index, n in own for _ in range(n)]
    assert [sum(n for _, n in own) for own in found.selection] == counts
    assert sum(o[1] for o in taken) + max(o[2] for o in taken) <= capacity
    assert found.seconds == pytest.approx(sum(o[0] for o in taken))
    assert found.seconds >= min(sum(o[0] for o in one) for one in fitting) - 1e-9

"""The stage knapsack against complete enumeration."""

from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.knapsack import choose, enumerate_labels, relax

option = st.tuples(st.integers(1, 12), st.integers(0, 6), st.integers(0, 12))
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
    seconds, tails, memory = ([np.array([o[i] for o in of], dtype=float) for of in options] for i in range(3))
    return counts, options, seconds, tails, memory


@settings(max_examples=300, deadline=None)
@given(kinds, st.integers(0, 80))
def test_choose_is_the_best_that_fits(instance, capacity):
    counts, options, seconds, _, memory = arrays(instance)
    fitting = [s for s, _, m in outcomes(counts, options) if m <= capacity]
    found = choose(counts, seconds, memory, capacity)
    relaxed = relax(counts, seconds, memory, capacity)
    if not fitting:
        assert found is None
        assert relaxed is None
        return
    assert found.seconds == pytest.approx(min(fitting))
    assert relaxed.bound <= min(fitting) + 1e-9 <= relaxed.rounded + 2e-9
    assert [sum(n for _, n in chosen) for chosen in found.selection] == counts
    assert found.memory <= capacity
    assert choose(counts, seconds, memory, capacity, cutoff=min(fitting)) is None


@settings(max_examples=200, deadline=None)
@given(kinds, st.integers(0, 80), st.sampled_from([0.0, 0.3, 2.0]))
def test_labels_are_exactly_the_undominated_outcomes(instance, capacity, price):
    counts, options, seconds, tails, memory = arrays(instance)
    fitting = {o for o in outcomes(counts, options) if o[2] <= capacity}
    expected = {
        o for o in fitting if not any(p != o and all(a <= b for a, b in zip(p, o, strict=True)) for p in fitting)
    }
    labels = enumerate_labels(counts, seconds, tails, memory, capacity, price=price, limit=1e9)
    assert {(label.seconds, label.tail, label.memory) for label in labels} == expected
    for label in labels:
        total = sum(n * options[k][c][0] for k, chosen in enumerate(label.selection) for c, n in chosen)
        assert total == label.seconds

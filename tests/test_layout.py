"""Integer layout arithmetic against plain counting."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specs.layout import (
    Interval,
    balanced_cuts,
    block_of,
    block_starts,
    check_cuts,
    interval_of,
    kv_groups_of,
    refine,
    sequence_token_cuts,
)

compositions = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_balanced_cuts_differ_by_at_most_one(size: int, parts: int) -> None:
    cuts = balanced_cuts(size, parts)
    sizes = [stop - start for start, stop in pairwise(cuts)]
    assert (cuts[0], cuts[-1], len(sizes)) == (0, size, parts)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 500), st.integers(1, 64))
def test_check_cuts_takes_balanced_cuts_unless_a_part_is_empty(size: int, parts: int) -> None:
    cuts = balanced_cuts(size, parts)
    if parts <= size:
        check_cuts(cuts, size, parts, "m")
    else:
        with pytest.raises(ValueError, match=f"Use a degree of at most {size}"):
            check_cuts(cuts, size, parts, "m")


@pytest.mark.parametrize("cuts", [(0, 4), (1, 4, 8), (0, 4, 7), (0, 9, 8), (0, 4, 4, 8)])
def test_check_cuts_refuses(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="layer"):
        check_cuts(cuts, 8, 2, "layer")


@given(compositions)
def test_block_of_inverts_block_starts(blocks: list[int]) -> None:
    starts = block_starts(blocks)
    expected = [(index, position) for index, size in enumerate(blocks) for position in range(size)]
    assert [block_of(blocks, rank) for rank in range(sum(blocks))] == expected
    assert [starts[index] + position for index, position in expected] == list(range(sum(blocks)))
    with pytest.raises(ValueError, match="outside the blocks"):
        block_of(blocks, sum(blocks))


@given(st.integers(1, 12), st.integers(1, 8), st.data())
def test_kv_groups_are_those_that_the_heads_read(num_kv_heads: int, per_group: int, data: st.DataObject) -> None:
    num_heads = num_kv_heads * per_group
    start = data.draw(st.integers(0, num_heads - 1))
    stop = data.draw(st.integers(start + 1, num_heads))
    read = {head // per_group for head in range(start, stop)}
    groups = kv_groups_of(Interval(start, stop), num_heads, num_kv_heads)
    assert set(range(groups.start, groups.stop)) == read


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 12))
def test_kv_groups_of_a_cut_cover_all_heads(num_kv_heads: int, per_group: int, degree: int) -> None:
    num_heads = num_kv_heads * per_group
    cuts = balanced_cuts(num_heads, min(degree, num_heads))
    groups = [kv_groups_of(interval_of(cuts, part), num_heads, num_kv_heads) for part in range(len(cuts) - 1)]
    assert groups[0].start == 0
    assert groups[-1].stop == num_kv_heads
    # Neighbours share at most the one group in which the cut falls.
    assert all(right.start in (left.stop, left.stop - 1) for left, right in pairwise(groups))


@given(compositions, st.integers(1, 40), st.integers(1, 9))
def test_sequence_token_cuts_keep_sequences_whole(blocks: list[int], num_sequences: int, seq_len: int) -> None:
    cuts = sequence_token_cuts(blocks, num_sequences, seq_len)
    num_ranks = sum(blocks)
    if cuts is None:
        # Some block's fair share is under one sequence, or rounding to whole ones left it without.
        assert min(num_sequences * size / num_ranks for size in blocks) < 1
        return
    assert (cuts[0], cuts[-1], len(cuts)) == (0, num_sequences * seq_len, num_ranks + 1)
    assert list(cuts) == sorted(cuts)
    for start, stop, size in zip(block_starts(blocks), block_starts(blocks)[1:], blocks, strict=False):
        assert cuts[start] % seq_len == 0
        share = (cuts[stop] - cuts[start]) // seq_len
        assert share >= 1
        assert abs(share - num_sequences * size / num_ranks) < 1


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 9))
def test_equal_blocks_that_divide_the_batch_are_cut_evenly(num_blocks: int, each: int, seq_len: int) -> None:
    """Then the cut is the even one whenever the tokens of a block divide over its ranks."""
    size = seq_len  # ranks per block: a block's tokens divide over them
    assert sequence_token_cuts([size] * num_blocks, num_blocks * each, seq_len) == balanced_cuts(
        num_blocks * each * seq_len, num_blocks * size
    )


intervals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 10)).map(lambda pair: Interval(pair[0], pair[0] + pair[1])), max_size=6
)


@given(intervals)
def test_refine_gives_the_coarsest_common_division(given_intervals: list[Interval]) -> None:
    atoms = refine(given_intervals)

    def owners(unit: int) -> frozenset[int]:
        return frozenset(i for i, interval in enumerate(given_intervals) if interval.start <= unit < interval.stop)

    covered = [unit for atom in atoms for unit in range(atom.start, atom.stop)]
    assert covered == [unit for unit in range(50) if owners(unit)]
    for atom in atoms:
        assert len({owners(unit) for unit in range(atom.start, atom.stop)}) == 1
    points = {point for interval in given_intervals for point in interval}
    assert {point for atom in atoms for point in atom} <= points


def test_interval_arithmetic() -> None:
    assert Interval(2, 7).size == 5
    assert Interval(2, 7).overlap(Interval(5, 9)) == (5, 7)
    assert Interval(2, 4).overlap(Interval(5, 9)).size <= 0
    assert Interval(2, 7).shifted(3) == (5, 10)

"""LocalWeights of all ranks put together give the whole tensor, whatever the cuts."""

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hfscale.plan import Cut, ParameterPlan, write_share
from hfscale.plan.cut import cut_shape


@st.composite
def _cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Cut]]:
    """A shape and up to two cuts in sequence, also along the same dim; the first may have several parts."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    cuts = []
    for axis in draw(st.sampled_from([(), ("tp",), ("dp_shard",), ("tp", "dp_shard")])):
        dim = draw(st.integers(0, len(shape) - 1))
        size = draw(st.integers(1, 6))
        parts: tuple[int, ...] = ()
        replicas: tuple[int, ...] = ()
        if axis == "tp" and draw(st.booleans()):
            parts = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
            shape[dim] = sum(parts)
        if axis == "tp" and draw(st.booleans()):
            divisors = st.sampled_from([count for count in range(1, size + 1) if size % count == 0])
            replicas = tuple(draw(divisors) for _ in parts or (1,))
        cuts.append(Cut(axis, dim, size, parts, replicas))
    return tuple(shape), cuts


def _ranks(cuts: list[Cut]) -> list[dict[str, int]]:
    return [
        dict(zip([cut.axis for cut in cuts], ranks, strict=True))
        for ranks in product(*(range(cut.size) for cut in cuts))
    ]


@given(_cut_tensors())
@settings(deadline=None, max_examples=300)
def test_shares_reassemble(case: tuple[tuple[int, ...], list[Cut]]) -> None:
    shape, cuts = case
    whole = torch.arange(1, prod(shape) + 1).view(shape)
    planned = ParameterPlan("p", shape, whole.dtype, cuts=tuple(cuts))
    again = torch.zeros_like(whole)
    entries = []
    for ranks in _ranks(cuts):
        share = planned.take(whole, ranks)
        assert tuple(share.shape) == planned.local_shape(ranks) == cut_shape(shape, cuts, ranks)
        write_share(again, share, cuts, ranks)
        found = planned.counted(ranks)
        dim, spans = found if found is not None else (0, [(0, share.shape[0])])
        entries += [share.narrow(dim, start, stop - start).flatten() for start, stop in spans]
    assert torch.equal(again, whole)
    # Every entry counts on exactly one rank.
    assert torch.equal(torch.cat(entries).sort().values, whole.flatten())


@given(_cut_tensors(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100)
def test_a_share_is_written_to_its_place_only(
    case: tuple[tuple[int, ...], list[Cut]], random: object
) -> None:
    shape, cuts = case
    whole = torch.arange(1, prod(shape) + 1).view(shape)
    planned = ParameterPlan("p", shape, whole.dtype, cuts=tuple(cuts))
    ranks = random.choice(_ranks(cuts))  # type: ignore[attr-defined]
    written = torch.zeros_like(whole)
    write_share(written, planned.take(whole, ranks), cuts, ranks)
    expected = torch.isin(whole, planned.take(whole, ranks).contiguous())
    assert torch.equal(written, whole * expected)


@given(st.integers(0, 40), st.integers(1, 9))
def test_one_part_is_torch_chunk(length: int, size: int) -> None:
    whole = torch.arange(length)
    cut = Cut("tp", 0, size)
    chunks = list(torch.chunk(whole, size)) if length else []
    chunks += [whole[:0]] * (size - len(chunks))
    for rank, chunk in enumerate(chunks):
        assert torch.equal(cut.take(whole, rank), chunk)
        assert cut.local_length(length, rank) == len(chunk)


def test_every_rank_gets_its_chunk_of_every_part() -> None:
    # query, key and value of a fused projection with fewer key/value heads
    cut = Cut("tp", 0, 2, parts=(4, 2, 2))
    assert cut.spans(8, 0) == [(0, 2), (4, 5), (6, 7)]
    assert cut.take(torch.arange(8), 1).tolist() == [2, 3, 5, 7]


def test_one_part_is_a_view_and_several_are_a_copy() -> None:
    whole = torch.zeros(4, 2)
    Cut("tp", 0, 2).take(whole, 1).fill_(1)
    Cut("tp", 0, 2, parts=(2, 2)).take(whole, 0).fill_(7)
    assert whole.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_take_of_chosen_axes() -> None:
    planned = ParameterPlan("p", (8,), torch.int64, cuts=(Cut("tp", 0, 2), Cut("dp_shard", 0, 2)))
    whole = torch.arange(8)
    assert planned.take(whole, {"tp": 1, "dp_shard": 1}).tolist() == [6, 7]
    assert planned.take(whole, {"tp": 1, "dp_shard": 1}, axes=("tp",)).tolist() == [4, 5, 6, 7]
    assert planned.cut_over("cp") is None


@pytest.mark.parametrize("parts", [(), (3, 3, 3)])
def test_rank_zero_never_has_less(parts: tuple[int, ...]) -> None:
    # the table and the memory estimate rely on it
    for size in range(1, 6):
        cut = Cut("tp", 0, size, parts)
        lengths = [cut.local_length(9, rank) for rank in range(size)]
        assert lengths[0] == max(lengths)
        assert sum(lengths) == 9


def test_consecutive_ranks_hold_copies_of_one_chunk() -> None:
    # four heads' queries, then two key heads and two value heads, two entries each, on four ranks
    cut = Cut("tp", 0, 4, parts=(8, 4, 4), replicas=(1, 2, 2))
    assert cut.spans(16, 0) == [(0, 2), (8, 10), (12, 14)]
    assert cut.spans(16, 1) == [(2, 4), (8, 10), (12, 14)]
    assert cut.spans(16, 3) == [(6, 8), (10, 12), (14, 16)]
    assert cut.local_spans(16, 1, lambda replicas: replicas == 2) == [(2, 4), (4, 6)]
    planned = ParameterPlan("p", (16,), torch.int64, cuts=(cut, Cut("dp_shard", 0, 2)))
    assert (planned.replicas, cut.most_replicas) == (2, 2)
    # The first that holds the second heads.
    assert planned.counted({"tp": 2, "dp_shard": 1}) is None
    # Of its query and its key only the query.
    assert planned.counted({"tp": 1, "dp_shard": 0}) == (
        0,
        [(0, 2)],
    )
    assert planned.counted({"tp": 1, "dp_shard": 1}) == (0, [])
    alone = ParameterPlan("p", (16,), torch.int64, cuts=(Cut("tp", 0, 4, replicas=(4,)),))
    assert alone.counted({"tp": 0}) is None
    assert alone.counted({"tp": 3}) == (0, [])
    assert alone.local_shape({"tp": 3}) == (16,)

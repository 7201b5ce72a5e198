"""Rows travel between ranks and nothing else happens to them."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hfscale.distributed.ops.collectives import all_to_all
from hfscale.testing import RankPool

Pools = Callable[[int], RankPool]
# rows from rank (line) to rank (column): a rank that sends none, one that gets none, none at all
TABLES = {
    "uneven": [[2, 0, 1, 3], [0, 1, 0, 0], [4, 0, 0, 1], [1, 2, 3, 4]],
    "one sends none": [[0, 0, 0, 0], [1, 1, 1, 1], [2, 0, 0, 0], [0, 0, 5, 0]],
    "all to one": [[3, 0, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
    "nothing": [[0] * 4] * 4,
}


def exchanged(
    table: list[list[int]], dtype: torch.dtype, strided: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    group = dist.group.WORLD
    rows = [(rank, to, number) for to, count in enumerate(table[rank]) for number in range(count)]
    x = torch.tensor(rows, dtype=dtype).view(-1, 3)
    x = x.t().contiguous().t() if strided else x
    counts = (
        all_to_all(torch.tensor(table[rank]).view(-1, 1), [1] * 4, [1] * 4, group)
        .flatten()
        .tolist()
    )
    there = all_to_all(x, table[rank], counts, group)
    assert torch.equal(all_to_all(there, counts, table[rank], group), x)
    return torch.tensor(counts), there


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("dtype", "strided"), [(torch.float64, False), (torch.bfloat16, True)])
def test_rows_arrive_in_the_order_of_their_senders(
    pools: Pools, name: str, dtype: torch.dtype, strided: bool
) -> None:
    table = TABLES[name]
    for rank, (counts, rows) in enumerate(pools(4).run(exchanged, table, dtype, strided)):
        assert counts.tolist() == [line[rank] for line in table]
        expected = [
            [sender, rank, i] for sender, line in enumerate(table) for i in range(line[rank])
        ]
        assert rows.dtype == dtype
        assert rows.long().tolist() == expected


def test_one_rank_keeps_its_rows() -> None:
    x = torch.ones(2, 3)
    assert all_to_all(x, [2], [2], None) is x

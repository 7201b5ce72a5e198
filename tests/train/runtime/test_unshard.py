import torch

from hfscale import ParallelConfig
from hfscale.distributed.process_groups import build_mesh
from hfscale.plan import Cut, ParameterPlan
from hfscale.train.runtime.shards import gather_full

CASES = [
    ((7, 5), (Cut("tp", 0, 2), Cut("dp_shard", 0, 2))),
    ((6, 5), (Cut("tp", 1, 2), Cut("dp_shard", 0, 2))),
    ((10, 3), (Cut("tp", 0, 2, parts=(4, 3, 3)), Cut("dp_shard", 0, 2))),
    ((8, 3), (Cut("tp", 0, 2, parts=(4, 2, 2), replicas=(1, 2, 2)),)),
    ((1, 3), (Cut("tp", 0, 2), Cut("dp_shard", 0, 2))),
    ((4, 2), ()),
]


def _gathered() -> list[bool]:
    mesh = build_mesh(ParallelConfig(tp_size=2, dp_shard_size=2))
    found = []
    for shape, cuts in CASES:
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape).float()
        share = ParameterPlan("x", shape, torch.float32, cuts=cuts).take(whole, mesh.ranks)
        found.append(torch.equal(gather_full(share.contiguous(), shape, cuts, mesh), whole))
    return found


def test_shares_are_put_together_again(pools):
    assert pools(4).run(_gathered) == [[True] * len(CASES)] * 4

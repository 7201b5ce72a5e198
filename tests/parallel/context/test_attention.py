"""Attention over parts of sequences: the arithmetic, in one process."""

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from hfscale.sequences import CutBatch, MaskBlocks, Split, choose
from hfscale.sequences.attention import read
from hfscale.sequences.engine import OwnBlocks, Reading, attend, wide_zeros
from hfscale.sequences.kernels import Block, FlashOnCpu, ScoreKernel
from hfscale.sequences.masks import CAUSAL, FULL, MASKED, SKIPPED
from hfscale.sequences.seam import AttentionCall

TOTAL = 13
SCALE = 0.4


def mask_of(size: int, rank: int, window: int | None = None, padding: Tensor | None = None) -> MaskBlocks:
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    batch = CutBatch(Split(TOTAL, size), rank, padding)
    return MaskBlocks.of(batch, function, 2, torch.device("cpu"), lambda *_: None, packs=False)


def draw(heads: int = 4, keys: int = 2, width: int = 8, values: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, heads, TOTAL, width), (2, keys, TOTAL, width), (2, keys, TOTAL, values))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def plainly(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * SCALE
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    p = scores.softmax(-1).nan_to_num(0.0)
    return p[..., : k.shape[2]] @ v


class Parts:
    """The blocks that the ranks of a split have, in one process."""

    def __init__(self, split: Split, k: Tensor, v: Tensor) -> None:
        self.split, self.k, self.v = split, k, v
        self.dk, self.dv = wide_zeros(k), wide_zeros(v)

    def blocks(self, k: Tensor, v: Tensor):  # type: ignore[no-untyped-def]
        for rank in range(self.split.size):
            places = self.split.places(rank)
            yield rank, self.k[:, :, places], self.v[:, :, places]

    def gradients(self, k: Tensor, v: Tensor, backward):  # type: ignore[no-untyped-def]
        for rank, kb, vb in self.blocks(k, v):
            dk, dv = wide_zeros(kb), wide_zeros(vb)
            backward(rank, kb, vb, dk, dv)
            self.dk[:, :, self.split.places(rank)] += dk
            self.dv[:, :, self.split.places(rank)] += dv
        return torch.zeros_like(k), torch.zeros_like(v)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_ranks_read_what_one_process_reads(
    size: int, window: int | None, padded: bool, softcap: float | None, with_sinks: bool
) -> None:
    padding = torch.ones(2, TOTAL, dtype=torch.bool)
    padding[0, :4], padding[1, -2:] = False, False
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_() if with_sinks else None
    whole = mask_of(1, 0, window, padding if padded else None)
    allowed = whole.block((0, TOTAL), (0, TOTAL))
    q, k, v = draw()
    wanted = plainly(q, k, v, allowed, softcap, sinks)
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view(wanted.shape)
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
    expected = torch.autograd.grad((wanted * weights).sum(), leaves)
    dq, dsinks = torch.zeros_like(q), torch.zeros(4, dtype=torch.float64)
    source = Parts(Split(TOTAL, size), k.detach(), v.detach())
    kernel = FlashOnCpu(SCALE) if softcap is None else ScoreKernel(SCALE, softcap)
    for rank in range(size):
        places = source.split.places(rank)
        own = q.detach()[:, :, places].requires_grad_()
        mask = mask_of(size, rank, window, padding if padded else None)
        local = [x.detach()[:, :, places] for x in (k, v)]
        own_sinks = None if sinks is None else sinks.detach().requires_grad_()
        found = attend(own, *local, own_sinks, Reading(mask, kernel, source))
        torch.testing.assert_close(found, wanted[:, :, places], rtol=0, atol=1e-13)
        (found * weights[:, :, places]).sum().backward()
        assert own.grad is not None
        dq[:, :, places] = own.grad
        if own_sinks is not None and own_sinks.grad is not None:
            dsinks += own_sinks.grad
    for found, want in zip((dq, source.dk, source.dv, dsinks), expected, strict=False):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("width", "values"), [(8, 4), (4, 8)])
def test_heads_of_values_may_have_another_width(width: int, values: int) -> None:
    q, k, v = draw(width=width, values=values)
    mask = mask_of(1, 0)
    found = read(q, k, v, None, mask, AttentionCall(SCALE, None, 0.0, None), OwnBlocks())
    wanted = plainly(q, k, v, mask.block((0, TOTAL), (0, TOTAL)), None, None)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


def test_dropout_drops_the_same_in_the_backward_pass() -> None:
    q, k, v = draw()
    reading = Reading(mask_of(1, 0), ScoreKernel(SCALE, None, 0.3), OwnBlocks(), seed=5)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, None, reading), (q, k, v))
    kept = attend(q, k, v, None, reading)
    assert not torch.equal(kept, attend(q, k, v, None, Reading(mask_of(1, 0), reading.kernel, OwnBlocks(), seed=6)))
    ones = torch.zeros(1, 1, 99, 1), torch.zeros(1, 1, 99, 1), torch.ones(1, 1, 99, 1)
    out, _ = ScoreKernel(1.0, None, 0.3).forward(*ones, Block(seed=4))
    assert abs(float(out.mean()) - 1) < 0.03  # what is kept makes up for what is dropped


def test_plain_causal_attention_makes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MaskBlocks, "block", lambda *_: pytest.fail("a mask was made"))
    q, k, v = draw()
    for size in (2, 4):
        source = Parts(Split(TOTAL, size), k.detach(), v.detach())
        for rank in range(size):
            own = [x.detach()[:, :, source.split.places(rank)].requires_grad_() for x in (q, k, v)]
            attend(*own, None, Reading(mask_of(size, rank), FlashOnCpu(SCALE), source)).sum().backward()


def test_kinds_of_pairs() -> None:
    plain, window = mask_of(2, 0), mask_of(2, 0, window=3)
    assert plain.kind((0, 3), (0, 3)) == CAUSAL
    assert plain.kind((3, 6), (0, 3)) == FULL
    assert plain.kind((0, 3), (3, 6)) == SKIPPED
    assert plain.kind((3, 3), (0, 3)) == SKIPPED  # nobody there
    assert window.kind((3, 6), (0, 3)) == MASKED
    assert window.kind((9, 12), (0, 3)) == SKIPPED


@pytest.mark.parametrize("total", [4, 7, 16, 33])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_token_is_on_one_rank(total: int, size: int) -> None:
    split = Split(total, size)
    side_by_side = torch.cat([split.places(rank) for rank in range(size)])
    assert sorted(side_by_side.tolist()) == list(range(total))
    assert torch.equal(side_by_side[split.order], torch.arange(total))
    assert max(split.lengths) - min(split.lengths) <= 2
    assert sum(split.lengths) == total


@pytest.mark.parametrize(
    ("heads", "keys", "size", "method"),
    [(8, 8, 2, "heads"), (8, 2, 2, "gather"), (8, 2, 4, "heads"), (6, 6, 4, "gather"), (32, 8, 4, "heads")],
)
def test_what_auto_means(heads: int, keys: int, size: int, method: str) -> None:
    assert choose("auto", heads, keys, size) == method
    assert choose("ring", heads, keys, size) == "ring"


@pytest.mark.parametrize("total", [9, 16, 33])
@pytest.mark.parametrize("together", [1, 2, 4])
def test_ranks_that_count_together_have_the_tokens_of_all_of_them(total: int, together: int) -> None:
    alone, grouped = Split(total, 4), Split(total, 4 // together, together)
    for rank in range(4 // together):
        own = grouped.places(rank)
        assert torch.equal(own, own.sort().values)
        for member, which in zip(range(rank * together, (rank + 1) * together), grouped.members(rank), strict=True):
            assert torch.equal(own[which], alone.places(member))

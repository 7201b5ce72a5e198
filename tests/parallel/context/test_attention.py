"""Attention over parts of sequences: the arithmetic, in one process."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from hfscale._compat.torch_attention import flash_takes
from hfscale.parallel.context import kernels
from hfscale.parallel.context.attention_override import AttentionCall
from hfscale.parallel.context.cut_batch import (
    CAUSAL,
    FULL,
    MASKED,
    SKIPPED,
    CutBatch,
    MaskBlocks,
    cut_batch,
)
from hfscale.parallel.context.engine import OwnBlocks, Reading, attend
from hfscale.parallel.context.kernels import FlashOnCpu, ScoreBlock, ScoreKernel
from hfscale.parallel.context.methods import read
from hfscale.plan.sequence_split import Split, choose

TOTAL = 13
SCALE = 0.4


def mask_of(
    size: int, rank: int, window: int | None = None, padding: Tensor | None = None
) -> MaskBlocks:
    function = (
        causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    )
    batch = CutBatch(Split(TOTAL, size), rank, padding)
    return MaskBlocks(
        batch, function, 2, torch.device("cpu"), lambda *_: None, lambda *_: None
    ).of_examples()


def draw(heads: int = 4, keys: int = 2, width: int = 8, values: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, heads, TOTAL, width), (2, keys, TOTAL, width), (2, keys, TOTAL, values))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


def plainly(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, 1)
    v = v.repeat_interleave(groups, 1)
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
        self.split = split
        self.k = k
        self.v = v
        self.dk, self.dv = torch.zeros_like(k), torch.zeros_like(v)

    def blocks(self, k: Tensor, v: Tensor):  # type: ignore[no-untyped-def]
        for rank in range(self.split.size):
            places = self.split.places(rank)
            yield rank, self.k[:, :, places], self.v[:, :, places]

    def gradients(self, k: Tensor, v: Tensor, backward):  # type: ignore[no-untyped-def]
        for rank, kb, vb in self.blocks(k, v):
            dk, dv = backward(rank, kb, vb)
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
    dq = torch.zeros_like(q)
    dsinks = torch.zeros(4, dtype=torch.float64)
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
    found = read(q, k, v, mask, AttentionCall(SCALE, None, 0.0, None), OwnBlocks())
    wanted = plainly(q, k, v, mask.block((0, TOTAL), (0, TOTAL)), None, None)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


class Largest(TorchDispatchMode):
    """The most entries that a tensor had."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        self.most = max(
            self.most, *(leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, Tensor)), 0
        )
        return found


@pytest.mark.parametrize(("softcap", "dropout"), [(None, 0.0), (1.5, 0.3)])
@pytest.mark.parametrize("window", [None, 4])
def test_scores_of_few_rows_are_in_memory(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, dropout: float, window: int | None
) -> None:
    """Two rows at a time give what all give, dropout included: its backward pass drops what the forward pass did."""
    q, k, v = draw()
    reading = Reading(
        mask_of(1, 0, window), ScoreKernel(SCALE, softcap, dropout), OwnBlocks(), seed=5
    )
    whole = attend(q, k, v, None, reading)
    bound = 2 * 2 * 4 * TOTAL
    monkeypatch.setattr(kernels, "_SCORES", bound)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, None, reading), (q, k, v), fast_mode=True)
    with Largest() as seen:
        parts = attend(q, k, v, None, reading)
        parts.sum().backward()
    # Nor more than the mask.
    assert seen.most <= max(bound, *(x.numel() for x in (q, k, v)), 2 * TOTAL * TOTAL)
    if not dropout:
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-13)


def test_pairs_without_a_mask_of_their_own_hold_no_scores_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window, padding or documents leave most pairs whole or a triangle: those take the flash kernel."""
    monkeypatch.setattr(kernels, "capability_of", lambda _: (9, 0))
    on_gpu = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, shape=(2, 4, TOTAL, 8)
    )
    chosen = kernels.kernel_for(on_gpu, SCALE, None, 0.0)  # type: ignore[arg-type]
    seen: list[tuple[str, bool]] = []

    def scores(self: Any, q: Tensor, k: Tensor, v: Tensor, block: ScoreBlock) -> Any:
        seen.append(("scores", block.bias is not None))
        return FlashOnCpu.forward(self, q, k, v, block)

    def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        seen.append(("flash", False))
        return kernels.flash_on_cpu(q, k, v, causal, None, scale)

    monkeypatch.setattr(ScoreKernel, "forward", scores)
    monkeypatch.setattr(kernels, "flash_on_cuda", flash)
    q, k, v = (x.detach() for x in draw())
    padding = torch.ones(2, TOTAL, dtype=torch.bool)
    padding[1, -2:] = False
    attend(q, k, v, None, Reading(mask_of(1, 0), chosen, OwnBlocks()))
    for rank in range(2):
        source = Parts(Split(TOTAL, 2), k, v)
        own = [x[:, :, source.split.places(rank)] for x in (q, k, v)]
        attend(*own, None, Reading(mask_of(2, rank, padding=padding), chosen, source))
    assert ("flash", False) in seen[1:]
    assert set(seen) == {("flash", False), ("scores", True)}


@pytest.mark.parametrize(
    ("width", "dtype", "capability", "takes"),
    [
        (64, torch.bfloat16, (8, 0), True),
        (256, torch.float16, (9, 0), True),
        (512, torch.bfloat16, (9, 0), False),  # Gemma 4's layers that read everything
        (60, torch.bfloat16, (9, 0), False),
        (64, torch.float16, (7, 5), False),  # a T4
        (256, torch.bfloat16, (8, 9), False),
        (192, torch.bfloat16, (12, 0), True),
        (64, torch.float32, (9, 0), False),
    ],
)
def test_what_flash_attention_takes(
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    takes: bool,
) -> None:
    assert flash_takes(width, dtype, capability) == takes
    monkeypatch.setattr(kernels, "capability_of", lambda _: capability)
    device = torch.device("cuda")
    padded = kernels.padded_width(width, device)
    assert padded % 8 == 0
    assert padded - width < 8
    on_gpu = SimpleNamespace(device=device, dtype=dtype, shape=(2, 4, TOTAL, padded))
    chosen = kernels.kernel_for(on_gpu, SCALE, None, 0.0)  # type: ignore[arg-type]
    assert type(chosen) is (kernels.FlashOnCuda if takes or width == 60 else ScoreKernel)


def test_dropout_drops_the_same_in_the_backward_pass() -> None:
    q, k, v = draw()
    reading = Reading(mask_of(1, 0), ScoreKernel(SCALE, None, 0.3), OwnBlocks(), seed=5)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, None, reading), (q, k, v), fast_mode=True)
    kept = attend(q, k, v, None, reading)
    assert not torch.equal(
        kept, attend(q, k, v, None, Reading(mask_of(1, 0), reading.kernel, OwnBlocks(), seed=6))
    )
    ones = torch.zeros(1, 1, 99, 1), torch.zeros(1, 1, 99, 1), torch.ones(1, 1, 99, 1)
    out, _ = ScoreKernel(1.0, None, 0.3).forward(*ones, ScoreBlock(seed=4))
    assert abs(float(out.mean()) - 1) < 0.03  # what is kept makes up for what is dropped


def test_plain_causal_attention_makes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MaskBlocks, "block", lambda *_: pytest.fail("a mask was made"))
    q, k, v = draw()
    for size in (2, 4):
        source = Parts(Split(TOTAL, size), k.detach(), v.detach())
        for rank in range(size):
            own = [x.detach()[:, :, source.split.places(rank)].requires_grad_() for x in (q, k, v)]
            attend(
                *own, None, Reading(mask_of(size, rank), FlashOnCpu(SCALE), source)
            ).sum().backward()


def test_kinds_of_pairs() -> None:
    plain = mask_of(2, 0)
    window = mask_of(2, 0, window=3)
    assert plain.kind((0, 3), (0, 3)) == CAUSAL
    assert plain.kind((3, 6), (0, 3)) == FULL
    assert plain.kind((0, 3), (3, 6)) == SKIPPED
    assert plain.kind((3, 3), (0, 3)) == SKIPPED  # nobody there
    assert window.kind((3, 6), (0, 3)) == MASKED
    assert window.kind((9, 12), (0, 3)) == SKIPPED
    assert window.kind((3, 6), (3, 6)) == CAUSAL
    assert window.kind((3, 7), (3, 7)) == MASKED


@pytest.mark.parametrize("seed", range(20))
def test_kinds_of_packed_rows_follow_from_where_documents_begin(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that a look at the mask finds, of which there is one for all pairs of a pass."""
    generator = torch.Generator().manual_seed(seed)
    total, size = (
        int(torch.randint(least, most, (), generator=generator))
        for least, most in ((6, 70), (1, 5))
    )
    begins = torch.rand(2, total - 1, generator=generator) < (0.02, 0.1, 0.6)[seed % 3]
    documents = torch.cat((torch.zeros(2, 1, dtype=torch.long), begins.cumsum(-1)), -1)
    positions = torch.stack(
        [
            torch.cat([torch.arange(n) for n in row.unique(return_counts=True)[1]])
            for row in documents
        ]
    )
    ids = torch.zeros(2, total, dtype=torch.long)
    looks = list[Tensor]()
    monkeypatch.setattr(
        Tensor, "tolist", lambda x, original=Tensor.tolist: (looks.append(x), original(x))[1]
    )
    for rank in range(size):
        batch, _ = cut_batch({"input_ids": ids, "position_ids": positions}, size, rank, 1, None)
        if batch.documents is None:
            continue
        mask = MaskBlocks(
            batch, causal_mask_function, 2, torch.device("cpu"), print, print
        ).of_examples()
        seen = replace(mask, starts=None, _kinds={})
        every = [piece for other in range(size) for piece in batch.split.pieces(other)]
        pairs = [(rows, columns) for rows in batch.split.pieces(rank) for columns in every]
        looks.clear()
        found = [mask.kind(*pair) for pair in pairs]
        assert not looks
        wanted = [seen.kind(*pair) for pair in pairs]
        assert len(looks) == 1
        for (rows, columns), kind, want in zip(pairs, found, wanted, strict=True):
            # One token, for which both say the same.
            alone = rows == columns and rows[1] - rows[0] == 1
            assert kind == want or (alone and (kind, want) == (CAUSAL, FULL))


@pytest.mark.parametrize("total", [4, 7, 16, 33])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_token_is_on_one_rank(total: int, size: int) -> None:
    split = Split(total, size)
    side_by_side = torch.cat([split.places(rank) for rank in range(size)])
    assert sorted(side_by_side.tolist()) == list(range(total))
    assert torch.equal(side_by_side[split.order()], torch.arange(total))
    assert max(split.lengths) - min(split.lengths) <= 2
    assert sum(split.lengths) == total


@pytest.mark.parametrize(
    ("heads", "keys", "size", "method"),
    [
        (8, 8, 2, "heads"),
        (8, 2, 2, "gather"),
        (8, 2, 4, "heads"),
        (6, 6, 4, "gather"),
        (32, 8, 4, "heads"),
    ],
)
def test_what_auto_means(heads: int, keys: int, size: int, method: str) -> None:
    assert choose("auto", heads, keys, size) == method
    assert choose("ring", heads, keys, size) == "ring"


@pytest.mark.parametrize("total", [9, 16, 33])
@pytest.mark.parametrize("together", [1, 2, 4])
def test_ranks_that_count_together_have_the_tokens_of_all_of_them(
    total: int, together: int
) -> None:
    alone = Split(total, 4)
    grouped = Split(total, 4 // together, together)
    for rank in range(4 // together):
        own = grouped.places(rank)
        assert torch.equal(own, own.sort().values)
        for member, which in zip(
            range(rank * together, (rank + 1) * together), grouped.members(rank), strict=True
        ):
            assert torch.equal(own[which], alone.places(member))


def test_heads_that_no_kernel_divides_are_refused() -> None:
    q, k, v = draw(heads=2, keys=4)
    with pytest.raises(
        ValueError, match="must be a multiple of the number of key heads, got 2 and 4"
    ):
        FlashOnCpu(SCALE).forward(q, k, v, ScoreBlock())

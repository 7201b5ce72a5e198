"""Cross entropy, in one process and over two: torch's own, without the second buffer."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hfscale.ops import VocabularySlice, vocab_cross_entropy
from hfscale.testing import RankPool

from .pieces import piece


def _case(rows: int, vocabulary: int, ignored: float = 0.3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * 5
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = -100
    return logits, targets


@given(
    st.integers(0, 9), st.integers(1, 17), st.sampled_from([0.0, 0.4, 1.0]), st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(0, 99),
)  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_equals_torch(rows: int, vocabulary: int, ignored: float, smoothing: float, seed: int) -> None:
    logits, targets = _case(rows, vocabulary, ignored, seed)
    reference = logits.clone().requires_grad_()
    expected = F.cross_entropy(reference, targets, reduction="sum", label_smoothing=smoothing)
    (-3 * expected).backward()
    leaf = logits.clone().requires_grad_()
    loss = vocab_cross_entropy(leaf, targets, vocabulary=VocabularySlice(0, vocabulary, vocabulary, None, smoothing))
    (-3 * loss).backward()
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(leaf.grad, reference.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("block", [1, 20, 1 << 20])
def test_blocks_of_rows(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vocab_cross_entropy.__globals__, "_BLOCK_ELEMENTS", block)
    logits, targets = _case(13, 7)
    reference, leaf = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = F.cross_entropy(reference, targets, reduction="sum")
    loss = vocab_cross_entropy(leaf, targets)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(leaf.grad, reference.grad)


def test_all_ignored_is_zero_with_zero_gradients() -> None:
    logits, targets = _case(4, 5, ignored=1.0)
    logits.requires_grad_()
    loss = vocab_cross_entropy(logits, targets)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_another_ignore_index() -> None:
    logits, targets = _case(6, 5, ignored=0.0)
    loss = vocab_cross_entropy(logits, targets, ignore_index=int(targets[0]))
    expected = F.cross_entropy(logits, targets, reduction="sum", ignore_index=int(targets[0]))
    torch.testing.assert_close(loss, expected)
    assert loss < F.cross_entropy(logits, targets, reduction="sum")


def test_gradcheck() -> None:
    logits, targets = _case(5, 6)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: vocab_cross_entropy(x, targets), (logits,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_reduced_in_float32(dtype: torch.dtype) -> None:
    logits, targets = _case(200, 500)
    low = logits.to(dtype)
    reference = low.double().requires_grad_()
    expected = F.cross_entropy(reference, targets, reduction="sum")
    expected.backward()
    leaf = low.clone().requires_grad_()
    loss = vocab_cross_entropy(leaf, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=0)
    assert leaf.grad.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(
        leaf.grad.double(), reference.grad, rtol=max(2 * step, 5e-6), atol=max(1e-8, step * 1e-4)
    )


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], dtype=torch.float32, requires_grad=True)
    loss = vocab_cross_entropy(logits, torch.tensor([1, 2]))
    loss.backward()
    assert loss.item() == pytest.approx(2e4 + 1.0986, rel=1e-6)
    assert torch.isfinite(logits.grad).all()


def test_a_slice_of_the_vocabulary_counts_only_its_own_targets() -> None:
    # What one rank of two would contribute before the exchange: the log-sum-exp of its slice minus its own targets.
    logits, targets = _case(6, 8, ignored=0.0)
    loss = vocab_cross_entropy(logits[:, 4:].contiguous(), targets, vocabulary=VocabularySlice(4, 8, 4))
    own = torch.where(targets >= 4, logits.gather(1, targets[:, None]).squeeze(1), 0)
    torch.testing.assert_close(loss, (logits[:, 4:].logsumexp(-1) - own).sum())


LENGTHS = (8, 5)


def over_two(smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    logits, targets = _case(9, sum(LENGTHS))
    own = piece(logits, LENGTHS, 1, rank).clone().requires_grad_()
    vocabulary = VocabularySlice(sum(LENGTHS[:rank]), sum(LENGTHS), max(LENGTHS), dist.group.WORLD, smoothing)
    loss = vocab_cross_entropy(own, targets, vocabulary=vocabulary)
    (-3 * loss).backward()
    return loss.detach(), own.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_two_ranks_equal_torch(pools: Callable[[int], RankPool], smoothing: float) -> None:
    logits, targets = _case(9, sum(LENGTHS))
    logits.requires_grad_()
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    (-3 * expected).backward()
    for rank, (loss, grad) in enumerate(pools(2).run(over_two, smoothing)):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(grad, piece(logits.grad, LENGTHS, 1, rank), rtol=1e-12, atol=1e-14)

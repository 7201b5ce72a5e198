"""Cross entropy, in one process and over two: torch's own, without the second buffer."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hfscale.distributed.ops.vocab_cross_entropy import VocabularySlice, vocab_cross_entropy
from hfscale.testing import RankPool

from .pieces import piece

losses: Any = importlib.import_module("hfscale.distributed.ops.vocab_cross_entropy")


def _case(
    rows: int, vocabulary: int, ignored: float = 0.3, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
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
def test_equals_torch(
    rows: int, vocabulary: int, ignored: float, smoothing: float, seed: int
) -> None:
    logits, targets = _case(rows, vocabulary, ignored, seed)
    reference = logits.clone().requires_grad_()
    expected = F.cross_entropy(reference, targets, reduction="sum", label_smoothing=smoothing)
    (-3 * expected).backward()
    leaf = logits.clone().requires_grad_()
    loss = vocab_cross_entropy(
        leaf, targets, vocabulary=VocabularySlice(0, vocabulary, vocabulary, None, smoothing)
    )
    (-3 * loss).backward()
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(leaf.grad, reference.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("block", [1, 20, 1 << 20])
def test_blocks_of_rows(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vocab_cross_entropy.__globals__, "_BLOCK_ELEMENTS", block)
    logits, targets = _case(13, 7)
    reference = logits.clone().requires_grad_()
    leaf = logits.clone().requires_grad_()
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
    logits = torch.tensor(
        [[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], dtype=torch.float32, requires_grad=True
    )
    loss = vocab_cross_entropy(logits, torch.tensor([1, 2]))
    loss.backward()
    assert loss.item() == pytest.approx(2e4 + 1.0986, rel=1e-6)
    assert torch.isfinite(logits.grad).all()


def test_a_slice_of_the_vocabulary_counts_only_its_own_targets() -> None:
    # What one rank of two would contribute before the exchange: the log-sum-exp of its slice minus its own targets.
    logits, targets = _case(6, 8, ignored=0.0)
    loss = vocab_cross_entropy(
        logits[:, 4:].contiguous(), targets, vocabulary=VocabularySlice(4, 8, 4)
    )
    own = torch.where(targets >= 4, logits.gather(1, targets[:, None]).squeeze(1), 0)
    torch.testing.assert_close(loss, (logits[:, 4:].logsumexp(-1) - own).sum())


class Launched(TorchDispatchMode):
    """The names of operators that are no views and do not only take memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [value.alias_info for value in func._schema.returns]
        views = any(alias is not None and not alias.is_write for alias in aliases)
        if not views and "empty" not in func._schema.name:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def exchanged() -> tuple[list[str], bool]:
    terms = torch.arange(6.0).view(2, 3, 1) + 6 * dist.get_rank()
    with Launched() as launched:
        found = losses.gathered(terms, dist.group.WORLD)
    return launched.names, torch.equal(found, torch.arange(12.0).view(2, 2, 3, 1))


def test_terms_are_gathered_without_copies(pools: Callable[[int], RankPool]) -> None:
    """One launch for each chunk of rows, whatever the number of ranks."""
    for names, equal in pools(2).run(exchanged):
        assert names == ["c10d::_allgather_base_"]
        assert equal


LENGTHS = (8, 5)


def over_two(smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    logits, targets = _case(9, sum(LENGTHS))
    own = piece(logits, LENGTHS, 1, rank).clone().requires_grad_()
    vocabulary = VocabularySlice(
        sum(LENGTHS[:rank]), sum(LENGTHS), max(LENGTHS), dist.group.WORLD, smoothing
    )
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
        torch.testing.assert_close(
            grad, piece(logits.grad, LENGTHS, 1, rank), rtol=1e-12, atol=1e-14
        )


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch of accelerators, on the CPU."""
    monkeypatch.setattr(losses, "is_fused", lambda _: True)


def terms(
    logits: torch.Tensor, targets: torch.Tensor, vocabulary: VocabularySlice
) -> tuple[torch.Tensor, ...]:
    """Losses and gradients, as the operator that runs the head has them made."""
    found = losses.RowTerms(
        logits, losses.Targets.of_slice(targets, vocabulary, logits.shape[1]), vocabulary
    )
    loss = found.losses()
    return loss.squeeze(1), found.gradient(logits, torch.tensor(-3.0, dtype=logits.dtype))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    ("masked", "smoothing"),
    [
        (None, 0.0),
        (None, 0.2),
        (-1e4, 0.0),
        (torch.finfo(torch.bfloat16).min, 0.0),
        (-float("inf"), 0.0),
    ],
)
def test_the_fused_kernel_equals_torch(masked: float | None, smoothing: float) -> None:
    """Also where the first entry of the vocabulary is masked, as padding of it may be."""
    logits, targets = _case(9, 8, ignored=0.0)
    logits = logits.float()
    if masked is not None:
        logits[:, 0], targets = masked, targets.clamp(min=1)
    reference = logits.double().requires_grad_()
    expected = F.cross_entropy(reference, targets, reduction="none", label_smoothing=smoothing)
    (-3 * expected.sum()).backward()
    found, gradient = terms(logits, targets, VocabularySlice(0, 8, 8, None, smoothing))
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), reference.grad, rtol=1e-5, atol=1e-6)


def fused_over_two(masked: float, last: int) -> tuple[torch.Tensor, ...]:
    rank = dist.get_rank()
    before = losses.is_fused
    logits, targets = _masked_case(masked, last)
    vocabulary = VocabularySlice(sum(LENGTHS[:rank]), sum(LENGTHS), max(LENGTHS), dist.group.WORLD)
    losses.is_fused = lambda _: True
    try:
        return terms(piece(logits, LENGTHS, 1, rank).clone(), targets, vocabulary)
    finally:
        losses.is_fused = before


def _masked_case(masked: float, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The second slice is masked from its first entry to the ``last``."""
    logits, targets = _case(9, sum(LENGTHS), ignored=0.0)
    logits[:, LENGTHS[0] : last] = masked
    return logits, targets % LENGTHS[0]


@pytest.mark.parametrize("last", [LENGTHS[0] + 1, sum(LENGTHS)])
@pytest.mark.parametrize("masked", [torch.finfo(torch.float32).min, -float("inf")])
def test_the_fused_kernel_of_a_slice_that_is_masked(
    pools: Callable[[int], RankPool], masked: float, last: int
) -> None:
    logits, targets = _masked_case(masked, last)
    logits.requires_grad_()
    expected = F.cross_entropy(logits, targets, reduction="none")
    (-3 * expected.sum()).backward()
    for rank, (loss, gradient) in enumerate(pools(2).run(fused_over_two, masked, last)):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            gradient, piece(logits.grad, LENGTHS, 1, rank), rtol=1e-12, atol=1e-14
        )

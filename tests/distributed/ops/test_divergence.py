"""Divergence from a teacher's logits over a vocabulary that two ranks share unevenly: autograd over whole logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hfscale.distributed.ops.divergence import DivergenceTerms, TeacherRows
from hfscale.distributed.ops.head_cross_entropy import AnyRows, LinearRows, head_cross_entropy
from hfscale.distributed.ops.vocab_cross_entropy import VocabularySlice
from hfscale.testing import RankPool

from .pieces import piece, values

ROWS, HIDDEN, WIDER, LENGTHS = 9, 4, 6, (5, 2)
IGNORED = [1, 4, 8]
CASES = [(0.0, 1.0), (1.0, 1.0), (0.5, 1.0), (0.1, 2.0), (1.0, 0.7), (0.0, 3.0)]


def divergence(logits: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """The definition, row by row."""
    log_p, log_q = (logits / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    if beta == 0:
        return kl(log_q, log_p)
    if beta == 1:
        return kl(log_p, log_q)
    log_m = ((1 - beta) * log_p.exp() + beta * log_q.exp()).log()
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


def _case(rank: int | None) -> tuple[Tensor, ...]:
    """Hidden rows and weight of the student and the teacher, targets of which three are ignored."""
    targets = torch.randint(sum(LENGTHS), (ROWS,), generator=torch.Generator().manual_seed(2))
    targets[IGNORED] = -100
    weights = [values(1, sum(LENGTHS), HIDDEN), values(4, sum(LENGTHS), WIDER), values(5, sum(LENGTHS))]
    own = [weight if rank is None else piece(weight, LENGTHS, 0, rank).clone() for weight in weights]
    return (
        values(0, ROWS, HIDDEN).requires_grad_(),
        own[0].requires_grad_(),
        values(3, ROWS, WIDER),
        *own[1:],
        targets,
    )


def _tanh(logits: Tensor) -> Tensor:
    return 3 * torch.tanh(logits / 3)


def computed(beta: float, temperature: float, by_hand: bool) -> tuple[Tensor, ...]:
    rank = dist.get_rank()
    hidden, weight, teacher, its_weight, its_bias, targets = _case(rank)
    vocabulary = VocabularySlice(sum(LENGTHS[:rank]), sum(LENGTHS), max(LENGTHS), dist.group.WORLD)
    head: Any = LinearRows(weight, None, None, reusable=True, needed=True)
    if not by_hand:
        head = AnyRows(lambda rows: rows @ weight.T, [weight], None, needed=True)
    entropy = torch.zeros(ROWS, dtype=torch.float64)
    rows = TeacherRows(teacher, its_weight, its_bias, _tanh, beta, temperature, entropy)
    loss = head_cross_entropy(hidden, targets, head, vocabulary=vocabulary, teacher=rows)
    (3 * loss).backward()
    return loss.detach(), hidden.grad, weight.grad, entropy


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize(("beta", "temperature"), CASES)
def test_two_ranks_equal_autograd(
    pools: Callable[[int], RankPool], beta: float, temperature: float, by_hand: bool
) -> None:
    hidden, weight, teacher, its_weight, its_bias, targets = _case(None)
    logits, its_logits = hidden @ weight.T, _tanh(F.linear(teacher, its_weight, its_bias))
    expected = divergence(logits, its_logits, beta, temperature)[targets != -100].mean()
    (3 * expected).backward()
    log_p = (logits.detach() / temperature).log_softmax(-1)
    entropies = -(log_p.exp() * log_p).sum(-1).masked_fill(targets == -100, 0)
    found = pools(2).run(computed, beta, temperature, by_hand)
    torch.testing.assert_close(sum(rank[1] for rank in found), hidden.grad, rtol=1e-12, atol=1e-13)
    for rank, (loss, _, by_weight, entropy) in enumerate(found):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(by_weight, piece(weight.grad, LENGTHS, 0, rank), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(entropy, entropies, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_an_impossible_token_has_no_term(beta: float) -> None:
    logits, teacher = values(0, ROWS, 7), values(1, ROWS, 7)
    whole = VocabularySlice(0, 7, 7)
    plain = DivergenceTerms(logits[:, :5], teacher[:, :5], VocabularySlice(0, 5, 5), beta, 1.0)
    logits[:, 5:], teacher[:, 5:] = -torch.inf, -torch.inf
    found = DivergenceTerms(logits, teacher, whole, beta, 1.0)
    torch.testing.assert_close(found.losses(), plain.losses(), rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(found.entropy, plain.entropy, rtol=1e-14, atol=1e-15)
    gradient = found.gradient(logits, torch.ones((), dtype=torch.float64))
    expected = plain.gradient(logits[:, :5], torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(gradient[:, :5], expected, rtol=1e-14, atol=1e-15)
    assert not gradient[:, 5:].any()


def test_equal_to_itself() -> None:
    logits = values(0, ROWS, 7)
    for beta in (0.0, 0.3, 1.0):
        found = DivergenceTerms(logits, logits.clone(), VocabularySlice(0, 7, 7), beta, 2.0)
        assert found.losses().abs().max() < 1e-15

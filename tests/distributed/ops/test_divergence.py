"""Divergence from a teacher's logits over a vocabulary that two ranks share unevenly: autograd over whole logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hfscale.distributed.ops.divergence import (
    DivergenceTerms,
    StoredRows,
    TeacherRows,
    log_sum_exps,
    top_tokens,
)
from hfscale.distributed.ops.head_cross_entropy import AnyRows, LinearRows, head_cross_entropy
from hfscale.distributed.ops.vocab_cross_entropy import VocabularySlice
from hfscale.testing import RankPool

from .pieces import piece, values

ROWS = 9
HIDDEN = 4
WIDER = 6
LENGTHS = (5, 2)
IGNORED = [1, 4, 8]
CASES = [(0.0, 1.0), (1.0, 1.0), (0.5, 1.0), (0.1, 2.0), (1.0, 0.7), (0.0, 3.0)]


def divergence(logits: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """The definition, row by row."""
    log_p = (logits / temperature).log_softmax(-1)
    log_q = (teacher / temperature).log_softmax(-1)
    return between(log_p, log_q, beta)


def bucketed(logits: Tensor, teacher: Tensor, beta: float, temperature: float, k: int) -> Tensor:
    """The divergence of ``k + 1`` events: the teacher's first tokens, and any other."""
    log_p = (logits / temperature).log_softmax(-1)
    log_q = (teacher / temperature).log_softmax(-1)
    if k == logits.shape[-1]:
        return between(log_p, log_q, beta)
    chosen = log_q.topk(k).indices

    def events(log_probs: Tensor) -> Tensor:
        found = log_probs.gather(-1, chosen)
        return torch.cat((found, (1 - found.exp().sum(-1, keepdim=True)).log()), -1)

    return between(events(log_p), events(log_q), beta)


def between(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
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
    weights = [
        values(1, sum(LENGTHS), HIDDEN),
        values(4, sum(LENGTHS), WIDER),
        values(5, sum(LENGTHS)),
    ]
    own = [
        weight if rank is None else piece(weight, LENGTHS, 0, rank).clone() for weight in weights
    ]
    return (
        values(0, ROWS, HIDDEN).requires_grad_(),
        own[0].requires_grad_(),
        values(3, ROWS, WIDER),
        *own[1:],
        targets,
    )


def _tanh(logits: Tensor) -> Tensor:
    return 3 * torch.tanh(logits / 3)


def computed(
    beta: float, temperature: float, by_hand: bool, top_k: int | None = None
) -> tuple[Tensor, ...]:
    rank = dist.get_rank()
    hidden, weight, teacher, its_weight, its_bias, targets = _case(rank)
    vocabulary = VocabularySlice(sum(LENGTHS[:rank]), sum(LENGTHS), max(LENGTHS), dist.group.WORLD)
    head: Any = LinearRows(weight, None, None, reusable=True, needed=True)
    if not by_hand:
        head = AnyRows(lambda rows: rows @ weight.T, [weight], None, needed=True)
    entropy = torch.zeros(ROWS, dtype=torch.float64)
    its_logits = F.linear(teacher, its_weight, its_bias)
    given: dict[str, Any] = {"beta": beta, "temperature": temperature, "entropy": entropy}
    if top_k is None:
        rows: Any = TeacherRows(
            hidden=teacher, weight=its_weight, bias=its_bias, finish=_tanh, **given
        )
    else:
        stored = top_tokens(_tanh(its_logits), top_k, temperature, vocabulary)
        rows = StoredRows(**dict(zip(("stored", "tokens", "rest"), stored, strict=True)), **given)
    loss = head_cross_entropy(hidden, targets, head, vocabulary=vocabulary, teacher=rows)
    (3 * loss).backward()
    return loss.detach(), hidden.grad, weight.grad, entropy


@pytest.mark.parametrize(
    ("by_hand", "top_k"), [(True, None), (False, None), (True, 7), (False, 6), (True, 3), (True, 1)]
)
@pytest.mark.parametrize(("beta", "temperature"), CASES)
def test_two_ranks_equal_autograd(
    pools: Callable[[int], RankPool],
    beta: float,
    temperature: float,
    by_hand: bool,
    top_k: int | None,
) -> None:
    hidden, weight, teacher, its_weight, its_bias, targets = _case(None)
    logits = hidden @ weight.T
    its_logits = _tanh(F.linear(teacher, its_weight, its_bias))
    whole = bucketed(logits, its_logits, beta, temperature, top_k or sum(LENGTHS))
    expected = whole[targets != -100].mean()
    (3 * expected).backward()
    log_p = (logits.detach() / temperature).log_softmax(-1)
    entropies = -(log_p.exp() * log_p).sum(-1).masked_fill(targets == -100, 0)
    found = pools(2).run(computed, beta, temperature, by_hand, top_k)
    torch.testing.assert_close(sum(rank[1] for rank in found), hidden.grad, rtol=1e-12, atol=1e-13)
    for rank, (loss, _, by_weight, entropy) in enumerate(found):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(
            by_weight, piece(weight.grad, LENGTHS, 0, rank), rtol=1e-12, atol=1e-13
        )
        torch.testing.assert_close(entropy, entropies, rtol=1e-13, atol=1e-14)


def terms(
    logits: Tensor, teacher: Tensor, vocabulary: VocabularySlice, beta: float
) -> DivergenceTerms:
    lse = log_sum_exps([logits, teacher], vocabulary)
    return DivergenceTerms(logits - lse[0], teacher - lse[1], vocabulary, beta, 1.0)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_an_impossible_token_has_no_term(beta: float) -> None:
    logits = values(0, ROWS, 7)
    teacher = values(1, ROWS, 7)
    whole = VocabularySlice(0, 7, 7)
    plain = terms(logits[:, :5], teacher[:, :5], VocabularySlice(0, 5, 5), beta)
    logits[:, 5:], teacher[:, 5:] = -torch.inf, -torch.inf
    found = terms(logits, teacher, whole, beta)
    torch.testing.assert_close(found.losses(), plain.losses(), rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(found.entropy, plain.entropy, rtol=1e-14, atol=1e-15)
    gradient = found.gradient(logits, torch.ones((), dtype=torch.float64))
    expected = plain.gradient(logits[:, :5], torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(gradient[:, :5], expected, rtol=1e-14, atol=1e-15)
    assert not gradient[:, 5:].any()


def test_equal_to_itself() -> None:
    logits = values(0, ROWS, 7)
    for beta in (0.0, 0.3, 1.0):
        found = terms(logits / 2, logits / 2, VocabularySlice(0, 7, 7), beta)
        assert found.losses().abs().max() < 1e-15

"""Compute attention over one block of keys: the output, and the log-sum-exp of its scores.

Torch's flash kernels (Dao et al. 2022) never hold scores in memory. They support neither softcap nor dropout, and on
CUDA no mask but a causal one, so on CUDA the kernel is chosen for each block of the mask (queries of one interval of
tokens, keys of another). :class:`ScoreKernel` supports everything, and holds the scores of some rows at a time in
memory.

Shapes: queries ``[b, h, rows, d]``, keys and values ``[b, h / g, columns, d]``, outputs like queries, log-sum-exps
``[b, h, rows]``. The log-sum-exp of a row that reads no key is minus infinity.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._compat.torch_attention import (
    flash_on_cpu,
    flash_on_cpu_backward,
    flash_on_cuda,
    flash_on_cuda_backward,
    flash_takes,
)
from ..._compat.torch_device import capability_of

_SCORES = 1 << 25  # entries of a tensor of scores; a backward pass holds about five such tensors


@dataclass(frozen=True)
class ScoreBlock:
    """Describe the masking and dropout of one block of attention scores: queries of one interval, keys of another."""

    causal: bool = False  # row ``i`` reads columns 0 to ``i``
    # ``[b, 1, rows, columns]``, 0 or minus infinity, added to scores; ``None``: no mask except ``causal``
    bias: Tensor | None = None
    seed: int = 0  # seed of dropout
    # ``[b, 1, rows]``: True for queries that read all keys with equal weight; ``None``: there are no such queries
    idle: Tensor | None = None
    first: int = 0  # index of the first row in the whole block, for the causal mask

    def of_rows(self, rows: slice) -> "ScoreBlock":
        """Return this description for the query rows ``rows`` of the block."""
        if rows.start == 0 and rows.stop is None:
            return self
        bias = None if self.bias is None else self.bias[:, :, rows]
        idle = None if self.idle is None else self.idle[:, :, rows]
        return ScoreBlock(
            self.causal, bias, (self.seed * 1_000_003 + rows.start) % 2**63, idle, rows.start
        )


def kernel_for(
    q: Tensor, scale: float, softcap: float | None, dropout: float, idle: bool = False
) -> "Kernel":
    """Return the fastest attention kernel that supports these queries.

    The kernel runs blocks (queries of one interval of tokens, keys of another) with every kind of mask: full, causal,
    or any other. With ``idle``, some queries read all keys with equal weight.
    """
    plain = softcap is None and not dropout and not idle
    if plain and q.device.type == "cpu":
        return FlashOnCpu(scale)
    if plain and flash_takes(q.shape[-1], q.dtype, capability_of(q.device)):
        return FlashOnCuda(scale)
    return ScoreKernel(scale, softcap, dropout)


def padded_width(width: int, device: torch.device) -> int:
    """Return the width to which heads are padded with zeros: flash kernels on GPUs need multiples of 8."""
    return width if device.type == "cpu" else -(-width // 8) * 8


@dataclass(frozen=True)
class FlashOnCpu:
    """Run torch's flash kernel for CPUs, which supports any dtype, grouped-query attention and masks."""

    scale: float

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block: ScoreBlock,
    ) -> tuple[Tensor, Tensor]:
        out, lse = flash_on_cpu(q, k, v, block.causal, block.bias, self.scale)
        if block.bias is not None:
            nothing = torch.isneginf(block.bias).all(-1)
            lse = lse.masked_fill(nothing, float("-inf"))
            out = out.masked_fill(nothing[..., None], 0.0)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: ScoreBlock,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return flash_on_cpu_backward(
            grad, q, k, v, out, lse, causal=block.causal, bias=block.bias, scale=self.scale
        )


@dataclass(frozen=True)
class ScoreKernel:
    """Compute attention from scores in at least 32 bits, held for some rows at a time. Support softcap (Gemma Team
    2024) and dropout.
    """

    scale: float
    softcap: float | None = None
    dropout: float = 0.0

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block: ScoreBlock,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of attention over the block's keys, and the log-sum-exp of each query's scores."""
        out, lse = zip(
            *(
                self._forward(q[:, :, rows], k, v, block.of_rows(rows))
                for rows in _row_blocks(q, k)
            ),
            strict=True,
        )
        return joined(out), joined(lse)

    def _forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block: ScoreBlock,
    ) -> tuple[Tensor, Tensor]:
        scores, _ = self._scores(q, k, block)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - finite(lse)[..., None])
        if self.dropout:
            p = p * self._kept(p, block)
        out = torch.einsum("bkgqs,bksd->bkgqd", p, v.to(p.dtype))
        return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: ScoreBlock,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's terms of the gradients of q, k and v. ``out`` and ``lse`` are results over all blocks."""
        gradients = list[Tensor]()
        sums = list[Tensor]()
        for rows in _row_blocks(q, k):
            dout, queries, answers, sizes = (x[:, :, rows] for x in (grad, q, out, lse))
            dq, *more = self._backward(
                dout,
                queries,
                answers,
                sizes,
                k,
                v,
                block.of_rows(rows),
            )
            gradients.append(dq)
            sums = (
                [total.add_(part) for total, part in zip(sums, more, strict=True)] if sums else more
            )
        return joined(gradients), sums[0].to(k.dtype), sums[1].to(v.dtype)

    def _backward(
        self,
        grad: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        k: Tensor,
        v: Tensor,
        block: ScoreBlock,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of some query rows, and the terms that these rows add to the gradients of ``k`` and
        ``v``.

        The gradient of the rows is in the dtype of ``q``; the terms are in the dtype of the scores, at least 32 bits.
        """
        scores, slope = self._scores(q, k, block)
        wide = scores.dtype
        grad_ = _grouped(grad, k).to(wide)
        k_ = k.to(wide)
        v_ = v.to(wide)
        delta = (grad.to(wide) * out.to(wide)).sum(-1).view(scores.shape[:-1])
        p = torch.exp(scores - finite(lse).reshape(scores.shape[:-1])[..., None])
        dp = torch.einsum("bkgqd,bksd->bkgqs", grad_, v_)
        kept = p
        if self.dropout:
            mask = self._kept(p, block)
            dp = dp * mask
            kept = p * mask
        dv = torch.einsum("bkgqs,bkgqd->bksd", kept, grad_)
        ds = p * (dp - delta[..., None])
        ds = (ds if slope is None else ds * slope) * self.scale
        dq = torch.einsum("bkgqs,bksd->bkgqd", ds, k_).flatten(1, 2)
        dk = torch.einsum("bkgqs,bkgqd->bksd", ds, _grouped(q, k).to(wide))
        return dq.to(q.dtype), dk, dv

    def _scores(
        self,
        q: Tensor,
        k: Tensor,
        block: ScoreBlock,
    ) -> tuple[Tensor, Tensor | None]:
        """Return scores ``[b, h / g, g, rows, columns]``, and the softcap's derivative (``None`` without softcap)."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (
            torch.einsum(
                "bkgqd,bksd->bkgqs",
                _grouped(q, k).to(wide),
                k.to(wide),
            )
            * self.scale
        )
        slope = None
        if self.softcap is not None:
            squashed = torch.tanh(scores / self.softcap)
            scores = squashed * self.softcap
            slope = 1 - squashed**2
        if block.bias is not None:
            scores = scores + block.bias[:, :, None].to(wide)
        if block.causal:
            above = torch.ones(
                scores.shape[-2:],
                dtype=torch.bool,
                device=q.device,
            ).triu(1 + block.first)
            scores = scores.masked_fill(above, float("-inf"))
        if block.idle is not None:
            scores = scores.masked_fill(block.idle[:, :, None, :, None], 0.0)
        return scores, slope

    def _kept(self, p: Tensor, block: ScoreBlock) -> Tensor:
        generator = torch.Generator(p.device).manual_seed(block.seed)
        drawn = torch.rand(p.shape, generator=generator, device=p.device)
        return (drawn >= self.dropout).to(p.dtype) / (1 - self.dropout)


Kernel = FlashOnCpu | ScoreKernel


@dataclass(frozen=True)
class FlashOnCuda(ScoreKernel):
    """Run torch's flash kernel for GPUs (16 bits, grouped-query attention) on full and causal blocks. On blocks with
    any other mask, compute scores like :class:`ScoreKernel`.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block: ScoreBlock,
    ) -> tuple[Tensor, Tensor]:
        if block.bias is not None:
            return super().forward(q, k, v, block)
        out, lse = flash_on_cuda(q, k, v, block.causal, self.scale)
        return out, lse[..., : q.shape[2]]

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: ScoreBlock,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if block.bias is not None:
            return super().backward(grad, q, k, v, out, lse, block)
        return flash_on_cuda_backward(
            grad, q, k, v, out, lse.contiguous(), block.causal, self.scale
        )


def _row_blocks(q: Tensor, k: Tensor) -> list[slice]:
    """Split the queries' rows into slices, so that the attention scores of a slice are at most ``_SCORES`` numbers."""
    rows = max(
        1,
        _SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]),
    )
    return (
        [slice(0, None)]
        if q.shape[2] <= rows
        else [slice(i, i + rows) for i in range(0, q.shape[2], rows)]
    )


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors ``[b, h, rows, ...]`` along rows; a single tensor is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 2)


def finite(lse: Tensor) -> Tensor:
    """Replace log-sum-exps of minus infinity (rows that read no key) by 0, so that ``exp(x - lse)`` is 0, not NaN."""
    return lse.masked_fill(torch.isneginf(lse), 0.0)


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """Reshape ``[b, h, s, d]`` to ``[b, h / g, g, s, d]``, so that queries are grouped by their key head."""
    return q.unflatten(1, (k.shape[1], -1))

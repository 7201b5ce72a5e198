"""The one process of a draw: plain transformers, PEFT and bitsandbytes."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import hfscale
from hfscale._compat.bitsandbytes import keep_layout
from hfscale.testing.parity import plain_name

from .documents import by_document
from .draw import Draw
from .fuzz_batches import Batch, Call, as_given, batches, valid_labels
from .levers import (
    EIGHT_BITS,
    LossScale,
    computes_in,
    kinds,
    multiply_in_8_bits,
    roundings_in_32_bits,
    send_gradients,
    unrounded,
)
from .models import (
    AUTO,
    adapter,
    arguments,
    dtype_of,
    exact,
    in_float64,
    is_autocast,
    narrow_type,
    peft_config,
    prepared,
    prompts_drawn,
    quantization,
    round_experts,
    stock_config,
    stock_optimizers,
)


@dataclass
class Step:
    """What one optimizer step gave.

    Attributes:
        losses: ``[call][distinct batch]``.
        gradients: by the plan's names, before clipping.
        norm: before clipping.
        weights: after the step.
        scale: of the loss, behind it.
        skipped: whether gradients overflowed, so that it changed nothing.
    """

    losses: list[list[float]]
    gradients: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]
    scale: float = 1.0
    skipped: bool = False


@dataclass
class Record:
    """What one process computed.

    Attributes:
        steps: in float64 where the draw is not quantized, whatever its type.
        narrow: the same in the draw's own type; empty where that is float64.
        dtypes: of the stock parameters, by the plan's names.
        evaluation: loss in evaluation after the first step.
        tokens: what the model writes then; ``None`` where stock code writes nothing.
        logits: of each distinct batch's first microbatch then, where somebody looks at them.
    """

    steps: list[Step] = field(default_factory=list)
    narrow: list[Step] = field(default_factory=list)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    evaluation: float | None = None
    tokens: Tensor | None = None
    logits: list[Tensor] = field(default_factory=list)


def reference(draw: Draw, directory: Path) -> None:
    """Write the start that the layout loads, train it, and write what came out."""
    warnings.simplefilter("ignore")
    make_start(draw, directory)
    record = Record()
    own = dtype_of(draw)
    exact_draw = unrounded(draw)
    if draw.drops or draw.delayed:  # only whether it runs in one process at all
        train(draw.change(steps=1), directory, own, Record())
    elif draw.quantize is not None or (own == torch.float64 and kinds(draw) == ["float64"]):
        record.steps = train(draw, directory, own, record)
    else:
        narrow = narrow_type(draw)
        record.narrow = train(draw, directory, narrow, record)
        if narrow != own:
            record.dtypes = dict.fromkeys(record.dtypes, own)
        skipped = [step.skipped for step in record.narrow]
        record.steps = train(exact_draw, directory, torch.float64, Record(), skipped)
        if draw.mixed_precision == "fp16" and not _finite(record.narrow):
            raise ArithmeticError("stock code's loss is no number in float16")
        # ProphetNet's masks of padding overflow there.
        if _finite(record.narrow) and not _finite(record.steps):
            raise ArithmeticError(
                f"in float64 stock code's loss is no number, and in {narrow} it is"
            )
    torch.save(record, directory / "reference.pt")


def _finite(steps: list[Step]) -> bool:
    return all(math.isfinite(loss) for step in steps for call in step.losses for loss in call)


def make_start(draw: Draw, directory: Path) -> None:
    """A checkpoint in the draw's type, and an adapter."""
    config = stock_config(draw)
    own = dtype_of(draw)
    torch.manual_seed(draw.seed)
    if draw.entry == "from_config":
        model = hfscale.from_config(config, seed=draw.seed, dtype=own, **arguments(draw))
        stock = AUTO.from_config(stock_config(draw), dtype=own, **arguments(draw))
        stock.load_state_dict(model.state_dict())
        model = stock
    else:
        model = AUTO.from_config(config, dtype=torch.float64, **arguments(draw))
        # Norms start as ones and biases as zeros, which would hide errors in both.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model = model.to(own)
    model.save_pretrained(directory / "start")
    # The host's own first values depend on what was drawn before.
    if draw.peft is not None and "prompt" in draw.peft:
        return  # PEFT does not train what it has loaded of a prompt
    if draw.peft_fresh and draw.peft is not None:
        model = hfscale.from_pretrained(
            str(directory / "start"),
            peft_config=adapter(draw, directory),
            seed=draw.seed,
            **arguments(draw),
        )
        hfscale.save_pretrained(model, directory / "adapter")
    elif draw.peft is not None:
        import peft

        model = peft.get_peft_model(AUTO.from_pretrained(directory / "start"), peft_config(draw))
        with torch.no_grad():  # new adapters change nothing, which would hide errors in them
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(str(directory / "adapter"))


def load(draw: Draw, directory: Path, dtype: torch.dtype) -> Any:
    """The stock model, with stock adapters."""
    model: Any = AUTO.from_pretrained(
        directory / "start", dtype=dtype, **arguments(draw), **quantization(draw)
    )
    if draw.entry == "from_config":
        # Unlike from_pretrained it keeps nothing in 32 bits, and tables of positions frozen.
        with torch.device("meta"):
            built = AUTO.from_config(stock_config(draw), dtype=dtype, **arguments(draw))
        like = dict(built.named_parameters())
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(like[name].dtype)
            parameter.requires_grad_(like[name].requires_grad)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            keep_layout(module)
    if draw.quantize is not None:
        round_experts(model, draw)
    text = model.config.get_text_config()
    if draw.loop == "train_step" and hasattr(text, "use_cache"):
        # As train_step does, and as stock trainers do: with a cache, the host overlooks where packed rows begin anew.
        text.use_cache = False
    if draw.peft is not None and _own_parts(draw):
        if dtype == torch.float64:
            in_float64(model)
        model = hfscale.parallelize(model, **_own_parts(draw))
        with prompts_drawn(draw):
            model = hfscale.get_peft_model(model, adapter(draw, directory), seed=draw.seed)
    elif draw.peft is not None and "prompt" in draw.peft:
        import peft

        torch.manual_seed(draw.seed)
        with prompts_drawn(draw):
            model = peft.get_peft_model(model, peft_config(draw))
    elif draw.peft is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, str(directory / "adapter"), is_trainable=True)
        _check_adapter(model, directory / "adapter")
    if dtype == torch.float64:
        in_float64(model)
    multiply_in_8_bits(draw, model, stock_config(draw), dtype=dtype_of(draw), **arguments(draw))
    return prepared(model, draw, dtype)


def _check_adapter(model: Any, directory: Path) -> None:
    """PEFT overlooks what it cannot place: Inkling 2's convolutions, whose keys transformers renames.

    Raises:
        ArithmeticError: stock code has not loaded all of the adapter that it saved.
    """
    import peft

    loaded = peft.get_peft_model_state_dict(model)
    stored = load_file(directory / "adapter_model.safetensors")
    near = {"rtol": 1e-2, "atol": 1e-3}  # they may be loaded in 16 bits
    lost = [
        key
        for key, value in stored.items()
        if key not in loaded or not loaded[key].to(value).allclose(value, **near)
    ]
    if lost:
        raise ArithmeticError(
            f"stock PEFT does not load all of an adapter that it saved: {lost[0]}"
        )


def _autocast(forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    @functools.wraps(forward)
    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return forward(*args, **kwargs)

    return autocast_forward


@torch.no_grad()
def _counts_first(model: Any) -> bool:
    """Return whether a model's loss reads the labels of rows' first tokens: BART's decoders do not shift labels, and a
    prompt stands in front of the first token.
    """
    ids = torch.arange(1, 5)[None]
    one, other = ids.masked_fill(ids > 1, -100), ids.masked_fill(ids > 1, -100) + (ids == 1)
    model.eval()
    losses = [model(input_ids=ids, labels=labels).loss.nan_to_num() for labels in (one, other)]
    model.train()
    return not torch.equal(*losses)


def _computing(draw: Draw, model: Any, dtype: torch.dtype, first: bool) -> Any:
    """Return ``model`` as the reference runs it."""
    own = _own_parts(draw)
    runs = hfscale.parallelize(model, **own) if own and draw.peft is None else model
    if dtype != torch.float64 and is_autocast(draw):
        runs.forward = _autocast(runs.forward, computes_in(draw))
    if draw.packed and draw.positions and not own:
        runs.forward = by_document(runs.forward, first)
    return runs


def train(
    draw: Draw, directory: Path, dtype: torch.dtype, record: Record, skipped: Sequence[bool] = ()
) -> list[Step]:
    """All steps in one process; those of ``skipped`` change nothing, as if they had overflowed."""
    model = load(draw, directory, dtype)
    first = _counts_first(model)
    runs = _computing(draw, model, dtype, first)
    optimizers = stock_optimizers(draw, model, directory)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    record.dtypes = {plain_name(name): p.dtype for name, p in model.named_parameters()}
    world = draw.parallel().batch_world
    steps: list[Step] = []
    vocabulary = model.config.get_text_config().vocab_size
    scale = LossScale(draw)
    with exact(dtype), roundings_in_32_bits():
        for index, calls in enumerate(batches(draw, world, vocabulary)):
            losses = [_call(draw, runs, call, scale.scale, first) for call in calls]
            skips = scale.over(trained)
            if skipped and skipped[index]:
                model.zero_grad()
            send_gradients(draw, trained)
            gradients = _gradients(model)
            norm = torch.nn.utils.clip_grad_norm_(
                trained, draw.max_norm or 1e30, norm_type=draw.norm_type
            )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            steps.append(Step(losses, gradients, float(norm), _weights(model), scale.scale, skips))
            if index == 0:
                _look(draw, model, runs, calls[0], record, first)
    if draw.quantize is None or draw.peft is not None:
        model.save_pretrained(directory / f"end-{str(dtype).split('.')[1]}")
    return steps


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        plain_name(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        plain_name(n): p.detach().clone()
        for n, p in model.named_parameters()
        if p.is_floating_point()
    }


def _own_parts(draw: Draw) -> dict[str, Any]:
    """Losses of routing, and what layers keep in 8 bits, are hfscale's own: one process of it says what they are."""
    own: dict[str, Any] = {}
    if draw.routing is not None:
        own["routing"] = hfscale.RoutingConfig(**draw.routing)
    if EIGHT_BITS in kinds(draw):
        least = (draw.memory or {})["compress_activations"]
        own["memory"] = hfscale.MemoryConfig(compress_activations=least)
    return own


def _call(draw: Draw, model: nn.Module, call: Call, scale: float, first: bool) -> list[float]:
    """Forward and backward over all microbatches of all distinct batches."""
    if draw.routing is not None:
        given = [microbatch for rank in call for microbatch in rank if microbatch["labels"].numel()]
        return [
            float(hfscale.train_step(model, given, label_smoothing=draw.label_smoothing))
        ] * len(call)
    if draw.loop == "plain":
        return [_plain(model, rank, len(call)) for rank in call]
    microbatches = [microbatch for rank in call for microbatch in rank]
    counts = [valid_labels(microbatch, first) for microbatch in microbatches]
    loss = 0.0
    for microbatch, count in zip(microbatches, counts, strict=True):
        if count:
            part = _loss(draw, model, microbatch, first) * (count / sum(counts))
            (part * scale).backward()
            loss += float(part.detach())
    return [loss] * len(call)


def _plain(model: nn.Module, microbatches: list[Batch], world: int) -> float:
    total = 0.0
    for microbatch in microbatches:
        loss = model(**microbatch).loss / len(microbatches)
        (loss / world).backward()
        total += float(loss.detach())
    return total


def _loss(draw: Draw, model: nn.Module, microbatch: Batch, first: bool) -> Tensor:
    if not draw.label_smoothing:
        found: Tensor = model(**microbatch).loss
        return found
    logits = model(**unlabelled(microbatch)).logits
    logits = logits.float() if logits.dtype != torch.float64 else logits
    shift = int(not first)
    return nn.functional.cross_entropy(
        logits[:, : logits.shape[1] - shift].flatten(0, 1),
        microbatch["labels"][:, shift:].flatten(),
        label_smoothing=draw.label_smoothing,
    )


@torch.no_grad()
def _look(draw: Draw, model: Any, runs: Any, call: Call, record: Record, first: bool) -> None:
    """Evaluation and generation between two steps."""
    model.eval()
    if "eval" in draw.between and draw.loop == "train_step":
        if draw.routing is not None:
            given = [
                microbatch for rank in call for microbatch in rank if microbatch["labels"].numel()
            ]
            record.evaluation = float(
                hfscale.eval_step(runs, given, label_smoothing=draw.label_smoothing)
            )
        else:
            microbatches = [microbatch for rank in call for microbatch in rank]
            counts = [valid_labels(microbatch, first) for microbatch in microbatches]
            losses = [
                _loss(draw, model, m, first) * n
                for m, n in zip(microbatches, counts, strict=True)
                if n
            ]
            record.evaluation = float(torch.stack(losses).sum() / sum(counts))
    if "generate" in draw.between:
        try:
            record.tokens = model.generate(**prompt(call), **GREEDY)
        except Exception:  # a stock class that does not write
            record.tokens = None
    if {"scores", "outputs"} & {*draw.between}:
        record.logits = [model(**unlabelled(rank[0])).logits for rank in call]
    model.train()


GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


def unlabelled(microbatch: Batch) -> Batch:
    """What the model is given where its loss is not asked for."""
    return {name: value for name, value in microbatch.items() if name != "labels"}


def prompt(call: Call) -> dict[str, Tensor]:
    """What generation goes on from, the same on every rank."""
    ids = call[0][0]["input_ids"][:2]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


__all__ = ["GREEDY", "Record", "Step", "as_given", "exact", "prompt", "reference", "unlabelled"]

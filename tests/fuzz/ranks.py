"""One rank of a draw: the same training in the layout, compared with what one process computed as it goes."""

import copy
import hashlib
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hfscale
from hfscale.distributed.ops import overlap
from hfscale.testing.differences import difference
from hfscale.testing.parity import stored
from hfscale.train.runtime import Runtime, runtime_of
from hfscale.train.runtime.shards import local_tensor

from .between import look
from .children import Note
from .draw import Draw
from .fuzz_batches import Call, as_given, batches
from .levers import planned_by, roundings_in_32_bits
from .low_rank import LowRank
from .measures import EXACT, Yardstick, plain
from .models import (
    AUTO,
    adapter,
    arguments,
    dtype_of,
    exact,
    in_float64,
    is_named,
    named_options,
    narrow_type,
    options,
    prepared,
    prompts_drawn,
    quantization,
    stock_config,
    torch_options,
)
from .reference import Record, Step

_ACCELERATES = {"bf16": "bf16", "fp8": "bf16"}
"""What an Accelerator is told of a model's mixed precision."""


def run(draw: Draw, directory: Path, rank: int, note: Note) -> None:
    """Train in the layout; writes ``rank-N.json`` with the worst differences, losses and checksums.

    Args:
        note: told what comes next: ``config``, ``plan``, ``build``, ``step 0`` ...
    """
    warnings.simplefilter("ignore")
    overlap.OVERLAPPED_FROM = 0  # tiny blocks are taken apart as large ones are
    note("config")
    layout = draw.parallel()
    note("plan")
    asked = {"dtype": dtype_of(draw), **planned_by(draw), **arguments(draw), **quantization(draw)}
    planned = hfscale.plan(stock_config(draw), layout, **asked)
    layouts = [layout]
    if draw.resume_layout is not None:
        layouts.append(hfscale.ParallelConfig(**draw.resume_layout))
        hfscale.plan(stock_config(draw), layouts[1], **asked)
    note("build")
    held = any(each.data_world > 1 for each in layouts) and any(
        p.dtype != torch.float64 for p in planned.owned()
    )
    if draw.dtype == "float64" and held:
        # The data axes hold parameters that cannot be given another type.
        draw = draw.change(entry="parallelize")
    built = Rank(draw, directory, note)
    built.build()
    record: Record = torch.load(directory / "reference.pt", weights_only=False)
    quantized = planned.quantized
    aligned = quantized is None or all(
        quantized.aligned(planned.by_name[name]) for name in quantized.weights
    )
    yardstick = Yardstick(draw, record, aligned, bool(planned.mixtures))
    losses = built.train(record, yardstick)
    found = {
        "worst": plain(yardstick.worst),
        "losses": losses,
        "sums": checksums(runtime_of(built.model)),
        "own_loss": planned.loss is None,
    }
    (directory / f"rank-{rank}.json").write_text(json.dumps(found))
    note("end")


class Rank:
    """A live rank: model and optimizer, which are made anew where a run is resumed."""

    def __init__(self, draw: Draw, directory: Path, note: Note) -> None:
        self.draw = draw
        self.directory = directory
        self.note = note
        # Of one process, saved.
        self.end = directory / f"end-{str(narrow_type(draw)).removeprefix('torch.')}"

    def build(self) -> None:
        """By the drawn way."""
        draw = self.draw
        own = dtype_of(self.draw)
        layout = draw.parallel()
        start = str(self.directory / "start")
        further = options(draw)
        later = draw.peft is not None and (draw.peft_later or draw.entry != "from_pretrained")
        if draw.entry == "parallelize":
            whole = AUTO.from_pretrained(start, dtype=own, **arguments(draw))
            if own == torch.float64:
                in_float64(whole)
            model = hfscale.parallelize(whole, layout, **further)
        elif draw.entry == "from_config":
            model = hfscale.from_config(
                stock_config(draw),
                parallel=layout,
                seed=draw.seed,
                dtype=own,
                **arguments(draw),
                **further,
            )
        else:
            given = adapter(draw, self.directory) if draw.peft is not None and not later else None
            model = hfscale.from_pretrained(
                start,
                parallel=layout,
                dtype=own,
                peft_config=given,
                seed=draw.seed,
                **arguments(draw),
                **quantization(draw),
                **further,
            )
        if later:
            self.note("adapt")
            with prompts_drawn(draw):
                model = hfscale.get_peft_model(model, adapter(draw, self.directory), seed=draw.seed)
        if own == torch.float64:
            in_float64(model)
        self.model = prepared(model, draw, own)
        self.note("optimizer")
        if is_named(draw):
            self.optimizer = hfscale.create_optimizer(model, draw.optimizer, **named_options(draw))
        else:
            self.optimizer = getattr(torch.optim, draw.optimizer)(
                model.parameters(), **torch_options(draw)
            )
        if draw.accelerate:
            passes = max(1, draw.microbatches) if draw.loop == "plain" else 1
            self.accelerator = hfscale.Accelerator(
                gradient_accumulation_steps=passes,
                mixed_precision=_ACCELERATES.get(draw.mixed_precision, "no"),
            )
            self.model, self.optimizer = self.accelerator.prepare(model, self.optimizer)

    def train(self, record: Record, yardstick: Yardstick) -> list[float]:
        """All steps; the losses that this rank was told."""
        draw = self.draw
        compares = bool(record.steps)
        self.factors = (
            LowRank(draw.layout["powersgd_rank"]) if draw.compression == "powersgd" else None
        )
        told: list[float] = []
        vocabulary = stock_config(draw).get_text_config().vocab_size
        if record.dtypes and draw.quantize is None:
            self._compare_types(record, yardstick)
        with exact(dtype_of(draw)), roundings_in_32_bits():
            for index, calls in enumerate(
                batches(draw, hfscale.batch_world(self.model), vocabulary)
            ):
                self.note(f"step {index}")
                losses = [self._call(call, hfscale.batch_rank(self.model)) for call in calls]
                told += losses
                if compares:
                    self._compare_gradients(index, losses, record, yardstick)
                norm = self._clip(draw.max_norm or 1e30, draw.norm_type)
                if compares and self.factors is None:
                    narrow = record.narrow[index].norm if record.narrow else None
                    yardstick.scalar("norm", index, float(norm), record.steps[index].norm, narrow)
                told.append(float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
                if compares:
                    self._compare_weights(index, record, yardstick)
                if index == 0:
                    self._between(calls[0], record, yardstick)
        self._drain()
        if draw.quantize is None or draw.peft is not None:
            self._save(record, yardstick)
        return told

    def _drain(self) -> None:
        for _ in hfscale.drain(self.model):  # nothing, but under schedules without a flush
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _clip(self, max_norm: float, norm_type: float) -> Any:
        if self.draw.accelerate:
            return self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        return hfscale.clip_grad_norm_(self.model, max_norm, norm_type)

    def _call(self, call: Call, mine: int) -> float:
        if self.draw.loop == "train_step":
            given = as_given(self.draw, call[mine])
            if self.draw.user_loss:
                shift = runtime_of(self.model).loss.shift  # BART-like classes do not shift labels
                return float(
                    hfscale.train_step(self.model, given, partial(sum_of_tokens, shift=shift))
                )
            return float(
                hfscale.train_step(self.model, given, label_smoothing=self.draw.label_smoothing)
            )
        total = 0.0
        for microbatch in call[mine]:
            if self.draw.accelerate:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**microbatch).loss
                    self.accelerator.backward(loss)
            else:
                loss = self.model(**microbatch).loss
                (loss / len(call[mine])).backward()
            total += float(loss.detach()) / len(call[mine])
        return total

    def _compare_types(self, record: Record, yardstick: Yardstick) -> None:
        for planned, parameter in runtime_of(self.model).parameters():
            wanted = record.dtypes.get(planned.name, parameter.dtype)
            name = f"{planned.name}: {parameter.dtype} for {wanted}"
            yardstick.worst.note("dtype", float(parameter.dtype != wanted), 0.5, name)

    def _compare_gradients(
        self, index: int, losses: list[float], record: Record, yardstick: Yardstick
    ) -> None:
        step = record.steps[index]
        mine = hfscale.batch_rank(self.model)
        for call, loss in enumerate(losses):
            narrow = record.narrow[index].losses[call][mine] if record.narrow else None
            yardstick.scalar("loss", index, loss, step.losses[call][mine], narrow)
        pairs = []
        runtime = runtime_of(self.model)
        for planned, parameter in runtime.parameters():
            wanted = step.gradients.get(planned.name)
            gradient = parameter.grad
            if (gradient is None) != (wanted is None):
                name = f"step {index}: {planned.name} has {'none' if gradient is None else 'one'} alone"
                yardstick.worst.note("missing gradient", 1.0, 0.5, name)
            elif gradient is not None and wanted is not None:
                pairs.append(
                    (
                        planned.name,
                        local_tensor(gradient),
                        planned.take(wanted, runtime.mesh.ranks),
                        wanted,
                    )
                )
        if self.factors is None:
            yardstick.tensors("gradient", index, pairs)
        else:
            self._compare_factors(index, pairs, yardstick)
        if self.draw.mixed_precision == "fp16":
            self._compare_scales(index, (record.narrow or record.steps)[index], yardstick)

    def _compare_factors(
        self, index: int, pairs: list[tuple[str, Tensor, Tensor, Tensor]], yardstick: Yardstick
    ) -> None:
        assert self.factors is not None
        planned = runtime_of(self.model).plan
        for name, found, wanted, whole in pairs:
            kinds = {step.kind for step in planned.by_name[name].reductions}
            if kinds & {"sum-stages", "sum-replicas"}:
                continue  # of what was sent as factors, and is none any more
            terms = planned.layout.size("tp") if "sum" in kinds else 1
            floor = yardstick.least_scale("gradient", index, whole)
            error = self.factors.difference(name, found, wanted, floor, terms)
            yardstick.worst.note("factors", error, EXACT, f"step {index}: {name}")

    def _compare_scales(self, index: int, wanted: Step, yardstick: Yardstick) -> None:
        found = hfscale.metrics(self.model)
        told = float(found["loss_scale"]), bool(found["step_was_skipped"])
        name = f"step {index}: {told} for {(wanted.scale, wanted.skipped)}"
        yardstick.worst.note("loss scale", float(told != (wanted.scale, wanted.skipped)), 0.5, name)

    def _compare_weights(self, index: int, record: Record, yardstick: Yardstick) -> None:
        runtime = runtime_of(self.model)
        pairs = []
        for planned, parameter in runtime.parameters():
            if not parameter.is_floating_point() or planned.name not in record.steps[index].weights:
                continue
            wanted = record.steps[index].weights[planned.name]
            if (
                wanted.is_floating_point()
                and parameter.dtype != torch.uint8
                and wanted.shape == planned.shape
            ):
                found = local_tensor(parameter.detach())
                pairs.append(
                    (planned.name, found, planned.take(wanted, runtime.mesh.ranks), wanted)
                )
        yardstick.tensors("weight", index, pairs)

    def _between(self, call: Call, record: Record, yardstick: Yardstick) -> None:
        """What a run does between two steps."""
        look(self.draw, self.model, call, record, yardstick, self.note)
        if "save" in self.draw.between:
            self.note("save")
            hfscale.save_pretrained(self.model, self.directory / "middle")
        if "deepcopy" in self.draw.between:
            copy.deepcopy(self.model.config)
        if self.draw.resume:
            self.note("save_state")
            if self.draw.accelerate:
                self.accelerator.save_state(str(self.directory / "state"))
            else:
                hfscale.save_state(self.model, self.directory / "state", optimizer=self.optimizer)
            self.note("rebuild")
            if self.draw.resume_layout is not None:
                self.draw = self.draw.change(layout=self.draw.resume_layout)
                if self.factors is not None:
                    self.factors.forget()
            self.build()
            self.note("load_state")
            if self.draw.accelerate:
                self.accelerator.load_state(str(self.directory / "state"))
            else:
                hfscale.load_state(self.model, self.directory / "state", optimizer=self.optimizer)

    def _save(self, record: Record, yardstick: Yardstick) -> None:
        self.note("save")
        hfscale.save_pretrained(self.model, self.directory / "saved", max_shard_size="40KB")
        if not record.steps or (
            torch.distributed.is_initialized() and torch.distributed.get_rank() > 0
        ):
            return
        ours = stored(self.directory / "saved")
        wanted = stored(self.end)
        names = f"names differ: {sorted(ours.keys() ^ wanted.keys())[:4]}"
        yardstick.worst.note("saved", float(ours.keys() != wanted.keys()), 0.5, names)
        for name in ours.keys() & wanted.keys():
            yardstick.worst.note(
                "saved shape", float(ours[name].shape != wanted[name].shape), 0.5, name
            )
            if yardstick.exact and ours[name].shape == wanted[name].shape and yardstick.follows():
                floor = yardstick.least_scale("weight", len(record.steps) - 1, wanted[name])
                yardstick.worst.note(
                    "saved", difference(ours[name], wanted[name], floor=floor), EXACT, name
                )


def sum_of_tokens(outputs: Any, batch: Any, shift: int = 1) -> tuple[Tensor, int]:
    """The loss of causal language models, as a user would write it for :func:`hfscale.train_step`."""
    logits = outputs.logits
    targets = batch["labels"]
    logits = logits[:, : logits.shape[1] - shift].flatten(0, 1)
    targets = targets[:, shift:].flatten()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), int(
        (targets != -100).sum()
    )


def checksums(runtime: Runtime) -> dict[str, str]:
    """Of every parameter's share, by name and place: equal wherever the same is held."""
    found = {}
    for planned, parameter in runtime.parameters():
        place = {cut.axis: runtime.mesh.ranks[cut.axis] for cut in planned.cuts}
        value: Tensor = local_tensor(parameter.detach()).contiguous()
        data = value.view(torch.uint8).numpy().tobytes() if value.numel() else b""
        found[f"{planned.name} {place}"] = hashlib.sha1(data).hexdigest()
    return found

"""Compare training in a layout with training in one process (parity): both must compute the same loss, gradients and
weights.

One process runs the *stock* model, without hfscale, on all microbatches of all ranks. The layout runs the same
checkpoint on the same data. Loss, every gradient, the clipped norm and, after each step, every weight are compared in
float64.
"""

import copy
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

import hfscale

from .._compat.peft import NEW_WEIGHTS
from .._compat.transformers.classes import from_config as host_from_config
from .._compat.transformers.computing import enable_checkpointing
from .._compat.transformers.experts import use_eager_experts
from ..config.memory import MemoryConfig
from ..config.parallel import ParallelConfig
from ..models.fields import text_config
from ..models.precision import keep_float64, make_float64
from ..train.runtime import local_tensor, runtime_of
from ..train.runtime.parameter_names import stock_name
from .differences import difference, gradient_difference
from .pool import RankPool

Batch = dict[str, Tensor]


def vocabulary_of(config: Any) -> int:
    """Return the vocabulary size of a config's text model; 60, that of the tiny test models, if the config has none."""
    return int(getattr(text_config(config), "vocab_size", 60))


def ragged_batch(
    generator: torch.Generator, vocabulary: int, rows: int, length: int, masked: bool
) -> dict[str, Tensor]:
    """Return a batch of random tokens with uneven labels: about a third of the labels are ignored, and the second row
    ends with three padding tokens. With ``masked``, all labels are ignored.
    """
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.35, -100)
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[1, -3:] = 0
        labels[1, -3:] = -100
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels.fill_(-100) if masked else labels,
    }


@dataclass
class Case:
    """Describe one comparison of a layout with one process: the model's config, the data, and options of training."""

    config: PreTrainedConfig  # a tiny config of the stock model
    steps: int = 2  # optimizer steps
    accumulation: int = 2  # microbatches per step of each distinct batch
    max_norm: float | None = 0.5  # gradients are clipped to this norm; ``None``: not clipped
    # Learning rate of plain SGD; an optimizer that normalizes gradients could hide errors in gradients.
    learning_rate: float = 0.5
    frozen: Sequence[str] = ()  # parameters with one of these strings in their names do not train
    checkpointing: bool = False  # whether to recompute activations
    lengths: Sequence[int] = (13, 8)  # sequence lengths that microbatches take in turn
    rows: int = 2
    # How the layout's model is made: ``from_pretrained`` or ``parallelize``.
    build: str = "from_pretrained"
    # Arguments of ``from_pretrained`` for both models.
    hf_kwargs: dict[str, Any] = field(default_factory=dict)
    auto_class: Any = AutoModelForCausalLM  # the model's Auto class or stock class
    peft: Any = None  # a PEFT config: the reference is then stock PEFT, with random adapters
    # how the layout's adapters are made: by ``from_pretrained``, or by a later ``get_peft_model``
    peft_build: str = "from_pretrained"
    memory: MemoryConfig | None = None  # recomputation and offloading in the layout
    # options of the layout that the reference lacks, such as ``mixed_precision``
    asked: dict[str, Any] = field(default_factory=dict)
    unlike: tuple[
        str, ...
    ] = ()  # tensors whose names end like this are not compared: counters that differ between data ranks

    def batches(self, batch_world: int) -> list[list[list[Batch]]]:
        """Return the batches of all steps as nested lists, by step, distinct batch and microbatch; microbatches have
        uneven numbers of labels (:func:`ragged_batch`).
        """
        generator = torch.Generator().manual_seed(11)
        vocabulary = vocabulary_of(self.config)

        def batch(step: int, rank: int, i: int) -> Batch:
            # one microbatch has no labels; in the second step, no microbatch of the last rank has labels
            masked = (step == 0 and rank == 0 and i == 1) or (
                step == 1 and rank == batch_world - 1 > 0
            )
            return ragged_batch(
                generator,
                vocabulary,
                self.rows,
                self.lengths[(rank + i) % len(self.lengths)],
                masked,
            )

        return [
            [
                [batch(step, rank, i) for i in range(self.accumulation)]
                for rank in range(batch_world)
            ]
            for step in range(self.steps)
        ]

    def reference_step(self, model: Any, step: list[list[Batch]]) -> list[Tensor]:
        """Run forward and backward passes of the stock model on all microbatches of a step, whose entries are the
        distinct batches. Return the step's loss once per distinct batch.
        """
        microbatches = [microbatch for rank in step for microbatch in rank]
        counts = [self.count(microbatch["labels"]) for microbatch in microbatches]
        loss = torch.zeros((), dtype=torch.float64)
        for microbatch, count in zip(microbatches, counts, strict=True):
            # Also run microbatches without labels, because a model's own counters count them.
            with torch.set_grad_enabled(count > 0):
                mean = model(**microbatch).loss
            if count:
                part = mean * count / sum(counts)
                part.backward()
                loss += part.detach()
        return [loss] * len(step)

    def count(self, labels: Tensor) -> int:
        """Return the weight of a microbatch in the mean loss of a step: its number of labels that are predicted."""
        return int((labels[:, 1:] != -100).sum())

    def layout_step(self, model: Any, microbatches: list[Batch]) -> Tensor:
        """Run a training step of the layout on this rank's microbatches, without the optimizer, and return the loss."""
        return hfscale.train_step(model, microbatches)


@dataclass
class Parity:
    """Hold the largest differences between a layout and one process, each relative to the largest entry of the tensor
    in one process.
    """

    loss: float
    gradient: float
    worst_gradient: str
    norm: float
    weight: float
    worst_weight: str
    saved: float
    replicas: float = 0.0  # difference between replicas after the last step: must be 0
    worst_replica: str = ""

    def worst(self) -> float:
        """Return the largest of all relative differences; infinity if replicas of a parameter differ between ranks."""
        apart = float("inf") if self.replicas > 0 else 0.0
        return max(self.loss, self.gradient, self.norm, self.weight, self.saved, apart)


def assert_layout_equal(
    case: Case, layout: ParallelConfig, pool: RankPool | None, tolerance: float = 1e-10
) -> Parity:
    """Compare a layout with one process of the stock model (:func:`measure_parity`); raise ``AssertionError`` if a
    relative difference exceeds ``tolerance``.
    """
    parity = measure_parity(case, layout, pool)
    assert parity.worst() <= tolerance, f"{layout.describe()} differs from one process: {parity}"
    return parity


def measure_parity(case: Case, layout: ParallelConfig, pool: RankPool | None) -> Parity:
    """Train the stock model in this process, and ``layout`` on the ranks of ``pool`` (``None``: in this process);
    return the largest differences.
    """
    with tempfile.TemporaryDirectory(prefix="hfscale-parity-") as name:
        directory = Path(name)
        run = pool.run if pool is not None else lambda function, *args: [function(*args)]
        alone = pool.alone if pool is not None else lambda function, *args: function(*args)
        alone(_reference, case, layout.batch_world, directory)
        of_ranks = run(run_rank, _portable(case), layout, str(directory))
        saved = stored(directory / "saved")
        final = stored(directory / "end")
        assert saved.keys() == final.keys(), (
            f"stored names differ: {sorted(saved.keys() ^ final.keys())}"
        )
        compared = [key for key in saved if not (case.unlike and key.endswith(case.unlike))]
        differences = {key: difference(saved[key], final[key]) for key in compared}
        apart, worst_replica = _replicas_apart(directory)
        if case.peft is None:
            case.auto_class.from_pretrained(directory / "saved", **case.hf_kwargs)
    worst = {
        name: max(getattr(parity, name) for parity in of_ranks)
        for name in ("loss", "gradient", "norm", "weight")
    }
    return Parity(
        **worst,
        worst_gradient=max(of_ranks, key=lambda parity: parity.gradient).worst_gradient,
        worst_weight=max(of_ranks, key=lambda parity: parity.weight).worst_weight,
        saved=max(differences.values()),
        replicas=apart,
        worst_replica=worst_replica,
    )


def _replicas_apart(directory: Path) -> tuple[float, str]:
    """Return the largest difference between ranks that hold the same entry of a parameter (0 if replicas are equal),
    and the name of the parameter. ``directory`` has a file with the shards of each rank.
    """
    first: dict[str, Tensor] = {}
    worst = 0.0
    name = ""
    for file in sorted(directory.glob("rank*.pt")):
        for key, (shape, entries, values) in torch.load(file).items():
            known = first.setdefault(
                key, torch.full((prod(shape),), float("nan"), dtype=values.dtype)
            )
            before = known[entries]
            apart = float((before - values).abs().nan_to_num(0.0).max()) if len(entries) else 0.0
            if apart > worst:
                worst = apart
                name = key
            known[entries] = values
    return worst, name


def _portable(case: Case) -> Case:
    """Return the case with a placeholder config if its config class was loaded from a checkpoint's own code, since
    other processes could not import the class when they unpickle the case.
    """
    if type(case.config).__module__.startswith("transformers."):
        return case
    plain: Any = PreTrainedConfig()
    plain.vocab_size = case.config.get_text_config().vocab_size
    return replace(case, config=plain)


def in_float64(model: Any) -> Any:
    """Convert all parameters to float64, also those that transformers keeps in float32."""
    for parameter in model.parameters():
        if parameter.dtype != torch.float64:
            parameter.data = parameter.data.double()
    return model


def _prepare(model: Any, case: Case) -> Any:
    for name, parameter in in_float64(model).named_parameters():
        if any(part in name for part in case.frozen):
            parameter.requires_grad_(False)
    use_eager_experts(model)
    model.train()
    if case.checkpointing:
        # Recomputation runs outside the context of the forward pass, and needs its own.
        enable_checkpointing(model, context_fn=lambda: (nullcontext(), keep_float64()))
    return model


def _reference(case: Case, batch_world: int, directory: Path) -> None:
    """Train the stock model in this process, and save to ``directory`` its initial and final weights and the results of
    every step, to compare layouts with.
    """
    torch.manual_seed(5)
    with make_float64():
        model = host_from_config(
            case.auto_class, case.config, dtype=torch.float64, **case.hf_kwargs
        )
    # Norms start as ones and biases as zeros, which would hide errors in norms and biases.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory / "start")
    # Load the model like the layout does, since loading changes some weights (a dtype, the padding token's row).
    with make_float64():
        model = case.auto_class.from_pretrained(
            directory / "start", dtype=torch.float64, **case.hf_kwargs
        )
    if case.peft is not None:
        model = _with_random_adapters(model, case, directory)
    _prepare(model, case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=case.learning_rate)
    results = []
    with keep_float64():
        for step in case.batches(batch_world):
            losses = case.reference_step(model, step)
            gradients = {
                plain_name(name): p.grad.clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
            norm = torch.nn.utils.clip_grad_norm_(
                trained, case.max_norm if case.max_norm is not None else 1e30
            )
            optimizer.step()
            optimizer.zero_grad()
            weights = {
                plain_name(name): value.clone() for name, value in model.state_dict().items()
            }
            results.append(
                {"losses": losses, "gradients": gradients, "norm": norm, "weights": weights}
            )
    model.save_pretrained(directory / "end")
    torch.save(results, directory / "reference.pt")


def _with_random_adapters(model: Any, case: Case, directory: Path) -> Any:
    """Wrap ``model`` in stock PEFT with randomly initialized adapters, and save the adapters. New adapters are
    initialized to have no effect, so they would hide errors.
    """
    import peft

    with warnings.catch_warnings():
        # PEFT 0.21 reads an attribute that transformers 5.23 deprecates.
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        model = peft.get_peft_model(model, copy.deepcopy(case.peft))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory / "adapter")
    return model


def plain_name(name: str) -> str:
    """Return the name that a parameter of a PEFT model has in hfscale's plan: the stock name for parameters of the base
    model.
    """
    name = name.removeprefix("base_model.model.")
    adapted = any(part in name for part in NEW_WEIGHTS)
    return name if adapted else stock_name(name)


def stored(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint's safetensors files."""
    tensors: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


def _built(case: Case, layout: ParallelConfig, directory: str) -> Any:
    """Build this rank's shard of the model from the saved initial weights."""
    start = Path(directory) / "start"
    adapter = str(Path(directory) / "adapter") if case.peft is not None else None
    later = adapter is not None and (
        case.build == "parallelize" or case.peft_build == "get_peft_model"
    )
    if case.build == "parallelize":
        with make_float64():
            whole = case.auto_class.from_pretrained(start, dtype=torch.float64, **case.hf_kwargs)
        # Convert to float64 first, because parameters of FSDP2 cannot be converted this way.
        model = hfscale.parallelize(in_float64(whole), layout, memory=case.memory, **case.asked)
    else:
        with make_float64():
            model = hfscale.from_pretrained(
                str(start), parallel=layout, auto_class=case.auto_class, dtype=torch.float64,
                peft_config=None if later else adapter, memory=case.memory, **case.asked, **case.hf_kwargs
            )  # fmt: skip
    if later:
        model = hfscale.get_peft_model(model, adapter)
    _prepare(model, case)
    return model


def run_rank(case: Case, layout: ParallelConfig, directory: str) -> Parity:
    """Train the model on this rank in ``layout``, and return the largest differences from the results of one process,
    which :func:`measure_parity` has saved in ``directory``.
    """
    reference = torch.load(Path(directory) / "reference.pt", weights_only=False)
    model = _built(case, layout, directory)
    runtime = runtime_of(model)
    ranks = runtime.mesh.ranks
    batch_rank = hfscale.batch_rank(model)
    # Give the optimizer frozen parameters too, which it skips, since a pipeline stage may train nothing.
    optimizer = torch.optim.SGD(model.parameters(), lr=case.learning_rate)
    parity = Parity(0.0, 0.0, "", 0.0, 0.0, "", 0.0)
    with keep_float64():
        for step, expected in zip(case.batches(layout.batch_world), reference, strict=True):
            loss = case.layout_step(model, step[batch_rank])
            parity.loss = max(parity.loss, difference(loss, expected["losses"][batch_rank]))
            largest = max(
                float(gradient.abs().max()) for gradient in expected["gradients"].values()
            )
            for planned, parameter in runtime.parameters():
                wanted = expected["gradients"].get(planned.name)
                gradient = parameter.grad
                assert (gradient is None) == (wanted is None), (
                    f"{planned.name}: {gradient=} where {wanted=}"
                )
                if gradient is not None:
                    share = planned.take(wanted, ranks)
                    error = gradient_difference(
                        local_tensor(gradient), share, wanted, largest, float(loss)
                    )
                    if error >= parity.gradient:
                        parity.gradient = error
                        parity.worst_gradient = planned.name
            norm = hfscale.clip_grad_norm_(
                model, case.max_norm if case.max_norm is not None else 1e30
            )
            parity.norm = max(parity.norm, difference(norm, expected["norm"]))
            optimizer.step()
            optimizer.zero_grad()
            for planned, parameter in runtime.parameters():
                wanted = expected["weights"][planned.name]
                error = difference(
                    local_tensor(parameter.detach()), planned.take(wanted, ranks), wanted
                )
                if error >= parity.weight:
                    parity.weight = error
                    parity.worst_weight = planned.name
    held = {}
    for planned, parameter in runtime.parameters():
        entries = planned.take(
            torch.arange(prod(planned.shape)).view(planned.shape),
            ranks,
        )
        held[planned.name] = (
            planned.shape,
            entries.flatten(),
            local_tensor(parameter.detach()).flatten().cpu(),
        )
    torch.save(
        held,
        Path(directory) / f"rank{torch.distributed.get_rank() if layout.total_size > 1 else 0}.pt",
    )
    hfscale.save_pretrained(model, Path(directory) / "saved", max_shard_size="40KB")
    if case.peft is None:
        hfscale.verify_experts(model, Path(directory) / "saved")
    return parity

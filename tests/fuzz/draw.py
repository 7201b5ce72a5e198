"""One random draw: everything that a run in a layout is made of, as plain data."""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from hfscale.config.parallel import ParallelConfig

TORCH = ("SGD", "SGD", "SGD", "AdamW", "Adagrad")
"""Optimizers of ``torch.optim``, as often as they are drawn; any other is one of :func:`hfscale.create_optimizer`."""


TOKENS = ("PromptTuningConfig", "PromptEncoderConfig")
PROMPTS = (*TOKENS, "PrefixTuningConfig")
"""PEFT's configs of tokens before a row, and of keys and values before those of every layer."""


@dataclass(frozen=True)
class Draw:
    """What to run. Every default is the ordinary choice, towards which a failing draw is made smaller.

    Attributes:
        family: a model type of a causal language model.
        config: changes to the family's tiny clone.
        layers: of the clone.
        layout: fields of :class:`hfscale.ParallelConfig`.
        dtype: ``float64``, ``float32``, ``bfloat16``: of the weights.
        mixed_precision: as in :func:`hfscale.from_pretrained`.
        float8: fields of a :class:`hfscale.Float8Config`.
        loss_scaling: fields of Accelerate's ``GradScalerKwargs``.
        entry: ``from_pretrained``, ``from_config`` or ``parallelize``.
        loop: ``train_step``, or ``plain``: ``model(**batch).loss.backward()``.
        accelerate: whether the loop is that of Accelerate's documentation, over :class:`hfscale.Accelerator`.
        steps: optimizer steps.
        calls: of the loop per optimizer step, whose gradients add up.
        microbatches: batches given in one call: a list of so many; 0 gives one batch as a dict.
        rows: samples of a batch.
        ragged: whether batches of a list have fewer rows here and there.
        lengths: tokens of a sample, used in turn by microbatches.
        padding: ``none`` (no mask), ``right``, ``left``.
        positions: whether ``position_ids`` are given.
        packed: whether they start anew within a row.
        masked: what has no label: ``some`` tokens, ``rows``, a whole ``microbatch``, a whole ``rank``; ``none``.
        empty_rank: whether the last batch rank has no rows at all.
        label_smoothing: as in :func:`hfscale.train_step`.
        max_norm: of clipping; 0 leaves gradients alone.
        norm_type: of clipping.
        optimizer: a class of ``torch.optim``, or a name for :func:`hfscale.create_optimizer`.
        learning_rate: of the optimizer.
        stochastic_rounding: whether it rounds bfloat16 weights by chance.
        peft: fields of a ``LoraConfig``; with ``prompt``, one of :data:`PROMPTS`, of that prompt's config.
        peft_later: whether adapters are added to the live model.
        peft_fresh: whether they start anew, instead of from a saved adapter.
        quantize: ``nf4``, ``fp4`` or ``int8``.
        frozen: parameters whose name contains one of these do not train.
        checkpointing: recompute activations.
        routing: fields of :class:`hfscale.RoutingConfig`.
        attention: ``attn_implementation``.
        memory: fields of a :class:`hfscale.MemoryConfig`.
        user_loss: whether the loss is a function of the user's, of whole logits.
        resume: whether state is saved after the first step and loaded into a new model.
        resume_layout: fields of the layout of that model, of as many ranks with the same batches; ``None``: the same.
        between: of ``eval``, ``generate``, ``save``, ``deepcopy``, ``scores``, ``outputs``, after the first step.
        seed: of weights and data.
    """

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    layout: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    mixed_precision: str = "no"
    float8: dict[str, Any] | None = None
    loss_scaling: dict[str, Any] | None = None
    entry: str = "from_pretrained"
    loop: str = "train_step"
    accelerate: bool = False
    steps: int = 2
    calls: int = 1
    microbatches: int = 1
    rows: int = 2
    ragged: bool = False
    lengths: tuple[int, ...] = (9,)
    padding: str = "none"
    positions: bool = False
    packed: bool = False
    masked: str = "none"
    empty_rank: bool = False
    label_smoothing: float = 0.0
    max_norm: float = 1.0
    norm_type: float = 2.0
    optimizer: str = "SGD"
    learning_rate: float = 0.1
    stochastic_rounding: bool = False
    peft: dict[str, Any] | None = None
    peft_later: bool = False
    peft_fresh: bool = False
    quantize: str | None = None
    frozen: tuple[str, ...] = ()
    checkpointing: bool = False
    routing: dict[str, Any] | None = None
    attention: str | None = None
    memory: dict[str, Any] | None = None
    user_loss: bool = False
    resume: bool = False
    resume_layout: dict[str, Any] | None = None
    between: tuple[str, ...] = ()
    seed: int = 0

    def parallel(self) -> ParallelConfig:
        """The layout; ``dp_shard_size`` may have grown by what experts need."""
        return ParallelConfig(**self.layout)

    def write(self) -> str:
        """One line of JSON with what differs from the defaults."""
        usual = asdict(Draw(self.family))
        return json.dumps({k: v for k, v in asdict(self).items() if k == "family" or v != usual[k]})

    def change(self, **changes: Any) -> "Draw":
        """A draw that differs in these fields."""
        return replace(self, **changes)

    @property
    def drops(self) -> bool:
        """Whether there is dropout, so that only ranks can be compared with each other."""
        return any(is_dropout(name) and value for name, value in self.config.items())

    @property
    def levers(self) -> tuple[str, ...]:
        """The levers of memory and precision it has, by name; each field of ``memory`` is one."""
        asked = {
            "checkpointing": self.checkpointing,
            "bf16": self.mixed_precision == "bf16",
            "fp16": self.mixed_precision == "fp16",
            "fp8": self.mixed_precision == "fp8",
            "gradient_compression": self.compression != "no",
            "peft": self.peft,
            "quantize": self.quantize,
            "optimizer": self.optimizer not in TORCH,
            "stochastic_rounding": self.stochastic_rounding,
        }
        of_memory = (name for name in self.memory or {} if name != "recompute_keep")
        return (*(name for name, has in asked.items() if has), *of_memory)

    @property
    def compression(self) -> str:
        """What replicas send each other of gradients."""
        return str(self.layout.get("gradient_compression", "no"))

    @property
    def distinct(self) -> int:
        """Distinct batches that the layout names; experts may add some."""
        return int(self.layout.get("dp_shard_size", 1) * self.layout.get("dp_replicate_size", 1))

    @property
    def delayed(self) -> bool:
        """Whether updates are delayed, so that steps are not those of one process."""
        return (
            str(self.layout.get("pipeline_schedule")).startswith("pipedream")
            and self.layout.get("pp_size", 1) > 1
        )


def is_dropout(name: str) -> bool:
    """Whether a config's field of that name is a share of what is dropped."""
    return any(word in name for word in ("dropout", "pdrop", "drop_rate", "layerdrop"))


def read(text: str) -> Draw:
    """The draw that :meth:`Draw.write` wrote."""
    given: dict[str, Any] = json.loads(text)
    kinds = {f.name: f.type for f in fields(Draw)}
    values: dict[str, Any] = {
        k: tuple(v) if str(kinds[k]).startswith("tuple") else v for k, v in given.items()
    }
    return Draw(**values)

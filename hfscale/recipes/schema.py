"""Define the schema of a recipe: data classes of all its settings, with their default values."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from omegaconf import MISSING

from ..config.environment import RUN, memory_of
from ..config.sections import OptionSections
from ..errors import HFScaleError

METHODS = ("lora", "dora", "ia3", "loha")  # adapter methods

FORMATS = {
    "text": ("text_column",),
    "chat": ("messages_column",),
    "completion": ("prompt_column", "completion_column"),
    "pairs": ("chosen_column", "rejected_column"),
    "classes": ("text_column", "label_column"),
    "prompts": ("prompt_column",),
}
"""Data formats, each with the recipe keys that name its columns."""

# Dtypes of weights; the first two are those that training supports.
DTYPES = (
    "float32",
    "bfloat16",
    "float16",
)

COUNT: dict[str, Any] = {"least": 1}
POSITIVE: dict[str, Any] = {"above": 0.0}
"""Metadata of fields whose values must be greater than 0; :func:`.checks.check_values` checks it."""


class RecipeError(HFScaleError):
    """Raised if a recipe cannot be run as written; the message says what the recipe asks for, what was found, and what
    to change.
    """


@dataclass
class DataRecipe:
    """Describe the data to train on: its source, format and columns, and how it is divided into sequences."""

    # ``stdlib`` (the source of the running Python's standard library), ``stdlib-docs`` (questions about its functions,
    # answered by their docstrings: chat, completion or pairs), a text file (documents are separated by blank lines), a
    # JSONL file, a directory of such files (each text file is one document), or the id of a data set on the Hub
    source: str = "stdlib"
    # ``text``, ``chat`` (conversations, rendered by the tokenizer's chat template), ``completion`` (prompts with
    # completions), ``pairs`` (a preferred and a rejected answer: trains a reward model), ``classes`` (texts with one
    # class each: trains a classifier) or ``prompts`` (texts, or conversations up to the answer, for a model that learns
    # from its own completions). All formats except ``text`` are read from records only
    format: str = field(default="text", metadata={"choices": tuple(FORMATS)})
    text_column: str = "text"  # the column of the text, in JSONL records and Hub data sets
    # The column of a conversation: a list of records with role and content.
    messages_column: str = "messages"
    prompt_column: str = "prompt"  # the column of the prompt
    completion_column: str = "completion"  # the column of the completion
    # The column of the preferred answer of a pair, a text or a conversation.
    chosen_column: str = "chosen"
    # The column of the rejected answer; a ``prompt_column``, if there is one, precedes both answers.
    rejected_column: str = "rejected"
    # The column of the class that ``text_column`` belongs to: the class's name or its number.
    label_column: str = "label"
    # The names of the classes, in the order of their numbers.
    classes: list[str] = field(default_factory=list)
    # the column of a conversation's pictures, in order: paths relative to the data source, or pictures as Hub data sets
    # store them. The base must be a vision-language model, whose processor encodes text and pictures
    images_column: Optional[str] = None  # noqa: UP045
    # this many validation examples are answered (or their texts continued) before and after training, for the model
    # card; impossible with pipeline stages
    samples: int = 0
    # a file with a Jinja template, or ``chatml`` or ``plain``, to replace the tokenizer's own template
    chat_template: Optional[str] = None  # noqa: UP045  # OmegaConf reads this spelling in all its versions
    # ``completions``: only the assistant's turns, or the completion, have labels; ``all``: everything has
    train_on: str = field(default="completions", metadata={"choices": ("completions", "all")})
    # true: rows hold several whole examples, which cannot attend to each other; false: one example per row, with
    # padding. By default chat and completion are packed, and text is one stream, with an end-of-text token after each
    # document, that is split into rows. Documents of text that are packed or padded are split into examples that fit
    packing: Optional[bool] = None  # noqa: UP045
    # the configuration of a Hub data set that has several
    subset: Optional[str] = None  # noqa: UP045
    split: str = "train"  # the split of a Hub data set to read
    # patterns such as ``asyncio/*``: only documents whose name, a path relative to the source, matches a pattern are
    # used; without patterns, all documents
    include: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)  # patterns of documents that are not used
    validation_fraction: float = 0.05  # fraction of documents that are kept for validation
    sequence_length: int = field(default=256, metadata=COUNT)  # tokens in one training sequence
    # The number of sequences that are evaluated is at most this.
    validation_sequences: int = field(default=64, metadata=COUNT)

    @property
    def is_stream(self) -> bool:
        """Return whether rows are intervals of all documents concatenated (separated by end-of-text tokens), so that a
        row may begin or end inside a document.
        """
        return self.format == "text" and self.packing is None

    @property
    def is_packed(self) -> bool:
        """Return whether rows are packed: a row holds several whole examples, and positions restart at each example."""
        if self.packing is not None or self.images_column is not None:
            return bool(self.packing)
        return self.format in ("chat", "completion")

    @property
    def is_whole(self) -> bool:
        """Return whether a row of data becomes several texts or pictures in a batch, which must not be split between
        microbatches.
        """
        return self.format == "pairs" or self.images_column is not None


@dataclass
class TrainingRecipe:
    """Describe how to train: steps, batch sizes, learning rate, precision, optimizer, evaluation and saved states."""

    steps: int = field(default=100, metadata=COUNT)  # optimizer steps
    # Sequences in one optimizer step, over all ranks.
    batch_size: int = field(default=16, metadata=COUNT)
    # Assign a step's sequences to ranks so that all ranks take equally long, by the planner's estimate of seconds.
    balanced_batches: bool = False
    # sequences in one forward pass of one rank; by default all sequences of the rank in a step. A smaller number
    # accumulates gradients
    microbatch_size: Optional[int] = field(default=None, metadata=COUNT)  # noqa: UP045
    learning_rate: float = 1e-3  # the peak of a cosine schedule
    warmup_ratio: float = 0.1  # fraction of the steps in which the rate rises to its peak
    weight_decay: float = 0.1  # as in HF Trainer, without biases and norms
    max_grad_norm: float = 1.0  # gradients are scaled down to at most this global norm
    mixed_precision: str = "no"  # ``bf16``, ...: as in ``from_pretrained``
    # Use Liger's kernels for norms, gated activations and rotary embeddings, on a GPU.
    use_liger_kernel: bool = False
    # weight of the loss of multi-token-prediction layers, for example 0.1; by default these layers do not train
    mtp_loss_weight: Optional[float] = field(default=None, metadata=POSITIVE)  # noqa: UP045
    compile: bool = False  # compile each layer with torch's compiler when it first runs
    # dtype of the weights: ``float32``, or ``bfloat16`` for a base that stays frozen under an adapter. Adapter weights
    # are in float32 either way
    dtype: str = field(default="float32", metadata={"choices": DTYPES[:2]})
    # a name of HF Trainer's ``optim``, such as ``adamw_8bit``, ``adafactor`` or ``lion_8bit``, or ``muon``
    optimizer: str = "adamw_torch_fused"
    # Round ``bfloat16`` weights stochastically, so that small updates are kept on average.
    stochastic_rounding: bool = False
    # Recompute activations in the backward pass instead of keeping them.
    gradient_checkpointing: bool = False
    log_every: int = field(default=10, metadata=COUNT)  # steps between lines of metrics
    # Steps between evaluations; the first and the last step are evaluated in addition.
    evaluate_every: int = field(default=50, metadata=COUNT)
    # steps between checkpoints of HF Trainer, in ``runs/<name>/state``; by default none. With it, a process that gets
    # SIGTERM or SIGUSR1 also saves after its current step, and ends with exit code 75
    save_every: Optional[int] = field(default=None, metadata=COUNT)  # noqa: UP045
    # steps between states in the memory of the machines, from which ``resume`` continues if they are newer than on disk
    memory_every: Optional[int] = field(default=None, metadata=COUNT)  # noqa: UP045
    # How often failed processes are forked again before the launcher starts the job again.
    restarts: int = 0
    # peak TFLOP/s of one device, for ``mfu`` in the log; by default the 16-bit peak of an A100, H100, H200 or B200.
    # Other devices have no ``mfu``
    peak_tflops: Optional[float] = field(default=None, metadata=POSITIVE)  # noqa: UP045
    # continue from the saved state: bit by bit in the same layout, up to rounding in another layout; from the start if
    # nothing has been saved yet
    resume: bool = False
    # seconds after which a process that waits for another one is reported and ended, with exit code 75; by default only
    # torch's time limits apply
    watchdog: Optional[float] = field(default=None, metadata=POSITIVE)  # noqa: UP045


@dataclass
class ModelRecipe:
    """Describe the model to pretrain by fields of its transformers config."""

    family: str = "llama"  # ``model_type`` of a decoder in transformers

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    tie_word_embeddings: bool = False
    # Further fields of the config, such as ``num_experts`` of ``qwen3_moe``.
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Recipe(OptionSections):
    """Hold the settings that recipes for pretraining and for fine-tuning have in common. The base class holds the
    sections that are options of :func:`hfscale.from_pretrained`, such as ``memory``.
    """

    name: str = MISSING  # results go to ``runs/<name>``
    # Whether to replace the results of an earlier run of this name, which is refused otherwise.
    replace: bool = False
    # where metrics go in addition to ``metrics.jsonl``, for example ``[tensorboard, csv]``: names of HF Trainer's
    # ``report_to``, or ``csv`` for ``metrics.csv``
    tracking: list[str] = field(default_factory=list)
    # ``3 steps``: torch's profiler records three steps after the first two, in ``profile/rank-N.json``.
    profile: str = ""
    seed: int = 0  # seed of the initial weights and of the order of sequences
    # the layout: fields of ``hfscale.ParallelConfig``. With pipeline stages, ``num_microbatches`` splits the sequences
    # that a rank runs at once (``training.microbatch_size``, or all sequences of a step)
    parallel: dict[str, Any] = field(default_factory=dict)
    # further layouts, of which the first that fits is used if a launcher starts the run again with fewer processes
    # (``torchrun --nnodes 1:2 --max_restarts 3 ...``)
    fallbacks: list[dict[str, Any]] = field(default_factory=list)
    # Try a save and a load after the first step, so that a full disk is noticed early.
    save_check: bool = False
    data: DataRecipe = field(default_factory=DataRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)

    @property
    def directory(self) -> Path:
        """The directory to which this run writes its results: ``runs/NAME``."""
        return Path("runs") / self.name

    @property
    def metrics(self) -> Path:
        """The path of the run's file of metrics."""
        return self.directory / "metrics.jsonl"

    @property
    def expert_loads(self) -> Path:
        """The path of the file that records how many tokens each expert of a mixture-of-experts model got."""
        return self.directory / "experts.jsonl"

    @property
    def saved_state(self) -> Path | None:
        """The directory of saved states, if the run resumes from one; ``None`` if it starts from the beginning."""
        return self.directory / "state" if self.training.resume and self.has_state else None

    @property
    def has_state(self) -> bool:
        """Return whether this machine has a saved state of a run with this name, on disk or in memory."""
        state = self.directory / "state"
        begun = (state / RUN).exists() and (self.directory / "recipe.yaml").exists()
        if self.training.memory_every is not None and begun:
            kept = memory_of(state) / (state / RUN).read_text()
            return any(kept.glob("step-*")) or any(state.glob("checkpoint-*"))
        return any(state.glob("checkpoint-*"))


@dataclass
class PretrainRecipe(Recipe):
    """Describe pretraining from random weights, with a tokenizer trained on the data."""

    model: ModelRecipe = field(default_factory=ModelRecipe)


@dataclass
class TeacherRecipe:
    """Describe a distillation: its teacher model, whose predicted token distributions the student learns instead of
    labels. See :class:`hfscale.Teacher`.
    """

    base: str = ""  # the teacher's checkpoint: a directory, or a model id on the Hub
    stored: str = ""  # a directory that ``write`` has filled, to read instead of ``base``
    # store the teacher's ``top_k`` most probable tokens at every position of the data in this directory, and train
    # nothing; a run that was interrupted continues
    write: str = ""
    top_k: int = field(default=64, metadata=COUNT)
    beta: float = 0.5  # 0: forward KL divergence, 1: reverse, between: generalized Jensen-Shannon
    # Temperature of student and teacher logits; a stored teacher keeps its own.
    temperature: float = field(default=1.0, metadata=POSITIVE)
    # the teacher's layout, on the same processes; by default the student's layout
    parallel: dict[str, Any] = field(default_factory=dict)
    # dtype of the teacher's weights
    dtype: str = field(default="float32", metadata={"choices": DTYPES})
    quantization: dict[str, Any] = field(default_factory=dict)  # like ``quantization`` of a base


@dataclass
class FinetuneRecipe(Recipe):
    """Describe fine-tuning of all parameters, or of an adapter over a frozen base."""

    # The checkpoint to start from: a directory, or the id of a model on the Hub.
    base: str = MISSING
    # the adapter to train instead of all parameters: ``method`` (``lora``, ``dora``, ``ia3`` or ``loha``) and fields of
    # the method's PEFT config, such as ``r``, ``lora_alpha``, ``target_modules: all-linear``, ``target_parameters``; or
    # only ``path``, a saved adapter to continue with. Empty: all parameters
    adapter: dict[str, Any] = field(default_factory=dict)
    # quantization of the base under an adapter: fields of ``transformers.BitsAndBytesConfig``, such as
    # ``load_in_4bit``, ``bnb_4bit_quant_type``; or only ``as_stored: true``, which keeps the bytes of weights that the
    # base stores quantized. Empty: no quantization
    quantization: dict[str, Any] = field(default_factory=dict)
    # whether to merge the adapter into the base after training and to write the result in addition, as a plain
    # checkpoint: false or true; a quantized base is dequantized, so name the dtype to merge into, such as ``bfloat16``
    merge: Any = False
    # A teacher model to learn from (distillation).
    teacher: TeacherRecipe = field(default_factory=TeacherRecipe)
    # functions that score completions (GRPO): ``exact_match`` and ``f1`` compare with the data's answer; other
    # functions are ``module:function``, which TRL calls with ``completions`` and the columns of the data
    rewards: list[str] = field(default_factory=list)
    # fields of TRL's GRPOConfig, such as ``num_generations``, ``use_vllm`` and ``vllm_mode``; with a teacher, fields of
    # DistillationConfig: the teacher then teaches on texts that the model generates
    trl: dict[str, Any] = field(default_factory=dict)

    @property
    def generates(self) -> bool:
        """Return whether the model trains on texts that it generates (GRPO, or distillation on the student's texts)."""
        return bool(self.rewards or self.trl)

    @property
    def distils(self) -> bool:
        """Return whether the model learns from a teacher model (distillation)."""
        return bool(self.teacher.base or self.teacher.stored)

"""Define the schema of a recipe: all of its settings and their defaults."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from omegaconf import MISSING

from ..config.environment import RUN, memory_of
from ..config.sections import OptionSections
from ..errors import HFScaleError

METHODS = ("lora", "dora", "ia3", "loha")  # kinds of adapters

FORMATS = {
    "text": ("text_column",),
    "chat": ("messages_column",),
    "completion": ("prompt_column", "completion_column"),
    "pairs": ("chosen_column", "rejected_column"),
    "classes": ("text_column", "label_column"),
    "prompts": ("prompt_column",),
}
"""Formats of data, with the keys that name their columns."""

# Types of weights; those to train on or over come first.
DTYPES = (
    "float32",
    "bfloat16",
    "float16",
)

COUNT: dict[str, Any] = {"least": 1}
POSITIVE: dict[str, Any] = {"above": 0.0}
"""What :func:`.checks.check_values` asks of a value, beside ``choices``."""


class RecipeError(HFScaleError):
    """Raised if a recipe asks for something that cannot be done; says what was asked, what was found and what to do."""


@dataclass
class DataRecipe:
    """Describe the data to train on."""

    # ``stdlib`` (the source of the running Python's standard library), ``stdlib-docs`` (questions about its functions,
    # answered by their docstrings: chat, completion or pairs), a text file (documents are separated by blank lines), a
    # JSONL file, a directory of such files (each text file is one document), or the id of a data set on the Hub
    source: str = "stdlib"
    # ``text``, ``chat`` (conversations, rendered through the tokenizer's chat template), ``completion`` (prompts with
    # completions), ``pairs`` (of answers, of which one is preferred: trains a reward model), ``classes`` (texts with a
    # class each: trains a classifier) or ``prompts`` (for a model that learns from what it generates: texts, or
    # conversations up to the answer). All but ``text`` read records only
    format: str = field(default="text", metadata={"choices": tuple(FORMATS)})
    text_column: str = "text"  # the field of JSONL records and Hub data sets that holds the text
    # The field that holds a conversation, a list of records with role and content.
    messages_column: str = "messages"
    prompt_column: str = "prompt"  # the field that holds the prompt
    completion_column: str = "completion"  # the field that holds the completion
    # The field of pairs that holds the preferred one, a text or a conversation.
    chosen_column: str = "chosen"
    # The field of the other; a ``prompt_column`` comes before both.
    rejected_column: str = "rejected"
    # The field that holds the class of ``text_column``: its name, or its number.
    label_column: str = "label"
    # The names of the classes, in the order of their numbers.
    classes: list[str] = field(default_factory=list)
    # the field of conversations that holds their pictures, in order: paths beside the records, or as data sets of the
    # Hub have them. The base is then a vision-language model, whose processor does the rest
    images_column: Optional[str] = None  # noqa: UP045
    # so many validation examples are answered, or their texts continued, before and after training, for the model card;
    # not through stages
    samples: int = 0
    # a file with a Jinja template, or ``chatml`` or ``plain``, instead of the tokenizer's own
    chat_template: Optional[str] = None  # noqa: UP045  # OmegaConf reads this spelling in all its versions
    # ``completions``: only what the assistant says, or the completion, has labels; ``all``: everything
    train_on: str = field(default="completions", metadata={"choices": ("completions", "all")})
    # whether rows hold several whole examples, which do not see each other; else every example has a row of its own,
    # with padding. By default chat and completion are packed, and text is one stream, an end-of-text token behind each
    # document, cut into rows; documents that are packed, or padded, are cut into examples
    packing: Optional[bool] = None  # noqa: UP045
    # the configuration of a Hub data set, where it has several
    subset: Optional[str] = None  # noqa: UP045
    split: str = "train"  # the split of a Hub data set to read
    # patterns such as ``asyncio/*``: only documents whose name, a path below the source, matches one are used; all of
    # them if there is no pattern
    include: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)  # patterns of documents that are not used
    validation_fraction: float = 0.05  # share of the documents kept out of training
    sequence_length: int = field(default=256, metadata=COUNT)  # tokens in one training sequence
    # At most this many sequences are evaluated.
    validation_sequences: int = field(default=64, metadata=COUNT)

    @property
    def is_stream(self) -> bool:
        """Return whether rows are cut from one stream of text."""
        return self.format == "text" and self.packing is None

    @property
    def is_packed(self) -> bool:
        """Return whether rows hold several examples, separated by their positions."""
        if self.packing is not None or self.images_column is not None:
            return bool(self.packing)
        return self.format in ("chat", "completion")

    @property
    def is_whole(self) -> bool:
        """Return whether rows of a microbatch must stay together: pairs, and texts with their pictures."""
        return self.format == "pairs" or self.images_column is not None


@dataclass
class TrainingRecipe:
    """Describe how to train."""

    steps: int = field(default=100, metadata=COUNT)  # optimizer steps
    # Sequences in one optimizer step, over all ranks.
    batch_size: int = field(default=16, metadata=COUNT)
    # Share a step's sequences so that ranks take equally long, by the planner's seconds.
    balanced_batches: bool = False
    # sequences in one forward pass of one rank; by default all that the rank gets in a step. A smaller number
    # accumulates gradients
    microbatch_size: Optional[int] = field(default=None, metadata=COUNT)  # noqa: UP045
    learning_rate: float = 1e-3  # the peak of a cosine schedule
    warmup_ratio: float = 0.1  # share of the steps over which the rate rises to its peak
    weight_decay: float = 0.1  # of what HF Trainer lets decay: all but biases and norms
    max_grad_norm: float = 1.0  # gradients are scaled down to at most this global norm
    mixed_precision: str = "no"  # of products over 32-bit weights, as for ``from_pretrained``
    # Norms, gated activations and rotary embeddings by Liger's kernels, on a GPU.
    use_liger_kernel: bool = False
    # weight of the loss of multi-token-prediction layers, as 0.1; by default they do not train
    mtp_loss_weight: Optional[float] = field(default=None, metadata=POSITIVE)  # noqa: UP045
    compile: bool = False  # compile each layer with torch's compiler when it first runs
    # of the weights: ``float32``, or ``bfloat16`` for a base that adapters leave as it is. Factors of adapters are in
    # 32 bits either way
    dtype: str = field(default="float32", metadata={"choices": DTYPES[:2]})
    # a name of HF Trainer's ``optim``, as ``adamw_8bit``, ``adafactor`` or ``lion_8bit``, or ``muon``
    optimizer: str = "adamw_torch_fused"
    # Of ``bfloat16`` weights, so that small updates are right in the mean.
    stochastic_rounding: bool = False
    # Recompute activations in the backward pass instead of keeping them.
    gradient_checkpointing: bool = False
    log_every: int = field(default=10, metadata=COUNT)  # steps between lines of metrics
    # Steps between evaluations, beside the first and the last.
    evaluate_every: int = field(default=50, metadata=COUNT)
    # steps between checkpoints of HF Trainer, to ``runs/<name>/state``; by default none. A process that is sent SIGTERM
    # or SIGUSR1 then saves behind its step as well, and ends with exit code 75
    save_every: Optional[int] = field(default=None, metadata=COUNT)  # noqa: UP045
    # steps between states in the memory of the machines, from which ``resume`` goes on where they are newer
    memory_every: Optional[int] = field(default=None, metadata=COUNT)  # noqa: UP045
    # How often processes that fail are forked again, before it is the launcher's turn.
    restarts: int = 0
    # of one device, for ``mfu`` in the log; by default that of an A100, H100, H200 or B200 in 16 bits; there is no
    # ``mfu`` on other devices
    peak_tflops: Optional[float] = field(default=None, metadata=POSITIVE)  # noqa: UP045
    # go on from there, bit by bit in the same layout, to rounding in another one; from the start where nothing has been
    # saved yet
    resume: bool = False
    # seconds after which a wait of one process for another is reported, and ends the processes that wait, with exit
    # code 75; by default torch's time limits alone
    watchdog: Optional[float] = field(default=None, metadata=POSITIVE)  # noqa: UP045


@dataclass
class ModelRecipe:
    """Describe the model that pretraining starts; names are those of its config."""

    family: str = "llama"  # ``model_type`` of a decoder of transformers

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    tie_word_embeddings: bool = False
    # Others, as ``num_experts`` of ``qwen3_moe``.
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Recipe(OptionSections):
    """Hold the settings that pretraining and fine-tuning share, other than the sections of :class:`OptionSections`."""

    name: str = MISSING  # results go to ``runs/<name>``
    # Whether to replace those of an earlier run of this name, which is refused otherwise.
    replace: bool = False
    # where numbers go besides ``metrics.jsonl``, as ``[tensorboard, csv]``: names of ``report_to`` of HF Trainer, or
    # ``csv``, which is ``metrics.csv``
    tracking: list[str] = field(default_factory=list)
    # Behind the first two, as ``3 steps``: torch's profiler writes ``profile/rank-N.json``.
    profile: str = ""
    seed: int = 0  # of the initial weights and of the order of the sequences
    # the layout, the fields of ``hfscale.ParallelConfig``; over stages, ``num_microbatches`` cuts what a rank runs at
    # once (``training.microbatch_size``, or all of its step)
    parallel: dict[str, Any] = field(default_factory=dict)
    # layouts to take instead, the first that fits, where a launcher starts the run again with fewer processes
    # (``torchrun --nnodes 1:2 --max_restarts 3 ...``)
    fallbacks: list[dict[str, Any]] = field(default_factory=list)
    # Save and load behind the first step, so that a disk without room is found out then.
    save_check: bool = False
    data: DataRecipe = field(default_factory=DataRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)

    @property
    def directory(self) -> Path:
        """The directory of this run's results."""
        return Path("runs") / self.name

    @property
    def metrics(self) -> Path:
        """The file of the run's numbers."""
        return self.directory / "metrics.jsonl"

    @property
    def expert_loads(self) -> Path:
        """The file of a mixture's expert loads."""
        return self.directory / "experts.jsonl"

    @property
    def saved_state(self) -> Path | None:
        """The state that the run resumes from; ``None`` for a new run."""
        return self.directory / "state" if self.training.resume and self.has_state else None

    @property
    def has_state(self) -> bool:
        """Return whether this machine finds checkpoints of a run of this name, on disk or in its memory."""
        state = self.directory / "state"
        begun = (state / RUN).exists() and (self.directory / "recipe.yaml").exists()
        if self.training.memory_every is not None and begun:
            kept = memory_of(state) / (state / RUN).read_text()
            return any(kept.glob("step-*")) or any(state.glob("checkpoint-*"))
        return any(state.glob("checkpoint-*"))


@dataclass
class PretrainRecipe(Recipe):
    """Describe pretraining: from random weights, with a tokenizer of its own."""

    model: ModelRecipe = field(default_factory=ModelRecipe)


@dataclass
class TeacherRecipe:
    """Describe a model whose distributions are learned instead of labels: see :class:`hfscale.Teacher`."""

    base: str = ""  # its checkpoint: a directory, or the id of a model on the Hub
    stored: str = ""  # a directory of its most probable tokens, by ``write``, which is read instead of ``base``
    # store its ``top_k`` most probable tokens of every position of the data in this directory, and train nothing; a run
    # that was cut short goes on
    write: str = ""
    top_k: int = field(default=64, metadata=COUNT)
    beta: float = 0.5  # 0: forward KL divergence, 1: reverse, between: generalized Jensen-Shannon
    # Divisor of all logits; a stored teacher has its own.
    temperature: float = field(default=1.0, metadata=POSITIVE)
    # its layout, on the same processes; by default the student's
    parallel: dict[str, Any] = field(default_factory=dict)
    dtype: str = field(default="float32", metadata={"choices": DTYPES})  # of its weights
    quantization: dict[str, Any] = field(default_factory=dict)  # of its weights, as that of a base


@dataclass
class FinetuneRecipe(Recipe):
    """Describe fine-tuning: of all parameters, or of an adapter over a base that stays as it is."""

    # The checkpoint to start from: a directory, or the id of a model on the Hub.
    base: str = MISSING
    # what to train instead of all parameters: ``method`` (``lora``, ``dora``, ``ia3`` or ``loha``) and fields of PEFT's
    # config of it, as ``r``, ``lora_alpha``, ``target_modules: all-linear``, ``target_parameters``; or only ``path``, a
    # saved adapter to go on with. Empty: all parameters
    adapter: dict[str, Any] = field(default_factory=dict)
    # of the base under an adapter, the fields of ``transformers.BitsAndBytesConfig``, as ``load_in_4bit``,
    # ``bnb_4bit_quant_type``; or only ``as_stored: true``, to keep the bytes of weights that it stores quantized.
    # Empty: none
    quantization: dict[str, Any] = field(default_factory=dict)
    # whether to add the adapter to the base after training and to write that besides, as a plain checkpoint: false or
    # true; over a quantized base, which is unpacked for it, the type to merge into, as ``bfloat16``
    merge: Any = False
    # A model to learn from (distillation).
    teacher: TeacherRecipe = field(default_factory=TeacherRecipe)
    # what scores completions (GRPO): ``exact_match`` and ``f1`` compare with the data's answer; any other is
    # ``module:function``, which TRL calls with ``completions`` and the columns of the data
    rewards: list[str] = field(default_factory=list)
    # fields of TRL's GRPOConfig, as ``num_generations``, ``use_vllm`` and ``vllm_mode``; with a teacher those of its
    # DistillationConfig: the teacher then teaches on what the model generates
    trl: dict[str, Any] = field(default_factory=dict)

    @property
    def generates(self) -> bool:
        """Return whether the model learns from what it generates."""
        return bool(self.rewards or self.trl)

    @property
    def distils(self) -> bool:
        """Return whether a teacher teaches."""
        return bool(self.teacher.base or self.teacher.stored)

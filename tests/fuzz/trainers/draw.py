"""One random script, as plain data."""

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hfscale.config.parallel import ParallelConfig


@dataclass(frozen=True)
class Draw:
    """What to run. Every default is the ordinary choice.

    Attributes:
        trainer: a class of transformers, or of TRL; ``ORPOTrainer`` is one of its experimental ones.
        model: a key of :data:`.data.MODELS`.
        layout: fields of :class:`hfscale.ParallelConfig`.
        arguments: of ``TrainingArguments``, or of TRL's config.
        batch: rows of a forward pass, of all distinct batches together.
        rows: of the data set that is trained on.
        evaluated: rows of the other.
        data: what a row is: ``masked`` (ids and labels), ``plain`` (ids alone), ``text``, ``completion``, ``chat``,
            ``pair``, ``label``, ``prompt``.
        source: ``torch``, ``datasets``, ``stream``: what the rows are in.
        collator: ``own``, or a class of transformers.
        metrics: what ``compute_metrics`` is given: ``logits``, ``chosen`` (what ``preprocess_logits_for_metrics``
            leaves of them), ``batches`` (one after the other); empty for none.
        adapter: ``lora`` or ``qlora``.
        late: whether the model is made by ``model_init``.
        loss: ``own`` of a subclass, ``watched`` by one, ``function`` given to the trainer; empty for the model's.
        brings: what else the script has of its own (:data:`.own.BRINGS`); empty for nothing.
        stops: a callback stops the run after so many steps, or, below zero, when the evaluation is no better.
        predicts: whether ``predict`` is called at the end.
        resume: who wrote the checkpoint that the run begins with: ``stock``, or a layout as JSON; empty for none.
        seed: of weights and data.
        nudge: stock code begins with weights one rounding apart, each draw of the number by others; 0 for as they are.
        precise: in float64 throughout, to tell a defect from a rounding that a run amplifies.
    """

    trainer: str = "Trainer"
    model: str = "llama"
    layout: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    batch: int = 4
    rows: int = 20
    evaluated: int = 8
    data: str = "masked"
    source: str = "torch"
    collator: str = "own"
    metrics: str = ""
    adapter: str = ""
    late: bool = False
    loss: str = ""
    brings: str = ""
    stops: int = 0
    predicts: bool = False
    resume: str = ""
    seed: int = 0
    nudge: int = 0
    precise: bool = False

    def parallel(self) -> ParallelConfig:
        """The layout."""
        return ParallelConfig(**self.layout)

    @property
    def rounds(self) -> bool:
        """Whether something is in bfloat16: all, or adapters over 4-bit weights, as TRL makes them."""
        return bool(self.arguments.get("bf16")) or (
            self.adapter == "qlora" and self.trainer != "Trainer"
        )

    def in_float64(self) -> "Draw | None":
        """The same script in float64; ``None`` where something of it is in few bits whatever the model is in."""
        few = self.adapter == "qlora" or "8bit" in str(self.arguments.get("optim"))
        if self.precise or few or self.arguments.get("bf16") or self.arguments.get("fp16"):
            return None
        # A recomputed forward pass would be in float32 inside.
        return replace(
            self, precise=True, arguments={**self.arguments, "gradient_checkpointing": False}
        )

    def write(self) -> str:
        """One line of JSON with what differs from the defaults."""
        usual = asdict(Draw())
        return json.dumps(
            {name: value for name, value in asdict(self).items() if value != usual[name]}
        )


def read(text: str) -> Draw:
    """The draw that :meth:`Draw.write` wrote."""
    return Draw(**json.loads(text))

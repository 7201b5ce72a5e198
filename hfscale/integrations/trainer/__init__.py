"""The bridge to ``transformers.Trainer``: its loop, arguments and callbacks over parallelized models.

The accelerator presents *distinct batches* as processes (:mod:`.trainer_accelerator`), so that everything a Trainer
computes from processes - token counts, loss scales, steps per epoch - is right in every layout. Printing and writing
depend on the real rank.
"""

from .memory_callback import StatesInMemoryCallback
from .mixin import Seq2SeqTrainer, Trainer, TrainerMixin

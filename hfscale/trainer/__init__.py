"""The bridge to ``transformers.Trainer``: its loop, arguments and callbacks over models that hfscale parallelized.

One idea carries it: the accelerator shows *distinct batches* as processes (:mod:`.accelerator`), so that whatever a
Trainer computes from processes - token counts, loss scales, steps per epoch - is right in every layout. Who prints and
writes is decided by the real rank.
"""

from .mixin import Seq2SeqTrainer, Trainer, TrainerMixin

__all__ = ["Seq2SeqTrainer", "Trainer", "TrainerMixin"]

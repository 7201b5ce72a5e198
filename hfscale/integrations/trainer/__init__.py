"""Connect hfscale to ``transformers.Trainer``: run its loop, arguments and callbacks over parallelized models."""

from .mixin import Seq2SeqTrainer, Trainer, TrainerMixin

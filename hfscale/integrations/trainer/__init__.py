"""The bridge to ``transformers.Trainer``: its loop, arguments and callbacks over parallelized models."""

from .mixin import Seq2SeqTrainer, Trainer, TrainerMixin

"""Training and evaluation steps, gradient clipping, preemption and the watchdog, in any layout."""

from .gradient_norm import BadStepError, BadSteps, clip_grad_norm_
from .preemption import Preempted, preempted
from .step import batch_rank, batch_world, drain, eval_step, metrics, train_step
from .teacher import Teacher
from .user_loss import token_scores
from .watchdog import watchdog

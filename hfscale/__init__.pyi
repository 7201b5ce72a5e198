from .api.adapt import (
    coverage_report as coverage_report,
    get_peft_model as get_peft_model,
    merge_and_unload as merge_and_unload,
)
from .api.build import (
    from_config as from_config,
    from_pretrained as from_pretrained,
    parallelize as parallelize,
    plan as plan,
)
from .checkpoint.checksums import verify_experts as verify_experts
from .checkpoint.foreign_optimizer import load_optimizer as load_optimizer
from .checkpoint.save import save_pretrained as save_pretrained
from .checkpoint.state import (
    SaveCheck as SaveCheck,
    check_save as check_save,
    load_state as load_state,
    save_state as save_state,
    wait_for_saves as wait_for_saves,
)
from .checkpoint.stream import stream_weights as stream_weights
from .config.float8 import Float8Config as Float8Config
from .config.memory import MemoryConfig as MemoryConfig
from .config.parallel import ParallelConfig as ParallelConfig
from .config.routing import RoutingConfig as RoutingConfig
from .cost.tools.estimate import estimate as estimate
from .cost.tools.memory_report import memory_estimate as memory_estimate
from .distributed.ops.token_scores import TokenScores as TokenScores
from .distributed.processes import fitting_layout as fitting_layout
from .errors import (
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    HFScaleError as HFScaleError,
    MeshError as MeshError,
    PlanError as PlanError,
)
from .extras.schedules.record import record_schedule as record_schedule
from .extras.upcycle.upcycle import upcycle as upcycle
from .integrations.accelerator import Accelerator as Accelerator
from .integrations.trainer import (
    Seq2SeqTrainer as Seq2SeqTrainer,
    Trainer as Trainer,
    TrainerMixin as TrainerMixin,
)
from .optim import create_optimizer as create_optimizer
from .parallel.experts.engine_routes import (
    routes_from_sglang as routes_from_sglang,
    routes_from_vllm as routes_from_vllm,
)
from .parallel.experts.load_report import (
    ExpertLoad as ExpertLoad,
    ExpertLoadHistory as ExpertLoadHistory,
    expert_load as expert_load,
)
from .parallel.experts.replay import record_routes as record_routes
from .train.balanced_batches import balanced_batches as balanced_batches
from .train.gradient_norm import (
    BadStepError as BadStepError,
    BadSteps as BadSteps,
    clip_grad_norm_ as clip_grad_norm_,
)
from .train.preemption import (
    Preempted as Preempted,
    preempted as preempted,
)
from .train.step import (
    batch_rank as batch_rank,
    batch_world as batch_world,
    drain as drain,
    eval_step as eval_step,
    metrics as metrics,
    train_step as train_step,
)
from .train.teacher import Teacher as Teacher
from .train.user_loss import token_scores as token_scores
from .train.watchdog import watchdog as watchdog

__version__: str
from .extras.states_in_memory.callback import StatesInMemoryCallback as StatesInMemoryCallback
from .extras.states_in_memory.in_memory import StatesInMemory as StatesInMemory
from .extras.states_in_memory.restarts import restart_in_place as restart_in_place

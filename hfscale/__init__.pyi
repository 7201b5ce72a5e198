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
from .checkpoint import (
    SaveCheck as SaveCheck,
    check_save as check_save,
    load_optimizer as load_optimizer,
    load_state as load_state,
    save_pretrained as save_pretrained,
    save_state as save_state,
    stream_weights as stream_weights,
    verify_experts as verify_experts,
    wait_for_saves as wait_for_saves,
)
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
from .parallel.experts import (
    ExpertLoad as ExpertLoad,
    ExpertLoadHistory as ExpertLoadHistory,
    expert_load as expert_load,
    record_routes as record_routes,
)
from .parallel.experts.engine_routes import (
    routes_from_sglang as routes_from_sglang,
    routes_from_vllm as routes_from_vllm,
)
from .train import (
    BadStepError as BadStepError,
    BadSteps as BadSteps,
    Preempted as Preempted,
    Teacher as Teacher,
    batch_rank as batch_rank,
    batch_world as batch_world,
    clip_grad_norm_ as clip_grad_norm_,
    drain as drain,
    eval_step as eval_step,
    metrics as metrics,
    preempted as preempted,
    token_scores as token_scores,
    train_step as train_step,
    watchdog as watchdog,
)
from .train.balanced_batches import balanced_batches as balanced_batches

__version__: str
from .extras.states_in_memory.callback import StatesInMemoryCallback as StatesInMemoryCallback
from .extras.states_in_memory.in_memory import StatesInMemory as StatesInMemory
from .extras.states_in_memory.restarts import restart_in_place as restart_in_place

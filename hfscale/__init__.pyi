from .api.adapt import (
    coverage_report as coverage_report,
)
from .api.adapt import (
    get_peft_model as get_peft_model,
)
from .api.adapt import (
    merge_and_unload as merge_and_unload,
)
from .api.build import (
    from_config as from_config,
)
from .api.build import (
    from_pretrained as from_pretrained,
)
from .api.build import (
    parallelize as parallelize,
)
from .api.build import (
    plan as plan,
)
from .checkpoint import (
    SaveCheck as SaveCheck,
)
from .checkpoint import (
    StatesInMemory as StatesInMemory,
)
from .checkpoint import (
    check_save as check_save,
)
from .checkpoint import (
    load_state as load_state,
)
from .checkpoint import (
    save_pretrained as save_pretrained,
)
from .checkpoint import (
    save_state as save_state,
)
from .checkpoint import (
    stream_weights as stream_weights,
)
from .checkpoint import (
    verify_experts as verify_experts,
)
from .checkpoint import (
    wait_for_saves as wait_for_saves,
)
from .checkpoint.upcycle.upcycle import upcycle as upcycle
from .config.float8 import Float8Config as Float8Config
from .config.memory import MemoryConfig as MemoryConfig
from .config.parallel import ParallelConfig as ParallelConfig
from .config.routing import RoutingConfig as RoutingConfig
from .cost.tools.estimate import estimate as estimate
from .cost.tools.memory_report import memory_estimate as memory_estimate
from .distributed.ops.token_scores import TokenScores as TokenScores
from .distributed.processes import fitting_layout as fitting_layout
from .distributed.restarts import restart_in_place as restart_in_place
from .errors import (
    CheckpointError as CheckpointError,
)
from .errors import (
    ConfigError as ConfigError,
)
from .errors import (
    HFScaleError as HFScaleError,
)
from .errors import (
    MeshError as MeshError,
)
from .errors import (
    PlanError as PlanError,
)
from .integrations.accelerator import Accelerator as Accelerator
from .integrations.trainer import (
    Seq2SeqTrainer as Seq2SeqTrainer,
)
from .integrations.trainer import (
    StatesInMemoryCallback as StatesInMemoryCallback,
)
from .integrations.trainer import (
    Trainer as Trainer,
)
from .integrations.trainer import (
    TrainerMixin as TrainerMixin,
)
from .optim import create_optimizer as create_optimizer
from .parallel.experts import (
    ExpertLoad as ExpertLoad,
)
from .parallel.experts import (
    ExpertLoadHistory as ExpertLoadHistory,
)
from .parallel.experts import (
    expert_load as expert_load,
)
from .parallel.experts import (
    record_routes as record_routes,
)
from .parallel.experts.engine_routes import (
    routes_from_sglang as routes_from_sglang,
)
from .parallel.experts.engine_routes import (
    routes_from_vllm as routes_from_vllm,
)
from .parallel.pipeline.record import record_schedule as record_schedule
from .train import (
    BadStepError as BadStepError,
)
from .train import (
    BadSteps as BadSteps,
)
from .train import (
    Preempted as Preempted,
)
from .train import (
    Teacher as Teacher,
)
from .train import (
    batch_rank as batch_rank,
)
from .train import (
    batch_world as batch_world,
)
from .train import (
    clip_grad_norm_ as clip_grad_norm_,
)
from .train import (
    drain as drain,
)
from .train import (
    eval_step as eval_step,
)
from .train import (
    metrics as metrics,
)
from .train import (
    preempted as preempted,
)
from .train import (
    token_scores as token_scores,
)
from .train import (
    train_step as train_step,
)
from .train import (
    watchdog as watchdog,
)
from .train.balanced_batches import balanced_batches as balanced_batches

__version__: str

"""Generate in TRL's GRPO and RLOO over the ranks of a layout, by vLLM or the model. Ranks that share a batch (tensor
ranks, for example) get the same completions.

Data flow of a generation with ``use_vllm=True``::

    hfscale.stream_weights: full tensors, adapters merged, by the names of a checkpoint
        server      --> rank 0 --> TRL's client, over NCCL --> the server's workers
        colocate    --> every rank --> the engine in its process; or only LoRA's factors, if the engine can serve them
    the prompts of each distinct batch
        server      --> rank 0 --> the server --> every rank gets the completions of its distinct batch
        colocate    --> ranks that share a batch divide its prompts --> each of these ranks gets all completions
    completions --> TRL, which asks the model for their log-probabilities: the fused head, in any layout
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from ..._compat.peft import LORA_A, LORA_B
from ..._compat.torch_device import fork_random_state
from ..._compat.trl import EngineHooks, asked_generation_size, record, replaced
from ...checkpoint.stream import stream_weights
from ...errors import ConfigError
from ...features.adapters.storage import WEIGHTS, needs_weights, write_adapter_config
from ...parallel.tensor.random import take_first_state
from ...train.runtime import find_runtime, runtime_of
from ..accelerator.gathering import gather_objects

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # LoRA ranks that vLLM supports (max_lora_rank)


def _refuse_other_tokens(model: Any) -> None:
    """Raise :class:`ConfigError` for a model with a resized vocabulary, because vLLM's engines allocate as many tokens
    as the checkpoint has.
    """
    kind: Any = type(model.config)
    config = kind.from_pretrained(model.name_or_path)
    expected = config.get_text_config().vocab_size
    found = model.config.get_text_config().vocab_size
    if found != expected:
        raise ConfigError(
            "vllm_mode='colocate' starts engines from the model's checkpoint, whose vocabulary must have the model's "
            f"{found} tokens, got {expected} in {model.name_or_path}: save the resized model with its adapters merged "
            "(hfscale.save_pretrained), and load the model from there"
        )


class LayoutEngine(EngineHooks):
    """Adapt TRL's vLLM engine to a parallelized model; a mixin before ``VLLMGeneration``."""

    _directory: TemporaryDirectory[str] | None = None
    sampled: Any = (
        None  # the engine's log-probabilities of the latest completions, by row and token
    )

    def check(self) -> None:
        """Raise :class:`ConfigError` for weights that cannot be sent to vLLM's engine, and for a model without a
        checkpoint from which an engine can start.
        """
        self.adapter_rank = self._adapter_rank()
        if self.mode == "colocate" and not self.model.name_or_path:
            raise ConfigError(
                "vllm_mode='colocate' starts engines from the model's checkpoint, but this model was not loaded from "
                "a checkpoint: save it (hfscale.save_pretrained), and load it with hfscale.from_pretrained"
            )
        if self.mode == "colocate":
            _refuse_other_tokens(runtime_of(self.model).model)
        quantized = runtime_of(self.model).plan.quantized
        if (
            quantized is not None
            and quantized.by_bitsandbytes
            and quantized.kind != "nf4"
            and self.mode == "colocate"
        ):
            raise ConfigError(
                "vllm_mode='colocate' lets vLLM quantize the checkpoint while it loads, but vLLM quantizes to nf4 "
                f"alone, and this model's weights are in {quantized.kind}: use bnb_4bit_quant_type='nf4', or load the "
                "model in 16 bits"
            )
        if quantized is not None and not self.adapter_rank:
            raise ConfigError(
                "use_vllm=True must merge these adapters into the weights before it sends them to vLLM, which "
                "weights in 4 or 8 bits do not allow: use vllm_mode='colocate' without vllm_enable_sleep_mode, and a "
                "LoraConfig for linear layers alone, without bias, DoRA, PiSSA, modules_to_save, rank_pattern and "
                "alpha_pattern, because such adapters are sent alone; or load the model in 16 bits"
            )
        if not self.adapter_rank:
            self.weights()

    def _adapter_rank(self) -> int:
        """Return the LoRA rank of adapters that vLLM can serve on unchanged base weights; 0 if adapters must be
        merged.
        """
        runtime = runtime_of(self.model)
        adapters = runtime.adapters
        factors = {each.name: each for each in runtime.plan.adapters}
        trained = {
            planned.name for planned, parameter in runtime.parameters() if parameter.requires_grad
        }
        others = any(runtime.mesh.all_gather_object(bool(trained - factors.keys())))
        if adapters is None or others or self.mode == "server" or self.enable_sleep_mode:
            return 0
        config = adapters.whole.peft_config[adapters.name]
        plain = all(
            each.kept_in in (LORA_A, LORA_B) and len(each.shape) == 2 and not each.experts
            for each in factors.values()
        )
        changed = needs_weights(config)  # PiSSA and similar initializations also change the base
        if (
            not plain
            or changed
            or config.rank_pattern
            or config.alpha_pattern
            or config.bias != "none"
        ):
            return 0
        return next((rank for rank in _RANKS if rank >= config.r), 0)

    def adapter(self) -> str:
        """Write the adapter into a directory of this process, and return the directory's path; collective."""
        adapters = runtime_of(self.model).adapters
        assert adapters is not None
        self._directory = self._directory or TemporaryDirectory()
        path = Path(self._directory.name)
        arriving = stream_weights(self.model, ranks="all", adapters_only=True)
        save_file(
            {key: tensor.clone() for key, tensor in arriving},
            path / WEIGHTS,
            metadata={"format": "pt"},
        )
        write_adapter_config(adapters.whole, adapters.name, path)
        return str(path)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over the full weights with merged adapters; iteration is collective. An engine may keep
        the tensors.
        """
        runtime = runtime_of(self.model)
        ranks: Any = (0,) if self.mode == "server" else "all"
        merged = runtime.adapters is not None
        whole = self.mode == "server"  # a server continues to run if a rank dies while it sends
        weights = stream_weights(self.model, ranks=ranks, merge_adapters=merged, staged=whole)
        return (
            (
                name,
                tensor.to(runtime.mesh.device, copy=True),
            )
            for name, tensor in weights
        )

    def generate(
        self, prompts: list[Any], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[Any, ...]:
        """Generate completions like TRL; all ranks that share a batch return the same completions."""
        made = self._generate(prompts, images, num_generations, profiler)
        self.sampled = made[2]
        return made

    def _generate(
        self, prompts: list[Any], images: Any, num_generations: int, profiler: Any
    ) -> tuple[Any, ...]:
        if self.mode == "server":
            with batches_gathered(type(self), self.accelerator):
                return super().generate(prompts, images, num_generations, profiler)  # type: ignore[no-any-return]
        group = runtime_of(self.model).mesh.sharing
        if group is None:
            return super().generate(prompts, images, num_generations, profiler)  # type: ignore[no-any-return]
        parts = dist.get_world_size(group)
        size = -(-len(prompts) // parts)
        first = dist.get_rank(group) * size
        own = [min(row, len(prompts) - 1) for row in range(first, first + size)] if prompts else []
        # Ranks that share a batch share the trainer's random stream, but each engine draws from its own stream.
        with fork_random_state(runtime_of(self.model).mesh.device):
            torch.manual_seed(int(torch.randint(2**48, ())) + dist.get_rank())
            made = super().generate(
                [prompts[row] for row in own],
                images and [images[row] for row in own],
                num_generations,
                profiler,
            )
        every: list[Any] = [None] * parts
        dist.all_gather_object(every, made, group=group)
        joined = (
            None if None in each else list(chain(*each))[: len(prompts)]
            for each in zip(*every, strict=True)
        )
        return tuple(joined)


def engine_over_layout(stock: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Create the vLLM engine with which a trainer generates; ``stock`` is TRL's class of the engine."""
    if find_runtime(model) is None:
        return stock(model, *args, **kwargs)
    if kwargs.get("logprobs", 0) is None:
        kwargs["logprobs"] = (
            0  # request log-probabilities of the sampled tokens, which RLOO does not request
        )
    return type(stock.__name__, (LayoutEngine, stock), {})(model, *args, **kwargs)


def agree_anew(trainer: Any) -> None:
    """Let ranks that share a batch synchronize their random streams again, because TRL's trainers that generate seed
    each process differently.
    """
    generates = ("reward_funcs", "teacher_model")
    shares = trainer.runtime.mesh.sharing is not None
    if shares and any(hasattr(trainer, name) for name in generates):
        trainer.runtime.streams.agreed = False


def log_difference(trainer: Any, log_probs: Tensor) -> None:
    """Log the difference between the log-probabilities of vLLM's engine, which generated the completions, and those of
    the trained model, unless TRL logs it itself (as in GRPO, but not in RLOO).
    """
    engine = getattr(trainer, "vllm_generation", None)
    sampled = getattr(engine, "sampled", None)
    if engine is None or sampled is None or hasattr(trainer, "vllm_importance_sampling_correction"):
        return
    engine.sampled = None
    given = [
        log_probs.new_tensor(
            [math.nan if difference[0] is None else difference[0] for difference in row]
        )
        for row in sampled
    ]
    apart = torch.cat(
        [(own[: len(row)] - row).abs() for own, row in zip(log_probs.detach(), given, strict=True)]
    )
    apart = apart[~apart.isnan()]
    own = torch.stack(
        (
            apart.sum() / max(len(apart), 1),
            apart.amax() if len(apart) else apart.sum(),
        )
    )
    every = trainer.accelerator.gather(own[None])
    record(trainer, "sampling/sampling_logp_difference/mean", every[:, 0].mean().item())
    record(trainer, "sampling/sampling_logp_difference/max", every[:, 1].max().item())


def batches_gathered(kind: type, accelerator: Any) -> AbstractContextManager[None]:
    """Inside the ``with`` block, let Accelerate's gather functions return each batch once, although several ranks
    (tensor ranks, for example) share it.
    """

    def gather(stock: Any, tensor: Any) -> Any:
        """Gather values over ranks that have different batches. Of ranks that share a batch, the first one's values
        count, because a reward function may be random or time out.
        """
        mesh = accelerator.mesh
        if mesh.sharing is not None:
            tensor = tensor.cpu()
            dist.broadcast(tensor, group=mesh.sharing, group_src=0)
        return accelerator.gather(tensor.to(mesh.device))

    def gather_object(stock: Any, given: Any) -> Any:
        return gather_objects(accelerator.mesh, given)

    def shuffle(stock: Any, rows: Any) -> Any:
        """Shuffle ``rows`` in the same order on all ranks that share a batch: that of the first of these ranks."""
        mesh = accelerator.mesh
        if mesh.sharing is None:
            return stock(rows)
        with torch.random.fork_rng(devices=[], enabled=not mesh.speaks_for_batch):
            take_first_state(torch.default_generator, mesh.sharing, torch.device("cpu"))
            return stock(rows)

    functions = {"gather": gather, "gather_object": gather_object, "shuffle_sequence_dict": shuffle}
    return replaced(kind, functions if accelerator.mesh.control is not None else {})


def count_generations(arguments: Any, batches: int) -> None:
    """Correct the generation batch size of a GRPO or RLOO config, which TRL computes from the number of processes. It
    must be computed from ``batches``, where ranks that share a batch (tensor ranks, for example) count once.
    """
    if getattr(arguments, "generation_batch_size", None) is None:
        return
    asked = _asked_size(arguments, batches)
    if asked is not None:
        arguments.steps_per_generation = _steps_per_generation(
            asked, arguments.per_device_train_batch_size, batches
        )
    size = arguments.per_device_train_batch_size * batches * arguments.steps_per_generation
    if size % arguments.num_generations:
        raise ConfigError(
            f"num_generations={arguments.num_generations} does not divide the {size} completions that are generated "
            f"at once, per_device_train_batch_size x steps_per_generation for each of {batches} distinct batch(es): "
            "change per_device_train_batch_size or steps_per_generation"
        )
    arguments.generation_batch_size = size
    _check_evaluation(arguments, batches)


def _asked_size(arguments: Any, batches: int) -> int | None:
    try:
        return asked_generation_size(arguments)
    except LookupError as error:
        usual = arguments.steps_per_generation == arguments.gradient_accumulation_steps
        if usual or arguments.world_size == batches:
            return None
        raise ConfigError(
            f"{error} must be created after the import of its trainer from hfscale.trl: "
            f"steps_per_generation={arguments.steps_per_generation} for {arguments.world_size} processes may come "
            "from a generation_batch_size that was divided by the number of processes, not of distinct batches: "
            "import the trainer first"
        ) from error


def _steps_per_generation(asked: int, rows: int, batches: int) -> int:
    steps, left = divmod(asked, rows * batches)
    if left or not steps:
        least = max(steps, 1) * rows * batches
        raise ConfigError(
            f"generation_batch_size must be a multiple of {rows * batches}, which is "
            f"per_device_train_batch_size={rows} times {batches} distinct batch(es), got {asked}: use {least}"
        )
    return steps


def _check_evaluation(arguments: Any, batches: int) -> None:
    rows = arguments.per_device_eval_batch_size * batches
    per_prompt = getattr(arguments, "num_generations_eval", None) or arguments.num_generations
    if arguments.eval_strategy != "no" and rows % per_prompt:
        raise ConfigError(
            f"{per_prompt} generations for each prompt (num_generations_eval, or num_generations) do not divide the "
            f"{rows} completions of an evaluation step, per_device_eval_batch_size for each of {batches} distinct "
            "batch(es): change per_device_eval_batch_size"
        )

"""A server's engine has the old weights or the new ones, whole, whichever moment a rank dies at as TRL sends them."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import trl
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hfscale
import hfscale.trl
from hfscale import CheckpointError, ParallelConfig
from hfscale.distributed.mesh import Mesh
from hfscale.testing import RankPool
from hfscale.testing.pool import RankError

from ...checkpoint.test_stream_versions import dying
from ...tiny_models import tiny
from .script import length_reward, rows, save_rows, tokenizer
from .stand_in import Client, standing_in
from .test_engine import SERVER


class OneByOne(Client):
    """A server that takes each tensor as it comes."""

    def update_named_params(
        self, metadata: list[Any], weights: Iterator[tuple[str, Tensor]]
    ) -> None:
        held = dict(self.model.named_parameters())
        for name, tensor in weights:
            held[name].data.copy_(tensor)


def killed(path: str, layout: dict[str, int], at: str, out: Path) -> None:
    """Sync, change the weights and sync again: rank 1 dies meanwhile, and rank 0 writes down what the engine has."""
    with standing_in(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.generation import vllm_generation

        with patch.object(
            vllm_generation, "VLLMClient", type("Client", (OneByOne,), {"path_of_server": path})
        ):
            model = hfscale.from_pretrained(
                path, dtype=torch.float32, parallel=ParallelConfig(**layout)
            )
            arguments = {**SERVER, "bf16": False, "use_cpu": True, "report_to": [], "beta": 0.0}
            # Stages take each of a step's batches as a microbatch.
            batches = 4 if "pp_size" in layout else 1
            config = trl.GRPOConfig(
                str(out.parent),
                per_device_train_batch_size=4 // batches,
                gradient_accumulation_steps=batches,
                **arguments,
            )
            prompts = rows(path, "prompt", 1)
            words = PreTrainedTokenizerFast.from_pretrained(path)
            trainer = hfscale.trl.GRPOTrainer(
                model, length_reward, config, prompts, processing_class=words
            )
        engine = trainer.vllm_generation
        sends = 0
        engine.sync_weights()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)

        def third(*_: Any) -> bool:
            nonlocal sends
            sends += 1
            return at == "middle" and sends == 3

        if dist.get_rank() == 1:
            commit = dying(Mesh.all_gather_object, lambda *_: at == "commit" and sends > 0)
            with (
                patch.object(dist, "isend", dying(dist.isend, third)),
                patch.object(Mesh, "all_gather_object", commit),
            ):
                engine.sync_weights()
            os.kill(os.getpid(), 9)
        before = [each.clone() for each in engine.vllm_client.model.parameters()]
        told = ""
        try:
            engine.sync_weights()
        except CheckpointError as error:
            told = str(error)
        after = list(engine.vllm_client.model.parameters())
        torch.save(
            ([not torch.equal(*pair) for pair in zip(before, after, strict=True)], told), out
        )


@pytest.mark.slow
@pytest.mark.parametrize("at", ["middle", "commit", "behind"])
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2}, {"dp_shard_size": 2}], ids=str)
def test_a_rank_dies_in_a_sync(tmp_path: Path, layout: dict[str, int], at: str) -> None:
    tokens = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    config = tiny("llama", num_hidden_layers=4, tie_word_embeddings=False, **tokens)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    tokenizer(tmp_path)
    save_rows(tmp_path, "prompt", 24, 1)
    with RankPool(2) as pool, pytest.raises(RankError, match="rank 1 failed:\nthe process died"):
        pool.run(killed, str(tmp_path), layout, at, tmp_path / "found")
    changed, told = torch.load(tmp_path / "found")
    assert all(changed) if at == "behind" else not any(changed)
    assert ("did not arrive completely: let the engine keep its previous version" in told) == (
        at != "behind"
    )

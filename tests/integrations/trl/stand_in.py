"""An engine in place of vLLM: a stock model that scores completions which are fixed, with the weights it was sent."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)
GROUP = 4  # completions of a prompt


class _Scores:
    """A stock model, filled as an engine is."""

    def __init__(self, path: str, **given: Any) -> None:
        self.path = path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **given)
        for module in self.model.modules():
            # A layout that some processors have for evaluation.
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        given = dict(weights)  # kept, as an engine may until a layer is complete
        config = self.model.config
        own = {name for name, _ in self.model.named_parameters()}
        if own == given.keys():
            self.model.load_state_dict(given, strict=False)
        else:
            self.model, told = type(self.model).from_pretrained(
                None, config=config, state_dict=given, output_loading_info=True, dtype=torch.float32
            )
            assert not told["missing_keys"]
            assert not told["unexpected_keys"]

    @torch.no_grad()
    def complete(self, prompt: list[int], number: int) -> tuple[list[int], list[float]]:
        made = [(sum(prompt) + 7 * number + k * k) % 60 + 5 for k in range(2 + number)] + [1]
        ids = torch.tensor([prompt + made])
        scores = self.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return made, scores.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()


class Client(_Scores):
    """TRL's client of a server."""

    path_of_server = ""

    def __init__(self, **_: Any) -> None:
        super().__init__(self.path_of_server)

    def init_communicator(self, device: Any) -> None:
        pass

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(
        self, metadata: list[Any], weights: Iterator[tuple[str, Tensor]]
    ) -> None:
        def checked() -> Iterator[tuple[str, Tensor]]:
            for (name, dtype, shape), (found, tensor) in zip(metadata, weights, strict=True):
                assert (name, dtype, shape) == (
                    found,
                    str(tensor.dtype).removeprefix("torch."),
                    list(tensor.shape),
                )
                yield found, tensor.clone()  # sent over the network

        self.fill(checked())

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
        made = [self.complete(prompt, number) for prompt in prompts for number in range(n)]
        logprobs = [[[each] for each in scores] for _, scores in made]
        return {
            "prompt_ids": prompts,
            "completion_ids": [ids for ids, _ in made],
            "logprobs": logprobs,
        }


class LLM(_Scores):
    """``vllm.LLM`` in this process, which is given whole groups of prompts."""

    def __init__(self, model: str, quantization: str | None = None, **given: Any) -> None:
        super().__init__(model, **({} if quantization is None else {"quantization_config": NF4}))
        self.rank = given.get("max_lora_rank", 0)
        self.adapter = 0

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        self.fill(kwargs["weights_iterator"])

    def reset_prefix_cache(self) -> None:
        pass

    def generate(
        self, prompts: list[dict[str, Any]], lora_request: Any = None, **_: Any
    ) -> list[Any]:
        if lora_request is not None and lora_request.number != self.adapter:
            base = self.model if self.adapter == 0 else self.model.unload()
            self.model = PeftModel.from_pretrained(base, lora_request.directory)
            self.adapter = lora_request.number
            assert self.model.peft_config["default"].r <= self.rank
        found = []
        for place, prompt in enumerate(prompts):
            ids, scores = self.complete(prompt["prompt_token_ids"], place % GROUP)
            logprobs = [
                {token: SimpleNamespace(logprob=x, rank=1)}
                for token, x in zip(ids, scores, strict=True)
            ]
            output = SimpleNamespace(token_ids=ids, logprobs=logprobs)
            found.append(
                SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[output])
            )
        return found


class LoRARequest(NamedTuple):
    """vLLM's."""

    name: str
    number: int
    directory: str


@contextmanager
def standing_in(path: str) -> Iterator[None]:
    """Let TRL find these in place of vLLM inside the ``with`` block."""
    from trl.generation import vllm_generation

    client = type("Client", (Client,), {"path_of_server": path})
    with ExitStack() as stack:
        for name, value in {
            "VLLMClient": client, "LLM": LLM, "SamplingParams": dict, "is_vllm_available": lambda: True
        }.items():  # fmt: skip
            stack.enter_context(patch.object(vllm_generation, name, value, create=True))
        sys.modules["vllm.lora.request"] = SimpleNamespace(LoRARequest=LoRARequest)  # type: ignore[assignment]
        stack.callback(sys.modules.pop, "vllm.lora.request")
        yield

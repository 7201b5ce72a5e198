"""Serve a model with vLLM to a test: lines of JSON in, lines of JSON out. Runs in an environment of its own.

    python vllm_server.py DIRECTORY

A line ``{"ids": [...], "weights": FILE}`` reloads the weights from a safetensors file, if it names one, and is answered
by the log-probability of each token behind those before it.
"""

import json
import os
import sys


def main() -> None:
    """Answer one line after the other."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
    )
    once = SamplingParams(detokenize=False, max_tokens=1, prompt_logprobs=0, temperature=0)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("weights"):
            weights = load_file(asked["weights"])
            engine.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(weights.items())}
            )
        ids = asked["ids"]
        found = engine.generate([{"prompt_token_ids": ids}], once, use_tqdm=False)[
            0
        ].prompt_logprobs
        print(
            json.dumps([found[place][ids[place]].logprob for place in range(1, len(ids))]),
            file=answers,
            flush=True,
        )


if __name__ == "__main__":
    main()

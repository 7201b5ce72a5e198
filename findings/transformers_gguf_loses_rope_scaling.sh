#!/bin/sh
# One would expect: the config that transformers makes of a GGUF file scales rotary embeddings as the file says, or
# transformers says that it does not.
# What happens: rope.scaling.type and rope.scaling.factor of a Llama are not read, and rope_freqs.weight, in which
# llama.cpp stores the scaling of Llama 3.1, is left out without a word: the model computes with plain rotary embeddings,
# so it is another model than the file's. Widths go the same way: attention.key_length of Qwen3 gives head_dim=128, and
# expert_feed_forward_length of Qwen3-MoE gives 768, the defaults of the config classes.
# Versions: transformers 5.23.0, gguf 0.19.0; CPU.
# Seen: what a file says and what AutoConfig.from_pretrained(..., gguf_file=...) has of it.
# PYTHON=... uses an environment that has these packages; otherwise they are installed in a temporary one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 gguf==0.19.0
fi
export OMP_NUM_THREADS=1
cat > "$work/script.py" <<'END'
import sys

import gguf
import numpy as np
from transformers import AutoConfig


def config_of(architecture, fill):
    writer = gguf.GGUFWriter(f"{sys.argv[1]}/m.gguf", architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(96)
    fill(writer)
    writer.add_tensor("token_embd.weight", np.zeros((96, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoConfig.from_pretrained(sys.argv[1], gguf_file="m.gguf")


def scaled(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def of_llama_31(writer):
    writer.add_tensor("rope_freqs.weight", np.full(8, 8.0, np.float32))


def of_qwen3(writer):
    writer.add_key_length(16)


def of_qwen3_moe(writer):
    writer.add_key_length(16)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(32)


linear = config_of("llama", scaled).rope_parameters["rope_type"]
print(f"rope.scaling.type linear, factor 4: rope_type {linear!r}")
llama = config_of("llama", of_llama_31).rope_parameters["rope_type"]
print(f"rope_freqs.weight of Llama 3.1: rope_type {llama!r}")
width = config_of("qwen3", of_qwen3).head_dim
print(f"attention.key_length 16 of Qwen3: head_dim {width}")
inner = config_of("qwen3moe", of_qwen3_moe).moe_intermediate_size
print(f"expert_feed_forward_length 32 of Qwen3-MoE: moe_intermediate_size {inner}")
as_seen = (linear, llama, width, inner) == ("default", "default", 128, 768)
raise SystemExit(0 if as_seen else 1)
END
"$python" "$work/script.py" "$work"

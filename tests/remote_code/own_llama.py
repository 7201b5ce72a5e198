"""Grouped-query attention, a gated MLP and RMS norms, none of them called what the host calls them."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class Config(PreTrainedConfig):
    model_type = "own_llama"

    def __init__(
        self,
        dim=64,
        n_layers=3,
        n_heads=8,
        n_kv_heads=4,
        ff_dim=96,
        vocab_size=97,
        drop_rate=0.0,
        **kwargs,
    ):
        self.dim = dim
        self.n_layers = n_layers
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.ff_dim = ff_dim
        self.vocab_size = vocab_size
        self.drop_rate = drop_rate
        super().__init__(**{"tie_word_embeddings": False, **kwargs})


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


class Mixer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.width = config.dim // config.n_heads
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads
        self.drop_rate = config.drop_rate
        self.wq = nn.Linear(config.dim, config.n_heads * self.width, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * self.width, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * self.width, bias=False)
        self.wo = nn.Linear(config.n_heads * self.width, config.dim)
        self.scale_q, self.scale_k = Scale(self.width), Scale(self.width)

    def forward(self, x, mask):
        b, s, _ = x.shape
        q = self.scale_q(self.wq(x).view(b, s, self.n_heads, self.width)).transpose(1, 2)
        k = self.scale_k(self.wk(x).view(b, s, self.n_kv_heads, self.width)).transpose(1, 2)
        v = self.wv(x).view(b, s, self.n_kv_heads, self.width).transpose(1, 2)
        k, v = (t.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for t in (k, v))
        weights = (q @ k.transpose(-1, -2) / self.width**0.5 + mask).softmax(-1)
        weights = F.dropout(weights, self.drop_rate, self.training)
        return self.wo((weights @ v).transpose(1, 2).reshape(b, s, -1))


class Gate(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.into = nn.Linear(config.dim, config.ff_dim, bias=False)
        self.gate = nn.Linear(config.dim, config.ff_dim, bias=False)
        self.out = nn.Linear(config.ff_dim, config.dim, bias=False)

    def forward(self, x):
        return self.out(F.silu(self.gate(x)) * self.into(x))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first, self.mixer = Scale(config.dim), Mixer(config)
        self.second, self.gated = Scale(config.dim), Gate(config)

    def forward(self, x, mask):
        x = x + self.mixer(self.first(x), mask)
        return x + self.gated(self.second(x))


class Base(PreTrainedModel):
    config_class = Config
    base_model_prefix = "decoder"

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.05)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Scale):
            nn.init.ones_(module.gain)


class Decoder(Base):
    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.stack = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.last = Scale(config.dim)
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, input_ids, attention_mask=None):
        x = self.tokens(input_ids)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()[
            None, None
        ]
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None].bool()
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill(~seen, -1e9)
        for layer in self.stack:
            x = layer(x, mask)
        return self.last(x)


class DecoderForCausalLM(Base, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.decoder = Decoder(config)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.decoder.tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        logits = self.lm_head(self.decoder(input_ids, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits)

"""BERT in plain PyTorch, small and clear: it turns tokens into sentence embeddings.

Modules and parameters have the names that Hugging Face gives them, so that a state dict fits a
`model.safetensors` as it is. The pooler, which embeddings do not use, is there where the file has
one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The numbers of a BERT, as its `config.json` has them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def read(cls, directory: Path) -> BertConfig:
        """Read `config.json`; other entries of it are left alone."""
        table = json.loads((directory / "config.json").read_text())
        if table.get("hidden_act", "gelu") != "gelu":
            raise ValueError(f"activation {table['hidden_act']!r}: this model has gelu only")
        return cls(**{name: table[name] for name in cls.__dataclass_fields__})


class Embeddings(nn.Module):
    """Tokens to vectors: the sum of a word's, a place's and a segment's vector, normalised.

    Older files hold the places 0, 1, 2, ... too, as `position_ids`.
    """

    def __init__(self, config: BertConfig, *, position_ids: bool) -> None:
        super().__init__()
        width, length = config.hidden_size, config.max_position_embeddings
        self.word_embeddings = nn.Embedding(config.vocab_size, width)
        self.position_embeddings = nn.Embedding(length, width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        if position_ids:
            self.register_buffer("position_ids", torch.arange(length).unsqueeze(0))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        segments = torch.zeros_like(tokens)
        return self.LayerNorm(  # (sentences, tokens, width)
            self.word_embeddings(tokens)
            + self.position_embeddings(places)
            + self.token_type_embeddings(segments)
        )


class SelfAttention(nn.Module):
    """Every token looks at every token of its sentence, with several heads."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.head_width = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(2, (-1, self.head_width)).transpose(
                1, 2
            )  # (s, heads, tokens, width)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return found.transpose(1, 2).flatten(2)


class AddAndNorm(nn.Module):
    """A projection, added to what went into the block before it, and normalised."""

    def __init__(self, width_in: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(width_in, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + before)


class Attention(nn.Module):
    """Self-attention and its output."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = AddAndNorm(config.hidden_size, config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.output(self.self(x, mask), x)


class Intermediate(nn.Module):
    """The wide half of the feed-forward block."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.dense(x))


class Layer(nn.Module):
    """One layer: attention, then feed-forward."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = Intermediate(config)
        self.output = AddAndNorm(config.intermediate_size, config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class Encoder(nn.Module):
    """All layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class Pooler(nn.Module):
    """A layer that some files hold and sentence embeddings do not use."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)


class Bert(nn.Module):
    """Sentence embeddings of unit length: encode, take the mean over the tokens, normalise."""

    def __init__(self, config: BertConfig, *, position_ids: bool, pooler: bool) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, position_ids=position_ids)
        self.encoder = Encoder(config)
        if pooler:
            self.pooler = Pooler(config)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens and mask (1 for a token, 0 for padding): (sentences, tokens) -> (s, width)."""
        visible = mask[:, None, None, :].bool()
        x = self.encoder(self.embeddings(tokens), visible)
        weights = mask.unsqueeze(-1).to(x.dtype)
        mean = (x * weights).sum(1) / weights.sum(1)
        return functional.normalize(mean, dim=1)

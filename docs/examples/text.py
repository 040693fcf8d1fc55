"""The sentences of the demo, and the tokens that they become."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

SENTENCES = (
    "The ferry to the island leaves at seven in the morning.",
    "Boats depart for the isle early, at 7 a.m.",
    "She tightened the last screw and switched the amplifier on.",
    "After the repair was done, she turned the amp back on.",
    "Bread dough needs time and warmth before it rises.",
    "Yeast works slowly when the kitchen is cold.",
    "The court postponed its ruling until next spring.",
    "Judges delayed the verdict to the following year's spring.",
    "A checkpoint of a large model is read by many machines at once.",
    "Hundreds of servers load the same saved neural network together.",
    "Our cat sleeps on the warm roof of the car.",
    "The price of copper fell for the third week in a row.",
)
# Sentences that say the same as another, with that other: places in SENTENCES.
TWINS = ((0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4), (6, 7), (7, 6), (8, 9), (9, 8))


def encode(directory: Path, sentences: tuple[str, ...] = SENTENCES) -> tuple[Tensor, Tensor]:
    """Tokens and mask of the sentences, padded to the longest: both int64 (sentences, tokens)."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(sentences))
    tokens = torch.tensor([found.ids for found in encoded])
    mask = torch.tensor([found.attention_mask for found in encoded])
    return tokens, mask


def closest_pairs(embeddings: Tensor, count: int) -> list[tuple[float, int, int]]:
    """The pairs of sentences that are most alike: (cosine, first, second), best first."""
    likeness = embeddings @ embeddings.T
    pairs = [
        (float(likeness[i, j]), i, j)
        for i in range(len(embeddings))
        for j in range(i + 1, len(embeddings))
    ]
    return sorted(pairs, reverse=True)[:count]

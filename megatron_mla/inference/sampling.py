"""From logits to the next token.

Legend: B sequences, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def probabilities(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Distribution that tokens are drawn from.

    Args:
        logits: [B, V], -inf for tokens that may not come.
        temperature: divides the logits, above 0.
        top_k: only that many of the likeliest tokens; 0: all.
        top_p: only the likeliest tokens that have this probability together, the one that reaches
            it among them.
    Returns:
        [B, V] fp32, each row with sum 1.
    """
    logits = logits.float() / temperature
    order = logits.argsort(dim=-1, descending=True, stable=True)
    # Subtracting the maximum first keeps small temperatures from overflowing to inf - inf.
    ranked = logits.gather(-1, order)
    ranked = (ranked - ranked[..., :1]).softmax(dim=-1)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    if top_k:
        ranked = ranked.masked_fill(rank >= top_k, 0.0)
        ranked = ranked / ranked.sum(-1, keepdim=True)
    if top_p < 1:
        before = ranked.cumsum(-1) - ranked
        # The likeliest token stays, however small top_p is.
        ranked = ranked.masked_fill((before >= top_p) & (rank > 0), 0.0)
        ranked = ranked / ranked.sum(-1, keepdim=True)
    return torch.zeros_like(ranked).scatter(-1, order, ranked)


class Sampler:
    """Draws tokens, with random numbers of its own.

    Args:
        temperature: 0 takes the likeliest token (the first of them).
        top_k, top_p: as in :func:`probabilities`.
        seed: same seed, same logits: same tokens, on a CPU and on a GPU.
        num_tokens: only tokens below this; None: all.
    Raises:
        ValueError: a value outside of its range.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1234,
        num_tokens: int | None = None,
    ) -> None:
        if not 0 <= temperature < float("inf"):
            raise ValueError(
                f"temperature must be a number of at least 0, got {temperature}; 0 takes the "
                "likeliest token"
            )
        if top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {top_k}; 0 takes all tokens")
        if not 0 < top_p <= 1:
            raise ValueError(
                f"top_p must be above 0 and at most 1, got {top_p}; 1 takes all tokens"
            )
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.num_tokens = num_tokens
        # On the host, whatever the device of the logits.
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """[B, V] -> [B] int64, on the host."""
        logits = logits[..., : self.num_tokens].float().cpu()
        if not self.temperature:
            return logits.argmax(-1)
        how = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        chances = probabilities(logits, **how)
        return torch.multinomial(chances, 1, generator=self.generator).squeeze(-1)

"""FLOPs of a decoder-only transformer from its shape.

Per token and training step, forward and backward together:

    6 * N  +  12 * layers * heads * head_size * context

N are the weights that a token is multiplied with: the projections of attention, the MLP and the
output head, tied or not. Looking up an embedding is no multiplication. A weight costs 2 FLOPs per
token forward (multiply, add) and twice that backward (its input's gradient and its own). Attention
compares a token with all of the context, 2 FLOPs per element for the scores and 2 for mixing the
values, again three times. With the causal mask half of that is useful work and half is counted.
Biases, norms, activations and softmax are not counted, and neither is recomputation: it is a choice
of the trainer and no work for the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from distmon.errors import ConfigError
from distmon.telemetry.mfu.model_flops import ModelFlops


@dataclass(frozen=True)
class TransformerShape:
    """What fixes the FLOPs of a transformer."""

    layers: int
    width: int
    heads: int
    context: int
    """Tokens in a training sequence, which may be fewer than the model could take."""
    vocabulary: int
    """Rows of the output head."""
    kv_heads: int | None = None
    """Heads of keys and values; as many as `heads` when absent."""
    head_size: int | None = None
    """`width / heads` when absent."""
    mlp: int | None = None
    """Inner width of the MLP; `4 * width` when absent. With experts: the sum of those that one
    token passes."""
    gated: bool = False
    """The MLP has a third matrix, as SwiGLU does."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocabulary"):
            _positive(name, getattr(self, name))
        for name in ("kv_heads", "head_size", "mlp"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.head_size is None and self.width % self.heads:
            raise ConfigError(
                f"the model's width {self.width} is no multiple of its {self.heads} heads; "
                "give the head_size"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ConfigError(
                f"the model's {self.heads} heads are no multiple of its {self.kv_heads} kv_heads"
            )

    @property
    def matmul_weights(self) -> int:
        """N of the formula."""
        projections = 2 * (self.heads + (self.kv_heads or self.heads)) * self._head_size
        mlp = (3 if self.gated else 2) * (self.mlp or 4 * self.width)
        return self.width * (self.layers * (projections + mlp) + self.vocabulary)

    def flops(self, causal: bool) -> ModelFlops:
        """Per token, with or without the discount for the causal mask."""
        attention = 12 * self.layers * self.heads * self._head_size * self.context
        return ModelFlops(
            6.0 * self.matmul_weights + (attention / 2 if causal else attention),
            f"6N + {'causal' if causal else 'full'} attention by formula",
            causal,
        )

    @property
    def _head_size(self) -> int:
        return self.head_size or self.width // self.heads


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"the model's {name} must be a whole number of at least 1, not {value!r}")

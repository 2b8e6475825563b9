"""FLOPs of a decoder-only transformer from its shape.

Per token and training step, forward and backward together:

    6 * N  +  12 * layers * heads * head_size * context

N is the number of weights in matrix products: attention projections, MLP and output head, tied or
not. An embedding lookup is not a product. A weight costs 2 FLOPs per token forward (multiply, add)
and twice that backward (the gradients of its input and of itself). Attention costs 2 FLOPs per
element of the context for the scores and 2 for the weighted values, again three times. With a
causal mask half of that counts. Biases, norms, activations and softmax are not counted, and neither
is recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass

from distmon.collect.telemetry.mfu.model_flops import ModelFlops
from distmon.errors import ConfigError


@dataclass(frozen=True)
class TransformerShape:
    """The dimensions that determine the FLOPs of a transformer."""

    layers: int
    width: int
    heads: int
    context: int
    """Tokens in a training sequence; may be less than the model's maximum."""
    vocabulary: int
    """Rows of the output head."""
    kv_heads: int | None = None
    """Heads of keys and values; as many as `heads` when absent."""
    head_size: int | None = None
    """`width / heads` when absent."""
    mlp: int | None = None
    """Hidden width of the MLP; `4 * width` when absent. For mixture of experts: the sum over the
    experts of one token."""
    gated: bool = False
    """Whether the MLP has a third matrix, as SwiGLU does."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocabulary"):
            _positive(name, getattr(self, name))
        for name in ("kv_heads", "head_size", "mlp"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.head_size is None and self.width % self.heads:
            raise ConfigError(
                f"the model's width {self.width} is not a multiple of its {self.heads} heads; "
                "set head_size"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ConfigError(
                f"the model's {self.heads} heads are not a multiple of its {self.kv_heads} kv_heads"
            )

    @property
    def matmul_weights(self) -> int:
        """N of the formula."""
        projections = 2 * (self.heads + (self.kv_heads or self.heads)) * self._head_size
        mlp = (3 if self.gated else 2) * (self.mlp or 4 * self.width)
        return self.width * (self.layers * (projections + mlp) + self.vocabulary)

    def flops(self, causal: bool) -> ModelFlops:
        """Return the FLOPs per token; with `causal`, attention counts half."""
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

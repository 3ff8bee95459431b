"""``Transformer``: a decoder as a few sizes, and how many parameters, operations and bytes its layers have."""

import attrs

positive = attrs.validators.and_(attrs.validators.instance_of(int), attrs.validators.ge(1))
_positive_or_none = attrs.validators.optional(positive)


@attrs.frozen(kw_only=True)
class Transformer:
    """A decoder of equal layers. The defaults are GPT's; Llama's are ``gated=True, biased=False, tied=False, dropout=False``.

    Attributes:
        layers: how many.
        width: h, features of a token.
        heads: of queries.
        vocabulary: V.
        length: s, tokens of a row.
        key_heads: of keys and values; by default as many as of queries.
        inner: f, features within an MLP; by default 4 h.
        gated: whether an MLP multiplies two products, SwiGLU, and norms have no mean.
        biased: whether products and norms have biases.
        learned_positions: whether positions have an embedding.
        tied: whether the head is the embedding.
        dropout: whether attention's weights and both residual branches have it.
        flash: whether attention's weights are kept nowhere.

    >>> Transformer(layers=128, width=25600, heads=160, vocabulary=51200, length=2048).parameters / 1e9
    1008.0...
    """

    layers: int = attrs.field(validator=positive)
    width: int = attrs.field(validator=positive)
    heads: int = attrs.field(validator=positive)
    vocabulary: int = attrs.field(validator=positive)
    length: int = attrs.field(validator=positive)
    key_heads: int | None = attrs.field(default=None, validator=_positive_or_none)
    inner: int | None = attrs.field(default=None, validator=_positive_or_none)
    gated: bool = False
    biased: bool = True
    learned_positions: bool = True
    tied: bool = True
    dropout: bool = True
    flash: bool = False

    def __attrs_post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads}: they do not divide the width {self.width}")
        if self.heads % self.groups:
            raise ValueError(f"key_heads={self.groups}: they do not divide the {self.heads} heads")

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.key_heads or self.heads

    @property
    def mlp(self) -> int:
        """Features within an MLP."""
        return self.inner or 4 * self.width

    @property
    def key_width(self) -> int:
        """Features of all keys of a token."""
        return self.width // self.heads * self.groups

    # -- parameters ----------------------------------------------------------------------------------------------------

    @property
    def layer_matrices(self) -> int:
        """Elements of a layer's products."""
        h, f = self.width, self.mlp
        return 2 * h * h + 2 * h * self.key_width + (3 if self.gated else 2) * h * f

    @property
    def layer_cut(self) -> int:
        """A layer's parameters that tensor parallelism splits: the products, and biases of column-parallel ones."""
        biases = self.width + 2 * self.key_width + (2 if self.gated else 1) * self.mlp
        return self.layer_matrices + biases * self.biased

    @property
    def layer_whole(self) -> int:
        """A layer's other parameters: two norms, and biases of row-parallel products."""
        return (6 if self.biased else 2) * self.width

    @property
    def final_norm(self) -> int:
        """Parameters of the norm before the head."""
        return (2 if self.biased else 1) * self.width

    @property
    def parameters(self) -> int:
        """Of the whole model.

        With GPT's defaults 12 l h² (1 + 13 / 12 h + (V + s) / 12 l h), equation 2 of Narayanan et al. 2021, and a last norm.
        """
        outside = (1 if self.tied else 2) * self.vocabulary * self.width + self.learned_positions * self.length * self.width
        return self.layers * (self.layer_cut + self.layer_whole) + outside + self.final_norm

    # -- operations ----------------------------------------------------------------------------------------------------

    def layer_flops(self, tokens: int) -> int:
        """Of a layer's products forward: 2 for each parameter and token, 4 s h for a token's attention, masked or not."""
        return tokens * (2 * self.layer_matrices + 4 * self.length * self.width)

    def last_product_flops(self, tokens: int) -> int:
        """Of a layer's last product, which a recomputation does not need."""
        return 2 * tokens * self.width * self.mlp

    def head_flops(self, tokens: int) -> int:
        """Of the head forward."""
        return 2 * tokens * self.vocabulary * self.width

    def step_flops(self, tokens: int, *, recompute: bool = False) -> int:
        """Of a step by the papers' convention: a backward pass has twice a forward's, a recomputation has the layers' again.

        With GPT's sizes and recomputation 96 B s l h² (1 + s / 6 h + V / 16 l h), equation 3 of Narayanan et al. 2021.
        """
        return (4 if recompute else 3) * self.layers * self.layer_flops(tokens) + 3 * self.head_flops(tokens)

    # -- bytes of 16-bit values ----------------------------------------------------------------------------------------

    def layer_kept(self, tokens: int, tp: int = 1) -> int:
        """Bytes of 16-bit activations that a layer keeps for its backward pass, on one of tp ranks.

        GPT's: s b h (10 + 24 / tp + 5 a s / h tp) (Korthikanti et al. 2022, arXiv:2205.05198, equation 2). Statistics of norms
        and of flash attention are left out.
        """
        h, f = self.width, self.mlp
        outside = 4 * 2 * h + 2 * h * self.dropout  # inputs of norms and of the products after them; masks
        inside = 2 * (2 * h + 2 * self.key_width) + (8 if self.gated else 4) * f
        if not self.flash:
            inside += (2 + 3 * self.dropout) * self.heads * self.length  # softmax; its mask, and what it leaves
        return tokens * outside + tokens * inside // tp

    def head_kept(self, tokens: int, tp: int = 1) -> int:
        """Bytes that the last norm, the head and the loss keep: 4 s b h, and the logits' log-softmax in fp32, 4 s b V / tp."""
        return 4 * tokens * self.width + 4 * tokens * self.vocabulary // tp

    def layer_moved(self, tokens: int, tp: int = 1) -> int:
        """Bytes that a layer's elementwise kernels read and write forward, on one of tp ranks.

        The kernels are those of Narayanan et al. 2021, section 4.2: a norm; bias, dropout and addition; bias and activation;
        scale, mask and softmax; dropout of the weights. Each reads its inputs and writes its results once.
        """
        outside = 2 * 4 * self.width + 2 * (6 + self.dropout) * self.width
        inside = (6 if self.gated else 4) * self.mlp
        if not self.flash:
            inside += (4 + 5 * self.dropout) * self.heads * self.length
        return tokens * outside + tokens * inside // tp

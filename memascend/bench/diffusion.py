"""A diffusion transformer with adaLN modulation, as trained in LoHan's Fig. 12; no installed library provides one."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor, nn
from torch.nn import functional

PATCH, STEPS, HEADS = 16, 1000, 8  # values in a patch of the latent image; diffusion steps; attention heads


class DiT(nn.Module):
    """Diffusion transformer that learns to predict the noise added to patches of images (LoHan, Table VI).

    It has `layers` blocks of 18 `hidden`^2 parameters each, of which 6 `hidden`^2 are for the modulation. HEADS must
    divide `hidden`.
    """

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH, hidden)
        self.times = nn.Embedding(STEPS, hidden)
        self.layers = nn.ModuleList(_Block(hidden) for _ in range(layers))
        self.noise = nn.Linear(hidden, PATCH)

    def forward(self, images: Tensor, noise: Tensor, steps: Tensor) -> SimpleNamespace:
        """Return an object whose `loss` is the mean squared error of the predicted noise, in fp32.

        `images` and `noise` have the shape (images, patches, PATCH); `steps` has the shape (images,) and values below
        STEPS.
        """
        kept = (1 - steps / STEPS).to(images.dtype)[:, None, None]
        x, c = self.patches(kept * images + (1 - kept) * noise), self.times(steps)
        for layer in self.layers:
            x = layer(x, c)
        return SimpleNamespace(loss=functional.mse_loss(self.noise(x).float(), noise.float()))


class _Block(nn.Module):
    """A block whose attention and feed-forward are shifted, scaled and gated by values computed from the condition."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(hidden, 6 * hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Transform `x` of shape (images, patches, hidden), conditioned on `c` of shape (images, hidden)."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(functional.silu(c))[:, None].chunk(6, -1)
        h = functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        h = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + gate * self.projection(h)
        h = functional.layer_norm(x, x.shape[-1:]) * (1 + mlp_scale) + mlp_shift
        return x + mlp_gate * self.fc2(functional.gelu(self.fc1(h), approximate="tanh"))

"""How far two pictures lie apart as a frozen prior sees them: a perceptual loss that needs no other network.

A prior that was trained to denoise photographs knows what they are made of. The distance is LPIPS's, without learned
weights, on the features of the prior's way down: each place's channels are brought to unit length and compared. "Diffusion
Model with Perceptual Loss" (Lin & Yang 2023, 2401.00110) has the idea, for training priors.
"""

import torch
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.networks import CompactUNet, run_unet
from ddc.perceptual import unit_difference


class PriorFeatures(nn.Module):
    """The distance of two batches of [-1, 1] pictures, (B,), in features of a frozen U-Net at the time 0."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, x: Tensor, truth: Tensor) -> Tensor:
        features = self.features(x)
        with torch.no_grad():
            expected = self.features(truth)
        distance = torch.zeros(len(x), device=x.device)
        for fx, fy in zip(features, expected, strict=True):
            distance = distance + unit_difference(fx, fy).sum(1).mean((1, 2))
        return distance / len(features)

    def features(self, x: Tensor) -> list[Tensor]:
        if isinstance(self.unet, CompactUNet):
            return self.unet.encode(x, torch.zeros(1, device=x.device))
        blocks = getattr(self.unet, "down_blocks", None)  # of diffusers' UNet2DModel
        if blocks is None:
            raise UserError(
                f"the prior is a {type(self.unet).__name__}, whose features are not known; leave --w-features out"
            )
        found: list[Tensor] = []
        hooks = [block.register_forward_hook(lambda _, __, out: found.append(out[0])) for block in blocks]
        try:
            run_unet(self.unet, x, 0)
        finally:
            for hook in hooks:
                hook.remove()
        return found

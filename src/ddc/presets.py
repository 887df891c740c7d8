"""Named network configurations: ours, the paper's, and OpenAI's 256×256 prior."""

import json
from pathlib import Path
from typing import Any

from ddc.errors import UserError

PRIORS: dict[str, dict[str, Any]] = {
    # 15.0 M parameters, 53 GFLOP for a 256×256 picture
    "compact": {
        "_class_name": "CompactUNet",
        "in_channels": 3,
        "out_channels": 3,
        "channels": [96, 160, 256, 320],
        "encoder_blocks": [2, 2, 2, 2],
        "decoder_blocks": [2, 2, 2],
    },
    # OpenAI's unconditional ImageNet 256×256 (2105.05233): 552.8 M parameters, 2,240 GFLOP
    "adm-256": {
        "_class_name": "UNet2DModel",
        "in_channels": 3,
        "out_channels": 6,
        "block_out_channels": [256, 256, 512, 512, 1024, 1024],
        "layers_per_block": 2,
        "down_block_types": ["ResnetDownsampleBlock2D"] * 3 + ["AttnDownBlock2D"] * 3,
        "up_block_types": ["AttnUpBlock2D"] * 3 + ["ResnetUpsampleBlock2D"] * 3,
        "downsample_type": "resnet",
        "upsample_type": "resnet",
        "attention_head_dim": 64,
        "attn_norm_num_groups": 32,
        "resnet_time_scale_shift": "scale_shift",
    },
}

NETWORKS: dict[str, dict[str, Any]] = {
    # 26 M parameters, 86 GFLOP; told what is known about the measurement
    "compact": {
        "_class_name": "CompactUNet",
        "out_channels": 3,
        "channels": [96, 192, 352, 448],
        "encoder_blocks": [2, 2, 2, 2],
        "decoder_blocks": [3, 3, 2],
        "inputs": ["wiener", "projection", "mask", "sigma"],
        "residual": "blend",
    },
    # the paper's: 113.7 M parameters, 497 GFLOP; reads x̂0 and the repeated y
    "paper": {
        "_class_name": "UNet2DModel",
        "out_channels": 3,
        "block_out_channels": [128, 128, 256, 256, 512, 512],
        "layers_per_block": 2,
        "down_block_types": ["DownBlock2D"] * 4 + ["AttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "AttnUpBlock2D"] + ["UpBlock2D"] * 4,
        "inputs": ["y"],
    },
}

POSTERIORS: dict[str, dict[str, Any]] = {
    # 46.6 M parameters, 98 GFLOP; the compact network with more blocks and attention where they are cheap
    "posterior": {
        "_class_name": "CompactUNet",
        "out_channels": 3,
        "channels": [96, 192, 352, 448],
        "encoder_blocks": [2, 2, 2, 2],
        "decoder_blocks": [3, 3, 2],
        "middle_blocks": 4,
        "attention_levels": [2],
    },
}

BRIDGES: dict[str, dict[str, Any]] = {
    # 8.7 M parameters (17 MB in fp16), 28 GFLOP
    "compact": {
        "_class_name": "CompactUNet",
        "in_channels": 3,
        "out_channels": 3,
        "channels": [64, 128, 192, 256],
        "encoder_blocks": [2, 2, 2, 2],
        "decoder_blocks": [2, 2, 2],
    },
}


def preset(name: str, presets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A configuration by its name, or from a JSON file."""
    if name in presets:
        return dict(presets[name])
    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        config = json.loads(path.read_text())
        if isinstance(config, dict):
            return config
        raise UserError(f"{path} should hold one JSON object, the network's configuration")
    raise UserError(f"{name!r} is neither a preset ({', '.join(presets)}) nor a JSON file with a configuration")

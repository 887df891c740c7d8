"""Train a tiny model from nothing: a prior, and a data-consistency network on top of it.

The few steps here take seconds on a CPU, and the model learns almost nothing; a real run uses the same commands.

python examples/train_tiny.py FOLDER_OF_PICTURES OUT
"""

import json
import sys
from pathlib import Path

from ddc.cli import main as ddc

TINY = {
    "_class_name": "CompactUNet",
    "channels": [8, 16],
    "encoder_blocks": [1, 1],
    "decoder_blocks": [1],
    "groups": 4,
    "head_dim": 8,
    "out_channels": 3,
}


def main(pictures: str, out: str, steps: int = 20) -> Path:
    """Train both networks, put them together, and return the model's folder."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "tiny.json"
    config.write_text(json.dumps(TINY))
    common = ["--data", pictures, "--network", str(config), "--steps", str(steps)]
    common += ["--batch-size", "4", "--crop", "32", "--warmup", "1", "--precision", "fp32"]

    run("train", "prior", *common, "--out", str(folder / "prior-run"))
    prior = folder / "prior-run" / "model"
    run(
        "train",
        "ddc",
        *common,
        "--out",
        str(folder / "ddc-run"),
        "--prior",
        str(prior),
        "--tasks",
        "sr2,denoise",
    )

    model = folder / "model"  # a model is a folder with prior/ and network/
    model.mkdir()
    prior.rename(model / "prior")
    (folder / "ddc-run" / "model").rename(model / "network")
    return model


def run(*arguments: str) -> None:
    print("ddc", *arguments)
    if ddc(arguments) != 0:
        raise SystemExit(1)


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2]))

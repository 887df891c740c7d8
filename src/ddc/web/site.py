"""The page as a folder of plain files, which restores pictures in the browser: `ddc web --static`."""

import gzip
import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from base64 import b64encode
from pathlib import Path

from ddc.errors import UserError
from ddc.onnx.export import WEIGHTS, Precision, export_onnx
from ddc.perceptual import cache_folder
from ddc.web.controls import BLUR, HOLES, JPEG, NOISE, SUPER_RESOLUTION
from ddc.web.uploads import write_examples

ASSETS = Path(__file__).with_name("static")
RUNTIME = "onnxruntime-web-1.30.0.tgz"
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="  # SHA-512
# of WebAssembly and of WebGPU; the browser loads one of them
MODULES = ("ort.wasm.min.mjs", "ort.webgpu.min.mjs")
ENGINES = ("ort-wasm-simd-threaded", "ort-wasm-simd-threaded.asyncify")
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'"
)
KINDS = {SUPER_RESOLUTION: "size", BLUR: "blur", HOLES: "holes", JPEG: "jpeg", NOISE: "noise"}


def write_site(
    out: Path, model: Path | None, runtime: Path | None = None, dtype: Precision = "fp16", side: int = 256
) -> None:
    """Write the page, the ONNX files of a model, the runtime and examples into the new folder `out`. Without a model, the
    one that is shipped with the package is taken."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists; name a new or empty folder for the page")
    archive = find_runtime(runtime)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".site-") as temporary:
        made = Path(temporary) / "site"
        made.mkdir()
        export_onnx(model, made / "model", dtype, side, for_page=True)
        _pack(made / "model" / WEIGHTS)
        _unpack_runtime(archive, made / "ort")
        _write_examples(made / "examples")
        _write_page(made)
        if out.exists():
            out.rmdir()
        made.replace(out)


def find_runtime(given: Path | None) -> Path:
    """The archive of onnxruntime-web: the one that is given, one that was downloaded before, or a new one from npm."""
    path = given or cache_folder() / RUNTIME
    if given is None and not path.is_file():
        npm = shutil.which("npm")
        if npm is None:
            raise UserError(
                f"the page needs {RUNTIME}, and npm, which fetches it, is not installed; install npm, or get the file "
                "on another computer with `npm pack onnxruntime-web@1.30.0` and name it with --runtime"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [npm, "pack", RUNTIME.removesuffix(".tgz").replace("web-", "web@"), "--silent"]
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if result.returncode or not (Path(folder) / RUNTIME).is_file():
                reason = " ".join(result.stderr.split())[-200:]
                raise UserError(
                    f"npm could not fetch {RUNTIME} ({reason}); connect to the network, or name it with --runtime"
                )
            (Path(folder) / RUNTIME).replace(path)
    if not path.is_file():
        raise UserError(f"{path} is not a file; expected {RUNTIME}, from `npm pack onnxruntime-web@1.30.0`")
    if b64encode(hashlib.sha512(path.read_bytes()).digest()).decode() != INTEGRITY:
        raise UserError(f"{path} is not {RUNTIME}, or is damaged; delete it, and fetch it again with `npm pack`")
    return path


def _unpack_runtime(archive: Path, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(archive) as tar:
        for name in (*MODULES, *(f"{engine}.{end}" for engine in ENGINES for end in ("mjs", "wasm"))):
            file = tar.extractfile(f"package/dist/{name}")
            assert file is not None  # the archive is the one whose hash is known
            (folder / name).write_bytes(file.read())
            if name.endswith(".wasm"):
                _pack(folder / name)


def _pack(path: Path) -> None:
    """Compress a file with gzip. The page unpacks it itself; a name with .gz would let some servers do so."""
    path.with_name(f"{path.name}.packed").write_bytes(gzip.compress(path.read_bytes(), 6, mtime=0))
    path.unlink()


def _write_examples(folder: Path) -> None:
    examples = []
    for upload, choices in write_examples(folder):
        shown = {"file": upload.path.name, "kind": KINDS[choices.kind], "scale": choices.scale, "sigma": choices.sigma}
        examples.append(shown | {"blur": choices.blur, "quality": choices.quality})
    (folder / "examples.json").write_text(json.dumps(examples, indent=2) + "\n")


def _write_page(folder: Path) -> None:
    """The files of the page; the service worker is told what to keep, and a version that changes with any file."""
    for source in ASSETS.iterdir():
        (folder / source.name).write_text(
            source.read_text(encoding="utf-8").replace("{{policy}}", POLICY), encoding="utf-8"
        )
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "sw.js")
    version = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()[:16]
    small = [
        path.relative_to(folder).as_posix() for path in files if path.parent.name != "ort" and path.suffix != ".packed"
    ]
    worker = (folder / "sw.js").read_text(encoding="utf-8")
    worker = worker.replace("{{version}}", f"ddc-{version}").replace('"{{files}}"', json.dumps(["./", *small]))
    (folder / "sw.js").write_text(worker, encoding="utf-8")

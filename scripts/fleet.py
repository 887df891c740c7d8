"""What `ddc restore --ray` costs, and what it survives, on this computer. Needs the extras ray and s3, and moto[s3], flask and
flask-cors for the bucket.

python scripts/fleet.py throughput [PICTURES]   one worker for each core, against `ddc restore`, and against `--shard`
python scripts/fleet.py node                    two nodes as processes, one killed midway
python scripts/fleet.py bucket                  from bucket to bucket; killed midway and started again
python scripts/fleet.py many [PICTURES]         10,000 pictures of 8×8 pixels: time and memory of the engine
python scripts/fleet.py memory                  a picture that kills its workers, and one that needs small tiles
"""

import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from skimage import data

from ddc.images import Picture
from ddc.networks import CompactUNet
from ddc.priors import DataConsistency, Prior, schedule_from_config, scheduler_config
from ddc.storage import Remote

KILLER = """
import os, signal
from ddc.operators import Denoise
class Killer(Denoise):
    def singular_values(self, size, x):
        if max(size) > 128 or size[0] == 33:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().singular_values(size, x)
"""


def make_model(folder: Path, width: int = 32, blocks: int = 1) -> None:
    def network(channels: int, seed: int) -> CompactUNet:
        torch.manual_seed(seed)
        net = CompactUNet(
            channels, 3, channels=(width,), encoder_blocks=(blocks,), decoder_blocks=(), groups=4, head_dim=8
        )
        for parameter in net.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.02)
        return net.eval()

    config = scheduler_config(clamp=1.0)
    prior = Prior(network(3, 0), schedule_from_config(config), clamp=1.0, scheduler_config=config)
    prior.save_pretrained(folder / "prior")
    DataConsistency(network(6, 1)).save_pretrained(folder / "network")


def make_pictures(folder: Path, count: int, side: int) -> None:
    photo = data.astronaut()
    for number in range(count):
        top, left = 7 * number % (512 - side), 13 * number % (512 - side)
        Picture(photo[top : top + side, left : left + side]).write(folder / f"{number % 10}" / f"{number:06d}.png")


def start(*words: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ddc", "restore", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate()
    assert process.returncode == 0, f"exit code {process.returncode}: {err}"
    return out, err


def contents(folder: Path) -> dict[str, bytes]:
    names = folder.files() if hasattr(folder, "files") else [p.relative_to(folder) for p in folder.rglob("*.*")]
    return {str(name): (folder / name).read_bytes() for name in names}


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def throughput(home: Path, count: int = 200) -> None:
    """The shipped model, with its five steps, on pictures of 32×32 pixels, enlarged to 64×64; the whole commands are timed,
    from their start to their end."""
    make_pictures(home / "in", count, 32)
    words = (home / "in", "--task", "sr2", "--device", "cpu")
    cores = os.cpu_count() or 1
    parts = [("--shard", f"{part}/{cores}") for part in range(1, cores + 1)]
    ways: dict[str, Sequence[tuple[str, ...]]] = {
        "ddc restore": [()],
        "a process for each core": parts,
        "--ray": [("--ray",)],
    }
    threads = {"ddc restore": cores, "a process for each core": 1, "--ray": 1}
    seconds = {}
    for name, commands in ways.items():
        out, environment = home / name, os.environ | {"OMP_NUM_THREADS": str(threads[name])}
        began = time.time()
        processes = [start(*words, "-o", out, *more, env=environment) for more in commands]
        for process in processes:
            finish(process)
        seconds[name] = time.time() - began
        written = sorted(file.stat().st_mtime for file in out.rglob("*.png"))
        running = (count - 1) / (written[-1] - written[0])
        each = f"{threads[name]} thread{'s' if threads[name] > 1 else ''} each"
        print(f"{name} ({each}): {seconds[name]:.1f} s, {running:.2f} pictures a second once running", flush=True)
    for name in ("ddc restore", "a process for each core"):
        print(f"throughput of --ray against {name}: {seconds[name] / seconds['--ray']:.2f}")
    for name in ("ddc restore", "a process for each core"):
        same = contents(home / name) == contents(home / "--ray")
        print(f"{count} pictures, {cores} cores: {'the same bytes' if same else 'OTHER BYTES'} as {name}")
        assert same


def node(home: Path, count: int = 200) -> None:
    from ray.cluster_utils import Cluster

    make_model(home / "model", blocks=2)
    make_pictures(home / "in", count, 16)
    words = (home / "in", "--model", home / "model", "--task", "sr2", "--device", "cpu")
    finish(start(*words, "-o", home / "one"))
    cluster = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 1 << 27})
    second = cluster.add_node(num_cpus=1, object_store_memory=1 << 27)
    process = start(*words, "-o", home / "out", "--json", "--ray", cluster.address)
    wait_until(lambda: len(list((home / "out").rglob("*.png"))) >= count // 4, process)
    made = len(list((home / "out").rglob("*.png")))
    cluster.remove_node(second, allow_graceful=False)
    out, _ = finish(process)
    cluster.shutdown()
    times = collections.Counter(json.loads(line)["input"] for line in out.splitlines())
    assert len(times) == count and set(times.values()) == {1} and contents(home / "one") == contents(home / "out")
    print(f"one of two nodes killed after {made} of {count}: all there, each told once, exit code 0, same bytes")


def bucket(home: Path, count: int = 120) -> None:
    make_model(home / "model", blocks=2)
    make_pictures(home / "in", count, 16)
    words = ("--model", home / "model", "--task", "sr2", "--device", "cpu")
    finish(start(home / "in", "-o", home / "one", *words))
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", "5555"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    keys = {"ENDPOINT_URL": "http://127.0.0.1:5555", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    os.environ |= {f"AWS_{name}": value for name, value in keys.items()} | {"AWS_DEFAULT_REGION": "us-east-1"}
    try:
        import s3fs

        time.sleep(5)
        s3fs.S3FileSystem().mkdir("pictures")
        source, target = Remote("s3:", "pictures/in"), Remote("s3:", "pictures/out")
        for file in (home / "in").rglob("*.png"):
            (source / file.relative_to(home / "in")).send(file)
        line = (source, "-o", target, *words, "--ray")
        process = start(*line)
        wait_until(lambda: len(target.files()) > count // 3, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(3)  # until its workers are gone
        kept = contents(target)
        assert all(kept[name] == whole for name, whole in contents(home / "one").items() if name in kept)
        begun = time.time()
        out, err = finish(start(*line))
        assert contents(target) == contents(home / "one"), "lost or half"
        again = len(out.splitlines())
        assert again == count - len(kept) + 1, (again, len(kept))  # one of them is ddc-job.json
        print(f"killed after {len(kept) - 1} of {count}: they are whole; the same command made the other {again}")
        print(f"in {time.time() - begun:.0f} s; {err.splitlines()[1]}")
    finally:
        server.terminate()


def processes_of(session: int) -> list[Path]:
    """The folders in /proc of the processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += [folder] if os.getsid(int(folder.name)) == session else []
    return found


def memory_of(session: int) -> dict[str, int]:
    """Megabytes of the processes of a command, by their kind."""
    found: dict[str, int] = collections.Counter()
    for folder in processes_of(session):
        with suppress(OSError, IndexError):
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            kind = "command" if "-m ddc" in words else "workers" if "MapWorker" in words else "Ray"
            _, resident, shared, *_ = map(int, (folder / "statm").read_text().split())
            found[kind] += (resident - shared) * os.sysconf("SC_PAGE_SIZE") // 2**20
    return dict(found)


def seconds_of(session: int) -> float:
    """Processor time of the processes of a command until now."""
    ticks = 0
    for folder in processes_of(session):
        with suppress(OSError):
            ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def many(home: Path, count: int = 10_000) -> None:
    make_model(home / "model", width=8, blocks=0)
    make_pictures(home / "in", count, 8)
    words = (home / "in", "--model", home / "model", "--task", "denoise", "--sigma", "0.1", "--steps", "1")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}  # one thread, as a worker has
    each = {}
    for name, more in (("--ray", ("--ray", "--workers", "1")), ("alone", ())):
        line = (*words, "-o", home / name, "--device", "cpu", *more)
        process = start(*line, env=environment, start_new_session=True)
        assert process.stdout is not None
        marks = []
        for number, _ in enumerate(process.stdout):
            if number in (0, count - 1):
                marks.append((time.monotonic(), seconds_of(process.pid)))
            if more and number % (count // 5) == count // 10:
                print(f"after {number:>6}: MB {memory_of(process.pid)}", flush=True)
        finish(process)
        each[name] = [1000 * (end - begin) / (count - 1) for begin, end in zip(*marks, strict=True)]
        print(f"{name}: {each[name][0]:.1f} ms a picture, {each[name][1]:.1f} ms of processor time", flush=True)
    print(f"the engine costs {each['--ray'][1] - each['alone'][1]:.1f} ms of processor time a picture")
    assert contents(home / "--ray") == contents(home / "alone")


def memory(home: Path) -> None:
    make_model(home / "model")
    (home / "killer.py").write_text(KILLER)
    for name, side in (("fine", 32), ("large", 200), ("bad", 33), ("good", 40)):
        Picture(data.astronaut()[:side, :side]).write(home / "in" / f"{name}.png")
    words = (home / "in", "-o", home / "out", "--model", home / "model", "--solver", "ddnm", "--steps", "2")
    process = start(*words, "--operator", f"{home / 'killer.py'}:Killer", "--device", "cpu", "--ray")
    out, err = process.communicate()
    print(process.returncode, sorted(Path(line).name for line in out.splitlines()), err.splitlines()[-1])
    print((home / "out" / "ddc-failures.json").read_text())


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ("throughput", "node", "bucket", "many", "memory"):
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        {f.__name__: f for f in (throughput, node, bucket, many, memory)}[sys.argv[1]](
            Path(folder), *map(int, sys.argv[2:])
        )
        print(f"{time.time() - began:.0f} s")

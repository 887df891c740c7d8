"""Many workers: Ray Data shares the pictures out, and each worker runs what `ddc restore` runs on one computer."""

import dataclasses
import hashlib
import json
import logging
import os
import pickle
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ddc import __version__
from ddc.cli.files import FORMATS, Item, RayOptions, Report
from ddc.cli.restore import Restore
from ddc.cluster import Ledger, cluster, pool, silent, told
from ddc.errors import UserError
from ddc.hub import fetch_model
from ddc.images import appearing
from ddc.notation import duration
from ddc.storage import Remote, changed_at, located

if TYPE_CHECKING:
    from ddc.pipeline import RestorationPipeline

logger = logging.getLogger("ddc")

BEAT, SILENT = 15, 120  # seconds between signs of life of a job, and after which a job without one is dead
LARGEST_SHARE = {"CPU": 16, "GPU": 64}  # pictures that a worker takes at once
LOST = 3  # workers that one picture alone may cost; the last has small tiles
SMALL_TILE = 128
# what does not change the results, and may differ when a job is continued
_FREE = {"out", "skip_existing", "shard", "json", "batch", "device", *(f.name for f in dataclasses.fields(RayOptions))}


def new_ledger(ray: Any) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(Ledger).remote()


# ---------------------------------------------------------------------------------------------------------
# workers


@dataclass
class Share(Report):
    """The pictures that a worker has taken. What `Report` prints is collected."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    def finished(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def say(self, text: str) -> None:
        self.lines.append({"say": text})

    def failed(self, source: Path, error: UserError) -> None:
        self.lines.append({"input": str(source), "error": str(error)})


class Worker:
    """Restores shares of pictures; the model is loaded once.

    A row has the `path` of a picture, and `bytes` or the path is read; the result goes to `target`, or into the row.
    """

    def __init__(self, command: Restore, ledger: Any, began: float = 0.0) -> None:
        import torch

        torch.set_num_threads(command.cores)
        self.command, self.ledger, self.began = command, ledger, began
        self.pipe: RestorationPipeline | None = None

    def __call__(self, table: Any) -> dict[str, list[Any]]:
        rows = table.to_pylist()
        if "path" not in table.column_names:
            raise UserError(
                "the dataset has no column path; read pictures with read_binary_files(…, include_paths=True)"
            )
        try:
            if self.pipe is None:
                from ddc.pipeline import RestorationPipeline

                loaded = RestorationPipeline.from_pretrained(self.command.model, self.command.network)
                self.pipe = loaded.to(self.command.device, self.command.fast)
        except UserError as error:
            return {"path": [""], "bytes": [None], "error": [str(error)], "line": [json.dumps({"fatal": str(error)})]}
        with TemporaryDirectory(prefix="ddc-") as folder:
            items = [self._item(row, Path(folder, str(index))) for index, row in enumerate(rows)]
            lines = self._lines(items)
            return self._table(rows, items, lines)

    def _item(self, row: dict[str, Any], folder: Path) -> Item:
        """Where a picture is and where its result goes; in `folder`, if the row says neither."""
        source = located(row["path"])
        target = row.get("target")
        if row.get("bytes") is not None:
            folder.mkdir()
            source = folder / source.name
            source.write_bytes(row["bytes"])
        if target is None:
            own = source.suffix if source.suffix.lower() in FORMATS else ".png"
            target = folder / "out" / f"{source.stem}.{(self.command.ext or own).lstrip('.')}"
        return Item(source, located(target))

    def _lines(self, items: list[Item]) -> list[dict[str, Any]]:
        """Restore the pictures; after a worker was lost, one by one, to find the one that costs workers."""
        import ray

        share = Share(self.command, items, [])
        if not ray.get(self.ledger.take.remote(str(items[0].source))):
            self._process(share, self.command)
            return share.lines
        share.say("a worker was lost; its pictures are given to another")
        for item in items:
            name = str(item.source)
            if self.began and changed_at(item.target) >= self.began:
                notes = ["finished before its worker was lost"]
                share.finished({"input": name, "output": str(item.target), "notes": notes})
                continue
            lost, command = ray.get(self.ledger.begin.remote(name)), self.command
            if lost >= LOST:
                text = f"{name} has cost {LOST + 1} workers, the last with tiles of {SMALL_TILE} pixels"
                share.failed(item.source, UserError(f"{text}; it needs more memory than a worker has"))
            else:
                if lost == LOST - 1:
                    command = dataclasses.replace(command, tile=min(command.tile or SMALL_TILE, SMALL_TILE))
                self._process(part := Share(command, [item], []), command)
                share.lines += part.lines
            self.ledger.end.remote(name)
        return share.lines

    def _process(self, share: Share, command: Restore) -> None:
        assert self.pipe is not None
        command.process(self.pipe, share)

    def _table(self, rows: list[Any], items: list[Item], lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
        """One row for each line; what is said about a picture has no result."""
        number = {str(item.source): index for index, item in enumerate(items)}
        table: dict[str, list[Any]] = {"path": [], "bytes": [], "error": [], "line": []}
        for line in lines:
            index = number.get(line.get("input", ""))
            path = "" if index is None else rows[index]["path"]
            text = json.dumps(line | {"input": path})
            if index is not None and str(items[index].source) != path:
                text = text.replace(json.dumps(str(items[index].source))[1:-1], json.dumps(path)[1:-1])
            written = index is not None and "error" not in line and "target" not in rows[index]
            table["path"].append(path)
            table["bytes"].append(items[index].target.read_bytes() if written and index is not None else None)
            table["error"].append(json.loads(text).get("error"))
            table["line"].append(text)
        return table


def restore(dataset: Any, task: str = "auto", **options: Any) -> Any:
    """Restore the pictures of a `ray.data.Dataset` with the columns path and bytes, as `ray.data.read_binary_files(…,
    include_paths=True)` makes it.

    options: those of `ddc restore`, as in model="folder", solver="ddnm", ext="png", workers=4, cores=2

    Returns a dataset of path, bytes (the restored file), error (None if it was restored) and line (JSON, as `ddc restore
    --json` prints it). Nothing runs before its rows are asked for.
    """
    command = absolute(Restore(inputs=(), out=Path("restored"), task=task, ray="", **options))
    command.check()
    with cluster("") as ray:
        _, needs = pool(command, ray, command.device)
        arguments = {"command": command, "ledger": new_ledger(ray)}
        return dataset.map_batches(Worker, fn_constructor_kwargs=arguments, batch_size=command.batch or 8, **needs)


# ---------------------------------------------------------------------------------------------------------
# jobs


def absolute(command: Restore) -> Restore:
    """A command whose files are found from every folder, and whose model on the Hub stays the same when that changes."""
    names = ("model", "network", "mask", "kernel", "out")
    changes: dict[str, Any] = {name: path.absolute() for name in names if (path := getattr(command, name)) is not None}
    changes["inputs"] = tuple(path.absolute() for path in command.inputs)
    if command.model is not None and not command.model.exists():
        name = command.model.as_posix().partition("@")[0]
        changes["model"] = Path(f"{name}@{fetch_model(command.model).name}")
    file, colon, name = (command.operator or "").rpartition(":")
    return dataclasses.replace(
        command, **changes, operator=f"{Path(file).absolute()}:{name}" if colon else command.operator
    )


class Job:
    """A job has its output folder to itself: `ddc-job.json` there says who is at work, on what, and since when.

    The file stays when a job is interrupted. The same command then continues: results that are newer than the beginning,
    by the clock of the storage, are finished. Another command begins anew.
    """

    def __init__(self, command: Restore) -> None:
        self.path = command.out / "ddc-job.json"
        fields = {f.name: str(getattr(command, f.name)) for f in dataclasses.fields(command) if f.name not in _FREE}
        settings = hashlib.sha256(json.dumps([__version__, fields], sort_keys=True).encode()).hexdigest()[:16]
        self.state: dict[str, Any] = {"job": uuid.uuid4().hex, "settings": settings, "began": 0.0, "running": True}
        self.state |= {"host": socket.gethostname(), "pid": os.getpid(), "beat": time.time()}
        self.over, self.taken, self.worked = threading.Event(), False, False

    def __enter__(self) -> "Job":
        before = self._read()
        if before and self._lives(before):
            who = f"process {before['pid']} on {before['host']}"
            raise UserError(
                f"another job is writing into {self.path.parent} ({who}); wait for it, or give another folder with -o"
            )
        if before.get("settings") == self.state["settings"]:
            self.state["began"] = before["began"] or changed_at(self.path)
            self.worked = True
        else:
            self._create()
            self.state["began"] = changed_at(self.path)
        self._save()
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.over.set()
        with suppress(UserError, OSError):
            if self.taken:
                return
            if kind is None or not self.worked:
                self.path.unlink(missing_ok=True)
            else:
                self.state["running"] = False
                self._save()

    def _create(self) -> None:
        content = json.dumps(self.state).encode()
        try:
            self.path.unlink(missing_ok=True)  # of a job that is dead
            if isinstance(self.path, Remote):
                self.path.create(content)
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("xb") as file:
                    file.write(content)
        except FileExistsError:
            raise UserError(
                f"another job has begun to write into {self.path.parent}; give another folder with -o"
            ) from None
        except OSError as error:
            raise UserError(f"{self.path.parent} cannot be written ({error.strerror}); check its permissions") from None

    def _read(self) -> dict[str, Any]:
        """The job that is there; empty if there is none."""
        try:
            state: dict[str, Any] = json.loads(self.path.read_bytes())
            return state if {"host", "pid", "beat", "running", "began", "settings"} <= state.keys() else {}
        except (UserError, OSError, ValueError, AttributeError):
            return {}

    def _lives(self, job: dict[str, Any]) -> bool:
        if not job["running"] or time.time() - job["beat"] > SILENT:
            return False
        if job["host"] != self.state["host"]:
            return True
        try:
            os.kill(job["pid"], 0)
        except OSError as error:
            return isinstance(error, PermissionError)
        return True

    def _save(self) -> None:
        self.state["beat"] = time.time()
        with appearing(self.path) as temporary:
            temporary.write_text(json.dumps(self.state))

    def _beat(self) -> None:
        while not self.over.wait(BEAT):
            with suppress(UserError, OSError):  # it may work the next time
                if self._read().get("job", self.state["job"]) != self.state["job"]:
                    self.taken = True
                else:
                    self._save()

    def unfinished(self, items: Sequence[Item]) -> list[int]:
        """The numbers of the pictures that have no result of this job."""
        if not self.worked:  # nothing was done before
            return list(range(len(items)))
        out, began = self.path.parent, self.state["began"]
        times: dict[Path, float] | None = None
        if isinstance(out, Remote):
            times = {out / name: time for name, time in out.files().items()}
        changed = (changed_at(item.target) if times is None else times.get(item.target, 0.0) for item in items)
        return [number for number, time in enumerate(changed) if time < began]


class Line:
    """One line on stderr: how many are done, how many a second, and the time left; in a file, a line now and then."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began = total, 0, 0.0
        self.terminal = sys.stderr.isatty()
        self.printed = time.monotonic()

    def add(self) -> None:
        now = time.monotonic()
        self.began = self.began or now  # the first picture takes the start of the workers
        self.done += 1
        if now - self.printed < (0.2 if self.terminal else 30) and self.done < self.total:
            return
        self.printed = now
        rate = (self.done - 1) / (now - self.began) if self.done > 1 else 0.0
        left = f", {duration((self.total - self.done) / rate)} left" if rate and self.done < self.total else ""
        speed = f", {rate:.1f} a second" if rate else ""
        end = "\n" if not self.terminal or self.done == self.total else "\r"
        print(f"{self.done} of {self.total}{speed}{left}", end=end, file=sys.stderr, flush=True)


def restore_files(command: Restore, report: Report) -> None:
    """Restore the pictures of a report with the workers of a cluster; what `ddc restore --ray` runs."""
    if command.names_a_file():
        raise UserError(f"--ray writes into a folder, and {command.out} is a picture; give a folder with -o")
    report.stream = sys.stdout
    with Job(command) as job, silent(command.ray or "") as ray:
        numbers = job.unfinished(report.items)
        report.done += len(report.items) - len(numbers)
        if len(numbers) < len(report.items):
            logger.warning("%d of %d were finished before", report.done, len(report.items))
        workers, needs = pool(command, ray, command.device, len(numbers))
        places = [tuple(str(path.absolute()) for path in report.items[number]) for number in numbers]
        rows = [{"path": source, "target": target} for source, target in places]
        number_of = dict(zip((source for source, _ in places), numbers, strict=True))
        share = max(1, min(len(rows) // (16 * workers), LARGEST_SHARE["GPU" if needs["num_gpus"] else "CPU"]))
        if not rows:
            return
        dataset = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // share))
        arguments = {"command": absolute(command), "ledger": new_ledger(ray), "began": job.state["began"]}
        progress, noted = Line(len(rows)), set[str]()
        with told(ray):
            restored = dataset.map_batches(Worker, fn_constructor_kwargs=arguments, batch_size=share, **needs)
            for row in restored.iter_rows():
                _tell(json.loads(row["line"]), number_of, report, progress, noted)
                job.worked = True
                if job.taken:
                    raise UserError(f"another job has taken over {command.out}; this one ends")


def _tell(line: dict[str, Any], number_of: dict[str, int], report: Report, progress: Line, noted: set[str]) -> None:
    """Print what a worker says."""
    if "fatal" in line:
        raise UserError(line["fatal"])
    if "say" in line:
        report.say(line["say"])
        return
    progress.add()
    item = report.items[number_of[line["input"]]]
    if "error" in line:
        report.failed(item.source, UserError(line["error"]))
        return
    for note in set(line.get("notes", [])) - noted:
        noted.add(note)
        logger.warning(note)
    report.finished(line | {"input": str(item.source), "output": str(item.target)})


# ---------------------------------------------------------------------------------------------------------
# evaluation


class Meter:
    """Measures batches of an evaluation. A row has the number of a case, or -1 for the clean pictures alone, and the
    numbers of its images."""

    def __init__(self, cores: int, models: Any, options: Any, runs: Any) -> None:
        import ray
        import torch

        from ddc.evaluation.benchmark import Measuring
        from ddc.evaluation.run import Timer, machine
        from ddc.perceptual import Metrics

        torch.set_num_threads(cores)
        runs = ray.get(runs)
        device = models.pipeline(next(iter(runs)).model).device
        metrics = Metrics(device, options.inception, options.fid)
        self.run = SimpleNamespace(write=lambda rows: self.truths.extend(rows))
        self.truths: list[Any] = []
        self.measuring = Measuring(self.run, models, metrics, options, Timer(None), runs)  # type: ignore[arg-type]
        self.cases, self.warm = list(runs), set[int]()
        self.images = {image.name: image for images in runs.values() for image in images}
        self.machine = machine(device, options.compile)

    def __call__(self, table: Any) -> dict[str, list[Any]]:
        import torch

        answers = []
        for row in table.to_pylist():
            images = [self.images[name] for name in row["images"]]
            if row["case"] < 0:
                self.truths.clear()
                self.measuring.truths(images)
                answers.append(pickle.dumps((self.machine, self.truths, [])))
                continue
            case = self.cases[row["case"]]
            if row["case"] not in self.warm:
                self.measuring.warm_up(case, images)
                self.warm.add(row["case"])
            rows, pictures = self.measuring.batch(case, images)
            # in 8 bits, as they are written
            small = [[(x.cpu().clamp(0, 1) * 255).round().to(torch.uint8) for x in of_one] for of_one in pictures]
            answers.append(pickle.dumps((self.machine, rows, small)))
        return {"case": [row["case"] for row in table.to_pylist()], "answer": answers}


def evaluate_with(
    command: Any, cases: Sequence[Any], images: Any, models: Any, options: Any, protocol: dict[str, Any]
) -> Any:
    """`ddc.evaluation.benchmark.evaluate` with the workers of a cluster; what `ddc evaluate --ray` runs."""
    from ddc.evaluation.benchmark import Measuring, evaluate

    class Shared(Measuring):
        """Hands the batches to the workers, and takes the rows as they come."""

        def truths(self, images: list[Any]) -> None:
            self.clean = images

        def batches(self, todo: dict[Any, list[Any]]) -> Iterator[tuple[Any, Any]]:
            size, known, hardware = self.options.batch_size, list(self.runs), set[str]()
            parts = [(-1, self.clean), *((known.index(case), images) for case, images in todo.items())]
            rows = [
                {"case": case, "images": [image.name for image in images[start : start + size]]}
                for case, images in parts
                for start in range(0, len(images), size)
            ]
            models._pipes = {}  # each worker loads its own
            arguments = {"cores": command.cores, "models": models, "options": options, "runs": ray.put(self.runs)}
            dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
            _, needs = pool(command, ray, options.device, len(rows))
            with told(ray):
                measured = dataset.map_batches(Meter, fn_constructor_kwargs=arguments, batch_size=1, **needs)
                for row in measured.iter_rows():
                    machine, result, pictures = pickle.loads(row["answer"])
                    hardware.add(machine)
                    if row["case"] < 0:
                        self.run.write(result)
                    else:
                        yield known[row["case"]], (result, [[x.float() / 255 for x in of_one] for of_one in pictures])
                    if self.timer.late():
                        break
            self.run.save_protocol({}, hardware=sorted(hardware))

    with silent(command.ray or "") as ray:
        return evaluate(cases, images, models, options, protocol, Shared)

"""Drives a headless Chromium through the pipe of its DevTools protocol; no other package is needed."""

import contextlib
import functools
import http.server
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOFTWARE_WEBGPU = (
    *("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"),
    "--enable-dawn-features=disable_workgroup_init",  # which takes most of the compiler's time
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One tab. `run` evaluates JavaScript, `wait` repeats that until it is true."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, os.fdopen(from_browser, "rb", buffering=0)
        self._rest, self._count, self._session = b"", 0, None
        self.requests: list[str] = []
        self.messages: list[str] = []  # errors in the console
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Any:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.messages.append(json.dumps(answer["params"])[:500])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = self._from.read(1 << 20)
            assert part, "Chromium has ended"
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        return json.loads(line)

    def run(self, script: str) -> Any:
        """The value of an expression; of a promise, what it resolves to."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(AssertionError):  # while the page loads
                if value := self.run(script):
                    return value
            time.sleep(0.05)
        raise AssertionError(f"{script} is not true after {seconds} s; {self.messages[-3:]}")

    def choose(self, path: Path) -> None:
        """Put a file into the page's field."""
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
        self.send("DOM.setFileInputFiles", files=[str(path)], nodeId=node)


@contextlib.contextmanager
def chromium(*options: str) -> Iterator[Page]:
    """A page of a new Chromium, which ends with the block. Without options it has no graphics card."""
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()

    def pipes() -> None:  # Chromium reads from 3 and writes to 4
        os.dup2(read_commands, 103), os.dup2(write_answers, 104)
        os.dup2(103, 3), os.dup2(104, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--remote-debugging-pipe"]
        command += ["--disable-dev-shm-usage", "--disable-background-networking", f"--user-data-dir={folder}"]
        command += options or ["--disable-gpu"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, close_fds=False, preexec_fn=pipes, **quiet)  # type: ignore[call-overload]
        os.close(read_commands), os.close(write_answers)
        try:
            page = Page(write_commands, read_answers)
            page.process = process  # type: ignore[attr-defined]
            yield page
        finally:
            process.terminate()
            process.wait(10)
            os.close(write_commands)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[http.server.ThreadingHTTPServer]:
    """A plain static server, which knows nothing of the page."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()

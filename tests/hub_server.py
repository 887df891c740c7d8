"""The part of the Hugging Face Hub's protocol that models need, on loopback: listing, fetching, and pushing."""

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub:
    """Models by name: their commits, and the branches and tags that point to them."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Files]] = {}
        self.refs: dict[str, dict[str, str]] = {}
        self.large: dict[str, bytes] = {}  # by SHA-256
        self.fetched: list[str] = []
        self.asked = 0
        self.url = ""

    def commit(self, name: str, files: Files) -> str:
        known = self.commits.setdefault(name, {})
        sha = hashlib.sha1(repr((len(known), sorted(files.items()))).encode()).hexdigest()
        known[sha] = files
        self.refs.setdefault(name, {})["main"] = sha
        return sha

    def files(self, name: str, revision: str) -> tuple[str, Files]:
        sha = self.refs[name].get(revision, revision)
        return sha, self.commits[name][sha]

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        handler = type("Handler", (_Handler,), {"hub": self})
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            often = 0.02  # seconds after which it looks whether to end
            threading.Thread(target=server.serve_forever, args=[often], daemon=True).start()
            yield self
            server.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, code: str) -> None:
        self.reply({"error": code}, 404, X_Error_Code=code)

    def do_GET(self) -> None:
        self.hub.asked += 1
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        start = 2 if words[0] == "api" else 0
        name, rest = "/".join(words[start : start + 2]), words[start + 2 :]
        if name not in self.hub.commits:
            self.missing("RepoNotFound")
            return
        what, revision, *path = rest or ["revision", "main"]
        try:
            sha, files = self.hub.files(name, revision)
        except KeyError:
            self.missing("RevisionNotFound")
            return
        if what == "revision":
            self.reply({"id": name, "sha": sha, "siblings": [{"rfilename": one} for one in files], "tags": []})
        elif what == "tree":
            self.reply([self.entry(one, content) for one, content in files.items()])
        elif "/".join(path) not in files:
            self.missing("EntryNotFound")
        else:
            content = files["/".join(path)]
            self.hub.fetched += ["/".join(path)] if self.command == "GET" else []
            tag = self.entry("/".join(path), content).get("lfs", {"oid": git_hash(content)})["oid"]
            self.reply(content, X_Repo_Commit=sha, ETag=f'"{tag}"')

    do_HEAD = do_GET

    def entry(self, path: str, content: bytes) -> dict[str, Any]:
        plain = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
        large = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return plain | ({"lfs": large} if path.endswith(".safetensors") else {})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.large[hashlib.sha256(content).hexdigest()] = content
        self.reply({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        if self.headers.get("Authorization") != "Bearer hf_right" and words[-1] != "validate-yaml":
            self.reply({"error": "not allowed"}, 401)
        elif words == ["api", "repos", "create"]:
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}"
            if name in self.hub.commits:
                self.reply({"error": "exists", "url": f"{self.hub.url}/{name}"}, 409)
                return
            self.hub.commit(name, {})
            self.reply({"url": f"{self.hub.url}/{name}", "name": name})
        elif words[-1] == "validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif "preupload" in words:
            modes = {True: "lfs", False: "regular"}
            self.reply(
                {
                    "files": [
                        {
                            "path": one["path"],
                            "uploadMode": modes[one["path"].endswith(".safetensors")],
                            "shouldIgnore": False,
                        }
                        for one in json.loads(body)["files"]
                    ]
                }
            )
        elif words[-1] == "batch":
            where = {"upload": {"href": f"{self.hub.url}/upload"}}
            objects = [one | {"actions": where} for one in json.loads(body)["objects"]]
            self.reply({"transfer": "basic", "objects": objects})
        else:
            name = "/".join(words[2:4])
            files = dict(self.hub.files(name, "main")[1])
            for line in body.splitlines():
                one = json.loads(line)
                value = one["value"]
                if one["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif one["key"] == "lfsFile":
                    files[value["path"]] = self.hub.large[value["oid"]]
            sha = self.hub.commit(name, files)
            self.reply({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}"})

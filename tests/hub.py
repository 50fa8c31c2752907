"""A Hugging Face Hub of our own on loopback, for the real huggingface_hub and KerasHub to upload to."""

import base64
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

URI, REPOSITORY = "hf://someone/some-bert", "someone/some-bert"


class StandIn(ThreadingHTTPServer):
    """The part of the Hub that uploads and downloads of one model use.

    Attributes:
        commits: after each commit, all files by name.
        failures: requests to make the repository that are answered by status 500.
        silent: whether those are not answered at all.
        public: whether the repository is, as its first request said; None before that.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.commits, self.failures, self.silent, self.public = [], 0, False, None
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def names(self):
        """Of the commits."""
        return [f"{number:040}" for number, _ in enumerate(self.commits, start=1)]

    @property
    def files(self):
        return self.commits[-1] if self.commits else {}


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        hub, path = self.server, self.path.split("?")[0].removeprefix("/api/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "repos/create":
            while hub.silent:
                time.sleep(0.01)
            hub.failures -= 1
            status = 500 if hub.failures >= 0 else 200 if hub.public is None else 409
            if status == 200:
                hub.public = json.loads(body).get("visibility") != "private"
            self.send(status, {"url": f"{hub.url}/{REPOSITORY}"})
        elif path == "validate-yaml":
            self.send(200, {})
        elif path.startswith(f"models/{REPOSITORY}/preupload/"):
            as_it_is = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self.send(200, {"files": [{"path": file["path"]} | as_it_is for file in json.loads(body)["files"]]})
        elif path.startswith(f"models/{REPOSITORY}/commit/"):
            values = [line["value"] for line in map(json.loads, body.splitlines()) if line["key"] == "file"]
            hub.commits.append(hub.files | {file["path"]: base64.b64decode(file["content"]) for file in values})
            self.send(200, {"commitUrl": f"{hub.url}/{REPOSITORY}/commit/1", "commitOid": hub.names[-1]})
        elif path == f"models/{REPOSITORY}/revision/main":
            self.send(200, {"id": REPOSITORY, "sha": hub.names[-1], "siblings": []})
        elif found := re.fullmatch(f"models/{REPOSITORY}/tree/(.*)", path):
            files = hub.commits[hub.names.index(found[1])]
            tree = [{"type": "file", "path": name, "size": len(files[name]), "oid": name} for name in files]
            self.send(200, tree)
        elif (found := re.fullmatch(f"/{REPOSITORY}/resolve/([^/]*)/(.*)", path)) and found[2] in hub.files:
            commit = hub.names[-1] if found[1] == "main" else found[1]
            content = hub.commits[hub.names.index(commit)][found[2]]
            self.send(200, content, {"ETag": f'"{hash(content)}"', "X-Repo-Commit": commit})
        else:
            self.send(404, {}, {"X-Error-Code": "EntryNotFound"})

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def send(self, status, content, headers=None):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *words):
        pass

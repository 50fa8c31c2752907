"""A Hugging Face Hub of our own on loopback, for the real huggingface_hub and KerasHub to upload to."""

import base64
import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import constants, hf_api

URI, REPOSITORY = "hf://someone/some-bert", "someone/some-bert"


class StandIn(ThreadingHTTPServer):
    """The part of the Hub that uploads and downloads of one model use; files of weights go the way of Git LFS.

    Attributes:
        requests: `METHOD path` of each, in order.
        commits: after each commit, all files by name.
        hold: requests whose path has this pattern are not answered before `released` is set, for 30 seconds.
        failures: requests to make the repository that are answered by status 500.
        public: whether the repository is, as its first request said; None before that.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests, self.commits, self.objects = [], [], {}
        self.hold, self.released, self.failures = "nothing", threading.Event(), 0
        self.public = None
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def files(self):
        return self.commits[-1] if self.commits else {}

    def handle_error(self, request, client_address):
        pass  # a process that was ended in the middle of an upload


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        hub, path = self.server, self.path.split("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.requests.append(f"{self.command} {path}")
        if re.search(hub.hold, path):
            hub.released.wait(30)
        match path.removeprefix("/api/"):
            case "repos/create":
                hub.failures -= 1
                status = 500 if hub.failures >= 0 else 200 if hub.public is None else 409
                if status == 200:
                    hub.public = json.loads(body).get("visibility") != "private"
                self.send(status, {"url": f"{hub.url}/{REPOSITORY}"})
            case "validate-yaml":
                self.send(200, {})
            case str(p) if p.startswith(f"models/{REPOSITORY}/preupload/"):
                self.send(200, {"files": [self.mode(file) for file in json.loads(body)["files"]]})
            case str(p) if p.endswith("/info/lfs/objects/batch"):
                upload = {"upload": {"href": f"{hub.url}/lfs"}}
                objects = [o | {"actions": upload} for o in json.loads(body)["objects"]]
                self.send(200, {"objects": objects})
            case "/lfs":
                hub.objects[hashlib.sha256(body).hexdigest()] = body
                self.send(200, {})
            case str(p) if p.startswith(f"models/{REPOSITORY}/commit/"):
                hub.commits.append(hub.files | dict(self.committed(body)))
                self.send(200, {"commitUrl": f"{hub.url}/{REPOSITORY}/commit/1", "commitOid": "1" * 40})
            case str(p) if p.startswith(f"models/{REPOSITORY}/xet-write-token/"):
                self.send(200, {"casUrl": f"{hub.url}/xet", "accessToken": "token", "exp": 99999999999})
            case str(p) if (name := p.removeprefix(f"/{REPOSITORY}/resolve/main/")) in hub.files:
                self.send(200, hub.files[name], {"ETag": f'"{digest(hub.files[name])}"', "X-Repo-Commit": "1" * 40})
            case _:
                self.send(404, {}, {"X-Error-Code": "EntryNotFound"})

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def mode(self, file):
        known = self.server.files.get(file["path"])
        oid = known and digest(known)
        lfs = file["path"].endswith(".h5")
        return {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}

    def committed(self, body):
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                yield value["path"], base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                yield value["path"], self.server.objects[value["oid"]]

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


def digest(content):
    return hashlib.sha256(content).hexdigest()


def use(url, monkeypatch):
    """Turns this process's huggingface_hub, which has read its environment already, to another Hub."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hf_api.api, "endpoint", url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_token")


def environment(hub, **more):
    """Of a process that uploads to the stand-in."""
    return os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_token"} | more

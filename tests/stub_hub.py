"""A stand-in of the Hub's HTTP API: what `huggingface_hub` calls to make a repository and commit to it. No Xet."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Repository:
    """What was pushed to one repository."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)


class StubHub:
    """
    Serves on a thread inside `with`. `repositories` are by type and full name, such as `("model", "me/tiny")`. With
    `failing`, commits end with status 503.
    """

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.failing = False
        self.url = ""
        self._blobs: dict[str, bytes] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> StubHub:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/api/repos/create", self._create)
        app.router.add_get("/api/{kind}s/{space}/{name}", self._info)
        app.router.add_post("/api/{kind}s/{space}/{name}/preupload/main", self._preupload)
        app.router.add_post("/api/{kind}s/{space}/{name}/commit/main", self._commit)
        app.router.add_post("/{space}/{name}.git/info/lfs/objects/batch", self._batch)
        app.router.add_post("/datasets/{space}/{name}.git/info/lfs/objects/batch", self._batch)
        app.router.add_put("/blobs/{oid}", self._put)
        app.router.add_post("/api/validate-yaml", lambda _: web.json_response({"errors": [], "warnings": []}))
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def _of(self, request: web.Request) -> Repository | None:
        names = request.match_info
        return self.repositories.get((names["kind"], f"{names['space']}/{names['name']}"))

    async def _create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        kind, name = asked.get("type") or "model", f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = f"{self.url}/{'datasets/' if kind == 'dataset' else ''}{name}"
        if (kind, name) in self.repositories:
            return web.json_response({"error": "exists", "url": url}, status=409)
        self.repositories[kind, name] = Repository(private=asked.get("visibility") == "private")
        return web.json_response({"url": url, "name": name})

    async def _info(self, request: web.Request) -> web.Response:
        repository = self._of(request)
        if repository is None:
            return web.json_response({}, status=404, headers={"X-Error-Code": "RepoNotFound"})
        name = f"{request.match_info['space']}/{request.match_info['name']}"
        return web.json_response({"id": name, "private": repository.private, "tags": [], "siblings": []})

    async def _preupload(self, request: web.Request) -> web.Response:
        files = (await request.json())["files"]
        large = (".safetensors", ".arrow", ".png", "tokenizer.json")
        modes = [(file["path"], "lfs" if file["path"].endswith(large) else "regular") for file in files]
        answer = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes]
        return web.json_response({"files": answer})

    async def _batch(self, request: web.Request) -> web.Response:
        asked = await request.json()
        objects = [
            {**wanted, "actions": {"upload": {"href": f"{self.url}/blobs/{wanted['oid']}"}}}
            for wanted in asked["objects"]
        ]
        return web.json_response({"transfer": "basic", "objects": objects})

    async def _put(self, request: web.Request) -> web.Response:
        content = await request.read()
        assert hashlib.sha256(content).hexdigest() == request.match_info["oid"]
        self._blobs[request.match_info["oid"]] = content
        return web.Response()

    async def _commit(self, request: web.Request) -> web.Response:
        repository = self._of(request)
        assert repository is not None
        if self.failing:
            return web.json_response({"error": "the stand-in fails"}, status=403)
        repository.tokens.add(request.headers.get("Authorization", "").removeprefix("Bearer "))
        for line in (await request.text()).splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                repository.commits.append(value["summary"])
            elif entry["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert entry["key"] == "lfsFile", entry
                repository.files[value["path"]] = self._blobs[value["oid"]]
        url = f"{self.url}{request.path.removeprefix('/api').replace('/models', '').replace('/main', '/' + '1' * 40)}"
        return web.json_response({"success": True, "commitUrl": url, "commitOid": "1" * 40})

"""The same store with the requests of Google Cloud Storage (JSON API)."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.write.object_store import Handler, Object, Refused, Server, listed, object_store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

# Otherwise gcsfs asks Google what kind of bucket it is. gcsfs reads this when it is imported.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

_OBJECT = re.compile(r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)")
_BUCKET = re.compile(r"/(?:upload/)?storage/v1/b/([^/]+)/o")


def gcs_store(**settings: Any) -> AbstractContextManager[Server]:
    return object_store(GcsHandler, **settings)


def gcs_options(server: Server) -> dict[str, Any]:
    return {"token": "anon", "endpoint_url": server.url, "project": "test", "skip_instance_cache": True}


class GcsHandler(Handler):
    """Generations are counted by the store."""

    def path_of(self) -> str:
        parts = urlsplit(self.path)
        match = _OBJECT.fullmatch(parts.path)
        if match is not None:
            return f"{unquote(match[1])}/{unquote(match[2])}"
        bucket = _BUCKET.fullmatch(parts.path)
        return unquote(bucket[1]) if bucket is not None else parts.path

    def called(self, query: Mapping[str, str]) -> str:
        path = urlsplit(self.path).path
        if "/rewriteTo/" in path:
            return "copy_object"
        if self.command == "POST":
            return "put_object"
        if self.command == "DELETE":
            return "delete_object"
        if _OBJECT.fullmatch(path) is None:
            return "list_objects"
        return "get_object" if query.get("alt") == "media" else "head_object"

    def heed(self, state: Server, kind: str, stored_object: Object | None) -> None:
        query = {k: v[0] for k, v in parse_qs(urlsplit(self.path).query).items()}
        wanted = query.get("ifGenerationMatch")
        if wanted is not None and wanted != ("0" if stored_object is None else str(stored_object.number)):
            raise Refused(412, "conditionNotMet")

    def told(self, path: str, stored_object: Object) -> dict[str, Any]:
        bucket, _, key = path.partition("/")
        fixed = {"bucket": bucket, "name": key, "size": str(len(stored_object.data)), "etag": stored_object.tag}
        times = {"updated": listed(stored_object.written), "timeCreated": listed(stored_object.written)}
        return {
            **json.loads(stored_object.headers.get("told", "{}")),
            **fixed,
            **times,
            "generation": str(stored_object.number),
        }

    def head_object(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        stored_object = state.objects.get(path)
        if stored_object is None:
            raise Refused(404, "notFound")
        return 200, {"Content-Type": "application/json"}, json.dumps(self.told(path, stored_object)).encode()

    def get_object(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        stored_object = state.objects.get(path)
        if stored_object is None or query.get("generation", str(stored_object.number)) != str(stored_object.number):
            raise Refused(404, "notFound")
        return super().get_object(state, path, query, body)

    def put_object(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])
        assert boundary is not None
        mark = f"--{boundary[1]}".encode()
        first = body.index(mark) + len(mark)
        second = body.index(mark, first)
        told = json.loads(re.split(rb"\r?\n\r?\n", body[first:second], maxsplit=1)[1])
        content = re.split(rb"\r?\n\r?\n", body[second + len(mark) : body.rindex(mark)], maxsplit=1)[1]
        data = content.removesuffix(b"\n").removesuffix(b"\r") if content.endswith(b"\r\n") else content[:-1]
        path = f"{path}/{told['name']}"
        self.heed(state, "put", state.objects.get(path))
        metadata = {k: v for k, v in told.items() if k in ("contentType", "metadata", "cacheControl")}
        state.objects[path] = Object(data, {"told": json.dumps(metadata)})
        return self.head_object(state, path, query, b"")

    def copy_object(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        match = re.fullmatch(r"/storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)", urlsplit(self.path).path)
        assert match is not None
        old, new = f"{unquote(match[1])}/{unquote(match[2])}", f"{unquote(match[3])}/{unquote(match[4])}"
        state.objects[new] = Object(state.objects[old].data, dict(state.objects[old].headers))
        return 200, {}, json.dumps({"done": True, "resource": self.told(new, state.objects[new])}).encode()

    def list_objects(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        prefix, bucket = query.get("prefix", ""), path
        keys = sorted(p.partition("/")[2] for p in state.objects if p.startswith(f"{bucket}/{prefix}"))
        files = [k for k in keys if "/" not in k[len(prefix) :] or "delimiter" not in query]
        groups = sorted({prefix + k[len(prefix) :].partition("/")[0] + "/" for k in keys if k not in files})
        items = [self.told(f"{bucket}/{k}", state.objects[f"{bucket}/{k}"]) for k in files]
        return 200, {}, json.dumps({"items": items, "prefixes": groups}).encode()

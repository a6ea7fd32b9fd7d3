"""A server with a second dialect, run as a program: it is in the list before the server's modules look at that."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from inlay.api import dialect as dialects
from inlay.api.call import AnswerRoute, Call, Level
from inlay.api.failures import BodyError, Failure
from inlay.sampling.params import SamplingParams
from inlay.types import RequestOutput

PATH = "/v1/say"


class Events:
    """One event with all of the text so far."""

    def update(self, number: int, output: RequestOutput) -> Iterable[str]:
        return [f"data: {json.dumps({'said': output.outputs[0].text})}\n\n"]

    def end(self) -> Iterable[str]:
        return ["data: over\n\n"]

    def fail(self, failure: Failure) -> Iterable[str]:
        return [f"data: {json.dumps(Say().error_body(failure))}\n\n"]


class Say:
    """A dialect of one field: ``{"say": "…"}`` is answered with ``{"said": "…"}``."""

    routes = (
        AnswerRoute(PATH, "say", "What comes behind it.", body="SayBody", error="SayError", answer={"type": "object"}),
    )

    def components(self, names: Sequence[str]) -> dict[str, Any]:
        return {"SayBody": {"type": "object", "title": names[0]}, "SayError": {"type": "object"}}

    def read(self, raw: Any, endpoint: str) -> Any:
        if not isinstance(raw, dict) or "say" not in raw:
            raise BodyError("there is nothing to say; give say", param="say")
        return raw

    def translate(self, body: Any, **_: Any) -> Call:
        return Call(
            endpoint=PATH,
            model=None,
            prompts=(body["say"],),
            params=SamplingParams(max_tokens=4, temperature=0),
            said_max_tokens=True,
            reuse=None,
            positions=None,
            priority=0,
            stream=bool(body.get("stream")),
            include_usage=False,
            running_usage=False,
            tools=None,
        )

    def respond(self, call: Call, outputs: Sequence[RequestOutput], **_: Any) -> dict[str, Any]:
        return {"said": outputs[0].outputs[0].text}

    def stream(self, call: Call, **_: Any) -> Events:
        return Events()

    def error_body(self, failure: Failure) -> dict[str, Any]:
        return {"wrong": failure.message}

    def limit_headers(self, levels: Sequence[Level]) -> dict[str, str]:
        return {f"rest-{level.name}": str(level.remaining) for level in levels}


def main() -> None:
    dialects.DIALECTS = (*dialects.DIALECTS, Say())
    from inlay import AsyncLLM
    from tests.conftest import tiny
    from tests.server.server.conftest import running
    from tests.system.batch.helpers import read, run, write

    llm = AsyncLLM(tiny("llama"), kv_memory="16MiB", chunk_size=8)
    with running(llm) as site:
        *events, last, _ = site.call("POST", PATH, {"say": "Hello", "stream": True})[2].split("\n\n")
        found = {
            "whole": site.post(PATH, say="Hello"),
            "streamed": [json.loads(events[-1].removeprefix("data: ")), last],
            "wrong": site.call("POST", PATH, {})[::2],
            "other": site.call("POST", "/v1/completions", {})[2]["error"]["param"],
            "described": site.call("GET", "/openapi.json")[2]["paths"][PATH]["post"]["requestBody"],
        }
    llm.shutdown()
    with TemporaryDirectory() as folder:
        asked = {"a": {"say": "Hello"}, "b": {}}
        rows = [{"custom_id": name, "method": "POST", "url": PATH, "body": body} for name, body in asked.items()]
        run(write(Path(folder) / "in", rows), Path(folder) / "out")
        found["batch"] = {row["custom_id"]: row["response"]["body"] for row in read(Path(folder) / "out")}
    print(json.dumps(found))


if __name__ == "__main__":
    main()

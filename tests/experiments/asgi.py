"""Asks an application without a socket."""

import asyncio
import json
from typing import Any


def ask(app: Any, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Returns the status and the JSON of an answer, GET's without a body, else POST's."""
    received: list[Any] = [
        {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET" if body is None else "POST", "path": path, "query_string": b""}
    scope |= {"raw_path": path.encode(), "headers": [], "http_version": "1.1"}
    asyncio.run(app(scope, receive, send))
    head, *bodies = sent
    return head["status"], json.loads(b"".join(one["body"] for one in bodies))

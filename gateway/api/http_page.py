"""`/docs`: the endpoints' description for people, as one page that loads nothing from anywhere."""

import html
from collections.abc import Sequence

import msgspec

from gateway.api.http_docs import Operation

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "pre{background:#8882;padding:.6rem;overflow-x:auto;border-radius:.3rem}h3 code{font-size:1.1rem}"
    ":root{color-scheme:light dark}"
)
HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


def page(docs: Sequence[Operation]) -> str:
    """HTML."""
    body: list[str] = []
    for tag in dict.fromkeys(operation.tag for operation in docs):
        body.append(f"<h2>{html.escape(tag)}</h2>")
        body.extend(_section(operation) for operation in docs if operation.tag == tag)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Headrace HTTP API</title><style>{_STYLE}</style>'
        "<h1>Headrace HTTP API</h1><p>Machine-readable: <a href=/openapi.json>/openapi.json</a>. Every answer of an "
        "inference has the headers <code>request-id</code> and <code>server-timing</code>; a failure is JSON "
        '<code>{"error": "…"}</code> with <code>error-reason</code> and, where a retry can help, '
        f"<code>retry-after</code>.</p>{''.join(body)}</html>"
    )


def _section(operation: Operation) -> str:
    paths = "<br>".join(f"<code>{operation.method} {html.escape(path)}</code>" for path in operation.paths)
    query = "".join(f"<li><code>{one['name']}</code> {html.escape(one['description'])}</li>" for one in operation.query)
    answer = msgspec.json.format(msgspec.json.encode(operation.answer)).decode()
    return (
        f"<h3>{html.escape(operation.summary)}</h3><p>{paths}</p><p>{html.escape(operation.description)}</p>"
        + (f"<ul>{query}</ul>" if query else "")
        + f"<pre>curl {html.escape(operation.curl)}</pre><pre>{html.escape(answer)}</pre>"
    )

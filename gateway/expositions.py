"""Several gateways' metrics as one page for Prometheus. Pure policy.

Each gateway's own text is taken line by line and not parsed: it was made by the same library, and a scrape must not
hold up the event loop (the library's parser takes over ten times as long). Every family is there once, and every sample
says whose it is.
"""

from collections.abc import Mapping

LABEL = "gateway"


def merged(texts: Mapping[str, str | None]) -> str:
    """Number → what that gateway's own `/metrics` says; None for one that does not answer."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for number, text in texts.items():
        heads: list[str] = []
        samples: list[str] = []
        for line in (text or "").splitlines():
            if line.startswith("# HELP "):
                heads, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
                if not heads:
                    heads.append(line)
            elif line.startswith("#"):
                if len(heads) == 1:
                    heads.append(line)
            elif line:
                samples.append(_labelled(line, number))
    lines = [
        f"# HELP headrace_{LABEL}_up Whether this gateway process answers the one that was asked.",
        f"# TYPE headrace_{LABEL}_up gauge",
        *(f'headrace_{LABEL}_up{{{LABEL}="{number}"}} {float(text is not None)}' for number, text in texts.items()),
    ]
    for heads, samples in families.values():
        lines += heads + samples
    return "\n".join(lines) + "\n"


def _labelled(sample: str, number: str) -> str:
    """`name{a="b"} 1` or `name 1` with one more label in front."""
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        return f'{sample[:brace]}{{{LABEL}="{number}",{sample[brace + 1 :]}'
    return f'{sample[:space]}{{{LABEL}="{number}"}}{sample[space:]}'

"""URLs, and the names by which everything else knows them: without user, password, or what a query may sign.

`https://me:pw@host/m.pt?version=3&X-Amz-Signature=5f…` is shown as `https://host/m.pt?version=3&X-Amz-Signature=…`. The
file beside it, `https://host/config.json?version=3&X-Amz-Signature=…`, is asked for with the same user and query.
"""

from __future__ import annotations

import re

_HARMLESS = "file filename name path rev revision ref version versionid generation branch raw download dl"
#: Parameters of a query that are shown as they are: which file, and which version of it.
HARMLESS = frozenset(_HARMLESS.split())

#: The name shown -> the URL as it was typed; without what follows the last `/` for the folder around it.
typed: dict[str, str] = {}

_URL = re.compile(r"(?P<scheme>[^/?#]*://)(?:(?P<user>[^/?#]*)@)?(?P<way>[^?]*)(?:\?(?P<query>.*))?", re.DOTALL)


def shown(url: str) -> str:
    """The name for a URL, which may be such a name already; a section behind `#` stays where it is."""
    way, mark, section = url.partition("#")
    found = _URL.fullmatch(way)
    if found is None or (found["user"] is None and found["query"] is None):
        return url
    name = found["scheme"] + found["way"] + _query(found["query"])
    count = 1
    while typed.setdefault(name, way) != way:
        if way == name:  # it was typed as it is shown
            break
        count += 1
        name = f"{found['scheme']}{found['way']}{_query(found['query'])}({count})"
    folder = found["way"].rpartition("/")[0]
    user = "" if found["user"] is None else f"{found['user']}@"
    query = "" if found["query"] is None else f"?{found['query']}"
    typed.setdefault(
        found["scheme"] + folder + name.partition("?")[1] + name.partition("?")[2],
        found["scheme"] + user + folder + query,
    )
    return name + mark + section


def _query(query: str | None) -> str:
    if query is None:
        return ""
    return "?" + "&".join(map(_parameter, query.split("&")))


def _parameter(text: str) -> str:
    name, equals, value = text.partition("=")
    if not equals:  # a token alone
        return "…" if len(text) > 16 else text
    return text if name.lower() in HARMLESS else f"{name}={'…' if value else ''}"


def url_of(path: str) -> str:
    """The URL for a name: as it was typed, or that of a file in a folder that was typed, or around a file that was."""
    if path in typed:
        return typed[path]
    way, mark, query = path.partition("?")
    folder, rest = way, ""
    while "/" in folder.partition("://")[2]:
        folder, _, name = folder.rpartition("/")
        rest = f"/{name}{rest}"
        for known in (folder + mark + query, f"{folder}/{mark}{query}"):
            if known in typed:
                real, sign, secret = typed[known].partition("?")
                return real.rstrip("/") + rest + sign + secret
    return path


def is_folder(path: str) -> bool:
    """Whether it can only be a folder, as its name ends."""
    way = path.partition("?")[0]
    return way.endswith("/") or "/" not in way.partition("://")[2]

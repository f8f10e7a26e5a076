"""Look up paths below a directory in the order given, then print what each of them is, and what a walk finds, as JSON.

Arguments: DIRECTORY walk|- PATHS, these as a JSON list. A directory is shown as null, a file as its bytes in base64, an
error as its number.
"""

from __future__ import annotations

import base64
import json
import os
import sys


def kind(path: str) -> str | int | None:
    try:
        if os.path.isdir(path):
            return None
        with open(path, "rb") as file:
            return base64.b64encode(file.read()).decode()
    except OSError as e:
        return e.errno


def main() -> None:
    root, listed = sys.argv[1], sys.argv[2] == "walk"
    kinds = {path: kind(os.path.join(root, path)) for path in json.loads(sys.argv[3])}
    walked = []
    for directory, directories, files in os.walk(root) if listed else ():
        walked += [os.path.relpath(os.path.join(directory, name), root) for name in (*directories, *files)]
    print(json.dumps([kinds, sorted(walked)]))


if __name__ == "__main__":
    main()

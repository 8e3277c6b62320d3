"""Wrapper that runs a command and prints twice per second the sum of counters in files.

Each file of the directory FOLDER contains one counter: `python counted.py FOLDER COMMAND…`. The
command has the directory as COUNTED_FOLDER in its environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tied import tied  # (a program of its own, next to this one)


def main(folder: Path, command: list[str]) -> None:
    os.environ["COUNTED_FOLDER"] = str(folder)
    with subprocess.Popen(tied(command), stdout=sys.stderr, stdin=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(0.5)
            texts = [file.read_text() for file in folder.iterdir()] if folder.exists() else []
            print(sum(int(text or 0) for text in texts), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

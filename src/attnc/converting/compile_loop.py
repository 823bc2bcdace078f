"""The program of the process that compiles a loop: `python -m attnc.converting.compile_loop NAME DTYPE FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from attnc.converting.compiled_loops import write_library

if __name__ == "__main__":
    loop_name, loop_dtype, library_path = sys.argv[1:]
    sys.exit(0 if write_library(loop_name, loop_dtype, Path(library_path)) else 1)

"""Peak memory of a piece of Python, measured in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# The high-water mark of this address space; ru_maxrss would also count the process that started it.
PEAK = """
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"peak": peak, "error": float(error)}))
"""


def peak_and_error(code: str, *arguments: object) -> dict[str, Any]:
    """What `code`, which leaves an `error`, reaches: its peak in bytes and that error."""
    done = subprocess.run(
        [sys.executable, "-c", "import json\n" + code + PEAK, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found

"""``python -m tinyllm.trace PROMPT [PROMPT ...]``"""

import sys

from tinyllm.console import run
from tinyllm.trace.command import main

if __name__ == "__main__":
    sys.exit(run(main))

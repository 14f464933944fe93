"""``python -m tinyllm.trace PROMPT [PROMPT ...]``"""

import sys

try:  # Ctrl-C while the package itself is imported, before this line, still shows a traceback; ``tinyllm trace`` has none
    from tinyllm.console import EXIT_INTERRUPTED, run
    from tinyllm.trace.command import main
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    try:
        sys.exit(run(main))
    except KeyboardInterrupt:  # before run's own, or behind it
        sys.exit(EXIT_INTERRUPTED)

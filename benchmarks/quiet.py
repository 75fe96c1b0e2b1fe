"""A benchmark prints its tables and nothing else: what libraries write meanwhile is shown
only if it fails.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_tables() -> Iterator[None]:
    """Within, `print` reaches the terminal; all else that is written to the file descriptors
    1 and 2 does not.

    PyTorch's profiler and Megatron write there, some of it from C++, which no Python setting reaches.
    After an error what they wrote goes to standard error, before the traceback.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    out, error, printed = os.dup(1), os.dup(2), sys.stdout
    with tempfile.TemporaryFile() as noise, os.fdopen(os.dup(out), "w", buffering=1) as sys.stdout:
        os.dup2(noise.fileno(), 1)
        os.dup2(noise.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        except SystemExit as end:
            failed = end.code not in (None, 0)
            raise
        finally:
            sys.stderr.flush()
            os.dup2(out, 1)
            os.dup2(error, 2)
            os.close(out)
            os.close(error)
            sys.stdout.flush()
            sys.stdout = printed
            if failed:
                noise.seek(0)
                sys.stderr.write(noise.read().decode(errors="replace"))

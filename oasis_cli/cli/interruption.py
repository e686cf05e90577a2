"""Ctrl-C while modules are being imported takes effect once they are.

Libraries in C++ call back into Python as they are imported, and some answer a KeyboardInterrupt there with abort().
"""

import signal
import threading
from types import FrameType
from typing import Final

_PAUSE_S: Final = 0.05
_IMPORT_SYSTEM: Final = "<frozen importlib"


def interrupt_between_imports() -> None:
    """Replace Python's own handler of SIGINT; where another one was set, or none is wanted, it stays."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _is_importing(frame):
        raise KeyboardInterrupt
    later = threading.Timer(_PAUSE_S, signal.raise_signal, [number])
    later.daemon = True
    later.start()


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT_SYSTEM):
            return True
        frame = frame.f_back
    return False

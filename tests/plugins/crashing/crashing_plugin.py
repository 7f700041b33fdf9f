"""A plugin module whose library takes the interpreter down."""

import os
import signal

os.kill(os.getpid(), signal.SIGSEGV)

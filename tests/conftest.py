"""One core a test process: workers then do not fight for cores, and timings mean something."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

"""Tests in ``on_device`` register a back-end with torch for good: they run in processes of their own."""

import os

collect_ignore = [] if os.environ.get("SIMULATED_ACCELERATOR") else ["on_device"]

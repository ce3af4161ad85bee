"""A module of LMCache's server that removes its first L2 adapter when a file appears."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any


def build_server_modules(context: Any) -> list[Any]:
    storage, asked = context.server_context.storage_manager, Path(context.config["signal_file"])

    def watch() -> None:
        while not asked.exists():
            time.sleep(0.02)
        (first, *_) = storage.l2_adapters()
        storage.delete_l2_adapter(first[0].index)
        asked.unlink()

    threading.Thread(target=watch, daemon=True).start()
    return []

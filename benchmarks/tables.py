"""Write the tables and figures of `docs/benchmarks.md` from the raw numbers in `docs/results/`.

    python benchmarks/tables.py

A file there is what `lynx bench fidelity ... --json` wrote. Files of one mode and model are taken
together, the later in the alphabet over the earlier. In the page a table stands between
`<!-- table: NAME -->` and `<!-- end -->`; one without results stays as it is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lynx_backend.benchmarks.plot import plot
from lynx_backend.benchmarks.report import tables

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "benchmarks.md"
Result = dict[str, Any]


def merged(old: Any, new: Any) -> Any:
    """``new`` over ``old``, key by key."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {
        k: merged(old[k], new[k]) if k in old and k in new else (new | old)[k] for k in old | new
    }


def results() -> dict[str, dict[str, Result]]:
    """By mode and model."""
    found: dict[str, Any] = {}
    for path in sorted((DOCS / "results").glob("*.json")):
        one = json.loads(path.read_text())
        found = merged(found, {one["mode"]: one["models"]})
    order = ["smollm2", "gemma3"]
    return {
        mode: dict(sorted(models.items(), key=lambda m: order.index(m[0])))
        for mode, models in found.items()
    }


def page(text: str, found: dict[str, dict[str, Result]]) -> str:
    """The page with its tables written anew."""
    made = {name: table for models in found.values() for name, table in tables(models)}

    def table(match: re.Match[str]) -> str:
        if match[2] not in made:
            return match[0]
        return f"{match[1]}\n{made[match[2]].markdown()}\n{match[3]}"

    return re.sub(r"(<!-- table: (.+?) -->)\n.*?(<!-- end -->)", table, text, flags=re.DOTALL)


def main() -> None:
    found = results()
    PAGE.write_text(page(PAGE.read_text(), found))
    for mode in ("frontier", "drafts"):
        if mode in found:
            plot({"mode": mode, "models": found[mode]}, DOCS / f"{mode}.png")


if __name__ == "__main__":
    main()

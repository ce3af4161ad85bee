"""``lynx bench fidelity`` from a clone: ``python benchmarks/fidelity.py --help``."""

import typer

from lynx_backend.cli.bench import fidelity

if __name__ == "__main__":
    typer.run(fidelity)

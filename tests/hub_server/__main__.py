"""Serve folders until interrupted: see the package."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from .server import HubServer

MINIATURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
DEFAULT = (f"{MINIATURE}", f"deepseek-ai/DeepSeek-V3={MINIATURE}")


def main() -> None:
    """Serve folders until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.hub_server", description="A local server with the Hub's routes."
    )
    parser.add_argument("folders", nargs="*", default=DEFAULT, metavar="[NAME=]FOLDER")
    parser.add_argument("--port", type=int, default=8017)
    arguments = parser.parse_args()
    served = [named(text) for text in arguments.folders]
    for _, folder in served:
        if not (folder / "config.json").is_file():
            parser.error(f"there is no checkpoint in {folder}")
    try:
        server = HubServer(arguments.port)
    except OSError as error:
        parser.error(f"nothing can listen on port {arguments.port}: {error.strerror}")
    for name, folder in served:
        print(f"hf://{name}@{server.serve(name, folder)}")
        server.repositories[name].is_xet = True  # so that pushes copy its shards
    print(f"export HF_ENDPOINT={server.endpoint}")
    print(f"export HF_TOKEN={server.token}  # to push", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()


def named(text: str) -> tuple[str, Path]:
    """Return the name and the folder that an argument stands for."""
    name, _, folder = text.rpartition("=")
    path = Path(folder)
    return name or f"local/{path.resolve().name}", path


if __name__ == "__main__":
    main()

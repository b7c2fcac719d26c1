"""A local server that speaks the Hugging Face Hub's routes by which models are read and pushed.

Its storage is another origin, reached by links that are signed and expire, as the real one's. Tests
switch faults on one by one; the program and huggingface_hub on the other side are the real ones.

    python -m tests.hub_server [[NAME=]FOLDER ...] [--port PORT]

serves each folder under its name, or as hf://local/<name of the folder>; without any it serves the
trained miniature, also under the name of the real model.
"""

from .server import HubServer, Request
from .storage import Repository, StoredFile

__all__ = ["HubServer", "Repository", "Request", "StoredFile"]

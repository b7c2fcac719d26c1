"""SGLang's own arguments on a printed command: `python sglang_arguments.py JOB.json RESULT.json`.

The job names SGLang's wheel and holds the words behind its module; the result, what its fields of
model, speculation and experts get from them. The rest of its parser needs SGLang's dependencies."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from sglang_modules import Finder

_ARGUMENTS = "sglang.srt.arg_groups"
_FIELDS = {
    f"{_ARGUMENTS}.fields.model": "Model",
    f"{_ARGUMENTS}.fields.spec": "Spec",
    f"{_ARGUMENTS}.fields.exec_": "ExecMoe",
}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    real = {f"{_ARGUMENTS}.arg_utils", f"{_ARGUMENTS}.choices", *_FIELDS}
    finder = Finder(Path(job["wheel"]), real)
    sys.meta_path.insert(0, finder)
    arguments = importlib.import_module(f"{_ARGUMENTS}.arg_utils")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for module, name in _FIELDS.items():
        fields = getattr(importlib.import_module(module), name)
        arguments.add_cli_args_from_dataclass(parser, fields)
    assert set(finder.loaded) == real, real - set(finder.loaded)
    parsed = vars(parser.parse_args(job["words"]))
    changed = {key: value for key, value in parsed.items() if value != parser.get_default(key)}
    Path(sys.argv[2]).write_text(json.dumps(changed))


if __name__ == "__main__":
    main()

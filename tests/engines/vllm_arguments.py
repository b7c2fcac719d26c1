"""vLLM's own parser on a printed command: `python vllm_arguments.py JOB.json RESULT.json`.

The job holds the command's words; the result, what vLLM would serve with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    program, *words = json.loads(Path(sys.argv[1]).read_text())["words"]
    assert program == "vllm"
    parser = FlexibleArgumentParser()
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    commands = {command.name: command for command in cmd_init()}
    for command in commands.values():
        command.subparser_init(subparsers)
    arguments = parser.parse_args(words)
    commands[arguments.subparser].validate(arguments)
    model = getattr(arguments, "model_tag", None) or arguments.model
    arguments.model = model
    config = EngineArgs.from_cli_args(arguments).create_engine_config()
    speculation = config.speculative_config
    Path(sys.argv[2]).write_text(
        json.dumps(
            {
                "model": config.model_config.model,
                "draft": speculation.draft_model_config.model,
                "architecture": speculation.draft_model_config.architecture,
                "method": speculation.method,
                "tokens": speculation.num_speculative_tokens,
            }
        )
    )


if __name__ == "__main__":
    main()

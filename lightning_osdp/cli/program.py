"""Arguments in, an exit code out.

0: done. 1: nothing fits. 2: bad input, told in one sentence.
"""

from __future__ import annotations

import inspect
import os
import sys
from argparse import ArgumentError, HelpFormatter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

from jsonargparse import ArgumentParser, Namespace

from lightning_osdp.cli import estimating, looking, planning
from lightning_osdp.cli.answer import Answer, write
from lightning_osdp.errors import InfeasibleError, OSDPError

DONE, DOES_NOT_FIT, BAD_INPUT = 0, 1, 2

COMMANDS: Mapping[str, Callable[..., Answer]] = {
    "estimate": estimating.estimate,
    "show": looking.show,
    "explain": looking.explain,
    "diff": looking.diff,
    "simulate": looking.simulate_step,
    "plan": planning.plan,
    "what-if": planning.what_if_table,
}
"""Name -> function, whose parameters are the arguments and whose docstring is the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and writes its answer to standard output.

    Returns:
        The exit code.
    """
    try:
        given = _parser().parse_args(arguments)
        name = given.subcommand
        chosen: Namespace = given[name]
        as_json = chosen.pop("json")
        answer = COMMANDS[name](**chosen.as_dict())
        write(answer, as_json=as_json)
    except InfeasibleError as error:
        return _fail(error, DOES_NOT_FIT)
    except (OSDPError, ArgumentError) as error:
        return _fail(error, BAD_INPUT)
    except BrokenPipeError:  # who reads has seen enough; what is left to flush goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    return DONE if answer.fits else DOES_NOT_FIT


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"lightning-osdp: {' '.join(str(error).split())}\n")
    return code


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lightning-osdp",
        description="Look into a plan of lightning_osdp, or make another one from the profile that a fit has written.",
        epilog="Exit codes: 0 done, 1 nothing fits, 2 bad input.",
        version=version("lightning-osdp"),
        exit_on_error=False,
        formatter_class=HelpFormatter,  # jsonargparse's own tells annotations, too
    )
    commands = parser.add_subcommands(metavar="COMMAND", required=True)
    for name, function in COMMANDS.items():
        description = inspect.getdoc(function) or ""
        summary, _, _ = description.partition("\n")
        command = ArgumentParser(
            description=description.partition("\n\nArgs:")[0], exit_on_error=False, formatter_class=HelpFormatter
        )
        command.add_function_arguments(function, as_group=False, as_positional=True, skip={"force"})
        if "force" in inspect.signature(function).parameters:
            command.add_argument("--force", action="store_true", help="replace files that are there already")
        command.add_argument("--json", action="store_true", help="print JSON in place of text")
        commands.add_subcommand(name, command, help=summary)
    return parser

"""Entry point: arguments in, an exit code out.

0: done. 1: nothing fits. 2: bad input, told in one sentence. 70: a mistake in the program. 130: interrupted.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from argparse import ArgumentError, HelpFormatter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib.metadata import version
from typing import Any

from jsonargparse import ArgumentParser

from lightning_osdp.cli import estimating, looking, planning
from lightning_osdp.cli.answer import Answer, write
from lightning_osdp.errors import ConfigurationError, InfeasibleError, OSDPError

_MOST_LETTERS = 2000
"""Most letters of an error that are shown: errors repeat what was given."""
DONE, DOES_NOT_FIT, BAD_INPUT, INTERNAL, INTERRUPTED = 0, 1, 2, 70, 130

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
    """Runs one command and writes its answer to standard output, and everything else to standard error.

    Returns:
        The exit code.
    """
    try:
        parsed = _parser().parse_args(arguments)
        options = parsed[parsed.subcommand].as_dict()
        as_json = options.pop("json")
        answer = _answer(parsed.subcommand, options)
        write(answer, as_json=as_json)
    except InfeasibleError as error:
        return _fail(str(error), DOES_NOT_FIT)
    except (OSDPError, ArgumentError) as error:
        return _fail(str(error), BAD_INPUT)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except Exception as error:  # a mistake of the program must not read as an answer
        at = traceback.extract_tb(error.__traceback__)[-1]
        told = f"internal error, {error!r} at {at.filename}:{at.lineno}. Please report it with the command."
        return _fail(told, INTERNAL)
    return DONE if answer.fits else DOES_NOT_FIT


def _answer(command: str, options: Mapping[str, Any]) -> Answer:
    """Answer of a command; prints of the user's own code go to standard error."""
    try:
        with redirect_stdout(sys.stderr):
            return COMMANDS[command](**options)
    except SystemExit as error:
        raise ConfigurationError(
            f"Expected the model's own code to return, but it ended the program with {error.code!r}."
        ) from error


def _fail(why: str, code: int) -> int:
    if sys.stderr is not None:  # which somebody may have closed
        with suppress(OSError):
            line = " ".join(why.split())
            if len(line) > _MOST_LETTERS:
                line = f"{line[: _MOST_LETTERS // 2]} ... {line[-_MOST_LETTERS // 2 :]}"
            sys.stderr.write(f"lightning-osdp: {line}\n")
    return code


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lightning-osdp",
        description="Look into a plan of lightning_osdp, or make another one from the profile that a fit has written.",
        epilog="Exit codes: 0 done, 1 nothing fits, 2 bad input, 70 internal error, 130 interrupted.",
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

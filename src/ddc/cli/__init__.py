"""The command `ddc`: a list of subcommands, each imported only when it is called."""

import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "restore": ("ddc.cli.restore:Restore", "restore pictures: super-resolution, blur, holes, JPEG, noise"),
    "degrade": ("ddc.cli.degrade:Degrade", "make the measurement of a task from clean pictures"),
    "demo": ("ddc.cli.demo:Demo", "degrade and restore four photographs, with a page to look at"),
    "convert": ("ddc.cli.convert:Convert", "turn a guided-diffusion checkpoint into a model folder"),
    "info": ("ddc.cli.info:Info", "show what a model folder contains, and what this computer supports"),
    "evaluate": ("ddc.cli.evaluate:Evaluate", "measure solvers on a folder of pictures"),
    "reproduce": ("ddc.cli.reproduce:Reproduce", "run the experiments of the paper"),
    "train": ("ddc.cli.train:Train", "train a prior or a data-consistency network"),
    "export": ("ddc.cli.export:Export", "write a trained model as a folder to share"),
    "bench": ("ddc.cli.bench:Bench", "measure speed and memory on this computer"),
    "web": ("ddc.cli.web:Web", "open the web page for restoring pictures"),
}


def available() -> dict[str, tuple[str, str]]:
    """The commands whose module is there."""
    here = importlib.util.find_spec
    return {name: entry for name, entry in COMMANDS.items() if here(entry[0].partition(":")[0]) is not None}


def usage() -> str:
    lines = "\n".join(f"  {name:<10} {summary}" for name, (_, summary) in available().items())
    return f"""usage: ddc COMMAND …

Deep Data Consistency: restore images with diffusion models in a few steps.

{lines}

`ddc COMMAND --help` shows the options of a command; `ddc --version` the version."""


def _print_any_name() -> None:
    """A file's name that the terminal cannot show must not end a run; in UTF-8 its own bytes are printed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            utf8 = stream.encoding.lower() in ("utf-8", "utf8")
            stream.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 1: some files failed; 2: nothing could be done; 130: interrupted; 141: the reader of
    its output has gone."""
    _print_any_name()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from ddc import __version__

        print(f"ddc {__version__}")
        return 0
    command, *rest = arguments
    commands = available()
    if command not in commands:
        print(f"ddc: there is no command {command!r}; expected one of {', '.join(commands)}", file=sys.stderr)
        return 2

    from ddc.errors import UserError

    module_name, _, class_name = commands[command][0].partition(":")
    try:
        import tyro

        command_class = getattr(importlib.import_module(module_name), class_name)
        try:
            settings = tyro.cli(command_class, args=rest, prog=f"ddc {command}")
        except SystemExit as stop:  # --help, or a line that cannot be parsed
            return stop.code if isinstance(stop.code, int) else 2
        if any(":/" in word for word in rest):
            from ddc.storage import use_urls

            use_urls(settings)
        code = int(settings.run())
        if sys.stdout is not None:  # as with `>&-`
            sys.stdout.flush()
        return code
    except UserError as error:
        print(f"ddc: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has gone, as in `ddc … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a closed folder, a full disk
        what = f"{error.filename} cannot be used ({error.strerror})" if error.filename else str(error)
        print(f"ddc: {UserError(what)}; check the name, the permissions and the free space", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ddc: interrupted; what was finished is whole", file=sys.stderr)
        return 130

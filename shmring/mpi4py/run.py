"""Run a program that imports mpi4py, with this package in its place: `python -m shmring.mpi4py script.py`."""

from __future__ import annotations

import os
import runpy
import sys
from ast import literal_eval
from importlib import import_module
from typing import NoReturn

from . import __version__, finder, rc

_USAGE = """usage: python -m {program} [options] FILE [ARGUMENT ...]
   or: python -m {program} [options] -m MODULE [ARGUMENT ...]
   or: python -m {program} [options] -c COMMAND [ARGUMENT ...]
   or: python -m {program} [options] - [ARGUMENT ...]"""
_OPTIONS = """
options:
  --prefix             show the folder of the package, and end
  --version            show the version of mpi4py that the package stands in for, and end
  --mpi-std-version    show the version of MPI, and end
  --mpi-lib-version    show the version of shmring, and end
  -h, --help           show this, and end
  -rc KEY=VALUE,...    set mpi4py.rc.KEY"""


def main() -> None:
    """Run the command line. An exception that the program does not catch ends the job."""
    arguments = _take_options(sys.argv[1:])
    finder.install_for_children()
    run_command_line(arguments)


def run_command_line(args: list[str] | None = None) -> None:
    """Run `FILE`, `-m MODULE`, `-c COMMAND` or `-` (stdin) with its arguments as the main program."""
    arguments = sys.argv[1:] if args is None else args
    target = arguments[0]
    if target in ("-", "-c"):
        code, rest = (sys.stdin.read(), arguments[1:]) if target == "-" else (arguments[1], arguments[2:])
        sys.argv[:] = [target, *rest]
        search_first("")
        _run_text(code, "<stdin>" if target == "-" else "<string>")
    elif target == "-m":
        sys.argv[:] = arguments[1:]
        search_first(os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        search_first(os.path.realpath(os.path.dirname(target)))
        runpy.run_path(target, run_name="__main__")


def search_first(folder: str) -> None:
    """Search a program's folder first, in place of this module's.

    With -P, -I or PYTHONSAFEPATH Python searches neither, and the first folder of sys.path is another one.
    """
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _run_text(text: str, name: str) -> None:
    """Run text in the module `__main__`, so that its functions pickle."""
    main_module = sys.modules["__main__"]
    names = vars(main_module)
    for extra in set(names) - {"__name__", "__builtins__", "__doc__"}:
        del names[extra]
    exec(compile(text, name, "exec", dont_inherit=True), names)


def set_abort_status(status: object) -> None:
    """Let this process end the job by `Abort(status)` when it ends; call it in an `except` block."""
    from . import process

    if isinstance(status, SystemExit):
        status = status.code
    if isinstance(status, KeyboardInterrupt):
        status = 130
    if not isinstance(status, int):
        status = 0 if status is None else 1
    process.set_abort_status(status)


def _take_options(arguments: list[str]) -> list[str]:
    """Act on the options, and return what follows them."""
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-m", "-c", "-"):
        option, *arguments = arguments
        name, _, value = option.lstrip("-").partition("=")
        if name == "rc":
            if not value and not arguments:
                _complain(f"{option} needs an argument")
            _set_rc(value or arguments.pop(0))
        else:
            _show(name, option)
    if not arguments:
        _complain("there is no program to run")
    if arguments[0] in ("-m", "-c") and len(arguments) < 2:
        _complain(f"{arguments[0]} needs an argument")
    return arguments


def _show(name: str, option: str) -> NoReturn:
    """Print what an option asks for, and end."""
    if name in ("h", "help"):
        print(_USAGE.format(program=_program()) + _OPTIONS)
    elif name == "version":
        print(f"mpi4py {__version__}")
    elif name == "prefix":
        print(os.path.dirname(os.path.abspath(__file__)))
    elif name in ("mpi-std-version", "mpi-lib-version"):
        rc.initialize = False
        MPI = import_module(".MPI", __package__)
        print("MPI {}.{}".format(*MPI.Get_version()) if "std" in name else MPI.Get_library_version())
    else:
        _complain(f"there is no option {option}")
    sys.exit(0)


def _set_rc(text: str) -> None:
    for entry in text.split(","):
        name, _, value = entry.partition("=")
        if not name or not value:
            _complain(f"-rc takes KEY=VALUE, not {entry!r}")
        try:
            parsed = literal_eval(value)
        except (ValueError, SyntaxError):
            parsed = value
        try:
            setattr(rc, name, parsed)
        except TypeError as error:
            _complain(str(error))


def _complain(message: str) -> NoReturn:
    print(message, _USAGE.format(program=_program()), sep="\n", file=sys.stderr)
    sys.exit(1)


def _program() -> str:
    """Return the name after `python -m`: mpi4py's or shmring's."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec is not None else "shmring.mpi4py"


if __name__ == "__main__":
    main()

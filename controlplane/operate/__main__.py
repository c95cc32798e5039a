"""The programs behind the commands of this package, one process each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from controlplane.env import SettingError, report_setting_errors
from controlplane.launcher.console import LauncherError, complain
from controlplane.launcher.installation import default_data
from controlplane.operate.installation import find_installation

Run = Callable[[argparse.Namespace], int]


def main(words: list[str]) -> int:
    """Run one command; trouble is one line on standard error and status 1."""
    report_setting_errors()
    options = build_parser().parse_args(words)
    try:
        return int(options.run(options))
    except (LauncherError, SettingError) as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read it has enough
        sys.stdout = None
        return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="muster")
    commands = parser.add_subparsers(required=True)

    def add(name: str, text: str, run: Run) -> argparse.ArgumentParser:
        command = commands.add_parser(name, description=text)
        command.set_defaults(run=run)
        where = "directory of the installation (default: %(default)s); DATABASE_URL with MUSTER_SECRET_KEY takes its place"
        command.add_argument("--data", type=Path, default=default_data(), metavar="DIR", help=where)
        return command

    text = "Write the database, and keys and settings under a passphrase, into one file. Nothing has to stop."
    backup = add("backup", text, _run_backup)
    restore = add("restore", "Bring a backup back into an empty database, with every process stopped.", _run_restore)
    for command in (backup, restore):
        command.add_argument("file", type=Path, metavar="FILE")
        told = "file that holds the passphrase (default: it is asked for)"
        command.add_argument("--passphrase-file", type=Path, metavar="FILE", help=told)
    restore.add_argument("--replace", action="store_true", help="delete what is in the database; its name has to be typed")
    restore.add_argument("--confirm", default="", metavar="NAME", help="with --replace: the name, where nobody can be asked")
    restore.add_argument("--settings", type=Path, metavar="OUT", help="only write the settings of the backup into this file")
    return parser


def _run_backup(options: argparse.Namespace) -> int:
    from controlplane.operate.backup import ask_passphrase, run_backup

    installation = find_installation(options.data)
    return run_backup(installation, options.file.absolute(), ask_passphrase(options.passphrase_file, is_new=True))


def _run_restore(options: argparse.Namespace) -> int:
    from controlplane.operate.backup import RestoreOptions, ask_passphrase, run_restore

    chosen = RestoreOptions(options.file, replace=options.replace, confirm=options.confirm, settings=options.settings)
    return run_restore(find_installation(options.data), chosen, lambda: ask_passphrase(options.passphrase_file, is_new=False))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
